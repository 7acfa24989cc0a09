"""Torch's own functions sent another way for a while: what the runtime, the dry run and optimizers redirect.

Begin with ``_torch_internals``, the only file. Imports no other folder of modelparallel; those import this.
"""
