"""What a rank does in ``test_killed_saves``: save one generation after the other, and load what a kill left.

All elements of a model and of its optimizer's state are known from the generation's number, so that a
checkpoint which mixes two generations is found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import smdistributed.modelparallel.torch as smp
from opensmd.modelparallel import communicate
from opensmd.modelparallel.checkpoint.saving.background import finish_background_save
from opensmd.modelparallel.state import state
from opensmd.modelparallel.state_dicts.model_state import ModelState
from tests.support.partitioned import restart, split

__all__ = ["KINDS", "Kind", "resume", "save_for_ever"]

Trainee = tuple[ModelState, Any]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A way to save, and what is saved.

    Attributes:
        layout: of the job, one of ``LAYOUTS``.
        ranks: how many the job has.
        partial: each rank of the first replica writes its part; otherwise the first one gathers everything.
        is_in_background: a thread writes.
        has_optimizer: its state is saved with the model.
        has_folder: ``smp.save_checkpoint`` saves; otherwise ``smp.save``, one file a rank.
    """

    layout: str = "split"
    ranks: int = 2
    partial: bool = True
    is_in_background: bool = False
    has_optimizer: bool = True
    has_folder: bool = True


def _of_layout(layout: str, ranks: int) -> dict[str, Kind]:
    """All ways of ``smp.save_checkpoint`` with model and optimizer."""
    return {
        f"{layout}, {'partial' if partial else 'full'}{', background' if beside else ''}": Kind(
            layout=layout, ranks=ranks, partial=partial, is_in_background=beside
        )
        for partial in (True, False)
        for beside in (False, True)
    }


KINDS: dict[str, Kind] = {
    "smp.save": Kind(has_folder=False),
    "smp.save, full": Kind(has_folder=False, partial=False),
    "model alone, full": Kind(partial=False, has_optimizer=False),
    **_of_layout("split", 2),
    **_of_layout("sharded", 2),
    **_of_layout("shared state", 2),
    **_of_layout("tensor-parallel", 4),
    "tensor-parallel, smp.save": Kind(layout="tensor-parallel", ranks=4, has_folder=False),
}


class Counting(torch.optim.SGD):
    """Its step makes everything one more, as soon as it may."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in (each for group in self.param_groups for each in group["params"]):
            parameter += 1
            self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter)).add_(1)


def _plain_module() -> nn.Module:
    """Large, so that it is copied beside training."""
    return nn.Sequential(nn.Linear(200, 600), nn.Linear(600, 40))


def split_trainee() -> Trainee:
    """A model and an optimizer whose tensors all have one value, the generation."""
    restart(partitions=2)
    state.model = model = ModelState(_plain_module())
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    optimizer = smp.DistributedOptimizer(Counting(model.parameters(), lr=0.1, momentum=0.9))
    split(model)
    return model, optimizer


@smp.step
def _mean_step(model: Any, x: Tensor) -> None:
    model.backward(model(x).mean())


def tensor_parallel_trainee() -> Trainee:
    """The same, where two ranks have slices of each of the two stages."""
    restart(partitions=2, microbatches=2, tensor_parallel_degree=2, ddp=True, prescaled_batch=True)
    with smp.tensor_parallelism():
        module = _plain_module()
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(Counting(model.parameters(), lr=0.1, momentum=0.9))
    _mean_step(model, torch.ones(2, 200))
    for parameter in model.local_parameters():
        nn.init.zeros_(parameter)
    return model, optimizer


class Minus(nn.Module):
    """Its parameters have gradients of -1, and so they are known after any number of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(400, 300))
        self.odd = nn.Parameter(torch.zeros(7, 5))

    def forward(self, x: Tensor) -> Tensor:
        return -(self.large.sum() + self.odd.sum()) * x.mean()


@smp.step
def _minus_step(model: Any, x: Tensor) -> None:
    model.backward(model(x))


def _replicas(**settings: Any) -> Trainee:
    """Two replicas: after generation g the momentum is -g."""
    restart(ddp=True, **settings)
    model = smp.DistributedModel(Minus())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0, momentum=1.0))
    return model, optimizer


def sharded_trainee() -> Trainee:
    """Two ranks that share out parameters and what belongs to them."""
    return _replicas(sharded_data_parallel_degree=2, sdp_gradient_clipping=0.0)


