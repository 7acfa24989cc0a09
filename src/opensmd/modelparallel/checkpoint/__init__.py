"""Checkpoints, from what users call down to bytes.

The public calls are in ``folder`` (with ``saving``) and ``save_load``; ``conversion`` is for a single process
outside a job; ``agreement`` makes work succeed on all ranks or none. ``files`` writes and reads one file, and
``seal`` its end; ``trusted``, ``numpy_values`` and ``contents`` say what may be in it. ``names`` and
``newest`` name files, ``part_files`` decides which belong together, and ``records`` checks files without a
checksum of the whole.

Begin with ``save_load``. Imports ``ranks``, ``state_dicts``, ``precision``, the names of
``tensor_parallel.huggingface`` and ``runtime.tensors``, and nothing that runs steps.
"""
