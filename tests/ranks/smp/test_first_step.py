"""The first step runs the step function once more, on one rank; all ranks must see it end alike."""

from __future__ import annotations

import contextlib
import copy
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from opensmd.modelparallel.exceptions import PeerFailed, SMPCheckpointError
from opensmd.modelparallel.ranks import heartbeat
from tests.support.microbatch_threads import wait_until_microbatch_threads_end
from tests.support.patience import PATIENCE, wait_until
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]


class Net(nn.Module):
    """Two layers to cut between; with a parameter in the first or the second that nothing uses."""

    def __init__(self, unused: str = "") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 2)
        if unused:
            getattr(self, unused).spare = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


@contextlib.contextmanager
def started(*, fails: bool = False, **config: Any) -> Iterator[None]:
    """``fails``: messages of a failed step may be left, so that the next test needs another group."""
    smp.shutdown()
    smp.init({"partitions": 2, "microbatches": 2, **config})
    try:
        yield
    finally:
        smp.shutdown()
        if fails:
            dist.destroy_process_group()


def rows(count: int = 4) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(1))


def outcome(call: Callable[[], Any]) -> str:
    """What came of a call, in words."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


# --- what does not go into a step ----------------------------------------------------------------------


def step_in_a_step(steps_before: int) -> str:
    with started(fails=True):
        model = smp.DistributedModel(Net())
        inner = smp.step(lambda x: model(x).sum())
        for _ in range(steps_before):
            inner(rows())
        return outcome(lambda: smp.step(lambda x: inner(x))(rows()))


@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_step_in_a_step_is_an_error_also_in_the_first(pool: Pools, steps_before: int) -> None:
    for told in pool(2).run(step_in_a_step, steps_before):
        assert "a smp.step function was called inside another one" in told


def _talk(name: str, model: Any, optimizer: Any) -> Callable[[], Any]:
    nowhere = "/nowhere/at all"
    return {
        "smp.allgather": lambda: smp.allgather(1, smp.MP_GROUP),
        "smp.broadcast": lambda: smp.broadcast(1, smp.WORLD),
        "smp.send": lambda: smp.send(1, 1 - smp.rank(), smp.WORLD_RANK),
        "smp.recv_from": lambda: smp.recv_from(1 - smp.rank(), smp.PP_RANK),
        "smp.barrier": smp.barrier,
        "smp.mp_barrier": smp.mp_barrier,
        "model.state_dict()": model.state_dict,
        "model.local_state_dict()": model.local_state_dict,
        "optimizer.state_dict()": optimizer.state_dict,
        "optimizer.local_state_dict()": optimizer.local_state_dict,
        "model.load_state_dict": lambda: model.load_state_dict({}),
        "optimizer.load_state_dict": lambda: optimizer.load_state_dict({}),
        "smp.save(partial=True)": lambda: smp.save({}, nowhere),
        "smp.load(partial=True)": lambda: smp.load(nowhere),
        "smp.save_checkpoint": lambda: smp.save_checkpoint(nowhere, "tag", model=model),
        "smp.resume_from_checkpoint": lambda: smp.resume_from_checkpoint(nowhere),
    }[name]


def talking(name: str, placed: bool) -> str:
    by_hand = {"auto_partition": False, "default_partition": 0} if placed else {}
    with started(fails=True, **by_hand):
        model = smp.DistributedModel(Net())
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        if placed:
            smp.set_partition(model.module.second, 1)
        smp.dp_barrier()  # of one rank

        def talk(x: Tensor) -> Tensor:
            smp.dp_barrier()
            _talk(name, model, optimizer)()
            return model(x)

        return outcome(lambda: smp.step(talk)(rows()))


@pytest.mark.parametrize(
    ("name", "placed"),
    [
        ("smp.allgather", False),
        ("smp.allgather", True),
        ("smp.broadcast", False),
        ("smp.send", False),
        ("smp.recv_from", False),
        ("smp.barrier", True),
        ("smp.mp_barrier", False),
        ("model.state_dict()", False),
        ("model.local_state_dict()", True),
        ("optimizer.state_dict()", True),
        ("optimizer.local_state_dict()", False),
        ("model.load_state_dict", True),
        ("optimizer.load_state_dict", False),
        ("smp.save(partial=True)", True),
        ("smp.load(partial=True)", False),
        ("smp.save_checkpoint", False),
        ("smp.resume_from_checkpoint", True),
    ],
)
def test_what_all_ranks_call_together_is_refused_in_a_step_function_on_all_ranks(
    pool: Pools, name: str, placed: bool
) -> None:
    name_in_text = "smp.barrier" if "barrier" in name else name
    for told in pool(2).run(talking, name, placed):
        assert f"{name_in_text} was called on rank" in told and "after the step" in told


def gathering_with_one_partition() -> list[int]:
    with started(partitions=1, ddp=True):
        model = smp.DistributedModel(Net())

        @smp.step
        def gather(x: Tensor) -> int:
            model(x)
            return sum(smp.allgather(smp.rank() + 1, smp.DP_GROUP))

        numbers: list[int] = gather(rows())
        return numbers


def test_with_one_partition_a_step_function_may_gather_objects(pool: Pools) -> None:
    assert pool(2).run(gathering_with_one_partition) == [[3, 3], [3, 3]]


# --- the same outcome everywhere -----------------------------------------------------------------------


def kept_graphs() -> list[Any]:
    with started():
        model = smp.DistributedModel(Net())
        step = smp.step(detach_outputs=False)(lambda x: (model(x), x + 1))
        out, plain = step(rows())
        told = outcome(lambda: out.reduce_mean().sum().backward())
        again, _ = step(rows())  # the refusal has broken nothing
        assert torch.equal(again.concat(), out.concat())
        return [out.outputs[0].requires_grad, plain.outputs[0].requires_grad, told]


def test_outputs_that_are_not_detached_are_the_same_on_all_ranks(pool: Pools) -> None:
    for result in pool(2).run(kept_graphs):
        assert result[:2] == [True, False]
        assert "call model.backward there" in result[2]


def with_unused(name: str) -> tuple[str, str]:
    with started(fails=True, ddp=True):
        model = smp.DistributedModel(Net(name))
        step = smp.step(lambda x: model.backward(model(x).square().sum()))
        return outcome(lambda: step(rows())), outcome(lambda: step(rows()))


@pytest.mark.parametrize("name", ["first", "second"])
def test_an_unused_parameter_fails_the_step_on_all_stages_of_all_replicas(pool: Pools, name: str) -> None:
    for told, later in pool(4).run(with_unused, name):
        assert f"1 have no gradient: {name}.spare" in told
        assert "an earlier step of this pipeline failed" in later


def failing(rank: int, good: int, late: bool) -> list[str]:
    """``late``: in the last microbatch, after its backward, when other ranks may have done their part."""
    with started(fails=True):
        model = smp.DistributedModel(Net())
        done = 0

        def train(x: Tensor) -> None:
            nonlocal done
            model.backward(model(x).sum())
            if not smp.is_tracing():
                done += 1
                if smp.rank() == rank and done == 2 * good + (2 if late else 1):
                    time.sleep(0.2 if late else 0)  # until the other waits in its next step
                    raise ValueError("mine")

        step = smp.step(train)
        return [outcome(lambda: step(rows())) for _ in range(good + 2)]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("good", [0, 1])
@pytest.mark.parametrize("late", [False, True])
def test_a_failed_step_fails_on_all_ranks(pool: Pools, rank: int, good: int, late: bool) -> None:
    results = pool(2).run(failing, rank, good, late)
    assert all(result[:good] == ["fine"] * good for result in results)
    assert results[rank][good] == "ValueError: mine"
    other = results[1 - rank]
    if good == 0:
        assert other[0].startswith("PeerFailed") and "mine" in other[0]
    else:  # it may have ended its part of the step before
        failed = next(told for told in other[good:] if told != "fine")
        assert failed.startswith("PeerFailed") and "mine" in failed
    assert "mine" in other[-1]


def interrupted(folder: Path) -> tuple[str, list[str]]:
    """While another thread than the step's has the turn; with the modules that are still redirected."""
    heard, over = threading.Event(), threading.Event()
    second_runs = folder / "the second microbatch runs"

    def interrupt(*_: object) -> None:
        if not heard.is_set():
            heard.set()
            raise KeyboardInterrupt

    usual = signal.signal(signal.SIGINT, interrupt)
    with started(fails=True):
        net = Net()
        model = smp.DistributedModel(net)
        caller = threading.current_thread()
        later = False

        def hold_back(*_: object) -> None:
            if later and smp.rank() == 1:  # else the first microbatch would have nothing to wait for
                wait_until(second_runs.exists)

        for layer in (net.first, net.second):
            layer.register_forward_pre_hook(hold_back)

        def train(x: Tensor) -> None:
            if later and smp.rank() == 0 and threading.current_thread() is not caller:
                second_runs.touch()
                while not heard.wait(0.05):  # one that comes before the caller waits does not wake it
                    signal.pthread_kill(caller.ident or 0, signal.SIGINT)
                over.wait(PATIENCE)
                return
            model(x).sum().item()

        step = smp.step(train)
        step(rows())
        later = True
        try:
            told = outcome(lambda: step(rows()))
        except KeyboardInterrupt as error:
            told = repr(error)
        left = [name for name, each in model.named_modules() if "forward" in each.__dict__]
        over.set()
    signal.signal(signal.SIGINT, usual)
    wait_until_microbatch_threads_end()
    return told, left


