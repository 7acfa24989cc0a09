"""Redirection of torch's functions for a while, and of objects' methods, for runtime, dry run and optimizers.

Begin with ``_torch_internals``. Imports no other folder of modelparallel; those import this.
"""
