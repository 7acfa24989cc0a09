"""Random numbers in steps, although microbatches take turns and each module runs on one rank.

Begin with ``torch_generators.py``, then ``script_generators.py``: those of Python and NumPy, for which
``positions.py`` tells whether anything has been drawn. Imports nothing from the runtime; the step and its
microbatches import this.
"""
