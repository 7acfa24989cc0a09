"""Training a model of the zoo in plain PyTorch and in parts, and what differs between the two.

All functions here run on ranks of a pool; models are found by name there, because they cannot be sent.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.zoo.catalogue import find
from tests.zoo.model import MICROBATCHES, ROWS, Model, loss_of, seeded

__all__ = ["Trained", "pieces", "plain_problem", "quiet", "split_problem"]

STEPS = 3
LEARNING_RATE = 0.01
# relative to the largest entry of each tensor; stages add up their microbatches in another order
TOLERANCE = 1e-5
FLOOR = 1e-7
SWAY = 2.0  # times the largest distance of a few plain trainings with other roundings
DRAWS = 6

_T = TypeVar("_T")


@dataclass
class Trained:
    """What training leaves behind, by names in the module."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)


def plain_problem(name: str) -> str | None:
    """Why a model cannot be compared: plain PyTorch does not train it twice alike; None if it does."""
    model = find(name)
    with quiet():
        one, other = (_train_plain(model, load=False, checkpoint=False, seed=seed) for seed in (1, 2))
    return "draws random numbers" if list(_differences(one, other)) else None


def _tried_plain(name: str, *, load: bool, checkpoint: bool, kept: Path) -> tuple[Trained, str | None]:
    """The model trained in plain PyTorch, or why it does not train."""
    if kept.exists():
        return torch.load(kept, weights_only=False), None
    try:
        trained = _train_plain(find(name), load=load, checkpoint=checkpoint)
    except Exception as error:
        return Trained(), f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    why = _does_not_train(trained)
    if why is None:
        torch.save(trained, kept)
    return trained, why


def _does_not_train(trained: Trained) -> str | None:
    if not all(torch.tensor(trained.losses).isfinite()):
        return "the loss is not finite"
    if not any(gradient is not None and gradient.any() for gradient in trained.gradients[-1].values()):
        return "no gradient"
    return None


def split_problem(name: str, stages: int, load: bool, checkpoint: bool, kept: Path) -> dict[str, Any]:
    """Train in parts on this rank; what differs from plain PyTorch, and which parameters live here.

    What does not train in plain PyTorch is no case; the result has the reason as "plain" then. What plain
    PyTorch has trained is ``kept`` in this file, for the other numbers of stages.
    """
    import smdistributed.modelparallel.torch as smp

    began = time.monotonic()
    with quiet():
        wanted, why = _from_rank_0(lambda: _tried_plain(name, load=load, checkpoint=checkpoint, kept=kept))
        if why is not None:
            return {"plain": why}
        model = find(name)
        smp.init({"partitions": stages, "microbatches": MICROBATCHES})
        try:
            found, here = _train_split(model, load=load, checkpoint=checkpoint)
        finally:
            smp.shutdown()
        if checkpoint:
            _forget_statistics(found, wanted)
        lines = list(_differences(found, wanted))
        swayed = _on_any_rank(lines)
        if swayed:
            others = _from_rank_0(lambda: _train_rounded(model, load=load, checkpoint=checkpoint))
            lines = list(_differences(found, wanted, others))
    return {
        "lines": lines[:5],
        "swayed": swayed,
        "here": here,
        "names": sorted(wanted.gradients[0]),
        "seconds": time.monotonic() - began,
    }


def _from_rank_0(call: Callable[[], _T]) -> _T:
    """What rank 0 gets from ``call``, on all ranks."""
    got: list[Any] = [call() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(got)
    value: _T = got[0]
    return value


def _on_any_rank(lines: list[str]) -> bool:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, bool(lines))
    return any(found)


def _train_rounded(model: Model, *, load: bool, checkpoint: bool) -> list[Trained]:
    """Train the whole model some times with other roundings in all of backward."""
    factors = range(3, 3 + 2 * DRAWS, 2)  # no powers of two, which leave roundings alone
    return [_train_plain(model, load=load, checkpoint=checkpoint, factor=factor) for factor in factors]


def _train_plain(model: Model, *, load: bool, checkpoint: bool, seed: int = 1, factor: int = 1) -> Trained:
    """Train the whole model; gradients are computed ``factor`` times as large, and divided by it."""
    module = seeded(model, load=load, checkpoint=checkpoint)
    optimizer = torch.optim.SGD(_trainable(module), lr=LEARNING_RATE)
    result = Trained()
    torch.manual_seed(seed)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = []
        for batch in pieces(model.batch(step)):
            loss = loss_of(module(**batch))
            (loss / MICROBATCHES * factor).backward()
            losses.append(loss.item())
        _divide_gradients(module, factor)
        result.losses.append(sum(losses) / len(losses))
        result.gradients.append(_gradients(module.named_parameters()))
        optimizer.step()
    result.state = {name: value.detach().clone() for name, value in module.state_dict().items()}
    return result


def _divide_gradients(module: nn.Module, factor: int) -> None:
    for parameter in module.parameters() if factor != 1 else ():
        if parameter.grad is not None:
            parameter.grad /= factor


