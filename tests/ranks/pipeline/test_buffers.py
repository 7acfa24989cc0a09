"""Buffers of modules that are run piece by piece: every rank has a copy, and all copies say the same."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from opensmd.modelparallel.exceptions import SMPCheckpointError, SMPError
from tests.support.equality import Pools, train_beside
from tests.support.partitioned import restart
from tests.support.patience import PATIENCE

WIDTH = 6


class Scaled(nn.Module):
    """Uses its buffers on both stages; one of them follows the data."""

    scale: Tensor
    seen: Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        torch.manual_seed(seed)
        self.register_buffer("scale", torch.randn(WIDTH))
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x * self.scale))
        with torch.no_grad():
            self.seen.mul_(0.5).add_(h.mean(0))
        out: Tensor = self.second(h - self.seen) * self.scale
        return out


class Assigned(Scaled):
    """Replaces its buffers, so that what is in them is on the second stage alone; the first one reads it."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x * self.scale))
        out: Tensor = self.second(h - self.seen)
        self.scale = 0.5 * self.scale + out.detach().mean(0)
        self.seen = torch.zeros(WIDTH)
        self.seen.add_(out.detach().amax(0))
        return out


def placed(module: Scaled, **settings: bool) -> Scaled:
    restart(partitions=2, microbatches=2, auto_partition=False, default_partition=0, **settings)
    smp.set_partition(module.second, 1)
    return module


