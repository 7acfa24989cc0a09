"""The engine of one rank: places a model by its plan and runs steps on it."""

from __future__ import annotations

import atexit
import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensmd.modelparallel._torch_internals import (
    WithoutMode,
    any_modes,
    gathered,
    has_backward_hooks,
    run_backward,
    without_interception,
)
from opensmd.modelparallel.compatibility.clipping import ClippingWarning
from opensmd.modelparallel.config import Config
from opensmd.modelparallel.exceptions import PeerFailed, SMPError, SMPUnsupportedError
from opensmd.modelparallel.planning.plan import Plan
from opensmd.modelparallel.planning.schedule import (
    FixedOrder,
    Policy,
    Progress,
    ReadyFirst,
    split_backwards,
    window,
)
from opensmd.modelparallel.replicas.backward_count import Backwards
from opensmd.modelparallel.runtime.backward.deferred import DeferredBackward
from opensmd.modelparallel.runtime.backward.roots import root_gradient, root_pairs
from opensmd.modelparallel.runtime.backward.weight_gradients import WeightGradients
from opensmd.modelparallel.runtime.calls.call_runner import CallRunner
from opensmd.modelparallel.runtime.calls.glue import Glue
from opensmd.modelparallel.runtime.calls.interception import current_run, intercepted, set_run
from opensmd.modelparallel.runtime.calls.keys import stable_hash
from opensmd.modelparallel.runtime.calls.sequential import Sequences
from opensmd.modelparallel.runtime.messages.results import Results
from opensmd.modelparallel.runtime.messages.step_inputs import agreed_inputs
from opensmd.modelparallel.runtime.messages.transport import Message, abort, control_device, open_transport
from opensmd.modelparallel.runtime.pipeline_context import PipelineContext
from opensmd.modelparallel.runtime.side_effects.attributes import OwnAttributes, Places
from opensmd.modelparallel.runtime.side_effects.escaped import Carried
from opensmd.modelparallel.runtime.side_effects.per_microbatch import Own
from opensmd.modelparallel.runtime.side_effects.random import OwnRandom, ReplicatedRandom, default_generators
from opensmd.modelparallel.runtime.tensors.placeholder import make_remote, out_of_mapping
from opensmd.modelparallel.runtime.tensors.tags import Tag, put_tag, tag_of, tags_of
from opensmd.modelparallel.runtime.turns.record import Record, Stretch
from opensmd.modelparallel.runtime.turns.threads import Threads
from opensmd.modelparallel.runtime.turns.turns import Turns

__all__ = ["Engine"]

Call = tuple[tuple[Any, ...], dict[str, Any]]

# Groups on which a step has failed: messages of it may be left, which another engine would take for its own.
_poisoned: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


