"""Tensors that know where their data is: tags, placeholders, memory, and structures that hold tensors.

Begin with ``tags.py``: a tensor with a tag has a home, one without is replicated. ``placeholder.py`` is what
a rank holds in place of data elsewhere; ``before_writing.py`` waits for background readers of parameters.
Imports nothing else of the runtime.
"""