def shared_state_trainee() -> Trainee:
    """Two ranks that share out the optimizer's state alone, of a model whose first step has cut it."""
    model, optimizer = _replicas(shard_optimizer_state=True)
    _minus_step(model, torch.ones(2))
    return model, optimizer


LAYOUTS: dict[str, Callable[[], Trainee]] = {
    "split": split_trainee,
    "sharded": sharded_trainee,
    "shared state": shared_state_trainee,
    "tensor-parallel": tensor_parallel_trainee,
}


OF_REPLICAS = ("sharded", "shared state")


def _next_generation(kind: Kind, model: ModelState, optimizer: Any) -> None:
    if kind.layout in OF_REPLICAS:
        optimizer.zero_grad()
        _minus_step(model, torch.ones(2))
    optimizer.step()


def _values_of(kind: Kind, generation: int) -> set[float]:
    """What the elements are that one rank has."""
    if kind.layout not in OF_REPLICAS:
        return {generation}
    weight = generation * (generation + 1) / 2
    return {weight, -generation} if kind.has_optimizer else {weight}


def _own_tensors(kind: Kind, model: ModelState, optimizer: Any) -> list[Tensor]:
    own = list(model.local_parameters())
    if kind.has_optimizer:
        own += [entries["momentum_buffer"] for entries in optimizer.state.values()]
    return [each.to_local() if isinstance(each, DTensor) else each for each in own]


def _save_generation(folder: str, kind: Kind, generation: int, model: ModelState, optimizer: Any) -> None:
    _next_generation(kind, model, optimizer)
    if not kind.has_folder:
        _save_file(folder, kind, generation, model, optimizer)
        return
    smp.save_checkpoint(
        folder,
        f"s{generation}",
        partial=kind.partial,
        model=model,
        optimizer=optimizer if kind.has_optimizer else None,
        user_content=generation,
        num_kept_partial_checkpoints=2,
        blocking=not kind.is_in_background,
    )


def _save_file(folder: str, kind: Kind, generation: int, model: ModelState, optimizer: Any) -> None:
    states = (each.local_state_dict() if kind.partial else each.state_dict() for each in (model, optimizer))
    content = {**dict(zip(("model", "optimizer"), states, strict=True)), "generation": generation}
    if kind.partial or state.rank == 0:
        smp.save(content, f"{folder}/g.pt", partial=kind.partial)


def save_for_ever(folder: str, kind: Kind) -> None:
    """Save generation after generation; ``done`` in the folder has the last whose call has returned."""
    model, optimizer = LAYOUTS[kind.layout]()
    for generation in range(1, 1_000_000):
        _save_generation(folder, kind, generation, model, optimizer)
        communicate.barrier()
        if state.rank == 0:
            done = Path(folder) / "done"
            done.with_suffix(".new").write_text(str(generation))
            done.with_suffix(".new").replace(done)


def _load(folder: str, kind: Kind, model: ModelState, optimizer: Any) -> int:
    if kind.has_folder:
        return int(smp.resume_from_checkpoint(folder, partial=kind.partial))
    found = smp.load(f"{folder}/g.pt", partial=kind.partial)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    return int(found["generation"])


def resume(folders: list[str], kind: Kind) -> list[int]:
    """For each folder: load what is there, check that it is of one generation, and save the next one over it.

    The first is loaded into a new model, the others into what is left of the one before, whose values no
    generation has.
    """
    model, optimizer = LAYOUTS[kind.layout]()
    found = []
    for folder in folders:
        found.append(_resume(folder, kind, model, optimizer))
        with torch.no_grad():
            for tensor in _own_tensors(kind, model, optimizer):
                tensor.fill_(torch.nan)
    return found


def _resume(folder: str, kind: Kind, model: ModelState, optimizer: Any) -> int:
    generation = _load(folder, kind, model, optimizer)
    found = {value for tensor in _own_tensors(kind, model, optimizer) for value in tensor.unique().tolist()}
    assert found == _values_of(kind, generation), generation
    _save_generation(folder, kind, generation + 1, model, optimizer)
    finish_background_save()
    if kind.has_folder or kind.partial:  # otherwise any rank may write, and none removes what others write
        is_replaced = not (kind.has_folder and kind.partial)  # the next save has files of the same names
        left = [each for each in Path(folder).rglob(".*") if is_replaced or each.parent == Path(folder)]
        assert not left, "the next save takes away what the killed one has left"
    return generation
