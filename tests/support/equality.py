"""Is a model trained by ``smp`` the model that plain PyTorch trains? Runs a case both ways and compares.

The reference runs in the test's process: every microbatch's loss backward, one after the other, then SGD.
The same training runs on ranks through the public interface; each rank returns what lives on it. Losses and
gradients of every step, parameters and buffers must agree; every parameter must live on exactly one stage.

Many steps let two things grow that are no errors of a pipeline. A stage adds up its microbatches' gradients
in the order in which they come back, so its sums are rounded otherwise than the reference's, and the next
step starts from slightly different parameters. With a small learning rate SGD keeps such a difference small;
with a large one it multiplies it until both trainings end in NaN (one case did, with 0.1). Therefore plain
SGD without momentum, and a rate at which the loss of every case stays bounded. What is left depends on the
model; it is measured: plain PyTorch trains a second time with gradients that are off by one rounding, and
where it moves away from itself by more than the tolerance, a pipeline may do so, too. The first two steps
have nothing but the tolerance.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.ranks.models.case import Case
from tests.support.ranks import RankFailed, RankPool

__all__ = [
    "Result",
    "Setup",
    "cases",
    "compare",
    "differences",
    "equal_gradients",
    "find",
    "one_thread",
    "reference",
    "run_smp",
    "train_beside",
    "united",
]

LEARNING_RATE = 0.02
# Of the model's largest gradient: some gradients, such as that of an attention's key bias or of a bias before
# BatchNorm, are zero but for rounding.
ROUNDING = 1e-7
SWAY = 2.0  # times the distance of two plain trainings: it varies from one draw of roundings to the next
STRICT = 2  # steps
IN_PIECES = {"searched v": "searched", "looped": "interleaved"}  # schedules of two pieces a stage, by setting
Pools = Callable[[int], RankPool]


@dataclass(frozen=True)
class Setup:
    """One way to run a case.

    Attributes:
        stages: partitions.
        microbatches: of one replica's batch.
        placement: a label of :meth:`Case.placements`.
        schedule: the setting ``pipeline``, or a key of :data:`IN_PIECES`.
        replicas: of the whole pipeline; each gets its share of the batch.
        steps: of the optimizer.
        config: more settings for ``smp.init``.
        backend: of torch.distributed.
    """

    stages: int = 1
    microbatches: int = 1
    placement: str = "automatic"
    schedule: str = "interleaved"
    replicas: int = 1
    steps: int = 2
    config: Mapping[str, Any] = field(default_factory=dict)
    backend: str = "smddp"

    def __str__(self) -> str:
        more = "".join(f", {key}={value}" for key, value in self.config.items())
        return (
            f"{self.stages} stages {self.placement}, {self.microbatches} microbatches {self.schedule}, "
            f"{self.replicas} replicas, {self.steps} steps{more}"
        )


@dataclass
class Result:
    """What training left behind; tensors by their names in the plain module.

    Attributes:
        losses: one for each step, the mean over microbatches.
        gradients: for each step; None where there is none.
        twice: parameters that live on several stages.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    twice: list[str] = field(default_factory=list)


def cases(family: str) -> tuple[Case, ...]:
    """The cases of one module of ``tests.ranks.models``."""
    cases: tuple[Case, ...] = _module(family).CASES
    return cases


def find(family: str, name: str) -> Case:
    """One case of a family; families without end make it from the name."""
    module = _module(family)
    if hasattr(module, "make"):
        case: Case = module.make(name)
        return case
    return next(case for case in cases(family) if case.name == name)


@functools.lru_cache(maxsize=512)
def reference(
    family: str, name: str, pieces: int, *, steps: int, replicas: int = 1, rounded: bool = False
) -> Result:
    """Plain PyTorch on the whole model.

    Args:
        pieces: microbatches of each replica's batch; 1 is the whole batch at once.
        replicas: the batch has that many times the case's rows.
        rounded: the optimizer gets gradients with random errors of one rounding.
    """
    case = find(family, name)
    model = case.build()
    optimizer = torch.optim.SGD(_trainable(model), lr=LEARNING_RATE)
    result = Result()
    with one_thread():
        for step in range(steps):
            _plain_backward(case, model, optimizer, result, step, pieces, replicas)
            if rounded:
                _round(model, step)
            optimizer.step()
    result.parameters = {parameter: p.detach().clone() for parameter, p in model.named_parameters()}
    result.buffers = {buffer: b.detach().clone() for buffer, b in model.named_buffers()}
    return result


