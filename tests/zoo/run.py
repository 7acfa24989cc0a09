"""One result of the zoo: a model on a pool of ranks, and what came of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opensmd.modelparallel.exceptions import PeerFailed, SMPError
from tests.support.ranks import RankFailed, RankPool
from tests.zoo.tracer import tracer_problem
from tests.zoo.training import plain_problem, split_problem

__all__ = ["Line", "split", "traced"]

TIMEOUT = 400.0
GROUP_TIMEOUT = 200.0
TRACE_TIMEOUT = 240.0

Line = dict[str, Any]


def traced(pool: RankPool, name: str) -> Line:
    """Whether torch's own tracer cuts a model in two."""
    found = _outcome(lambda: pool.run(tracer_problem, name, backend=None, timeout=TRACE_TIMEOUT)[0])
    if "status" in found:
        return found
    return {"status": "failed" if found["value"] else "split", "why": found["value"] or ""}


def split(pool: RankPool, alone: RankPool, name: str, stages: int, folder: Path) -> Line:
    """A model trained on the ranks of ``pool``, as many as ``stages``, compared with plain PyTorch.

    What plain PyTorch has trained is kept in ``folder``, so that other numbers of stages find it there.

    The line is of kind "plain" where the model is no case: it does not train, or it draws random numbers, as
    the one rank of ``alone`` finds out.
    """
    number = sum(map(ord, name))  # which way a model is loaded does not change when others come
    load, checkpoint = number % 2 == 0, number % 4 == 1
    way = {"kind": "split", "model": name, "stages": stages, "safetensors": load, "checkpointing": checkpoint}
    arguments = (split_problem, name, stages, load, checkpoint, _file(folder, name))
    found = _outcome(lambda: pool.run(*arguments, timeout=TIMEOUT, group_timeout=GROUP_TIMEOUT))
    if "status" in found:
        return {**way, **found}
    ranks = found["value"]
    if "plain" in ranks[0]:
        return {"kind": "plain", "model": name, "status": "no case", "why": ranks[0]["plain"]}
    lines = [f"rank {rank}: {line}" for rank, other in enumerate(ranks) for line in other["lines"]]
    here = [name for other in ranks for name in other["here"]]
    if sorted(here) != ranks[0]["names"]:
        lines.append("the ranks' parameters are not the model's, each once")
    if lines:
        again = _outcome(lambda: alone.run(plain_problem, name, backend=None, timeout=TIMEOUT)[0])
        if again.get("value"):
            return {"kind": "plain", "model": name, "status": "no case", "why": again["value"]}
    used = sum(bool(other["here"]) for other in ranks)
    status = "wrong" if lines else "equal"
    return {**way, "status": status, "why": "; ".join(lines), "used": used, "swayed": ranks[0]["swayed"]}


def _file(folder: Path, name: str) -> Path:
    return folder / (hashlib.sha256(name.encode()).hexdigest() + ".pt")


def _outcome(call: Callable[[], Any]) -> Line:
    """What a call on ranks returned, or a status of what went wrong."""
    try:
        return {"value": call()}
    except RankFailed as failed:
        kinds = {outcome.kind for outcome in failed.outcomes}
        if "timeout" in kinds:
            return {"status": "hang", "why": "no answer in time"}
        if "died" in kinds:
            return {"status": "died", "why": "a rank died"}
        return _of_errors(failed)


def _of_errors(failed: RankFailed) -> Line:
    errors = [outcome.value for outcome in failed.outcomes if outcome.kind == "error"]
    causes = [error for error in errors if not isinstance(error, PeerFailed)] or errors
    text = f"{type(causes[0]).__name__}: {' '.join(str(causes[0]).split())[:600]}"
    return {"status": "refused" if isinstance(causes[0], SMPError) else "failed", "why": text}
