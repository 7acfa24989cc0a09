"""From what a run of the model showed to a stage for every module.

Pure: no ranks, and only shapes of tensors. ``trace`` comes in, ``plan`` goes out; begin with ``partition``.
Imports no other folder; all of modelparallel may import this.
"""
