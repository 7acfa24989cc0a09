"""Checkpoints read and written by one process without ``smp.init``: in other formats, and put together.

Begin with ``convert``. Imports the files around this folder and the names of ``tensor_parallel.huggingface``,
and nothing that talks to ranks.
"""
