"""How torch finds the backend "smddp": by a name that torch.distributed knows as soon as torch is imported.

Frameworks that make the process group themselves are given a backend by its name, and some of them ask
whether torch knows it before they make anything. So the name comes first, with nothing behind it: the backend
is imported as soon as ``init_process_group`` looks it up, before torch makes a store that listens, and its
core is built with the first group that asks for it.
"""

from __future__ import annotations

import os
from typing import Any

from opensmd.collectives.name import DEVICES, NAME

__all__ = ["make_known"]

# opensmd.timeline.recorder's; importing that would make every `import torch` slower
TIMELINE = "OPENSMD_TIMELINE"


def make_known() -> None:
    """Let torch take "smddp" for a backend; a backend that has the name already keeps it."""
    import torch.distributed as dist  # not above: torch calls this while it is imported

    known = getattr(dist, "Backend", None)  # a torch built without torch.distributed has none
    if known is not None and NAME not in known.backend_list:
        known.register_backend(NAME, _create_first, extended_api=True, devices=list(DEVICES))
        known.SMDDP = _Backend()
    if known is not None and os.environ.get(TIMELINE):  # of all groups, also without smddp
        from opensmd.collectives.recording.begin import record_all_groups

        record_all_groups()


class _Backend:
    """What ``Backend.SMDDP`` is until somebody asks for it: then it is the name, and the backend is there."""

    def __get__(self, instance: object, owner: Any) -> str:
        from opensmd.collectives import backend

        owner.SMDDP = NAME
        backend.register()
        return NAME


def _create_first(torch_options: Any, own_options: Any = None) -> Any:
    """Make the first group; for those after it, torch calls the backend itself."""
    from opensmd.collectives import backend

    backend.register()
    return backend.create(torch_options, own_options)
