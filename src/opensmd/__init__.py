"""OpenSMD: data and model parallelism for PyTorch, on any machine.

The import paths that scripts use (``smdistributed``, ``torch.distributed.deprecated``) are thin
doors to this package; every line of logic lives here, a room per concept.
"""

__version__ = "0.1.0"
