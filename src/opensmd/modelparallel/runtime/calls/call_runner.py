"""The intercepted calls of one microbatch on this rank: each runs at its home."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from opensmd.modelparallel._torch_internals import in_transform, out_of_transforms
from opensmd.modelparallel.exceptions import SMPUnsupportedError
from opensmd.modelparallel.runtime.backward.backward_pass import BackwardPass
from opensmd.modelparallel.runtime.calls.call import Call, parents_of
from opensmd.modelparallel.runtime.calls.changed_arguments import ChangedArguments
from opensmd.modelparallel.runtime.calls.checkpointed import can_be_repeated, checkpointed
from opensmd.modelparallel.runtime.calls.descriptions.describing import ResultParts, check_result
from opensmd.modelparallel.runtime.calls.descriptions.description import (
    Description,
    TensorDescription,
    local_device,
)
from opensmd.modelparallel.runtime.calls.descriptions.exchange import DescriptionExchange
from opensmd.modelparallel.runtime.calls.keys import call_key
from opensmd.modelparallel.runtime.calls.transfers import Transfers
from opensmd.modelparallel.runtime.messages.message import Kind, make_tag
from opensmd.modelparallel.runtime.microbatch import Microbatch
from opensmd.modelparallel.runtime.pipeline_context import PipelineContext
from opensmd.modelparallel.runtime.side_effects.containers import Containers
from opensmd.modelparallel.runtime.side_effects.effects import apply
from opensmd.modelparallel.runtime.side_effects.escaped_from_checkpoints import EscapedFromCheckpoint
from opensmd.modelparallel.runtime.side_effects.objects.elsewhere import found_elsewhere
from opensmd.modelparallel.runtime.side_effects.watch import Watch
from opensmd.modelparallel.runtime.stable_hash import stable_hash
from opensmd.modelparallel.runtime.tensors import structure
from opensmd.modelparallel.runtime.tensors.packed import unpack
from opensmd.modelparallel.runtime.tensors.placeholder import DataElsewhere
from opensmd.modelparallel.runtime.tensors.tags import (
    Tag,
    origins_of,
    put_origin,
    put_tag,
    real_tensor,
    tag_of,
    tags_of,
)
from opensmd.modelparallel.runtime.turns.turns import Turns

__all__ = ["CallRunner"]


class CallRunner:
    """Runs the intercepted calls of one microbatch, each at its home.

    Args:
        microbatch: whose calls these are.
        context: what the microbatches of a pipeline have in common.
        transfers: brings the calls' tensors to where they run.
        turns: lets earlier microbatches go first if calls must keep their order.
        backward_pass: that of the step; a deferred backward runs before anything that might notice it.

    Attributes:
        checkpointing: how many activation checkpoints are open around the current program point.
        escaped_from_checkpoint: what the innermost running reentrant checkpoint has created.
        iterators: those that were arguments of modules, by id.
    """

    def __init__(
        self,
        microbatch: Microbatch,
        context: PipelineContext,
        transfers: Transfers,
        turns: Turns,
        backward_pass: BackwardPass,
    ) -> None:
        self.microbatch = microbatch
        self.context = context
        self.transfers = transfers
        self.turns = turns
        self.backward_pass = backward_pass
        self.rank = context.rank
        self.checkpointing = 0
        self.escaped_from_checkpoint: EscapedFromCheckpoint | None = None
        self.iterators: dict[int, Any] = {}
        self._transport = context.transport
        self._known = context.calls
        self._descriptions = DescriptionExchange(microbatch, context, transfers)
        self._changed = ChangedArguments(microbatch, context, transfers, turns)

    def leaves_of(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Tensor], list[Tag | None]]:
        """Return the tensors in a call's arguments, and their tags.

        Untagged ones get a tag if their memory has since been given a home, because a value with a home was
        written into it.
        """
        leaves: list[Tensor] = []
        structure.collect(args, leaves)
        if kwargs and not structure.are_values(kwargs.values()):
            structure.collect([*kwargs.values()], leaves)
        tags = tags_of(leaves)
        # Only then: most calls need no search.
        if None in tags:
            known = leaves
            if in_transform():
                known = [*map(out_of_transforms, leaves)]
                tags = tags_of(known)
            if self._changed.memories:
                self._changed.tag(known, tags)
            self.context.escaped.require_replicated(known, tags, self.microbatch.point)
            if self._known.spreads:
                for origin in origins_of(known):
                    self.microbatch.require_not_later(origin)
        return leaves, tags

    def release(self) -> None:
        """Release everything."""
        self.transfers.release()
        self._changed.release()
        self.iterators.clear()

    def settle(self) -> None:
        """Run the rest of a backward before something that might notice it or change what it needs."""
        if self.microbatch.deferred is not None or self.microbatch.leaves_weights:
            self.backward_pass.settle(self.microbatch)

    def wait_for_earlier(self) -> None:
        """Let all earlier microbatches complete their forwards on this rank first."""
        self.turns.wait_for_earlier(self.microbatch)

    # --- values and random numbers ---------------------------------------------------------------------

    def value(self, call: Call, home: int) -> Any:
        """Run something at ``home`` that yields a Python value, and send that to all."""
        tensors = self.transfers.bring_all(call, home)
        number = self.microbatch.next_point()
        self.microbatch.point = f"the value of {call.name} from pipeline rank {home}"
        # With a few bits of the name, so that ranks that diverge do not mistake another value for this one.
        tag = make_tag(Kind.OBJECT, self.microbatch.index, number, stable_hash(call.name, 10))
        if self.rank != home:
            self.transfers.wait([(home, tag)])
            return self._transport.receive_object(home, tag)
        self.settle()
        result = self._run(call, tensors)
        for rank in self.context.others:
            self._transport.send_object(rank, tag, result)
        return result

    def shared_gradient(self, tensor: Tensor) -> Tensor | None:
        """Return the gradient of a tensor on all ranks, each of which has computed a share."""
        self.backward_pass.complete_gradients(self.microbatch)
        number = self.microbatch.next_point()
        self.microbatch.point = "the gradient of a tensor that all ranks have"
        tag = make_tag(Kind.OBJECT, self.microbatch.index, number)
        share = None if tensor.grad is None else tensor.grad.cpu()
        shares: list[Tensor | None] = []
        # Rank by rank: if messages are ordered, the first one between two ranks waits for its receiver.
        for source in range(self.context.size):
            if source == self.rank:
                for rank in self.context.others:
                    self._transport.send_object(rank, tag, share)
                shares.append(share)
            else:
                self.transfers.wait([(source, tag)])
                shares.append(self._transport.receive_object(source, tag))
        self.microbatch.gradients.put(tensor, shares)
        return tensor.grad

    def replicated_random(self, call: Call) -> Any:
        """Draw the same numbers on every rank, from a generator for this step and microbatch."""
        self.settle()
        with self.context.random.of(self.microbatch.index):
            return call.function(*call.args, **call.kwargs)

    def run_everywhere(self, call: Call) -> Any:
        """Run on every rank, with copies of what has a home, to write into replicated memory."""
        self.settle()
        self.wait_for_earlier()
        for tensor in call.written:
            self.context.buffers.written(tensor)
        tensors: list[Tensor | None] = []
        for leaf in call.leaves:
            # To all ranks, on all ranks: each counts every transfer, even those between others.
            copies = [self.transfers.bring(leaf, tag_of(leaf), rank) for rank in range(self.context.size)]
            tensors.append(copies[self.rank])
        return self._run(call, tensors)

    # --- calls -----------------------------------------------------------------------------------------

    def run_at(self, home: int, call: Call) -> Any:
        """Run a call at ``home``; elsewhere create placeholders for its results."""
        microbatch = self.microbatch
        tensors = self.transfers.bring_all(call, home)
        key = call_key(call.key, call.args, call.kwargs, self.context.trained.epoch)
        known = self._known.descriptions.get(key)
        if known is None:
            self._known.new += 1
        # Counted whether or not the result is known, because another rank may be about to learn it.
        number = microbatch.next_point()
        microbatch.point = _point(call.name, home)
        call.parents = parents_of(call.tags)
        if not call.lasting:
            call.serial = microbatch.serial
        if self.rank != home:
            if known is None or known.depends_on_data:
                known = self._descriptions.receive(home, key, number)
            return self._stand_in(home, call, known)
        self.settle()
        stateful = self._known.stateful
        if known is not None and known.is_plain and not (stateful and key in stateful):
            return self._run_known(home, call, tensors, known)
        result, description = self._run_watched(home, call, tensors, key, known, number)
        for change in description.changed:
            self._changed.add(call, change, home, tensors[change.argument])
        return result

    def _stand_in(self, home: int, call: Call, description: Description) -> Any:
        """Do what a call at ``home`` means on another rank."""
        # The path of nearly all calls; the rest is for those that change arguments or return more.
        described = description.new_tensor
        if described is not None:
            placeholder = described.placeholder()
            self.put(placeholder, call.new_tag(described, home))
            return placeholder
        for change in description.changed:
            self._changed.add(call, change, home, None)
        tensors = [self._placeholder(tensor, call, home) for tensor in description.tensors]
        own = Containers((call.args, call.kwargs)).containers if description.refers else ()
        result = description.build(tensors, own)
        if description.left is not None:
            arguments = (call.args, call.kwargs)
            apply(
                description.left,
                arguments,
                call.leaves,
                call.owner,
                tensors,
                lambda described, data: self._left(described, data, call, home),
            )
        return result

    def _run_known(self, home: int, call: Call, tensors: Sequence[Tensor | None], known: Description) -> Any:
        """Run a call whose result the others already know."""
        arguments = call.given(tensors)
        result = self._call(call, *arguments, known)
        described = known.new_tensor
        if described is not None and isinstance(result, Tensor) and described.fits(result):
            if tag_of(result) is None:  # nearly all are new
                self.put(result, call.new_tag(described, home))
                return result
            return self._new(result, described, call, home)
        parts = ResultParts.of(result, call.name, lambda: Containers(arguments).containers)
        check_result(known, parts, call.name)
        copied = arguments[0] is not call.args or arguments[1] is not call.kwargs
        own = Containers((call.args, call.kwargs)).containers if known.refers and copied else None
        return self._tagged(call, home, parts, known, result, own)

    def _run_watched(
        self,
        home: int,
        call: Call,
        tensors: Sequence[Tensor | None],
        key: Hashable,
        known: Description | None,
        number: int,
    ) -> tuple[Any, Description]:
        """Run a call whose results and changes are unknown or may vary, and tell the others."""
        # Tensors being sent may not be changed before they have left.
        if self.context.sent_since_flush and (known is None or known.changed or call.written):
            self._transport.flush()
            self.context.sent_since_flush = False
        real = [tensor for tensor in tensors if tensor is not None]
        assert len(real) == len(tensors)
        if self._waits_for_earlier(call, key, real, is_new=known is None):
            known = self._known.descriptions.get(key)  # an earlier one may have learned it meanwhile
        if known is not None and not known.depends_on_data:
            return self._run_known(home, call, tensors, known), known
        arguments = call.given(real)
        with Watch(call, arguments, real, first=known is None) as watch:
            result = self._call(call, *arguments, known)
        effects = watch.effects
        parts = ResultParts.of(result, call.name, lambda: effects.containers)
        description = watch.description(parts)
        self._require_whole(call, watch.written_buffers())
        changed = (real[change.argument] for change in description.changed)
        if watch.goes_on() or any(map(self.context.lasts, changed)):
            self._known.stateful.add(key)
        elif effects.carries_on:
            self._known.carrying.add(key)
        self._descriptions.send(description, key, number, is_new=known is None)
        # They are not in the result, but the call has left them in an attribute or a list, where whoever
        # finds them must know their home.
        for tensor in watch.made:
            if tag_of(tensor) is None:
                tag = Tag(home, tensor.requires_grad, parents=call.parents, serial=self.microbatch.serial)
                self.put(tensor, tag)
        for tensor in watch.spread:
            self._spread(tensor, home)
        return self._tagged(call, home, parts, description, result, effects.own_containers), description

    def _waits_for_earlier(self, call: Call, key: Hashable, real: Sequence[Tensor], *, is_new: bool) -> bool:
        """Wait for earlier microbatches to make such a call first, if they must; return whether they must."""
        # A call that changes what outlives the microbatch must see what earlier ones have written. An unknown
        # one with buffers might do so.
        buffers = _has_buffers(call.owner) or any(map(self.context.lasts, real))
        changes = key in self._known.stateful or (is_new and buffers)
        if not (changes or is_new or key in self._known.carrying):
            return False
        self.turns.wait_for_earlier(self.microbatch, None if changes else key)
        return True

    def _require_whole(self, call: Call, written: Sequence[Tensor]) -> None:
        """Raise if a module has changed a buffer that modules on other ranks have copies of.

        Raises:
            SMPUnsupportedError: the module has changed such a buffer.
        """
        for buffer in written if self.context.divided else ():
            if buffer in self.context.divided:
                raise SMPUnsupportedError(
                    f"{call.name} has changed a buffer of shape {tuple(buffer.shape)} in place that a module "
                    "on another partition has, too, where it stays as it was. Place the modules that share "
                    "it on one partition with smp.set_partition"
                )

    def _run(self, call: Call, tensors: Sequence[Tensor | None], known: Description | None = None) -> Any:
        """Call the function on this rank's tensors."""
        return self._call(call, *call.given(tensors), known)

    def _call(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], known: Description | None
    ) -> Any:
        if not (call.whole and self.context.script_random.swaps):
            return self._call_uninterrupted(call, args, kwargs, known)
        with self.context.script_random.inside(self.microbatch.index):
            return self._call_uninterrupted(call, args, kwargs, known)

    def _call_uninterrupted(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], known: Description | None
    ) -> Any:
        # By a flag, because the mode may be below others on the stack. Operations need this like modules:
        # those of torch.library call autograd functions, on this rank only.
        self.microbatch.inside = True
        try:
            repeats = call.whole and self.checkpointing and torch.is_grad_enabled()
            if repeats and can_be_repeated(call, known):
                return checkpointed(call.function, args, kwargs, offloading=self.context.offloading)
            return call.function(*args, **kwargs)
        except DataElsewhere as error:
            # No argument of the call: what it finds elsewhere does not travel.
            raise found_elsewhere(error, call.name, self.rank, call.owner, (args, kwargs)) from error
        finally:
            self.microbatch.inside = False

    def _tagged(
        self,
        call: Call,
        home: int,
        parts: ResultParts,
        description: Description,
        result: Any,
        containers: Sequence[Any] | None,
    ) -> Any:
        """Tag the result's tensors, at home.

        Args:
            containers: the script's own among the arguments, if the call got copies of them.
        """
        same = containers is None or not description.refers
        handles = []
        for tensor, described in zip(parts.tensors, description.tensors, strict=True):
            handle = tensor
            # A returned argument must be the script's own object, which may differ from the copy that the
            # call got.
            if described.argument is not None:
                handle = call.leaves[described.argument]
            else:
                handle = self._new(tensor, described, call, home)
            same = same and handle is tensor
            handles.append(handle)
        return result if same else description.build(handles, containers or ())

    def _new(self, tensor: Tensor, described: TensorDescription, call: Call, home: int) -> Tensor:
        """Return, at home, what the program gets for a result that is no argument.

        The other ranks have a new placeholder. So what a module keeps and returns again, such as a parameter,
        must be a new tensor here: by their tags, all tell whether something has been sent.
        """
        tag = call.new_tag(described, home)
        if tag_of(tensor) is not None:
            kept, tensor = tensor, torch.ops.aten.alias(tensor)
            # without gradients, an alias of a parameter does not require any
            if tensor.requires_grad != kept.requires_grad:
                tag.real = real_tensor(kept)
        self.put(tensor, tag)
        return tensor

    def _placeholder(self, described: TensorDescription, call: Call, home: int) -> Tensor:
        if described.argument is not None:
            return call.leaves[described.argument]
        placeholder = described.placeholder()
        self.put(placeholder, call.new_tag(described, home))
        return placeholder

    def _left(self, described: TensorDescription, data: bytes | None, call: Call, home: int) -> Tensor:
        """Return what stands here for a tensor that a call at ``home`` has left outside its result."""
        if data is None:
            return self._placeholder(described, call, home)
        device = local_device(described.device)
        tensor = unpack(data, described.shape, described.stride, described.dtype, device)
        self._spread(tensor, home)
        return tensor

    def _spread(self, tensor: Tensor, home: int) -> None:
        """Note which microbatch has left a tensor that all ranks have."""
        put_origin(tensor, Tag(home, serial=self.microbatch.serial))
        self._known.spreads = True

    def put(self, tensor: Tensor, tag: Tag) -> None:
        """Give a home to a tensor that the program gets."""
        put_tag(tensor, tag)
        if self.escaped_from_checkpoint is not None:
            self.escaped_from_checkpoint.add(tensor)


@functools.lru_cache(maxsize=4096)
def _point(name: str, home: int) -> str:
    return f"{name} on pipeline rank {home}"


def _has_buffers(owner: nn.Module | None) -> bool:
    return isinstance(owner, nn.Module) and next(owner.buffers(), None) is not None
