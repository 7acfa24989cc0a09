"""Parameters without data until it is known where they live: recorded when made, filled at the first step.

Begin with ``contexts``. Imports ``tensor_parallel``, and of the ``runtime`` what describes tensors and side
effects.
"""
