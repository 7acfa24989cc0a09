"""Fewer bytes between hosts: sums, what they have lost, training, and what cannot be compressed.

Most hosts are made of this one by giving ranks different identities, as in ``test_two_hosts``.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import opensmd
import smdistributed.modelparallel.torch as smp
from opensmd.collectives import _torch_internals
from opensmd.modelparallel.init import shutdown
from tests.hosts.test_two_hosts import drawn, init_on, values
from tests.support.networks import assert_each_prints_ok
from tests.support.ranks import run_once

# The most that a number can be off, of the largest in its block, for each time that it is rounded.
STEP = {"bf16": 2**-8, "fp16": 2**-11, "int8": 1 / 253}
STEPS = 30


def reduced(tensor: torch.Tensor, compression: str, residual: torch.Tensor | None, *, average: bool) -> None:
    backend = _torch_internals.cpu_backend(None)
    backend.all_reduce_compressed(tensor, average=average, compression=compression, residual=residual).wait()


def run_sums(hosts: str) -> list[int]:
    init_on(hosts)
    return check_sums()


def check_sums() -> list[int]:
    """Checksums of all results, of sizes that go with the comparison of calls and of larger ones."""
    rank, size = dist.get_rank(), dist.get_world_size()
    checksums = []
    for count in (0, 1, 3000, 1_700_003):
        inputs = [drawn(of, count) for of in range(size)]
        exact = torch.stack(inputs).double().sum(0)
        bound = sum(tensor.abs().max().item() for tensor in inputs) if count else 0.0
        for compression, step in STEP.items():
            for average in (False, True):
                residual = torch.full((count,), 0.25 * rank)
                before = sum(0.25 * of for of in range(size))
                result = inputs[rank].clone()
                reduced(result, compression, residual, average=average)
                checksums.append(zlib.crc32(result.view(torch.uint8).numpy()))
                whole = result.double() * (size if average else 1)
                error = (whole - exact - before).abs()
                assert count == 0 or error.max().item() <= 2 * step * (bound + before), (compression, count)
                # Nothing is lost for good: what the sum lacks lies with the ranks.
                kept = residual.double()
                dist.all_reduce(kept)
                torch.testing.assert_close(whole + kept, exact + before, rtol=1e-4, atol=1e-4)
    return checksums


def run_refusals() -> None:
    backend = _torch_internals.cpu_backend(None)
    for tensor, error, text in (
        (torch.ones(3, dtype=torch.float64), TypeError, "only float32 tensors are compressed"),
        (torch.ones(3, 2).t(), ValueError, "contiguous"),
    ):
        with pytest.raises(error, match=text):
            backend.all_reduce_compressed(tensor, average=True, compression="int8", residual=None)
    with pytest.raises(ValueError, match="residual has 2 numbers, but the tensor that is reduced has 3"):
        backend.all_reduce_compressed(
            torch.ones(3), average=True, compression="int8", residual=torch.zeros(2)
        )
    with pytest.raises(ValueError, match="compression is 'int4', but there are"):
        backend.all_reduce_compressed(torch.ones(3), average=True, compression="int4", residual=None)
    with pytest.raises(TypeError, match=r"only float32 gradients are compressed to int8 .* torch.float64"):
        trained(net().double(), opensmd.CompressionState("int8"), steps=1)
    with pytest.raises(TypeError, match=r"compression_hook got None for its state: call register_comm_hook"):
        opensmd.compression_hook(None, None)  # type: ignore[arg-type]
    other = dist.new_group(backend="gloo")
    with pytest.raises(
        ValueError, match=r"only the backend smddp compresses .* group .* has the backend 'gloo'"
    ):
        trained(net(), opensmd.CompressionState("bf16", other), steps=1, group=other)


def run_infinities() -> None:
    """A scaler of losses must see that a step has overflowed, and the next one must not suffer from it."""
    for compression in STEP:
        residual = torch.zeros(600)
        tensor = torch.ones(600)
        tensor[300] = float("inf")
        reduced(tensor, compression, residual, average=True)
        assert not tensor[300].isfinite() and residual.isfinite().all()
        assert tensor[0].isfinite() and tensor[599].isfinite()


def run_mismatches() -> str:
    with pytest.raises(dist.DistBackendError) as found:
        reduced(torch.ones(3), "int8" if dist.get_rank() else "fp16", None, average=False)
    return str(found.value)


def net() -> nn.Sequential:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 1))


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1000 * step + rank)
    rows = torch.randn(16, 40, generator=random)
    return rows, (rows[:, :4].prod(1, keepdim=True) + rows[:, 5:6]).tanh()


def trained(
    model: nn.Module,
    state: opensmd.CompressionState | None,
    *,
    steps: int = STEPS,
    first: int = 0,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, list[float]]:
    """All parameters after so many steps, and this rank's losses."""
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.01)  # several, cut twice
    if state is not None:
        ddp.register_comm_hook(state, opensmd.compression_hook)
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(first, first + steps):
        rows, target = batch(dist.get_rank(), step)
        dtype = next(model.parameters()).dtype
        loss = nn.functional.mse_loss(ddp(rows.to(dtype)), target.to(dtype))
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        losses.append(loss.item())
    return nn.utils.parameters_to_vector(model.parameters()).detach(), losses


