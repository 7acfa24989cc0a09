"""``--device cpu``: scripts that hard-code CUDA run on the CPU. Begin with ``cuda_on_cpu``.

Imported by a rank alone, and only where that option is given.
"""
