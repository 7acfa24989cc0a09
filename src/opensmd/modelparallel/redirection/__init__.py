"""Temporary redirection of torch's own functions, for the runtime, the dry run and optimizers.

Begin with ``_torch_internals``, the only file. Imports no other folder of modelparallel; those import this.
"""
