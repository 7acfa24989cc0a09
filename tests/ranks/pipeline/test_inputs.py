"""What a model writes into the inputs of a step: each microbatch its own part, and the batch has it all."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from tests.support.equality import Pools, train_beside
from tests.support.partitioned import restart

WIDTH, WORDS, PADDING = 6, 10, -100


class Embedded(nn.Embedding):
    """Takes out of its input what marks padding."""

    def forward(self, ids: Tensor) -> Tensor:
        ids.masked_fill_(ids == PADDING, 1)
        return super().forward(ids)


class Translator(nn.Module):
    """Reads its ids on both stages, and writes into them on both and between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.source, self.target = Embedded(WORDS, WIDTH), Embedded(WORDS, WIDTH)
        self.encoder, self.decoder = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor, wanted: Tensor, scale: Tensor) -> Tensor:
        h = self.encoder(self.source(ids))
        wanted.clamp_(max=WORDS - 2)
        with torch.no_grad():
            scale[:, 0] = h.mean((1, 2))
        out: Tensor = self.decoder(torch.tanh(h + self.target(wanted))) * scale[:, :, None]
        return out


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(WORDS, (8, 4), generator=generator)
    wanted = torch.randint(WORDS, (8, 4), generator=generator)
    ids[:, 2], wanted[:, 1] = PADDING, PADDING
    return ids, wanted, torch.ones(8, 4)


def trained(stages: int, settings: dict[str, bool]) -> None:
    restart(partitions=stages, microbatches=4, auto_partition=False, default_partition=0, **settings)
    module, plain = Translator(), Translator()
    for part in (module.target, module.decoder):
        smp.set_partition(part, stages - 1)
    mine, other = batch(), batch()
    train_beside(smp.DistributedModel(module), plain, [mine, mine], microbatches=4)
    with torch.no_grad():
        plain(*other)
    for found, wanted in zip(mine, other, strict=True):
        torch.testing.assert_close(found, wanted)
    smp.shutdown()


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"deterministic_server": True}], ids=["ready", "in order"])
def test_writes_into_inputs_are_each_microbatchs_own_and_in_the_batch_afterwards(
    pool: Pools, stages: int, settings: dict[str, bool]
) -> None:
    pool(stages).run(trained, stages, settings)


class Doubling(nn.Linear):
    """Doubles its input in place, by way of ``out=``."""

    def forward(self, h: Tensor) -> Tensor:
        torch.mul(h, 2, out=h)
        return super().forward(h)


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), Doubling(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        out: Tensor = self.second(h) + h
        return out


def evaluated() -> None:
    restart(partitions=2, microbatches=2, auto_partition=False, default_partition=0)
    module, x = Doubled(), torch.ones(4, WIDTH)
    smp.set_partition(module.second, 1)
    model = smp.DistributedModel(module)
    step = smp.step(lambda x: model(x))
    with torch.inference_mode():
        for _ in range(2):
            torch.testing.assert_close(step(x).concat(), Doubled()(x))
    smp.shutdown()


def test_writes_by_out_are_seen_in_inference_mode(pool: Pools) -> None:
    pool(2).run(evaluated)


def planned(asks: bool) -> None:
    restart(partitions=2, microbatches=2)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    plain, x = copy.deepcopy(module), torch.ones(4, WIDTH)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        x.mul_(0.5)
        found: Tensor = model(x).square().mean()
        return found * 2 if asks and found.item() > 0 else found

    train_beside(smp.DistributedModel(module), plain, [(x,), (x,)], microbatches=2, loss=loss)
    assert torch.equal(x, torch.full_like(x, 0.25))
    smp.shutdown()


@pytest.mark.parametrize("asks", [False, True], ids=["under fakes", "for real"])
def test_the_dry_run_writes_nothing_into_a_batch(pool: Pools, asks: bool) -> None:
    pool(2).run(planned, asks)


class OnGraph(nn.Module):
    """Mixes rows by a sparse matrix, on every stage."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        out: Tensor = adjacency @ self.second(torch.tanh(adjacency @ self.first(x)))
        return out


def with_sparse_arguments() -> str:
    """Trains with the same sparse matrix on all ranks; what the step says to another one on this rank."""
    restart(partitions=2, microbatches=2, auto_partition=False, default_partition=0)
    module, plain = OnGraph(), OnGraph()
    smp.set_partition(module.second, 1)
    model = smp.DistributedModel(module)

    @smp.step(non_split_inputs=["adjacency"])
    def train_step(x: Tensor, adjacency: Tensor) -> Tensor:
        loss: Tensor = model(x, adjacency).square().mean()
        model.backward(loss)
        return loss

    x, dense = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)), torch.eye(4).flip(0) + 0.5
    for layout in (torch.sparse_coo, torch.sparse_csr):
        model.zero_grad()
        train_step(x, dense.to_sparse(layout=layout))
        plain.zero_grad()
        for rows in x.chunk(2):
            (plain(rows, dense).square().mean() / 2).backward()
        for name, parameter in model.local_named_parameters():
            torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)
    with pytest.raises(RuntimeError) as told:
        train_step(x, (dense * (1 + smp.rank())).to_sparse())
    smp.shutdown()
    dist.destroy_process_group()  # a step has failed on it
    return str(told.value)


def test_a_sparse_argument_is_used_on_all_stages_if_all_ranks_have_the_same(pool: Pools) -> None:
    for text in pool(2).run(with_sparse_arguments):
        assert "pass the same on all ranks" in text
