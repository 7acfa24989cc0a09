"""A thread's function modes, such as a default device: taken off its stack, and applied in others.

Begin with ``_torch_internals``, the only file. Imports no other folder of modelparallel; the runtime imports
this.
"""
