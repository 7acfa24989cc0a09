"""Every function of ``torch.distributed.deprecated``, each checked against numbers computed on the spot.

:func:`check_all` runs the whole table inside a job that has been initialised; the tests call it for every
backend, method and world size, under pytest's own ranks and under ``mpiexec``.
"""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable

import torch
import torch.distributed.deprecated as dist

DTYPES = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.float64,
]
SHAPES = [(), (1,), (3, 5), (0,), (2, 0, 3), (257,), (40_000,)]


def values(rank: int, shape: tuple[int, ...] = (3, 5), dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers, different between ranks and elements: so every dtype reduces them exactly."""
    count = int(torch.Size(shape).numel())
    return ((torch.arange(count) + 2 * rank) % 3 + 1).to(dtype).reshape(shape)


def expected(op: dist.reduce_op, ranks: list[int], **form: object) -> torch.Tensor:
    """The reduction of the ranks' values."""
    functions: dict[dist.reduce_op, Callable[..., torch.Tensor]] = {
        dist.reduce_op.SUM: operator.add,
        dist.reduce_op.PRODUCT: operator.mul,
        dist.reduce_op.MAX: torch.maximum,
        dist.reduce_op.MIN: torch.minimum,
    }
    return functools.reduce(functions[op], [values(rank, **form) for rank in ranks])


def same(got: torch.Tensor, want: torch.Tensor, what: object) -> None:
    """Equal in shape, dtype and every element."""
    assert got.dtype == want.dtype and got.shape == want.shape, (what, got, want)
    assert torch.equal(got, want), (what, got, want)


def check_all_reduce(rank: int, ranks: list[int], group: object) -> None:
    for op in dist.reduce_op:
        for dtype in DTYPES:
            tensor = values(rank, dtype=dtype)
            assert dist.all_reduce(tensor, op, group) is None
            same(tensor, expected(op, ranks, dtype=dtype), (op, dtype))
    for shape in SHAPES:
        tensor = values(rank, shape)
        dist.all_reduce(tensor, group=group)
        same(tensor, expected(dist.reduce_op.SUM, ranks, shape=shape), shape)
    whole = values(rank, (6, 4)).t()
    dist.all_reduce(whole[1:, ::2], group=group)
    same(
        whole[1:, ::2],
        expected(dist.reduce_op.SUM, ranks, shape=(6, 4)).t()[1:, ::2],
        "non-contiguous all_reduce",
    )
    same(whole[0], values(rank, (6, 4)).t()[0], "outside of the view")
    negated = torch._neg_view(-values(rank))
    dist.all_reduce(negated, group=group)
    same(negated, expected(dist.reduce_op.SUM, ranks), "all_reduce of what is negated when it is read")


def check_broadcast(rank: int, ranks: list[int], group: object) -> None:
    for src in ranks:
        for dtype in DTYPES:
            tensor = values(rank, dtype=dtype)
            dist.broadcast(tensor, src, group)
            same(tensor, values(src, dtype=dtype), ("broadcast", src, dtype))
    for shape in SHAPES:
        tensor = values(rank, shape)
        dist.broadcast(tensor, ranks[-1], group=group)
        same(tensor, values(ranks[-1], shape), shape)
    turned = values(rank, (4, 3)).t()
    dist.broadcast(turned, ranks[0], group)
    same(turned, values(ranks[0], (4, 3)).t(), "non-contiguous broadcast")
    negated = torch._neg_view(-values(rank))
    dist.broadcast(negated, ranks[0], group)
    same(negated, values(ranks[0]), "broadcast of what is negated when it is read")


def check_reduce(rank: int, ranks: list[int], group: object) -> None:
    for dst in ranks:
        for op in dist.reduce_op:
            for dtype in DTYPES:
                tensor = values(rank, dtype=dtype)
                dist.reduce(tensor, dst, op, group)
                want = expected(op, ranks, dtype=dtype) if rank == dst else values(rank, dtype=dtype)
                same(tensor, want, ("reduce", dst, op, dtype))
        turned = values(rank, (4, 3)).t()
        dist.reduce(turned, dst, group=group)
        total = expected(dist.reduce_op.SUM, ranks, shape=(4, 3)).t()
        same(turned, total if rank == dst else values(rank, (4, 3)).t(), "non-contiguous reduce")


def check_all_gather(rank: int, ranks: list[int], group: object) -> None:
    for form in [{"dtype": dtype} for dtype in DTYPES] + [{"shape": shape} for shape in SHAPES]:
        outputs = [torch.zeros_like(values(rank, **form)) for _ in ranks]
        dist.all_gather(outputs, values(rank, **form), group)
        for output, other in zip(outputs, ranks, strict=True):
            same(output, values(other, **form), ("all_gather", form))
    columns = torch.zeros(5, len(ranks))
    dist.all_gather([columns[:, i] for i in range(len(ranks))], values(rank, (5, 2))[:, 0], group)
    for i, other in enumerate(ranks):
        same(columns[:, i], values(other, (5, 2))[:, 0], "non-contiguous all_gather")


def check_gather(rank: int, ranks: list[int], group: object) -> None:
    forms = [{"dtype": dtype} for dtype in DTYPES] + [{"shape": shape} for shape in SHAPES]
    for turn, form in enumerate(forms):
        dst = ranks[turn % len(ranks)]
        tensor = values(rank, **form)
        if rank != dst:
            dist.gather(tensor, dst=dst, group=group)
            continue
        outputs = [torch.zeros_like(tensor) for _ in ranks]
        # the destination is the caller by default
        dist.gather(tensor, gather_list=outputs, group=group)
        for output, other in zip(outputs, ranks, strict=True):
            same(output, values(other, **form), ("gather", form))


def check_scatter(rank: int, ranks: list[int], group: object) -> None:
    forms = [{"dtype": dtype} for dtype in DTYPES] + [{"shape": shape} for shape in SHAPES]
    for turn, form in enumerate(forms):
        src = ranks[turn % len(ranks)]
        tensor = torch.zeros_like(values(rank, **form))
        if rank == src:
            dist.scatter(tensor, scatter_list=[values(other, **form) for other in ranks], group=group)
        else:
            dist.scatter(tensor, src=src, group=group)
        same(tensor, values(rank, **form), ("scatter", form))


def check_multigpu(rank: int, ranks: list[int], group: object) -> None:
    def own(each: int) -> list[torch.Tensor]:
        return [values(2 * each), values(2 * each + 1)]

    everything = [tensor for other in ranks for tensor in own(other)]
    total = functools.reduce(operator.add, everything)
    tensors = own(rank)
    dist.all_reduce_multigpu(tensors, group=group)
    for tensor in tensors:
        same(tensor, total, "all_reduce_multigpu")
    tensors = own(rank)
    dist.reduce_multigpu(tensors, ranks[-1], dist.reduce_op.MAX, group)
    highest = functools.reduce(torch.maximum, everything)
    same(tensors[0], highest if rank == ranks[-1] else own(rank)[0], "reduce_multigpu")
    same(tensors[1], own(rank)[1], "reduce_multigpu")
    tensors = own(rank)
    dist.broadcast_multigpu(tensors, ranks[-1], group)
    for tensor in tensors:
        same(tensor, own(ranks[-1])[0], "broadcast_multigpu")
    outputs = [[torch.zeros(3, 5) for _ in everything] for _ in range(2)]
    dist.all_gather_multigpu(outputs, own(rank), group)
    for one in outputs:
        for output, want in zip(one, everything, strict=True):
            same(output, want, "all_gather_multigpu")


def check_send_and_recv(rank: int, size: int) -> None:
    """Every ordered pair, every dtype; the sender is known or found out."""
    forms = [{"dtype": dtype} for dtype in DTYPES] + [{"shape": shape} for shape in SHAPES]
    for src in range(size):
        for dst in range(size):
            if src == dst:
                continue
            for turn, form in enumerate(forms):
                if rank == src:
                    assert dist.send(values(src, **form), dst) is None
                elif rank == dst:
                    tensor = torch.zeros_like(values(src, **form))
                    sender = dist.recv(tensor, src) if turn % 2 else dist.recv(tensor)
                    assert sender == src
                    same(tensor, values(src, **form), ("send", form))
            if rank == src:
                dist.send(torch._neg_view(-values(src)), dst)
            elif rank == dst:
                tensor = torch._neg_view(values(rank))
                dist.recv(tensor, src)
                same(tensor, values(src), "what is negated when it is read")
            dist.barrier()


def check_any_source(rank: int, size: int) -> None:
    """Rank 0 takes one message from each rank, whoever comes."""
    if rank:
        dist.send(values(rank), 0)
        return
    seen = set()
    for _ in range(size - 1):
        tensor = torch.zeros(3, 5)
        sender = dist.recv(tensor)
        same(tensor, values(sender), "any source")
        seen.add(sender)
    assert seen == set(range(1, size))


def check_all_send_before_any_receives(rank: int, size: int) -> None:
    """Large messages too: a send does not wait for its receiver."""
    for count in (10, 1_000_000):
        dist.send(torch.full((count,), float(rank)), (rank + 1) % size)
        tensor = torch.zeros(count)
        assert dist.recv(tensor, (rank - 1) % size) == (rank - 1) % size
        same(tensor, torch.full((count,), float((rank - 1) % size)), "ring")


def check_many_outstanding_requests(rank: int, size: int) -> None:
    """Messages of one pair do not overtake each other, whatever their sizes."""
    others = [other for other in range(size) if other != rank]
    counts = [1, 50_000, 3, 0, 20_000, 7] * 5
    sends = [
        dist.isend(torch.full((count,), float(turn)), other)
        for turn, count in enumerate(counts)
        for other in others
    ]
    tensors = {other: [torch.zeros(count) for count in counts] for other in others}
    receives = [dist.irecv(tensor, other) for other in others for tensor in tensors[other]]
    for request in reversed(receives):
        assert request.wait() is None
    for other in others:
        for turn, tensor in enumerate(tensors[other]):
            same(tensor, torch.full((counts[turn],), float(turn)), ("outstanding", other, turn))
    for request in sends:
        request.wait()
    assert all(request.is_completed() for request in sends + receives)
    dist.barrier()


def check_requests_complete_by_themselves(rank: int, size: int) -> None:
    """``is_completed`` becomes True without ``wait``."""
    tensor = torch.zeros(4, 2).t()
    request = dist.irecv(tensor, (rank - 1) % size)
    dist.barrier()
    assert not request.is_completed()
    dist.barrier()
    dist.isend(values(rank, (2, 4)), (rank + 1) % size)
    while not request.is_completed():
        pass
    same(tensor, values((rank - 1) % size, (2, 4)), "completed")
    request.wait()


def check_sizes_that_differ(rank: int, size: int) -> None:
    """The receiver is told; the connection lives on."""
    for count in (2, 20):
        if rank == 0:
            dist.send(torch.ones(count), 1)
            dist.send(values(0), 1)
        elif rank == 1:
            try:
                dist.recv(torch.zeros(10), 0)
            except RuntimeError as error:
                assert "tensor sizes do not match" in str(error), error
            else:
                raise AssertionError("a message of another size was accepted")
            tensor = torch.zeros(3, 5)
            dist.recv(tensor, 0)
            same(tensor, values(0), "after a mismatch")


def check_groups(rank: int, size: int) -> None:
    """Groups in groups, in another order than the ranks', of one; non-members get a silent no-op."""
    orders = [list(range(size)), [size - 1, 0], [size - 1], list(range(1, size)), list(reversed(range(size)))]
    for ranks in orders:
        group = dist.new_group(ranks)
        if rank not in ranks:
            check_no_op(rank, ranks, group)
            continue
        check_all_reduce(rank, ranks, group)
        check_broadcast(rank, ranks, group)
        check_all_gather(rank, ranks, group)
        check_gather(rank, ranks, group)
        check_scatter(rank, ranks, group)
        check_multigpu(rank, ranks, group)
        dist.barrier(group)
    check_all_reduce(rank, list(range(size)), dist.new_group())
    check_all_reduce(rank, list(range(size)), 0)  # WORLD, in scripts of 2017


def check_no_op(rank: int, ranks: list[int], group: object) -> None:
    tensor = values(rank)
    assert dist.all_reduce(tensor, group=group) is None
    dist.broadcast(tensor, ranks[0], group)
    dist.reduce(tensor, ranks[0], group=group)
    dist.all_gather([tensor], tensor, group)
    dist.gather(tensor, dst=ranks[0], group=group)
    dist.scatter(tensor, src=ranks[0], group=group)
    dist.all_reduce_multigpu([tensor], group=group)
    dist.broadcast_multigpu([tensor], ranks[0], group)
    dist.reduce_multigpu([tensor], ranks[0], group=group)
    dist.all_gather_multigpu([[tensor]], [tensor], group)
    dist.barrier(group)
    same(tensor, values(rank), "a non-member's tensor")


def check_arguments(rank: int, size: int) -> None:
    """What does not fit is refused on the rank that says it, before anything is sent."""
    tensor = torch.zeros(3)
    refused: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (RuntimeError, "twice", lambda: dist.init_process_group("tcp")),
        (RuntimeError, "unexpected keyword", lambda: dist.gather(tensor, root=0)),
        (RuntimeError, "unexpected keyword", lambda: dist.scatter(tensor, source=0)),
        (RuntimeError, "no gather_list", lambda: dist.gather(tensor)),
        (RuntimeError, "no scatter_list", lambda: dist.scatter(tensor)),
        (
            RuntimeError,
            "only that rank",
            lambda: dist.gather(tensor, dst=(rank + 1) % size, gather_list=[tensor]),
        ),
        (
            RuntimeError,
            "only that rank",
            lambda: dist.scatter(tensor, src=(rank + 1) % size, scatter_list=[tensor]),
        ),
        (RuntimeError, "expected", lambda: dist.all_gather([tensor] * (size + 1), tensor)),
        (RuntimeError, "sizes do not match", lambda: dist.all_gather([torch.zeros(2)] * size, tensor)),
        (
            RuntimeError,
            "sizes do not match",
            lambda: dist.gather(tensor, gather_list=[tensor.double()] * size),
        ),
        (RuntimeError, "sizes do not match", lambda: dist.all_reduce_multigpu([tensor, torch.zeros(2)])),
        (RuntimeError, "expected 1 list", lambda: dist.all_gather_multigpu([[tensor]], [tensor])),
        (ValueError, "this process itself", lambda: dist.send(tensor, rank)),
        (ValueError, "expected a rank", lambda: dist.isend(tensor, size)),
        (ValueError, "expected a rank", lambda: dist.irecv(tensor, None)),
        (ValueError, "not in the group", lambda: dist.broadcast(tensor, size)),
        (ValueError, "reduce_op", lambda: dist.all_reduce(tensor, "sum")),
        (ValueError, "new_group", lambda: dist.all_reduce(tensor, group=99)),
        (ValueError, "different ranks", lambda: dist.new_group([0, 0])),
        (ValueError, "different ranks", lambda: dist.new_group([size])),
    ]
    for kind, text, call in refused:
        try:
            call()
        except kind as error:
            assert text in str(error), (text, error)
        else:
            raise AssertionError(f"nothing was raised; expected {kind.__name__} with {text!r}")