def test_an_interrupt_ends_a_step_whoever_has_the_turn(pool: Pools, tmp_path: Path) -> None:
    first, _ = pool(2).run(interrupted, tmp_path)  # the other may have ended its part of the step before
    assert first == ("KeyboardInterrupt()", [])


# --- arguments -----------------------------------------------------------------------------------------


def other_batch(count: int) -> tuple[list[str], list[Tensor]]:
    with started(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = smp.DistributedModel(Net())
        step = smp.step(lambda x: model(x))
        mine = rows() if smp.rank() == 0 else rows(count)
        out = step(mine).concat()
        return [str(warning.message) for warning in caught], [out.detach()]


@pytest.mark.parametrize(("count", "said"), [(0, False), (6, True)])
def test_another_batch_size_of_a_later_stage_is_said_and_an_empty_one_is_not(
    pool: Pools, count: int, said: bool
) -> None:
    (first, wanted), (second, result) = pool(2).run(other_batch, count)
    torch.testing.assert_close(result, wanted)
    assert wanted[0].shape == (4, 2) and not any("of shape" in one for one in first)
    told = [one for one in second if "argument 1 of the step is a tensor of shape (6, 4) on rank 1" in one]
    assert bool(told) is said


def gradients_of_a_batch(as_empty: bool) -> Tensor:
    """Of what the first rank's batch says of itself, as far as the step function asks for it."""
    with started(microbatches=1):
        model = smp.DistributedModel(Net())

        def train(x: Tensor) -> Tensor:
            x.retain_grad()
            model.backward(model(x).sum())
            assert x.grad is not None
            return x.grad

        other = rows(0) if as_empty else rows()
        return smp.step(train)(rows().requires_grad_() if smp.rank() == 0 else other).concat()


@pytest.mark.parametrize("as_empty", [True, False])
def test_that_a_batch_requires_gradients_follows_from_the_first_ranks(pool: Pools, as_empty: bool) -> None:
    wanted = rows().requires_grad_()
    Net()(wanted).sum().backward()
    for found in pool(2).run(gradients_of_a_batch, as_empty):
        torch.testing.assert_close(found, wanted.grad)


# --- planning ------------------------------------------------------------------------------------------


def half_placed() -> list[str]:
    """A hook fails that runs when the parts have their places, and their replicas are still to be made."""
    with started(partitions=1, ddp=True):
        model = smp.DistributedModel(Net())
        model.register_post_partition_hook(lambda *_: {}["missing"])
        step = smp.step(lambda x: model.backward(model(x).sum()))
        return [outcome(lambda: step(rows())) for _ in range(2)]


def test_a_model_whose_placing_failed_trains_no_further(pool: Pools) -> None:
    for first, second in pool(2).run(half_placed):
        assert first == "KeyError: 'missing'"
        assert second.startswith("SMPError: an earlier step failed while the model's parts got their places")


def failing_once() -> list[str]:
    with started():
        model = smp.DistributedModel(Net())
        calls = 0

        def train(x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if calls == 1 and smp.rank() == 0:
                raise OSError("the disk is gone")
            return model(x)

        step = smp.step(train)
        told = outcome(lambda: step(rows()))
        step(rows())  # planning can be tried again
        return [told]


def test_an_exception_of_the_first_call_alone_is_raised(pool: Pools) -> None:
    (first,), (second,) = pool(2).run(failing_once)
    assert first == "OSError: the disk is gone"
    assert second == "PeerFailed: rank 0 could not partition the model: OSError: the disk is gone"


class Exits(nn.Module):
    """Ends the program in the dry run."""

    def forward(self, x: Tensor) -> Tensor:
        if smp.is_tracing():
            raise SystemExit("enough")
        return x


def exiting() -> None:
    with started():
        model = smp.DistributedModel(nn.Sequential(Net(), Exits()))
        wanted: type[BaseException] = SystemExit if smp.rank() == 0 else PeerFailed
        with pytest.raises(wanted, match="enough"):
            smp.step(lambda x: model(x))(rows())


def test_a_program_that_ends_in_the_dry_run_tells_the_others(pool: Pools) -> None:
    pool(2).run(exiting)


def planning_for_long(waited: Path) -> None:
    """Rank 0 plans until the other has waited for it several times, each for up to the group's timeout."""
    with started(), pytest.MonkeyPatch.context() as patch:
        model = smp.DistributedModel(Net())
        signal, signs = heartbeat._signal, list[int]()

        def heard(*arguments: Any) -> int:
            signs.append(signal(*arguments))
            if len(signs) == 3:
                waited.touch()
            return signs[-1]

        def slow(x: Tensor) -> Tensor:
            deadline = time.monotonic() + PATIENCE
            while not waited.exists():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            return model(x)

        patch.setattr(heartbeat, "MOST_SECONDS", 0.05)
        if smp.rank() == 1:
            patch.setattr(heartbeat, "_signal", heard)
        smp.step(slow)(rows())


def test_while_rank_0_plans_the_others_wait_again_and_again(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(planning_for_long, tmp_path / "waited")


def without_data() -> str:
    with started(fails=True), torch.device("meta"):
        model = smp.DistributedModel(Net())
        with torch.device("cpu"):
            return outcome(lambda: smp.step(lambda x: model(x))(rows()))


def test_a_model_without_values_is_refused_on_all_ranks(pool: Pools) -> None:
    for said in pool(2).run(without_data):
        assert (
            "ValueError: smp.DistributedModel: 4 of 4 parameters and buffers are on the meta device" in said
        )


async def asynchronous(x: Tensor) -> Tensor:
    return x


def generator(x: Tensor) -> Iterator[Tensor]:
    yield x


@pytest.mark.parametrize("function", [asynchronous, generator])
def test_coroutines_and_generators_are_no_step_functions(function: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=f"{function.__qualname__} is a coroutine or generator"):
        smp.step(function)


# --- what the dry run has filled ------------------------------------------------------------------------


class Cached(Net):
    """A constant is made in the first forward, and kept by the class."""

    offsets: ClassVar[dict[int, Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in self.offsets:
            self.offsets[len(x)] = torch.arange(4.0)
        out: Tensor = super().forward(x + self.offsets[len(x)])
        return out


def cached_in_a_class() -> None:
    with started():
        model = smp.DistributedModel(Cached())
        result = smp.step(lambda x: model(x))(rows())
        assert torch.equal(result.concat(), Net()(rows() + torch.arange(4.0)))


def test_what_the_dry_run_leaves_in_a_class_is_not_used(pool: Pools) -> None:
    pool(2).run(cached_in_a_class)


# --- a partial checkpoint that waits for the plan -------------------------------------------------------


def layers(fill: float) -> nn.Sequential:
    """Four equal layers, with ReLUs in the places of an odd number."""
    net = nn.Sequential(*[nn.Linear(4, 4) if place % 2 == 0 else nn.ReLU() for place in range(7)])
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(fill)
    return net


def resumed(settings: dict[str, Any]) -> None:
    """The checkpoint's partition is not what the planner would choose."""
    with started(**settings):
        net = layers(0.25)
        smp.set_partition(net[0], 0)
        for later in net[1:]:
            smp.set_partition(later, 1)
        model = smp.DistributedModel(net)
        smp.step(lambda x: model(x).square().mean())(rows())
        part = copy.deepcopy(model.local_state_dict())
    with started(**settings):
        model = smp.DistributedModel(layers(0.0))
        model.load_state_dict(part, same_partition_load=True)
        result = smp.step(lambda x: model(x))(rows())
        assert model.local_state_dict().keys() == part.keys()
        assert torch.equal(result.concat(), layers(0.25)(rows()))
    with started(**settings):
        model = smp.DistributedModel(layers(0.0))
        smp.step(lambda x: model(x))(rows())
        assert model.local_state_dict().keys() != part.keys()


def resumed_on_one_rank() -> None:
    with started():
        model = smp.DistributedModel(Net())
        if smp.rank() == 0:
            model.load_state_dict({"_smp_is_partial": True}, same_partition_load=True)
        with pytest.raises(SMPCheckpointError, match="rank 1 was given no partial state dict"):
            smp.step(lambda x: model(x))(rows())


@pytest.mark.parametrize("settings", [{}, {"skip_tracing": True}, {"pipeline": "v"}], ids=str)
def test_the_plan_keeps_the_partition_of_a_partial_checkpoint(pool: Pools, settings: dict[str, Any]) -> None:
    pool(2).run(resumed, settings)


def test_a_partial_checkpoint_on_one_rank_only_is_an_error(pool: Pools) -> None:
    pool(2).run(resumed_on_one_rank)
