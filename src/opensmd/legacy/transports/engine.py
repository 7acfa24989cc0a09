"""Which of today's engines carries a job's collectives, and what each accepts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from opensmd.legacy.rendezvous.host import Process
from opensmd.legacy.transports.wire import Wire

__all__ = ["WIRES", "choose_engine"]

# torch's Gloo and NCCL refuse 16-bit integers; int32 wraps to the same bits.
_MOVES = frozenset(
    [torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64]
)
WIRES = {
    "smddp": Wire("cpu", spares_tensors=True),
    "gloo": Wire("cpu", _MOVES, {torch.int16: torch.int32}),
    "nccl": Wire("cuda", _MOVES, {torch.int16: torch.int32}),
}


def choose_engine(wanted: str, processes: Sequence[Process], has_smddp: Sequence[bool]) -> str:
    """Choose the engine of a ``tcp`` or ``gloo`` job, the same on every rank.

    Args:
        wanted: the setting: ``auto``, ``smddp`` or ``gloo``.
        processes: all processes of the job.
        has_smddp: for each process, whether smddp with its native core is usable.

    Raises:
        RuntimeError: smddp is wanted and some process does not have it.
    """
    if wanted == "gloo":
        return "gloo"
    lacking = [rank for rank, has in enumerate(has_smddp) if not has]
    if wanted == "smddp":
        if lacking:
            raise RuntimeError(
                f"OPENSMD_LEGACY_ENGINE=smddp, but rank(s) {lacking} cannot load its native core"
            )
        return "smddp"
    one_host = len({process.pid_space for process in processes}) == 1
    return "smddp" if one_host and not lacking else "gloo"
