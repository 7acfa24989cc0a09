"""What a rank of a pipeline holds: its own part of the model, and few microbatches' activations."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from opensmd.launch.allocator import keeping_memory
from opensmd.modelparallel.dry_run.capture import capture
from opensmd.modelparallel.planning.rank_bytes import Sharing, bytes_of_rank
from opensmd.tools.interpreter_memory import interpreter_bytes
from tests.support.equality import Pools
from tests.support.partitioned import restart
from tests.support.ranks import run_once

Step = Callable[[nn.Module, Tensor], Tensor]
WIDTH, LAYERS = 64, 12


def train(partitions: int, settings: dict[str, Any]) -> tuple[int, int, list[tuple[int, str, int, int]]]:
    """Two steps with Adam: bytes of parameters, bytes of gradients and optimizer state, and the record."""
    smp.shutdown()
    smp.init({"partitions": partitions, "microbatches": 6, **settings})
    module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(module.parameters()))

    @smp.step
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    for _ in range(2):
        optimizer.zero_grad()
        step(torch.ones(12, WIDTH))
        optimizer.step()
    record = [] if partitions == 1 else smp.state.engine.record
    parameters = list(module.parameters())
    held = sum(parameter.untyped_storage().nbytes() for parameter in parameters)
    training = [parameter.grad for parameter in parameters if parameter.grad is not None]
    training += [one for kept in optimizer.state.values() for one in kept.values() if one.numel() > 1]
    smp.shutdown()
    return (
        held,
        sum(one.nbytes for one in training),
        [(one.microbatch, one.kind, one.start_ns, one.end_ns) for one in record],
    )


def leave_behind(settings: dict[str, Any]) -> int:
    """How many tensors of a step's microbatches are still there after it, without the garbage collector."""
    restart(partitions=2, microbatches=4, **settings)
    module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(2)])
    model = smp.DistributedModel(module)
    seen: list[weakref.ref[Tensor]] = []

    @smp.step
    def step(x: Tensor) -> Tensor:
        hidden = model(x)
        loss = hidden.square().mean()
        seen.extend(map(weakref.ref, (x, hidden, loss)))
        model.backward(loss)
        return loss.detach()

    step(torch.ones(8, WIDTH))
    seen.clear()
    gc.collect()
    gc.disable()
    try:
        step(torch.ones(8, WIDTH))
        return sum(reference() is not None for reference in seen)
    finally:
        gc.enable()


@pytest.mark.parametrize("settings", [{}, {"deterministic_server": True}], ids=str)
def test_a_step_leaves_nothing_to_the_garbage_collector(pool: Pools, settings: dict[str, Any]) -> None:
    assert pool(2).run(leave_behind, settings) == [0, 0]


def test_a_rank_holds_its_own_part_only(pool: Pools) -> None:
    [(whole, whole_training, _)] = pool(1).run(train, 1, {})
    parts = pool(2).run(train, 2, {"optimize": "memory"})
    assert sum(held for held, _, _ in parts) == whole
    assert sum(training for _, training, _ in parts) == whole_training
    for held, training, _ in parts:
        assert 0.3 * whole < held < 0.7 * whole
        assert training == 3 * held  # a gradient and Adam's two averages


@pytest.mark.parametrize(("active", "expected"), [(1, [1, 1]), (2, [2, 1]), (4, [3, 1])])
def test_no_more_microbatches_are_in_flight_than_allowed(
    pool: Pools, active: int, expected: list[int]
) -> None:
    results = pool(2).run(train, 2, {"active_microbatches": active})
    for (_, _, record), most in zip(results, expected, strict=True):
        assert 1 <= most_in_flight(record) <= most


def most_in_flight(record: list[tuple[int, str, int, int]]) -> int:
    """Microbatches between the beginning of their forward and the end of their backward, at most."""
    begun = {}
    ended = {}
    for microbatch, kind, start, end in record:
        if kind == "forward":
            begun[microbatch] = min(start, begun.get(microbatch, start))
        if kind == "backward":
            ended[microbatch] = end
    return max(sum(begun[other] <= begun[one] < ended[other] for other in begun) for one in begun)


# --- the plan's estimate ---------------------------------------------------------------------------------

KEPT = 1 << 20
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h


