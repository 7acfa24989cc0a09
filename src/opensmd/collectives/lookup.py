"""Making the name "smddp" known to torch.distributed as soon as torch is imported.

Frameworks that create the process group themselves are given a backend's name, and some check whether torch
knows it before they create anything. So at first there is only the name: the backend is imported when
``init_process_group`` looks it up, before torch creates a listening store, and its core is built with the
first group that needs it.
"""

from __future__ import annotations

import os
from typing import Any

from opensmd.collectives.name import DEVICES, NAME

__all__ = ["make_known"]

# that of opensmd.timeline.recorder, whose import would slow down every `import torch`
TIMELINE = "OPENSMD_TIMELINE"


def make_known() -> None:
    """Make torch accept "smddp" as a backend; an existing backend of that name is kept."""
    import torch.distributed as dist  # not above, because torch calls this during its import

    known = getattr(dist, "Backend", None)  # missing if torch was built without torch.distributed
    if known is not None and NAME not in known.backend_list:
        known.register_backend(NAME, _create_first, extended_api=True, devices=list(DEVICES))
        known.SMDDP = _Backend()
    if known is not None and os.environ.get(TIMELINE):  # for all groups, even without smddp
        from opensmd.collectives.recording.begin import record_all_groups

        record_all_groups()


class _Backend:
    """``Backend.SMDDP`` until it is first read, which imports the backend and gives the name."""

    def __get__(self, instance: object, owner: Any) -> str:
        from opensmd.collectives import backend

        owner.SMDDP = NAME
        backend.register()
        return NAME


def _create_first(torch_options: Any, own_options: Any = None) -> Any:
    """Create the first group; for later ones, torch calls the backend itself."""
    from opensmd.collectives import backend

    backend.register()
    return backend.create(torch_options, own_options)