def check_private_helpers() -> None:
    """Names with an underscore that scripts of the time called and read all the same."""
    assert dist._initialized == dist._INITIALIZED_PG
    assert dist._backend in (dist.dist_backend.TCP, dist.dist_backend.GLOO, dist.dist_backend.MPI)
    dist._clear_group_cache(dist.group.WORLD)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        dist._register_stream("stream")
    assert "is ignored" in str(seen[0].message)


def check_all() -> None:
    """The whole table."""
    rank, size = dist.get_rank(), dist.get_world_size()
    assert dist.is_available() and dist.is_initialized()
    ranks, world = list(range(size)), dist.group.WORLD
    check_all_reduce(rank, ranks, world)
    check_broadcast(rank, ranks, world)
    check_reduce(rank, ranks, world)
    check_all_gather(rank, ranks, world)
    check_gather(rank, ranks, world)
    check_scatter(rank, ranks, world)
    check_multigpu(rank, ranks, world)
    check_send_and_recv(rank, size)
    check_any_source(rank, size)
    dist.barrier()
    check_all_send_before_any_receives(rank, size)
    check_many_outstanding_requests(rank, size)
    check_requests_complete_by_themselves(rank, size)
    check_sizes_that_differ(rank, size)
    check_arguments(rank, size)
    check_private_helpers()
    check_groups(rank, size)
    dist.barrier()
