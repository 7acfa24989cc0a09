"""Random numbers that steps draw, though microbatches take turns and modules run on one rank each.

Begin with ``torch_generators.py``, then ``script_generators.py``: those of Python and NumPy, for which
``positions.py`` tells whether anything has been drawn. Imports nothing of the runtime; the step and its
microbatches import this.
"""
