"""Checkpoints, from what users call down to bytes.

The calls are in ``folder`` (with ``saving``) and ``save_load``, and ``conversion`` is for one process without
a job; ``agreement`` lets them happen on all ranks or none. Parts are
put together by ``gather`` and ``merge``. One file is written and read by ``files``, and its end by ``seal``;
what may be in it is in ``trusted``, ``numpy_values`` and ``contents``. What files are called is in ``names``
and ``newest``, and ``records`` checks files without a checksum of the whole. Who writes parameters asks
``before_writing`` whether a save still reads them.

Begin with ``save_load``. Imports ``ranks`` and ``state_dicts``, and nothing that runs steps.
"""
