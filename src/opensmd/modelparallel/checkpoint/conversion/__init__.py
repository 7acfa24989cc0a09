"""Checkpoints merged or converted to other formats, by one process without ``smp.init``.

Begin with ``convert``. Imports the files around this folder and the names of ``tensor_parallel.huggingface``,
and nothing that talks to ranks.
"""
