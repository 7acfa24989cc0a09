"""torch.ops.opensmd and opensmd.direct give what torch.distributed gives; operators also in a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import opensmd
from tests.support.ranks import RankPool

Pool = Callable[[int], RankPool]


def own(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(count) % 5 + rank).to(dtype)


def run_lazy() -> None:
    """Tensors that torch conjugates or negates only when something reads them."""
    size, rank = dist.get_world_size(), dist.get_rank()
    calls: Any = Operators()
    for dtype, lazy in ((torch.complex64, torch.conj), (torch.float32, torch._neg_view)):
        values = own(rank, size, dtype) * (1 + 2j if dtype.is_complex else 1)
        expected = lazy(values).clone()
        dist.all_reduce(expected)
        given = lazy(values.clone())
        calls.all_reduce_(given, "sum")
        assert (given.is_conj() or given.is_neg()) and torch.equal(given, expected)
        whole = lazy(torch.empty(size * size, dtype=dtype))
        calls.all_gather_into_(whole, lazy(values))
        assert torch.equal(whole.view(size, size)[rank], lazy(values))


class Operators:
    """torch.ops.opensmd with the interface of opensmd.direct."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        operator = getattr(torch.ops.opensmd, name)
        return lambda *tensors_and_more: operator(*tensors_and_more, dist.group.WORLD.group_name)


def run_operators() -> None:
    run_each(Operators())


def run_direct() -> None:
    run_each(opensmd.direct())


def run_each(calls: Any) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    for count in (size, 70 * size, 50_000 * size):
        for op, reduce_op in (
            ("sum", dist.ReduceOp.SUM),
            ("max", dist.ReduceOp.MAX),
            ("avg", dist.ReduceOp.AVG),
        ):
            expected = own(rank, count)
            dist.all_reduce(expected, reduce_op)
            tensor = own(rank, count)
            assert calls.all_reduce_(tensor, op) is None
            assert torch.equal(tensor, expected)
            mine, part = torch.empty(count // size), torch.empty(count // size)
            dist.reduce_scatter_tensor(part, own(rank, count), reduce_op)
            calls.reduce_scatter_into_(mine, own(rank, count), op)
            assert torch.equal(mine, part)
        tensor = own(rank, count, torch.bfloat16).view(-1, size).t()  # whose elements do not lie in a row
        calls.broadcast_(tensor, size - 1)
        assert torch.equal(tensor, own(size - 1, count, torch.bfloat16).view(-1, size).t())
        whole = torch.empty(count * size)
        calls.all_gather_into_(whole, own(rank, count))
        assert torch.equal(whole, torch.cat([own(r, count) for r in range(size)]))
        exchanged = torch.empty(count)
        calls.all_to_all_into_(exchanged, own(rank, count))
        pieces = [own(r, count).chunk(size)[rank] for r in range(size)]
        assert torch.equal(exchanged, torch.cat(pieces))


def run_compiled() -> None:
    name, size = dist.group.WORLD.group_name, dist.get_world_size()

    def normalized(x: torch.Tensor) -> torch.Tensor:
        total = x * 2
        torch.ops.opensmd.all_reduce_(total, "sum", name)
        everyone = torch.empty(x.numel() * size)
        torch.ops.opensmd.all_gather_into_(everyone, total + dist.get_rank(), name)
        return everyone / 2

    compiled = torch.compile(normalized, backend="aot_eager", fullgraph=True)
    x = own(dist.get_rank(), 12)
    for _ in range(2):
        assert torch.equal(compiled(x), normalized(x))
    expected = torch.stack([own(r, 12) for r in range(size)]).sum(0)
    assert torch.equal(compiled(x).view(size, 12)[0], expected)


def run_wrong() -> None:
    name = dist.group.WORLD.group_name
    with pytest.raises(ValueError, match="op is 'mean', but there are sum, avg"):
        torch.ops.opensmd.all_reduce_(torch.ones(2), "mean", name)
    with pytest.raises(RuntimeError, match="no such group"):
        torch.ops.opensmd.all_reduce_(torch.ones(2), "sum", "no such group")
    part = dist.new_group()
    with pytest.raises(dist.DistBackendError, match="different calls"):
        torch.ops.opensmd.all_reduce_(torch.ones(2 + dist.get_rank()), "sum", part.group_name)
    gloo = dist.new_group(backend="gloo")
    tensor = torch.ones(2)
    torch.ops.opensmd.all_reduce_(tensor, "sum", gloo.group_name)
    assert tensor[0] == dist.get_world_size()


def run_direct_wrong() -> None:
    with pytest.raises(ValueError, match="op is 'mean', but there are sum, avg"):
        opensmd.direct().all_reduce_(torch.ones(2), "mean")
    with pytest.raises(ValueError, match="root 2147483647, which is not one of the group's ranks"):
        opensmd.direct().broadcast_(torch.ones(2), 1 << 32)
    with pytest.raises(ValueError, match="broadcast got a quantized tensor"):
        opensmd.direct().broadcast_(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))
    part = dist.new_group([0])
    if dist.get_rank() > 0:
        with pytest.raises(ValueError, match="a group that this process is a member of"):
            opensmd.direct(part)
    both = dist.new_group()
    kept = opensmd.direct(both)
    with pytest.raises(dist.DistBackendError, match="different calls"):
        kept.all_reduce_(torch.ones(2 + dist.get_rank()))
    dist.destroy_process_group(both)
    with pytest.raises(RuntimeError, match="was shut down"):
        kept.all_reduce_(torch.ones(2))
    gloo = opensmd.direct(dist.new_group(backend="gloo"))
    tensor = torch.ones(2)
    gloo.all_reduce_(tensor)
    assert tensor[0] == dist.get_world_size()


@pytest.mark.parametrize(
    "case",
    [run_operators, run_direct, run_lazy, run_compiled, run_wrong, run_direct_wrong],
    ids=lambda case: case.__name__,
)
def test_operators_and_direct_calls_do_what_the_functions_of_torch_distributed_do(
    pool: Pool, case: Callable[[], None]
) -> None:
    pool(3 if case in (run_operators, run_direct) else 2).run(case)