def run_training() -> dict[str, float]:
    """How far from the exact run each compression ends, of how far that has come."""
    begin = nn.utils.parameters_to_vector(net().parameters()).detach()
    exact, exact_losses = trained(net(), None)
    way = (exact - begin).norm()
    distances = {}
    for name, state in {
        "bf16": opensmd.CompressionState("bf16"),
        "fp16": opensmd.CompressionState("fp16"),
        "int8": opensmd.CompressionState("int8"),
        "int8 without feedback": opensmd.CompressionState("int8", error_feedback=False),
    }.items():
        found, losses = trained(net(), state)
        everyones = [torch.empty_like(found) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, found)
        assert all(torch.equal(other, found) for other in everyones)
        assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
        assert abs(sum(losses[-5:]) - sum(exact_losses[-5:])) < 0.05 * sum(exact_losses[-5:])
        distances[name] = ((found - exact).norm() / way).item()
    return distances


def run_saving() -> None:
    """Residuals belong to parameters by name, and outlive buckets, hooks and the state itself."""
    model, state = net(), opensmd.CompressionState("int8")
    trained(model, state, steps=5)
    saved = state.state_dict(model)
    assert set(saved) == {name for name, _ in model.named_parameters()}
    # Small sums are coded by the first rank of each host, which keeps what they lose.
    assert any(bool(residual.any()) for residual in saved.values()) == (dist.get_rank() in (0, 2))
    again = opensmd.CompressionState("int8")
    other = net()
    other.load_state_dict(model.state_dict())
    again.load_state_dict(other, saved)
    for name, residual in again.state_dict(other).items():
        assert torch.equal(residual, saved[name])
    with pytest.raises(
        ValueError, match=r"residual of '2.weight' has shape \(60, 60\), but the model has none"
    ):
        again.load_state_dict(nn.Linear(1, 1), {"2.weight": saved["2.weight"]})
    # What was lost comes back with the next gradients: here with no gradients at all.
    lost = {name: residual.clone() for name, residual in saved.items()}
    for residual in lost.values():
        dist.all_reduce(residual, dist.ReduceOp.AVG)
    ddp = DistributedDataParallel(other)
    ddp.register_comm_hook(again, opensmd.compression_hook)
    (ddp(torch.zeros(1, 40)) * 0).sum().backward()
    for name, parameter in other.named_parameters():
        scale = max(float(residual.abs().max()) for residual in lost.values())
        torch.testing.assert_close(parameter.grad, lost[name], rtol=0, atol=scale / 60)


def run_on_hosts(hosts: str) -> tuple[list[int], dict[str, float]]:
    init_on(hosts)
    checksums, distances = check_sums(), run_training()
    run_saving()
    run_infinities()
    run_refusals()
    return checksums, distances


def run_whole_group(hosts: str) -> str:
    """The setting of the group: sums and averages of float32 alone, whoever asks for them."""
    os.environ["OPENSMD_COMPRESSION"] = "bf16"
    init_on(hosts)
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in (5, 300_007):
        inputs = [drawn(of, count) for of in range(size)]
        sums = torch.stack(inputs).sum(0)
        summed, largest, wide = inputs[rank].clone(), inputs[rank].clone(), inputs[rank].double()
        dist.all_reduce(summed)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        dist.all_reduce(wide)
        assert torch.equal(summed, summed.bfloat16().float()) or count == 5
        assert not torch.equal(summed, sums)
        torch.testing.assert_close(summed, sums, rtol=0.03, atol=0.1)
        assert torch.equal(largest, torch.stack(inputs).amax(0))
        torch.testing.assert_close(wide, torch.stack(inputs).double().sum(0), rtol=1e-12, atol=1e-12)
    return run_mismatches()


