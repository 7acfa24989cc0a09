"""OpenSMD: data and model parallelism for PyTorch, on any machine.

The import paths that scripts use (``smdistributed``, ``torch.distributed.deprecated``) are aliases for what
is in this package; every line of logic lives here, a folder a concept.
"""

__version__ = "0.2.0"