def run_smp(family: str, name: str, setup: Setup) -> Result:
    """Train a case with ``smp``, on every rank; the result holds what is local to this rank."""
    import smdistributed.modelparallel.torch as smp

    case = find(family, name)
    placement = case.placements(setup.stages)[setup.placement] if setup.stages > 1 else None
    smp.shutdown()
    smp.init(_settings(setup, by_hand=placement is not None))
    try:
        module = case.build()
        for part, stage in (placement or {}).items():
            smp.set_partition(module.get_submodule(part), stage)
        return _train(case, setup, module)
    finally:
        smp.shutdown()


def compare(pools: Pools, family: str, case: Case, setup: Setup, *, exact: bool = False) -> list[str]:
    """Run a case on ranks; what differs from plain PyTorch, a line each, or what went wrong.

    ``exact`` asks for equal bits.
    """
    pool = pools(setup.stages * setup.replicas)
    try:
        results = pool.run(
            run_smp,
            family,
            case.name,
            setup,
            backend=setup.backend,
        )
    except RankFailed as failed:
        return [f"{case.name} ({setup}): {failed}"]
    plain = functools.partial(
        reference, family, case.name, setup.microbatches, steps=setup.steps, replicas=setup.replicas
    )
    lines = differences(
        united(results, setup),
        plain(),
        tolerance=0.0 if exact else case.tolerance,
        exact=exact,
        buffers=setup.replicas == 1,
        rounded=plain(rounded=True) if setup.steps > STRICT and not exact else None,
    )
    return [f"{case.name} ({setup}): {line}" for line in lines]


def differences(
    found: Result,
    wanted: Result,
    *,
    tolerance: float,
    exact: bool = False,
    buffers: bool = True,
    rounded: Result | None = None,
) -> Iterator[str]:
    """What is not equal, within ``tolerance`` relative to the largest entry of each tensor, and rounding.

    Of gradients those of the first step in which some differ. ``rounded`` is ``wanted`` with other roundings.
    """
    rounding = 0.0 if exact else ROUNDING
    margins = _Margins(wanted, rounded or wanted)
    for step, (got, want) in enumerate(zip(found.losses, wanted.losses, strict=True)):
        if not abs(got - want) <= max(tolerance * abs(want), margins.losses[step]) + rounding:
            yield f"loss of step {step}: {got!r}, plain PyTorch {want!r}"
    for name in found.twice:
        yield f"parameter {name} lives on several stages"
    floors = [rounding * _largest(gradients) for gradients in wanted.gradients]
    steps = zip(found.gradients, wanted.gradients, floors, margins.gradients, strict=True)
    for step, (mine, plain, floor, more) in enumerate(steps):
        lines = list(_differ("gradient", mine, plain, tolerance, floor, more))
        if lines:
            yield from (f"step {step}: {line}" for line in lines)
            break
    floor = LEARNING_RATE * sum(floors)
    yield from _differ("parameter", found.parameters, wanted.parameters, tolerance, floor, margins.parameters)
    if buffers:
        yield from _differ("buffer", found.buffers, wanted.buffers, tolerance, rounding, margins.buffers)


class _Margins:
    """How far apart two plain trainings have been up to each step, times :data:`SWAY`."""

    def __init__(self, one: Result, other: Result) -> None:
        losses = (SWAY * abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))
        self.losses = list(itertools.accumulate(losses, max))
        apart = (_apart(a, b) for a, b in zip(one.gradients, other.gradients, strict=True))
        self.gradients = list(
            itertools.accumulate(apart, lambda a, b: {name: max(a.get(name, 0.0), b[name]) for name in b})
        )
        self.parameters = _apart(one.parameters, other.parameters)
        self.buffers = _apart(one.buffers, other.buffers)