def perceptron() -> tuple[nn.Module, Tensor, Step]:
    module = nn.Sequential(*[one for _ in range(8) for one in (nn.Linear(256, 256), nn.GELU())])
    return module, torch.randn(4 * 1024, 256), lambda model, x: model(x).square().mean()


def gpt() -> tuple[nn.Module, Tensor, Step]:
    import transformers

    config = transformers.GPT2Config(
        n_layer=4, n_embd=128, n_head=4, vocab_size=500, n_positions=64, tie_word_embeddings=False
    )
    module = transformers.GPT2LMHeadModel(config)
    return module, torch.randint(500, (4 * 8, 64)), lambda model, ids: model(input_ids=ids, labels=ids).loss


MODELS = {"perceptron": perceptron, "gpt": gpt}


def measured_and_estimated(name: str) -> tuple[float, float, float, int]:
    """What a step adds to this rank's memory, what the plan says, what it would say of no late gradients."""
    restart(partitions=2, microbatches=4, memory_weight=0.0)
    module, data, loss_of = MODELS[name]()
    model = smp.DistributedModel(module)

    @smp.step
    def step(x: Tensor) -> None:
        model.backward(loss_of(model, x))

    for _ in range(3):  # gradients and messages have their memory after the first
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        step(data)
        peak = memory("VmHWM")
    load = smp.state.engine.plan.loads[smp.pp_rank()]
    whole = load.memory_bytes - load.training_bytes
    return (peak - before) / KEPT, whole / KEPT, load.in_flight * load.activation_bytes / KEPT, load.late


def of_all_models() -> dict[str, tuple[float, float, float, int]]:
    libc = ctypes.CDLL(None)
    for threshold in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):  # free means gone
        assert libc.mallopt(threshold, 65536)
    return {name: measured_and_estimated(name) for name in MODELS}


def memory(kind: str) -> int:
    """A line of the kernel's account of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(kind))


@pytest.fixture(scope="module")
def found_of_models() -> list[dict[str, tuple[float, float, float, int]]]:
    """What each rank has found: both models are run by the same processes."""
    return [outcome.value for outcome in run_once(2, of_all_models)]


@pytest.mark.parametrize("name", MODELS)
def test_the_estimate_of_memory_is_that_of_a_run(
    found_of_models: list[dict[str, tuple[float, float, float, int]]], name: str
) -> None:
    (first, first_estimate, _, _), (last, estimate, without, late) = [each[name] for each in found_of_models]
    assert late == 2
    # A rank that waits computes weight gradients then, and keeps less until the end: how much, time tells.
    assert 0.75 * without < last < 1.25 * estimate
    assert estimate > 1.3 * without
    assert first < 1.25 * first_estimate


def language_model(**sizes: int) -> nn.Module:
    import transformers

    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_head=8, n_positions=64, **sizes))


def resident_and_predicted() -> tuple[float, float]:
    """What this rank's process has at most from the second step on, and what it should have by the plan."""
    torch.set_num_threads(1)
    smp.init({"partitions": 2, "microbatches": 4})
    small = language_model(n_layer=1, n_embd=64, vocab_size=100)
    capture(small, lambda: small(torch.ones(1, 64, dtype=torch.long)).logits.sum())
    interpreter = interpreter_bytes(small)
    model = smp.DistributedModel(language_model(n_layer=4, n_embd=512, vocab_size=20_000))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
    data = torch.randint(20_000, (4, 64))

    @smp.step
    def step(ids: Tensor) -> None:
        model.backward(model(input_ids=ids, labels=ids).loss)

    for number in range(4):
        optimizer.zero_grad()
        step(data)
        optimizer.step()
        if number == 1:
            Path("/proc/self/clear_refs").write_text("5")
    most = memory("VmHWM") - memory("RssFile") - memory("RssShmem")
    load = smp.state.engine.plan.loads[smp.pp_rank()]
    return most / KEPT, bytes_of_rank(load, Sharing()).resident(interpreter) / KEPT


def test_a_process_is_resident_as_the_plan_predicts() -> None:
    outcomes = run_once(2, resident_and_predicted, env=keeping_memory({}))
    for measured, predicted in [outcome.value for outcome in outcomes]:
        assert measured == pytest.approx(predicted, rel=0.1)
