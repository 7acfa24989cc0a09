"""Tensors that know where their data is: tags, placeholders, memory, and structures that hold tensors.

Begin with ``tags.py``: a tensor with a tag has a home, one without is replicated. ``placeholder.py`` is
what a rank holds instead of data that lives elsewhere; ``before_writing.py`` waits for whoever reads
parameters beside training. Imports nothing else of the runtime.
"""
