"""Parameters without data until their home is known: recorded at creation, filled in the first step.

Begin with ``contexts``. Imports ``tensor_parallel``, and from ``runtime`` the descriptions of tensors and
side effects.
"""
