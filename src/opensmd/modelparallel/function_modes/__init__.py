"""The function modes of a thread, such as a default device: taken off its stack, and put on that of others.

Begin with ``_torch_internals``, the only file. Imports no other folder of modelparallel; the runtime imports
this.
"""
