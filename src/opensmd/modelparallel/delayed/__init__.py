"""Parameters without data until it is known where they live: recorded when made, filled at the first step.

Begin with ``contexts``; imports ``runtime.tensors``.
"""
