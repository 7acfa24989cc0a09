"""From what a run of the model showed to a stage for every module.

Pure: no ranks, and of tensors only shapes. ``trace`` is what comes in, ``plan`` what goes out; begin with
``partition``. Imports no other folder; all of modelparallel may import this.
"""