class Engine:
    """Runs microbatches over the ranks of a pipeline group.

    Args:
        group: the pipeline's ranks, in the order of the stages.
        config: the settings.

    Raises:
        SMPError: a step of an earlier engine failed on the same group.

    Attributes:
        plan: where everything lives, once placed.
        backwards: of the latest step.
        before_last_backward: told the roots of the last backward of a step on this rank, right before it.
        before_plain_backward: told that a step function calls torch's own backward.
    """

    def __init__(self, group: dist.ProcessGroup, config: Config) -> None:
        if group in _poisoned:
            raise SMPError(
                "a step failed on this process group before, and messages of it may be left: call "
                "torch.distributed.destroy_process_group() and initialise again"
            )
        self.group = group
        self.config = config
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.plan: Plan | None = None
        self.before_last_backward: Callable[[Sequence[Tensor]], None] | None = None
        self.before_plain_backward: Callable[[], None] | None = None
        self._control_device = control_device(group)
        self._parameters: list[tuple[nn.Parameter, Tag]] = []
        self._numbers: dict[Tag, int] = {}
        self._whole: dict[str, tuple[nn.Module, int]] = {}
        self._split: dict[str, nn.Module] = {}
        self._sequences = Sequences({}, {})
        self._places = Places()
        self._context: PipelineContext | None = None
        self._turns: Turns | None = None
        self.backwards = Backwards(0)
        self._record = Record()
        self._weight_gradients = WeightGradients(self._record)
        self._splits_from = 0
        self._threads = Threads()
        self._failed: str | None = None
        self._generators: list[torch.Generator] = []
        atexit.register(self.close)

    @property
    def leaves_weight_gradients(self) -> bool:
        """Whether gradients of backwards that have returned are still to be computed."""
        return bool(self._weight_gradients)

    @property
    def carried(self) -> Carried:
        """What tells tensors that only this rank has from replicated ones; there once placed."""
        assert self._context is not None
        return self._context.carried

    @property
    def record(self) -> list[Stretch]:
        """What this rank did in the latest step."""
        return self._record.stretches

    def close(self) -> None:
        """Let everything that was sent leave, as the end of the process must not overtake it."""
        if self._context is not None and not self._failed:
            with contextlib.suppress(RuntimeError):  # the group may be gone
                self._context.transport.flush()
        atexit.unregister(self.close)

    def place(self, module: nn.Module, plan: Plan) -> None:
        """Give every part of ``module`` its home, and give back the memory of what lives elsewhere.

        Raises:
            SMPError: the ranks have different models.
        """
        self._require_same_model(module)
        self.plan = plan
        device = next((each.device for each in module.parameters()), torch.device("cpu"))
        self._generators = default_generators(device)
        modules = dict(module.named_modules(remove_duplicate=False))
        atomic = plan.atomic()
        seen: set[nn.Module] = set()
        for name, home in atomic.items():
            if modules[name] not in seen:
                seen.add(modules[name])
                self._whole[name] = (modules[name], home)
        self._split = {name: modules[name] for name in plan.split()}
        self._places = Places(module)
        self._sequences = Sequences(self._split, dict(self._whole.values()))
        self._tag_parameters(module, plan)
        placed, replicated = self._tag_buffers(modules, plan)
        seed = torch.tensor([torch.initial_seed() & ((1 << 62) - 1)], device=self._control_device)
        dist.broadcast(seed, group=self.group, group_src=0)
        self._context = PipelineContext(
            rank=self.rank,
            size=self.size,
            transport=open_transport(self.group, device),
            random=ReplicatedRandom(int(seed)),
            carried=Carried([parameter for parameter, _ in self._parameters], replicated),
            wait=self._wait,
            wait_for_earlier=self._wait_for_earlier,
            settle=self._settle,
            placed_memory=placed | self._parameter_memory(),
            replicated_memory=replicated,
        )

    def _require_same_model(self, module: nn.Module) -> None:
        mine = [(name, tuple(each.shape), str(each.dtype)) for name, each in module.named_parameters()]
        own = torch.tensor([stable_hash(tuple(mine), 63)], device=self._control_device)
        hashes = gathered(own, self.group)
        if bool((hashes == hashes[0]).all()):
            return
        models: list[Any] = [None] * self.size
        dist.all_gather_object(models, mine, group=self.group)
        other = next(rank for rank in range(self.size) if models[rank] != models[0])
        pairs = zip([*models[0], None], [*models[other], None], strict=False)
        first, second = next((a, b) for a, b in pairs if a != b)
        raise SMPError(
            f"the ranks of the pipeline have different models: pipeline rank 0 has {_named(first)} where "
            f"pipeline rank {other} has {_named(second)}. Build the same model on all ranks"
        )

    def _tag_parameters(self, module: nn.Module, plan: Plan) -> None:
        homes = {plan.parameter_home(name) for name, _ in module.named_parameters()}
        clipping = ClippingWarning(len(homes))
        for name, parameter in module.named_parameters():
            home = plan.parameter_home(name)
            tag = Tag(home, parameter.requires_grad)
            put_tag(parameter, tag)
            self._numbers[tag] = len(self._parameters)
            self._parameters.append((parameter, tag))
            if home != self.rank:
                make_remote(parameter, clipping)

    def _parameter_memory(self) -> frozenset[int]:
        here = [parameter for parameter, tag in self._parameters if tag.home == self.rank]
        return frozenset(each.untyped_storage()._cdata for each in here if each.layout is torch.strided)

    def _tag_buffers(
        self, modules: dict[str, nn.Module], plan: Plan
    ) -> tuple[frozenset[int], frozenset[int]]:
        """Buffers of modules that run as a whole live with them; those of split modules are everywhere.

        Returns:
            The memory of the ones and of the others.
        """
        split = plan.split()
        placed, replicated = set(), set()
        moved: dict[Tensor, Tensor] = {}  # buffers of several modules stay one
        for name, module in modules.items():
            for own, buffer in module._buffers.items():
                if buffer is None:
                    continue
                if name in split:
                    replicated.add(buffer.untyped_storage()._cdata)
                    continue
                home = plan.homes[name]
                if home != self.rank:
                    if buffer not in moved:
                        moved[buffer] = out_of_mapping(buffer)
                    buffer = module._buffers[own] = moved[buffer]
                placed.add(buffer.untyped_storage()._cdata)
                put_tag(buffer, Tag(home))
        return frozenset(placed), frozenset(replicated)

    # --- steps -----------------------------------------------------------------------------------------

    def agreed_inputs(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call:
        """A step's arguments, the same on all ranks (the first rank's where they differ)."""
        if self._failed:
            raise SMPError(f"an earlier step of this pipeline failed, and it cannot go on: {self._failed}")
        if self._context is None:
            return agreed_inputs(function, args, kwargs, self.group, self._control_device)
        with self.ending_alike(confirm=False):
            self._context.transport.require_no_abort()
            try:
                return agreed_inputs(function, args, kwargs, self.group, self._control_device)
            except RuntimeError:
                self._context.transport.require_no_abort()  # which tells the cause
                raise

    @contextlib.contextmanager
    def ending_alike(self, *, confirm: bool) -> Iterator[None]:
        """What the body raises on one rank is raised on all, at the latest when they begin their next step.

        Args:
            confirm: already at the body's end, for which every rank then waits.

        Raises:
            PeerFailed: the body failed on another rank.
        """
        try:
            yield
        except BaseException as error:
            self._announce(error)
            if confirm and isinstance(error, Exception) and not self._in_order:
                with contextlib.suppress(RuntimeError):
                    self._confirm(ended=False)
            raise
        if confirm and not self._confirm(ended=True):
            assert self._context is not None
            try:
                self._context.transport.require_no_abort()
                raise PeerFailed("another rank of the pipeline failed at the end of this step")
            except PeerFailed as error:
                self._announce(error)
                raise

    def _confirm(self, *, ended: bool) -> bool:
        """Whether all ranks ended this step well."""
        mine = torch.tensor([ended], dtype=torch.int64, device=self._control_device)
        return bool(gathered(mine, self.group).all())

    def run(self, function: Callable[..., Any], calls: Sequence[Call], *, detach: bool) -> list[Any]:
        """Run ``function`` once for each of ``calls``; tensors in the results are real on every rank.

        Raises:
            SMPError: another rank failed, or was lost; the message names it and what this rank waited for.
            Exception: what ``function`` raised on this rank.
        """
        context = self._begin_step()
        runs = [CallRunner(context, index) for index in range(len(calls))]
        results = Results(context, len(calls), detach=detach)
        self.backwards = Backwards(len(calls))
        self._record = Record()
        self._weight_gradients = WeightGradients(self._record)

        def begin(index: int) -> list[Message] | None:
            run = runs[index]
            backward, run.deferred = run.deferred, None
            if backward is not None:  # and the function has returned
                self._run_backward(run, backward)
            else:
                args, kwargs = calls[index]
                set_run(run)
                try:
                    with Glue(run, self.backward, self._complete_gradients, self._freeze) as run.mode:
                        value = function(*args, **kwargs)
                finally:
                    set_run(None)
                results.share(run, value)
                if run.deferred is not None:
                    return run.deferred.awaited
            run.release()
            return None

        alone = len(calls) == 1
        own = Own(OwnRandom(self._generators), OwnAttributes(self._places, context, alone=alone))
        self._turns = Turns(
            len(calls),
            policy=self._policy(len(calls)),
            transport=context.transport,
            begin=begin,
            held=self._is_held,
            idle=self._weight_gradients.run_one,
            record=self._record,
            threads=self._threads,
            explain=lambda index: runs[index].point,
            own=own,
        )
        try:
            with intercepted(self._whole, self._sequences.forwards(alone=alone), self.backward, alone=alone):
                self._turns.run()
            self._weight_gradients.run_all()
            return results.received()
        except BaseException as error:
            self._announce(error, runs)
            for run in runs:
                run.release()
            raise
        finally:
            self._turns = None
            context.begun += len(calls)
            self._weight_gradients.drop()
            context.carried.forget()
            own.end_step()

    def _begin_step(self) -> PipelineContext:
        assert self._context is not None
        self._require_no_backward_hooks()
        self._look_at_what_is_trained()
        self._context.random.begin_step()
        self._context.borrowed.clear()
        return self._context

    def _look_at_what_is_trained(self) -> None:
        assert self._context is not None
        trained = []
        with without_interception():  # parameters of other ranks are of a guarded class
            for parameter, tag in self._parameters:
                wanted = parameter.requires_grad
                tag.requires_grad = wanted
                trained.append(wanted)
        self._context.epoch = hash(tuple(trained))

    def _freeze(self, parameter: nn.Parameter, wanted: bool) -> None:
        """Give a parameter another ``requires_grad`` inside a step."""
        take_turns = self.backwards.microbatches > 1 and self.config.active_microbatches != 1
        if take_turns or self.before_last_backward is not None:
            raise SMPUnsupportedError(
                f"requires_grad of a parameter of shape {tuple(parameter.shape)} was changed inside a "
                "smp.step function. The microbatches of a step share its parameters and take turns, and "
                "replicas reduce what one backward finds: change it between steps. With one replica, "
                "microbatches or active_microbatches may be set to 1 instead"
            )
        with without_interception():
            parameter.requires_grad_(wanted)
        context, tag = self._context, tag_of(parameter)
        assert context is not None and tag is not None
        tag.requires_grad = wanted
        context.epoch = hash((context.epoch, self._numbers[tag], wanted))

    def _require_no_backward_hooks(self) -> None:
        for name, module in self._split.items():
            if has_backward_hooks(module):
                raise SMPUnsupportedError(
                    f"module {name!r} ({type(module).__name__}) is run piece by piece over the partitions "
                    "and has full backward hooks, which would need its inputs and outputs on one rank. "
                    "Register them on its children, use tensor.register_hook, or place it whole with "
                    "smp.set_partition"
                )

    def _policy(self, microbatches: int) -> Policy:
        assert self._context is not None and self.plan is not None
        in_order = self._in_order
        crossings = self.plan.crossings
        chain = bool(crossings) and all(each.source < each.target for each in crossings)
        active = self.config.active_microbatches
        size = window(
            partitions=self.size,
            stage=self.rank,
            chain=chain and not in_order,
            active_microbatches=active,
        )
        if in_order:
            self._splits_from = microbatches
            return FixedOrder(self.config.pipeline, size, microbatches)
        reducing = self.before_last_backward is not None  # which counts the gradients of one backward
        self._splits_from = microbatches - split_backwards(
            stage=self.rank, chain=chain, most=1 if reducing else active, microbatches=microbatches
        )
        return ReadyFirst(self.config.pipeline, size)

    def _announce(self, error: BaseException, runs: Sequence[CallRunner] = ()) -> None:
        """Go no further after ``error``, and tell the others, once."""
        if self._failed:
            return
        self._failed = f"{type(error).__name__}: {error}"
        _poisoned.add(self.group)
        if isinstance(error, PeerFailed):
            return
        assert self._context is not None
        failed = None if self._turns is None else self._turns.failed
        where = "" if failed is None else f" in microbatch {failed}, after {runs[failed].point}"
        rank = dist.get_global_rank(self.group, self.rank)
        text = f"rank {rank} (pipeline rank {self.rank}) failed{where}: {self._failed}"
        abort(self._context.transport, self._context.others, text)

    def _wait(
        self, microbatch: int, messages: list[Message], until: Callable[[], bool] | None = None
    ) -> None:
        assert self._turns is not None
        self._turns.wait(microbatch, messages, until)

    def _wait_for_earlier(self, microbatch: int) -> None:
        turns = self._turns
        assert turns is not None
        if not turns.forwards_before(microbatch):
            turns.wait(microbatch, [], lambda: turns.forwards_before(microbatch))

    @property
    def _in_order(self) -> bool:
        """Whether all ranks do everything in one order."""
        assert self._context is not None
        return self._context.transport.ordered or self.config.deterministic_server

    # --- backward --------------------------------------------------------------------------------------

    def backward(
        self,
        tensors: Tensor | Sequence[Tensor],
        grad_tensors: Tensor | Sequence[Tensor | None] | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
        *,
        share: float | None = None,
    ) -> None:
        """``torch.autograd.backward`` over all ranks, for the microbatch of the calling thread.

        Args:
            share: what gradients are multiplied by; None: the script calls torch's own backward.

        Raises:
            SMPError: ``create_graph`` or ``inputs`` is given, which reach over ranks.
        """
        if create_graph or inputs is not None:
            raise SMPError("backward inside a smp.step function takes neither create_graph nor inputs")
        if share is None and self.before_plain_backward is not None:
            self.before_plain_backward()
        run = current_run()
        assert run is not None
        roots, given = root_pairs(tensors, grad_tensors)
        run.inside = True
        try:
            with WithoutMode(run.mode):
                self._backward(run, roots, given, bool(retain_graph), 1.0 if share is None else share)
        finally:
            run.inside = False

    def _backward(
        self,
        run: CallRunner,
        roots: Sequence[Tensor],
        given: Sequence[Tensor | None],
        retain_graph: bool,
        share: float,
    ) -> None:
        run.settle()
        run.context.carried.require_replicated(roots, tags_of(roots), run.point)
        self.backwards.add(run.index)
        edges = run.edges_of(roots)
        tokens = run.tokens(edges, keep=retain_graph)
        starts, gradients = [], []
        for root, gradient in zip(roots, given, strict=True):
            tag = tag_of(root)
            if tag is not None:
                run.require_not_later(tag)
            if tag is None or tag.home == self.rank:
                real = run.real(root)
                starts.append(real)
                gradients.append(root_gradient(real, gradient, share))
        awaited = [] if starts else run.first_gradient(edges)
        starts += tokens
        gradients += tokens  # of no elements
        assert self._turns is not None
        if not starts:  # nothing to do here, but microbatches take turns as on the ranks that have
            self._turns.before_backward(run.index, [])
            return
        backward = DeferredBackward(starts, gradients, awaited, retain_graph)
        if not self._may_defer(run.index, retain_graph):
            self._turns.before_backward(run.index, awaited)
        elif not self._turns.is_first(run.index, awaited):
            run.deferred = backward
            return
        self._run_in_function(run, backward)

    def _may_defer(self, index: int, retain_graph: bool) -> bool:
        """Whether a backward may run after the user's function has returned.

        Not within modes that the function may leave, nor where everything has its order.
        """
        return not (
            retain_graph
            or self._in_order
            or self._is_last_of_replica(index)
            or self.backwards.microbatches == 1
            or any_modes()
        )

    def _settle(self, run: CallRunner) -> None:
        """Run the backward that a microbatch has deferred, while its function waits."""
        backward, run.deferred = run.deferred, None
        assert self._turns is not None and backward is not None
        inside, run.inside = run.inside, True
        try:
            with WithoutMode(run.mode):
                self._turns.before_backward(run.index, backward.awaited)
                self._run_in_function(run, backward)
        finally:
            run.inside = inside

    def _run_in_function(self, run: CallRunner, backward: DeferredBackward) -> None:
        self._record.turn("backward")
        self._run_backward(run, backward)
        self._record.turn("forward")

    def _run_backward(self, run: CallRunner, backward: DeferredBackward) -> None:
        roots, gradients, retain_graph = backward.roots, backward.gradients, backward.retain_graph
        if self._is_last_of_replica(run.index):
            assert self.before_last_backward is not None
            self._complete_gradients()
            self.before_last_backward(roots)
        splits = run.index >= self._splits_from and not retain_graph
        if not (splits and self._weight_gradients.split(run.index, roots, gradients)):
            run_backward(roots, gradients, retain_graph=retain_graph)

    def _is_last_of_replica(self, index: int) -> bool:
        """Whether a backward of this microbatch may be the one in which replicas reduce gradients."""
        return self.before_last_backward is not None and self.backwards.may_be_last(index)

    def _complete_gradients(self) -> None:
        if not self._weight_gradients:
            return
        with self._record.interrupted():
            self._weight_gradients.run_all()

    def _is_held(self, index: int, progress: Sequence[Progress]) -> bool:
        """With replicas, the last microbatch goes backward after all others: its gradients are the last."""
        if self.before_last_backward is None or index != len(progress) - 1:
            return False
        return any(each is not Progress.DONE for each in progress[:-1])


def _named(entry: tuple[str, tuple[int, ...], str] | None) -> str:
    return "no further parameter" if entry is None else f"{entry[0]} {entry[1]} {entry[2]}"
