"""Lists and dicts in attributes of modules, which forwards fill and clear: auxiliary losses, records."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from tests.support.equality import Pools, train_beside
from tests.support.partitioned import restart

WIDTH, MICROBATCHES = 6, 4


class Expert(nn.Linear):
    """Keeps a loss of its own."""

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(super().forward(x))
        self.keep(out.square().mean())
        return out

    def keep(self, loss: Tensor) -> None:
        raise NotImplementedError


class Mixture(nn.Module):
    """Three experts on three stages."""

    def __init__(self, kind: type[Expert]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(kind(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.begin()
        for expert in self.experts:
            x = expert(x)
        return x, self.total()

    def begin(self) -> None:
        """Before the experts run."""

    def total(self) -> Tensor:
        """Of the losses that they have kept."""
        raise NotImplementedError


class Sharing(Expert):
    """Into the list of the model."""

    losses: list[Tensor]

    def keep(self, loss: Tensor) -> None:
        self.losses.append(loss)


class ClearedFirst(Mixture):
    def __init__(self) -> None:
        super().__init__(Sharing)
        self.losses: list[Tensor] = []
        for expert in self.experts:
            expert.losses = self.losses

    def begin(self) -> None:
        self.losses.clear()

    def total(self) -> Tensor:
        return torch.stack(self.losses).sum()


class ClearedLast(ClearedFirst):
    def begin(self) -> None:
        assert not self.losses

    def total(self) -> Tensor:
        found = super().total()
        self.losses.clear()
        return found


class Clearing(Sharing):
    """Into a list of its own, which it clears itself."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.losses = []

    def keep(self, loss: Tensor) -> None:
        self.losses.clear()
        super().keep(loss)


class Collected(Mixture):
    def __init__(self) -> None:
        super().__init__(Clearing)

    def total(self) -> Tensor:
        return sum((expert.losses[-1] for expert in self.experts), torch.zeros(()))


class Filing(Expert):
    """Into a dict of lists."""

    losses: dict[str, list[Tensor]]

    def keep(self, loss: Tensor) -> None:
        self.losses["balance"].append(loss)
        self.losses["size"].append(2 * loss)


class Filed(Mixture):
    def __init__(self) -> None:
        super().__init__(Filing)
        self.losses: dict[str, list[Tensor]] = {"balance": [], "size": []}
        for expert in self.experts:
            expert.losses = self.losses

    def begin(self) -> None:
        for kept in self.losses.values():
            kept.clear()

    def total(self) -> Tensor:
        return torch.stack(self.losses["balance"] + self.losses["size"]).sum()


class Recording(Sharing):
    """Into a record for later, and with a loss that is returned."""

    def keep(self, loss: Tensor) -> None:
        self.losses.append(loss.detach())


class Recorded(Mixture):
    """Never cleared: what the steps have left is there for the script, in the order of the microbatches."""

    def __init__(self) -> None:
        super().__init__(Recording)
        self.losses: list[Tensor] = []
        for expert in self.experts:
            expert.losses = self.losses

    def total(self) -> Tensor:
        return torch.zeros(())


class Silent(Expert):
    """Keeps nothing."""

    def keep(self, loss: Tensor) -> None:
        """The model takes the losses itself."""


class SetAnew(Mixture):
    """Lists the losses itself, and sets a new list for the next microbatch when it is through."""

    def __init__(self) -> None:
        super().__init__(Silent)
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for expert in self.experts:
            x = expert(x)
            self.losses.append(x.square().mean())
        found = torch.stack(self.losses).sum()
        self.losses = []
        return x, found


class Remembering(Silent):
    """Adds what was there lately, in whichever microbatch."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.bank: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.bank:
            out = out + torch.stack(self.bank).mean(0)
        self.bank = [*self.bank, out.mean(0).detach()][-3:]
        return out


class Remembered(Mixture):
    def __init__(self) -> None:
        super().__init__(Remembering)

    def total(self) -> Tensor:
        return torch.zeros(())


def rows(seed: int) -> tuple[Tensor]:
    return (torch.randn(2 * MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(seed)),)


def with_what_was_kept(model: nn.Module, x: Tensor) -> Tensor:
    out, extra = model(x)
    loss: Tensor = out.square().mean() + extra
    return loss


def left(module: nn.Module) -> list[float]:
    """The losses that are on this rank."""
    kept = module.losses if hasattr(module, "losses") else []
    lists = kept.values() if isinstance(kept, dict) else [kept]
    return [value for values in lists for value in values]


def trained(kind: Callable[[], Mixture], looped: bool) -> None:
    restart(partitions=3, microbatches=MICROBATCHES, auto_partition=False, default_partition=0)
    module, plain = kind(), kind()
    for number, expert in enumerate(module.experts):
        smp.set_partition(expert, (2, 0, 1)[number] if looped else number)
    model = smp.DistributedModel(module)
    train_beside(model, plain, map(rows, range(3)), microbatches=MICROBATCHES, loss=with_what_was_kept)
    assert len(left(module)) == len(left(plain))
    smp.shutdown()


@pytest.mark.parametrize("kind", [ClearedFirst, ClearedLast, Collected, Filed, Recorded, SetAnew, Remembered])
@pytest.mark.parametrize("looped", [False, True], ids=["chain", "looped"])
def test_each_microbatch_finds_in_lists_and_dicts_what_it_has_put_there_itself(
    pool: Pools, kind: type[Mixture], looped: bool
) -> None:
    pool(3).run(trained, kind, looped)