def run_on_one_host(hosts: str) -> None:
    """Nothing is lost, and nothing is kept but what a run on several hosts has left."""
    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

    os.environ["OPENSMD_COMPRESSION"] = "int8"
    dist.init_process_group("smddp", rank=int(os.environ["RANK"]), world_size=len(hosts))
    plain, _ = trained(net(), None, steps=3)
    state, model = opensmd.CompressionState("int8"), net()
    found, _ = trained(model, state, steps=3)
    assert torch.equal(found, plain) and state.state_dict(model) == {}
    model = net()
    state.load_state_dict(model, {"4.bias": torch.tensor([8.0])})
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state, opensmd.compression_hook)
    (ddp(torch.zeros(1, 40)) * 0).sum().backward()
    assert model[4].bias.grad.item() == 8.0
    assert state.state_dict(model) == {}, state.state_dict(model)


def run_in_stages(hosts: str) -> list[float]:
    """Two stages and two replicas, which are on different hosts."""
    del os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]  # which speak of one host
    init_on(hosts)
    losses = []
    for compressed in (False, True):
        smp.init({"pipeline_parallel_degree": 2, "ddp": True, "microbatches": 2})
        group = smp.get_dp_process_group()
        assert {hosts[rank] for rank in dist.get_process_group_ranks(group)} == set(hosts)
        state = opensmd.CompressionState("int8", group) if compressed else None
        model = smp.DistributedModel(net())
        if state is not None:
            model.register_comm_hook(state, opensmd.compression_hook)
        sgd = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))

        @smp.step
        def train(rows: torch.Tensor, target: torch.Tensor, model: Any = model) -> Any:
            loss = nn.functional.mse_loss(model(rows), target)
            model.backward(loss)
            return loss

        for step in range(4):
            sgd.zero_grad()
            losses.append(train(*batch(smp.dp_rank(), step)).reduce_mean().item())
            sgd.step()
        if state is not None:
            assert state.state_dict(model)
        shutdown()
    return losses


@pytest.mark.parametrize("hosts", ["abbab", "abc"])
def test_every_rank_gets_the_same_sums_and_what_they_lack_is_kept(hosts: str) -> None:
    checksums = values(run_once(len(hosts), run_sums, hosts, backend=None))
    assert all(checksum == checksums[0] for checksum in checksums)


def test_training_ends_near_the_exact_one_and_with_feedback_nearer() -> None:
    found = values(run_once(4, run_on_hosts, "aabb", backend=None))
    for checksums, distances in found:
        assert checksums == found[0][0]
        assert distances["fp16"] < 0.005 and distances["bf16"] < 0.02 and distances["int8"] < 0.02
        assert distances["int8"] < 0.7 * distances["int8 without feedback"]


def test_a_group_compresses_its_sums_and_says_where_ranks_do_so_differently() -> None:
    for text in values(run_once(3, run_whole_group, "aab", backend=None)):
        assert "fp16 between hosts" in text and "int8 between hosts" in text


def test_nothing_is_compressed_within_one_host() -> None:
    values(run_once(2, run_on_one_host, "aa", backend=None))


def test_replicas_of_a_pipeline_compress_between_hosts() -> None:
    for losses in values(run_once(4, run_in_stages, "aabb", backend=None)):
        torch.testing.assert_close(losses[:4], losses[4:], rtol=0.02, atol=1e-3)


CROSSING = """
import opensmd
from pathlib import Path
from torch.nn.parallel import DistributedDataParallel

sent = Path("/sys/class/net/cable/statistics/tx_bytes")
bytes_of = {}
for compression in (None, "bf16", "int8"):
    model = torch.nn.Linear(1024, 1024, bias=False)
    ddp = DistributedDataParallel(model)
    if compression:
        ddp.register_comm_hook(opensmd.CompressionState(compression), opensmd.compression_hook)
    dist.barrier()
    before = int(sent.read_text())
    ddp(torch.full((2, 1024), 1.0 + dist.get_rank())).sum().backward()
    dist.barrier()
    bytes_of[compression] = int(sent.read_text()) - before
    torch.testing.assert_close(model.weight.grad, torch.full((1024, 1024), 5.0))
assert bytes_of[None] > 4 << 20, bytes_of
assert bytes_of["bf16"] < 0.6 * bytes_of[None] and bytes_of["int8"] < 0.4 * bytes_of[None], bytes_of
print("ok", dist.get_rank(), flush=True)
dist.destroy_process_group()
"""


def test_fewer_bytes_cross_the_cable(hosts: tuple[str, str], tmp_path: Path) -> None:
    assert_each_prints_ok(hosts, tmp_path / "script.py", CROSSING, size=4)
