"""What ``smp.save_checkpoint`` does: take a snapshot, and write it at once or in the background.

Begin with ``writing``. Imports the files around this folder, ``ranks``, ``state_dicts`` and
``runtime.tensors``, and nothing that runs steps.
"""
