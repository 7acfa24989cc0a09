"""Checkpoints, from what users call down to bytes.

The calls are in ``folder`` (with ``saving``) and ``save_load``, and ``conversion`` is for one process without
a job; ``agreement`` lets them happen on all ranks or none. One file is written and read by ``files``, and its
end by ``seal``; what may be in it is in ``trusted``, ``numpy_values`` and ``contents``. What files are called
is in ``names`` and ``newest``, which of them belong together in ``part_files``, and ``records`` checks files
without a checksum of the whole.

Begin with ``save_load``. Imports ``ranks``, ``state_dicts``, ``precision``, the names of
``tensor_parallel.huggingface`` and ``runtime.tensors``, and nothing that runs steps.
"""