def _train_split(model: Model, *, load: bool, checkpoint: bool) -> tuple[Trained, list[str]]:
    import smdistributed.modelparallel.torch as smp

    module = seeded(model, load=load, checkpoint=checkpoint)
    distributed = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(_trainable(module), lr=LEARNING_RATE))

    @smp.step(non_split_inputs=["whole"])
    def train_step(batch: dict[str, Any], whole: dict[str, Any]) -> Tensor:
        loss = loss_of(distributed(**batch, **whole))
        distributed.backward(loss)
        return loss

    result = Trained()
    torch.manual_seed(1)
    for step in range(STEPS):
        optimizer.zero_grad()
        result.losses.append(train_step(*_divided(model.batch(step))).reduce_mean().item())
        result.gradients.append(_gradients(distributed.local_named_parameters()))
        optimizer.step()
    result.state = {name: value.detach().clone() for name, value in distributed.state_dict().items()}
    return result, [name for name, _ in distributed.local_named_parameters()]


def _forget_statistics(*results: Trained) -> None:
    """Leave out the running statistics of norms: a repeated forward changes them again, at another time."""
    for result in results:
        result.state = {
            name: tensor
            for name, tensor in result.state.items()
            if name.rpartition(".")[2] not in ("running_mean", "running_var", "num_batches_tracked")
        }


def _differences(found: Trained, wanted: Trained, others: Sequence[Trained] = ()) -> Iterator[str]:
    """What is not equal; gradients of parameters that are elsewhere are compared there.

    ``others`` are of plain PyTorch with other roundings: some models multiply these, and so may stages then.
    """
    for step, (got, want) in enumerate(zip(found.losses, wanted.losses, strict=True)):
        sway = SWAY * max((abs(other.losses[step] - want) for other in others), default=0.0)
        if not abs(got - want) <= TOLERANCE * abs(want) + FLOOR + sway:
            yield f"loss of step {step}: {got!r}, plain PyTorch {want!r}"
    for step, gradients in enumerate(found.gradients):
        largest = max(
            (_largest(gradient) for gradient in wanted.gradients[step].values() if gradient is not None),
            default=0,
        )
        for name, got in gradients.items():
            want = wanted.gradients[step][name]
            sway = _sway(want, [other.gradients[step][name] for other in others])
            line = _different(got, want, floor=1e-6 * largest + sway)
            if line:
                yield f"step {step}, gradient of {name}: {line}"
    for name in found.state.keys() ^ wanted.state.keys():
        yield f"state dict: {name} is in one of the two alone"
    for name in found.state.keys() & wanted.state.keys():
        want = wanted.state[name]
        floor = FLOOR + _sway(want, [other.state[name] for other in others])
        line = _different(found.state[name], want, floor=floor)
        if line:
            yield f"state dict: {name}: {line}"


def _sway(want: Tensor | None, others: Sequence[Tensor | None]) -> float:
    if want is None or not want.numel():
        return 0.0
    tensors = [other for other in others if other is not None and other.shape == want.shape]
    return SWAY * max((_largest(_numbers(other) - _numbers(want)) for other in tensors), default=0.0)


def _different(got: Tensor | None, want: Tensor | None, *, floor: float) -> str | None:
    if got is None or want is None:
        return None if got is want else f"{'None' if got is None else 'a tensor'}, plain PyTorch otherwise"
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype} {tuple(got.shape)}, plain PyTorch {want.dtype} {tuple(want.shape)}"
    if not got.numel():
        return None
    got, want = _numbers(got), _numbers(want)
    apart = (got - want).abs().nan_to_num(0.0)
    same_holes = bool((got.isnan() == want.isnan()).all())
    allowed = TOLERANCE * _largest(want) + floor
    if same_holes and float(apart.max()) <= allowed:
        return None
    return f"apart {float(apart.max()):.3g}, allowed {allowed:.3g}"


def _numbers(tensor: Tensor) -> Tensor:
    dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return torch.view_as_real(dense).double() if dense.is_complex() else dense.double()


def _largest(tensor: Tensor) -> float:
    return float(_numbers(tensor).abs().nan_to_num(0.0).max()) if tensor.numel() else 0.0


def pieces(batch: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What each microbatch gets of a batch."""
    rows, whole = _divided(batch)
    for index in range(MICROBATCHES):
        yield {**{name: row.chunk(MICROBATCHES)[index] for name, row in rows.items()}, **whole}


def _divided(batch: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What has a row for each sample, and what all samples share."""
    rows = {name: value for name, value in batch.items() if isinstance(value, Tensor) and len(value) == ROWS}
    return rows, {name: value for name, value in batch.items() if name not in rows}


def _gradients(parameters: Any) -> dict[str, Tensor | None]:
    return {
        name: None if parameter.grad is None else parameter.grad.clone() for name, parameter in parameters
    }


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Libraries warn of their own affairs; of ours, errors tell."""
    import logging
    import warnings

    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