def rows(seed: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


def plain(module: Scaled, x: Tensor) -> Tensor:
    return torch.stack([module(part).square().mean().detach() for part in x.chunk(2)]).mean()


def of_all_stages(module: Scaled) -> list[tuple[Tensor, Tensor]]:
    found: list[tuple[Tensor, Tensor]] = smp.allgather((module.scale, module.seen), smp.PP_GROUP)
    return found


def drawn_without_a_common_seed() -> None:
    module = placed(Scaled(dist.get_rank()))
    model = smp.DistributedModel(module)
    step = smp.step(lambda x: model(x).square().mean())
    for number in range(2):
        found = step(rows(number)).reduce_mean()
        first, second = of_all_stages(module)
        torch.testing.assert_close(first, second, rtol=0, atol=0)
        if number == 0:
            torch.testing.assert_close(found, plain(Scaled(0), rows(0)))
    smp.shutdown()


def test_buffers_drawn_without_a_common_seed_are_the_first_ranks(pool: Pools) -> None:
    pool(2).run(drawn_without_a_common_seed)


def loaded(partial: bool, kind: type[Scaled]) -> None:
    """A checkpoint whose buffers are others is loaded after the first step, and before it if ``partial``."""
    other = kind(1)
    other.seen.fill_(0.25)
    module = placed(kind(0))
    model = smp.DistributedModel(module)
    step = smp.step(lambda x: model(x).square().mean())
    given = other.state_dict()
    if partial:
        names = [name for name in given if name.startswith("second") == bool(smp.pp_rank())]
        given = {**{name: given[name] for name in names}, "_smp_is_partial": True}
        model.load_state_dict(given, same_partition_load=True)
    step(rows(0))
    model.load_state_dict(given, **({"same_partition_load": True} if partial else {}))
    if kind is Scaled or partial:
        first, second = of_all_stages(module)
        torch.testing.assert_close(first, (other.scale, other.seen), rtol=0, atol=0)
        torch.testing.assert_close(second, (other.scale, other.seen), rtol=0, atol=0)
    torch.testing.assert_close(step(rows(2)).reduce_mean(), plain(other, rows(2)))
    if partial:
        require_saved_where_computed(model, step, other)
    smp.shutdown()


def require_saved_where_computed(model: Any, step: Any, other: Scaled) -> None:
    """What a step has computed is in exactly one rank's part, which another run loads."""
    model.to("cpu")  # of local tensors
    part, whole = model.local_state_dict(), model.state_dict()
    parts = smp.allgather([name for name in part if "." not in name], smp.PP_GROUP)
    assert sorted(name for names in parts for name in names if name in whole) == ["scale", "seen"]
    fresh = smp.DistributedModel(placed(type(other)(5)))
    fresh.load_state_dict(copy.deepcopy(part), same_partition_load=True)
    step = smp.step(lambda x: fresh(x).square().mean())
    torch.testing.assert_close(step(rows(3)).reduce_mean(), plain(other, rows(3)))


@pytest.mark.parametrize("kind", [Scaled, Assigned])
@pytest.mark.parametrize("partial", [False, True], ids=["full", "partial"])
def test_loading_changes_all_copies(pool: Pools, partial: bool, kind: type[Scaled]) -> None:
    pool(2).run(loaded, partial, kind)


def of_another_partition() -> None:
    model = smp.DistributedModel(placed(Scaled(0)))
    smp.step(lambda x: model(x).square().mean())(rows(0))
    part = model.local_state_dict()
    if smp.pp_rank() == 1:
        part["other"] = part.pop("second.bias")
    with pytest.raises(SMPCheckpointError, match=r"missing \['second.bias'\], unknown \['other'\]"):
        model.load_state_dict(part, same_partition_load=True)
    smp.shutdown()


def test_all_ranks_refuse_what_does_not_fit_one_of_them(pool: Pools) -> None:
    pool(2).run(of_another_partition)


def replicas(kind: type[Scaled]) -> None:
    module = placed(kind(dist.get_rank()), ddp=True)
    model = smp.DistributedModel(module)
    step = smp.step(lambda x: model.backward(model(x).square().mean()))
    reference = kind(0)
    for number in range(3):
        step(rows(10 * number + smp.dp_rank()))
        mine = kind(0)
        mine.load_state_dict(reference.state_dict())  # each step begins with what the first replica has
        plain(mine, rows(10 * number + smp.dp_rank()))
        found = of_all_stages(module) if kind is Scaled else [of_whole(model)]
        for stage in found:
            torch.testing.assert_close(stage, (mine.scale, mine.seen))
        plain(reference, rows(10 * number))
    smp.shutdown()


def of_whole(model: Any) -> tuple[Tensor, Tensor]:
    whole = model.state_dict()
    return whole["scale"], whole["seen"]


@pytest.mark.parametrize("kind", [Scaled, Assigned])
def test_replicas_share_all_copies(pool: Pools, kind: type[Scaled]) -> None:
    pool(4).run(replicas, kind)


class Statistics(nn.Module):
    """Children on three stages; statistics that each forward sets anew, writes into or only reads."""

    mean: Tensor
    count: Tensor
    norm: Tensor
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("norm", torch.ones(WIDTH))
        self.register_buffer("shift", torch.full((WIDTH,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x) - self.norm)
        h = torch.tanh(self.second(h) + self.shift)
        if self.training:
            self.mean = self.mean * 0.9 + h.detach().mean(0) * 0.1
            self.count = self.count + 1
            with torch.no_grad():
                self.norm.mul_(0.9).add_(h.norm(dim=0) * 0.1)
        out: Tensor = self.third(h - self.mean) / (1 + self.count)
        return out


def changing(looped: bool, evaluate_first: bool) -> None:
    places = {"first": 2, "second": 0, "third": 1} if looped else {"first": 0, "second": 1, "third": 2}
    restart(partitions=3, microbatches=4, auto_partition=False, default_partition=0)
    module, reference = Statistics(), Statistics()
    for name, place in places.items():
        smp.set_partition(module.get_submodule(name), place)
    model = smp.DistributedModel(module)

    step = smp.step(lambda x: model(x).square().mean())

    def evaluate(seed: int) -> None:
        model.eval()
        reference.eval()
        with torch.no_grad():
            wanted = torch.stack([reference(part).square().mean() for part in rows(seed).chunk(4)])
            torch.testing.assert_close(step(rows(seed)).reduce_mean(), wanted.mean())
        model.train()
        reference.train()

    if evaluate_first:
        evaluate(7)
    train_beside(model, reference, [(rows(number),) for number in range(3)], microbatches=4)
    evaluate(8)
    for name, found in model.state_dict().items():
        if "." not in name:
            torch.testing.assert_close(found, reference.state_dict()[name])
    smp.shutdown()


@pytest.mark.parametrize("looped", [False, True], ids=["chain", "looped"])
@pytest.mark.parametrize("evaluate_first", [False, True], ids=["train", "evaluate first"])
def test_statistics_follow_the_order_of_the_microbatches(
    pool: Pools, looped: bool, evaluate_first: bool
) -> None:
    pool(3).run(changing, looped, evaluate_first)


class LateStatistics(Statistics):
    """Only reads its buffer, until it is told to follow the data.

    Args:
        reached: called in such a forward with the number of the microbatch, and how far it has come.
    """

    def __init__(self, reached: Callable[[int, str], None] = lambda number, what: None) -> None:
        super().__init__()
        self.reached, self.number = reached, -1

    def forward(self, x: Tensor, late: bool) -> Tensor:
        before = x - self.mean
        if late:
            self.number += 1
            number = self.number
            self.reached(number, "read")
        h = torch.tanh(self.second(torch.tanh(self.first(before))))
        if late:
            self.reached(number, "computed")
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
            self.reached(number, "set")
        out: Tensor = self.third(h)
        return out


class Held(nn.Linear):
    """A layer that waits until somebody allows it."""

    allowed: Path | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.allowed is not None:
            wait_for(self.allowed)
        return super().forward(x)


def wait_for(file: Path) -> None:
    end = time.monotonic() + PATIENCE
    while not file.exists():
        assert time.monotonic() < end, f"nobody has made {file}"
        time.sleep(0.001)


def late_statistics(reached: Callable[[int, str], None]) -> tuple[Any, Any]:
    """On three ranks, after two steps that have only read the buffer."""
    restart(partitions=3, microbatches=4, auto_partition=False, default_partition=0)
    module = LateStatistics(reached)
    module.first = Held(WIDTH, WIDTH)
    module.load_state_dict(LateStatistics().state_dict())
    smp.set_partition(module.second, 1)
    smp.set_partition(module.third, 2)
    model = smp.DistributedModel(module)
    step = smp.step(lambda x, late: model.backward(model(x, late).square().mean()))
    for number in range(2):
        step(rows(number), False)
    return model, step


def changed_too_late(folder: Path) -> None:
    """The second rank begins microbatch 1 before the first one has sent microbatch 0."""
    has_read = folder / "has read"

    def reached(number: int, what: str) -> None:
        if (dist.get_rank(), number, what) == (1, 1, "read"):
            has_read.touch()

    model, step = late_statistics(reached)
    model.get_module().first.allowed = has_read
    with pytest.raises(SMPError, match=r"has changed buffer 'mean' after microbatch \d had read it"):
        step(rows(2), True)
    dist.destroy_process_group()  # there may be messages left in it


def test_a_buffer_that_is_changed_after_a_later_microbatch_has_read_it_is_refused(
    pool: Pools, tmp_path: Path
) -> None:
    pool(3).run(changed_too_late, tmp_path)


def changed_in_time(folder: Path) -> None:
    """All ranks go through microbatch 0 without a wait, so that no other comes in between."""
    is_sent, is_set = folder / "is sent", folder / "is set"

    def reached(number: int, what: str) -> None:
        rank = dist.get_rank()
        if number == 0 and rank == 1:
            if what == "read":
                wait_for(is_sent)
            elif what == "set":
                is_set.touch()
        elif number == 0 and what == "computed":
            if rank == 0:
                is_sent.touch()
            wait_for(is_set)

    model, step = late_statistics(reached)
    step(rows(2), True)
    reference = LateStatistics()
    for part in rows(2).chunk(4):
        reference(part, True)
    torch.testing.assert_close(model.state_dict()["mean"], reference.mean)
    smp.shutdown()


def test_a_buffer_may_be_changed_late_where_no_later_microbatch_has_read_it(
    pool: Pools, tmp_path: Path
) -> None:
    pool(3).run(changed_in_time, tmp_path)


class Sizing(nn.Linear):
    """Sizes its buffer in the first forward, as the observers of quantisation-aware training do."""

    peak: Tensor

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("peak", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        peak = x.detach().abs().amax(0)
        if self.peak.numel():
            peak = torch.max(self.peak, peak)
        self.peak.resize_(WIDTH)
        self.peak.copy_(peak)
        out: Tensor = super().forward(x / peak)
        return out


def sizing() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(Sizing(), nn.Tanh()) for _ in range(4)))


def sized_in_the_first_forward() -> None:
    restart(partitions=2, microbatches=2)
    model, plain = smp.DistributedModel(sizing()), sizing()
    train_beside(model, plain, [(rows(number),) for number in range(3)], microbatches=2)
    for name, found in model.state_dict().items():
        torch.testing.assert_close(found, plain.state_dict()[name])
    smp.shutdown()


def test_buffers_may_get_their_size_in_the_first_forward(pool: Pools) -> None:
    pool(2).run(sized_in_the_first_forward)


class KeepsBetween(nn.Module):
    """Keeps something while it reads one buffer, after another that steps only read."""

    scale: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("count", torch.zeros(()))
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        scale = self.scale
        self.kept = h
        count = self.count
        h, self.kept = self.kept * scale, None
        self.count = count + 1
        out: Tensor = self.third(self.second(h)) * (1 + self.count)
        return out


def waiting_elsewhere() -> None:
    """In the first step, microbatches wait before they keep anything, later after that."""
    restart(partitions=2, microbatches=4, pipeline="simple", auto_partition=False, default_partition=0)
    module = KeepsBetween()
    smp.set_partition(module.second, 1)
    batches = [(rows(number).repeat(2, 1),) for number in range(3)]
    train_beside(smp.DistributedModel(module), KeepsBetween(), batches, microbatches=4)
    smp.shutdown()


def test_what_is_kept_while_a_buffer_is_read_is_each_microbatchs_own_in_every_step(pool: Pools) -> None:
    pool(2).run(waiting_elsewhere)
