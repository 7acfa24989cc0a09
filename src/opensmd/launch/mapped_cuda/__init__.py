"""``--device cpu``: scripts that hard-code CUDA run on the CPU. Begin with ``cuda_on_cpu``.

Imported only by ranks, and only with that option.
"""
