"""The data-parallel library's v1 interface (SMDDP 1.0 to 1.3), a thin layer over torch.distributed.

``BACKEND`` is the process group it runs on. ``INTERFACE_VERSION`` is the last release of the original with
this interface; scripts may compare it.

Begin with ``distributed``. Imports ``collectives`` and ``environment``.
"""

from opensmd.tested_torch import warn_if_untested

warn_if_untested()

BACKEND = "smddp"
INTERFACE_VERSION = "1.8.0"