def equal_gradients(module: nn.Module, plain: nn.Module) -> list[str]:
    """Names of the parameters that have gradients on this rank, all of which equal those of ``plain``."""
    compared = []
    for (name, mine), other in zip(module.named_parameters(), plain.parameters(), strict=True):
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=1e-7)
            compared.append(name)
    return compared


def train_beside(
    model: Any,
    plain: nn.Module,
    batches: Iterable[tuple[Tensor, ...]],
    *,
    microbatches: int,
    loss: Callable[..., Tensor] | None = None,
) -> None:
    """On every rank: train a model in steps and ``plain`` a microbatch at a time, which must stay equal.

    Parameters stay as they are, so gradients add up. Equal are the losses of every microbatch, and after the
    last step the gradients of what lives on this rank, none of which may be missing.

    Args:
        model: the ``smp.DistributedModel``.
        plain: the same module.
        batches: the arguments of each step, which are cut along their first axis.
        microbatches: of ``smp.init``.
        loss: ``loss(model, *arguments)``; the mean square of the result by default.
    """
    import smdistributed.modelparallel.torch as smp

    compute: Callable[..., Tensor] = loss or (lambda model, *arguments: model(*arguments).square().mean())

    @smp.step
    def step(*arguments: Tensor) -> Tensor:
        result = compute(model, *arguments)
        model.backward(result)
        return result

    for batch in batches:
        # Both may write into what they are given.
        pieces = [[piece.clone() for piece in tensor.chunk(microbatches)] for tensor in batch]
        losses = step(*batch).stack()
        expected = []
        for arguments in zip(*pieces, strict=True):
            expected.append(compute(plain, *arguments))
            torch.autograd.backward(expected[-1] / microbatches)
        torch.testing.assert_close(losses, torch.stack(expected).detach())
    local = {name for name, _ in model.local_named_parameters()}
    assert local == set(equal_gradients(model.get_module(), plain))


def _apart(one: Mapping[str, Tensor | None], other: Mapping[str, Tensor | None]) -> dict[str, float]:
    distances = {}
    for name, a in one.items():
        b = other[name]
        if a is None or b is None or a.shape != b.shape or not a.numel():
            distances[name] = 0.0
        else:
            distances[name] = SWAY * float((a.double() - b.double()).abs().max())
    return distances


def _module(family: str) -> Any:
    return importlib.import_module(f"tests.ranks.models.{family}")


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Sums are then made as on the ranks, which have one thread each."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _plain_backward(
    case: Case,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    result: Result,
    step: int,
    pieces: int,
    replicas: int,
) -> None:
    optimizer.zero_grad()
    batches = _cut(case.batch(step, case.rows * replicas), pieces * replicas)
    backward = _backward(1 / len(batches) if case.averaged else 1.0)
    losses = [case.train(case, model, backward, batch).item() for batch in batches]
    if not case.averaged:
        for parameter in model.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad / replicas
    result.losses.append(sum(losses) / len(losses))
    result.gradients.append({parameter: _copy(p.grad) for parameter, p in model.named_parameters()})


def _round(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if (gradient := parameter.grad) is not None and gradient.numel():
            noise = torch.randn(gradient.shape, generator=generator, dtype=torch.float64)
            unit = gradient.abs().max() * torch.finfo(gradient.dtype).eps / 2
            gradient.add_((noise * unit).to(gradient.dtype))


def _train(case: Case, setup: Setup, module: nn.Module) -> Result:
    import smdistributed.modelparallel.torch as smp

    settings = dict(case.settings)
    model = smp.DistributedModel(module, **settings)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(_trainable(module), lr=LEARNING_RATE))

    @smp.step
    def train_step(model: Any, *batch: Any) -> Tensor:
        return case.train(case, model, model.backward, batch)

    result = Result()
    for step in range(setup.steps):
        optimizer.zero_grad()
        batch = _cut(case.batch(step, case.rows * setup.replicas), setup.replicas)[smp.dp_rank()]
        result.losses.append(train_step(model, *batch).reduce_mean().item())
        result.gradients.append({name: _copy(p.grad) for name, p in model.local_named_parameters()})
        optimizer.step()
    result.parameters = {name: p.detach().clone() for name, p in model.local_named_parameters()}
    result.buffers = {name: b.detach().clone() for name, b in model.local_named_buffers()}
    return result


def _settings(setup: Setup, *, by_hand: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "partitions": setup.stages,
        "microbatches": setup.microbatches,
        "pipeline": setup.schedule,
        **setup.config,
    }
    if setup.schedule in IN_PIECES:
        settings.update(pipeline=IN_PIECES[setup.schedule], virtual_stages=2)
    if setup.replicas > 1:
        settings["ddp"] = True
    if by_hand:
        settings.update(auto_partition=False, default_partition=0)
    return settings


def united(results: Sequence[Result], setup: Setup) -> Result:
    """One result from those of all ranks; the losses of replicas are averaged."""
    stages = setup.stages  # placement "cluster": the stages of a replica are neighbours
    replicas = [results[i * stages : (i + 1) * stages] for i in range(setup.replicas)]
    whole = Result(gradients=[{} for _ in results[0].losses])
    for losses in zip(*(replica[0].losses for replica in replicas), strict=True):
        whole.losses.append(sum(losses) / len(losses))
    for stage in replicas[0]:
        assert stage.losses == replicas[0][0].losses, "the stages report different losses"
        whole.twice += [name for name in stage.parameters if name in whole.parameters]
        for gradients, mine in zip(whole.gradients, stage.gradients, strict=True):
            gradients |= mine
        whole.parameters |= stage.parameters
        whole.buffers |= stage.buffers
    return whole


def _differ(
    what: str,
    found: Mapping[str, Tensor | None],
    wanted: Mapping[str, Tensor | None],
    tolerance: float,
    floor: float,
    margins: Mapping[str, float],
) -> Iterator[str]:
    for name in sorted(found.keys() ^ wanted.keys()):
        yield f"{what} {name}: " + ("lives nowhere" if name in wanted else "plain PyTorch has none")
    for name in found.keys() & wanted.keys():
        got, want = found[name], wanted[name]
        if got is None or want is None:
            if got is not want:
                yield f"{what} {name}: {_told(got)}, plain PyTorch {_told(want)}"
            continue
        if got.shape != want.shape or got.dtype != want.dtype:
            yield f"{what} {name}: {got.dtype} {got.shape}, plain PyTorch {want.dtype} {want.shape}"
            continue
        apart = (got.double() - want.double()).abs()
        if not want.numel():
            continue
        allowed = max(tolerance * want.double().abs().max().item(), margins[name]) + floor
        if not apart.max().item() <= allowed:
            worst = int(apart.argmax())
            yield (
                f"{what} {name}[{worst}]: {got.flatten()[worst].item()!r}, plain PyTorch "
                f"{want.flatten()[worst].item()!r}; apart {apart.max().item():.3g}, allowed {allowed:.3g}"
            )


def _largest(gradients: Mapping[str, Tensor | None]) -> float:
    largest = (gradient.abs().max().item() for gradient in gradients.values() if gradient is not None)
    return float(max(largest, default=1.0))


def _told(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"one of norm {tensor.norm().item():.6g}"


def _backward(share: float) -> Callable[..., None]:
    """``model.backward`` of plain PyTorch: the mean over microbatches is the batch's gradient."""

    def backward(tensors: Tensor | Sequence[Tensor], grad_tensors: Any = None) -> None:
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        given = [grad_tensors] if isinstance(grad_tensors, Tensor) else grad_tensors or [None] * len(roots)
        ones = (
            torch.ones_like(root) if pair is None else pair for root, pair in zip(roots, given, strict=True)
        )
        torch.autograd.backward(roots, [one * share for one in ones])

    return backward


def _cut(batch: tuple[Any, ...], pieces: int) -> list[tuple[Any, ...]]:
    """Equal pieces along the first axis, also of tensors in dicts; other values go to each."""
    return [tuple(_piece(value, pieces, index) for value in batch) for index in range(pieces)]


def _piece(value: Any, pieces: int, index: int) -> Any:
    if isinstance(value, dict):
        return {key: _piece(element, pieces, index) for key, element in value.items()}
    return value.tensor_split(pieces)[index] if isinstance(value, Tensor) and value.dim() else value


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()
