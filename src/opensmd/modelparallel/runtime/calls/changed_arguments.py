"""Arguments that the calls of one microbatch change in place, and where they live afterwards.

That depends on what a call at home 1 writes into (the home announces it as a ``Change``)::

    an input of the step, equal on all ranks ──── data travels, and it stays equal on all
    a buffer that all ranks keep ──────────────── the same, in the order of the microbatches
    a tensor of home 1 ────────────────────────── copies elsewhere are outdated
    a tensor of home 0 ────────────────────────── it lives at home 1 from now on; its views are invalid
    a buffer or parameter of home 0 ───────────── refused: it stays there, unchanged
    any other tensor that all ranks have ──────── it lives at home 1 from now on, and its memory with it
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from opensmd.modelparallel._torch_internals import unversioned
from opensmd.modelparallel.exceptions import SMPUnsupportedError
from opensmd.modelparallel.runtime.calls.call import Call
from opensmd.modelparallel.runtime.calls.descriptions.description import Change
from opensmd.modelparallel.runtime.calls.transfers import Transfers
from opensmd.modelparallel.runtime.microbatch import Microbatch
from opensmd.modelparallel.runtime.pipeline_context import PipelineContext
from opensmd.modelparallel.runtime.tensors.memory_layout import strides_of
from opensmd.modelparallel.runtime.tensors.placeholder import Placeholder
from opensmd.modelparallel.runtime.tensors.storages import lies_in
from opensmd.modelparallel.runtime.tensors.tags import AliasFamily, Tag, put_tag, real_tensor, tag_of
from opensmd.modelparallel.runtime.turns.turns import Turns

__all__ = ["ChangedArguments", "leave_where_changed"]


class ChangedArguments:
    """What the calls of one microbatch have changed in place.

    Args:
        microbatch: whose calls these are.
        context: what the microbatches of a pipeline have in common.
        transfers: brings what was written to the other ranks.
        turns: lets earlier microbatches write first if all write.

    Attributes:
        memories: replicated memory that has been given a home (``untyped_storage()._cdata``); tensors in it
            may not have a tag yet.
    """

    def __init__(
        self, microbatch: Microbatch, context: PipelineContext, transfers: Transfers, turns: Turns
    ) -> None:
        self._microbatch = microbatch
        self._context = context
        self._transfers = transfers
        self._turns = turns
        # The storage is kept alive, so that nothing else gets its address.
        self.memories: dict[int, tuple[int, AliasFamily, Any]] = {}

    def tag(self, leaves: Sequence[Tensor], tags: list[Tag | None]) -> None:
        """Add tags to ``leaves``, and in ``tags``, whose memory has since been given a home."""
        for place, leaf in enumerate(leaves):
            if tags[place] is None and leaf.layout is torch.strided:
                memory = self.memories.get(leaf.untyped_storage()._cdata)
                if memory is not None:
                    tags[place] = tag = Tag(memory[0], family=memory[1], serial=self._microbatch.serial)
                    put_tag(leaf, tag)

    def add(self, call: Call, change: Change, home: int, real: Tensor | None) -> None:
        """Note that an argument was changed in place at ``home``; ``real`` is what the call got there.

        Raises:
            SMPUnsupportedError: it is a buffer or parameter of another rank, which keeps its own.
        """
        leaf, requires_grad = call.leaves[change.argument], change.requires_grad
        tag = tag_of(leaf)
        is_input = tag is None and lies_in(leaf, self._microbatch.inputs)
        if is_input and change.numbers_alone and not requires_grad:
            with torch.no_grad():  # for the script's batch, which then stays equal on all ranks
                self._spread(leaf, home)
        elif tag is None and self._context.is_replicated(leaf):
            self._turns.wait_for_earlier(self._microbatch)
            self._context.buffers.written(leaf)
            _take_form(leaf, change, real)
            with torch.no_grad(), unversioned(leaf):  # as in torch's own norms: backwards ignore it
                self._spread(leaf, home)
        else:
            if tag is not None and tag.home == home:
                self._changed_at_home(call, tag, requires_grad)
            else:
                self._moved(call, leaf, tag, home, requires_grad, real)
            _take_form(leaf, change, real)

    def release(self) -> None:
        """Release all tensors and copies."""
        self.memories.clear()

    def _changed_at_home(self, call: Call, tag: Tag, requires_grad: bool) -> None:
        tag.form = None  # the change may concern the shape
        tag.family.memory.changes += 1  # copies on other ranks are outdated, and are sent again
        tag.family.parents += call.parents
        # As in autograd, writing something with a graph into one view makes all of them require gradients,
        # while detach_() and the like concern one tensor.
        if requires_grad != tag.requires_grad:
            if torch.is_grad_enabled() and requires_grad and call.parents:
                tag.family.requires_grad = True
            else:
                tag.requires_grad = requires_grad

    def _moved(
        self,
        call: Call,
        leaf: Tensor,
        tag: Tag | None,
        home: int,
        requires_grad: bool,
        real: Tensor | None,
    ) -> None:
        """Move the tensor to ``home``, where the call has written into its copy."""
        # No microbatch created it: the model, and whatever saves it, refers to the one that stays.
        if tag is not None and tag.serial < 0:
            raise SMPUnsupportedError(
                f"{call.name}, on pipeline rank {home}, has changed in place a buffer, parameter or gradient "
                f"of shape {tuple(leaf.shape)} that lives on pipeline rank {tag.home}, where it stays as it "
                "was. Change it in the module to which it belongs, or place both on one partition with "
                "smp.set_partition"
            )
        moved = Tag(home, serial=self._microbatch.serial)
        moved.family.requires_grad = requires_grad
        moved.family.parents = call.parents
        if tag is None:
            # Other tensors in this memory have no tag either; they get one on their next use.
            storage = leaf.untyped_storage()
            self.memories[storage._cdata] = (home, moved.family, storage)
        else:
            # Views that the script still has point to the old home, where nothing has changed.
            tag.family.memory.invalidated = (
                f"microbatch {self._microbatch.index}: {call.name}, on pipeline rank {home}, changed in "
                f"place a tensor of pipeline rank {tag.home}, and another view of that tensor was used "
                "afterwards. Change a copy instead (inplace=False), or place both on one partition with "
                "smp.set_partition"
            )
        if real is not None and real is not leaf:  # the call got and changed a copy
            moved.real = real
        put_tag(leaf, moved)
        self._context.moved = True

    def _spread(self, tensor: Tensor, home: int) -> None:
        """Send what a call at ``home`` has written into replicated memory to the other ranks."""
        # A new tag: the tensor itself stays replicated, and an older copy must not be mistaken for it.
        written, tag = tensor.detach(), Tag(home, serial=self._microbatch.serial)
        put_tag(written, tag)
        for rank in range(self._context.size):
            copy = self._transfers.bring(written, tag, rank)
            if copy is not None and rank != home:
                tensor.copy_(copy)


def leave_where_changed(modules: Iterable[nn.Module], rank: int) -> None:
    """Replace moved tensors in buffers and attributes at the end of a step by what they stand for.

    Elsewhere the script's object still has the numbers from before the change, and at home perhaps no data.
    """
    for module in modules:
        for values in (module.__dict__, module._buffers):
            for name, value in values.items():
                if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                    values[name] = _where_changed(value, rank)


def _where_changed(tensor: Tensor, rank: int) -> Tensor:
    """Return a tensor's data if that is on this rank, else a placeholder."""
    tag = tag_of(tensor)
    if tag is None:
        return tensor
    if tag.home == rank:
        changed = real_tensor(tensor)
    elif isinstance(tensor, Placeholder):
        return tensor
    else:
        changed = Placeholder.of_form(tensor.shape, strides_of(tensor), tensor.dtype, tensor.device)
    if changed is not tensor:
        put_tag(changed, Tag(tag.home, tag.requires_grad, serial=tag.serial))
    return changed


def _take_form(leaf: Tensor, change: Change, real: Tensor | None) -> None:
    """Give the script's tensor the form of the changed one, if that is a different tensor and form."""
    if change.form is None or real is leaf:
        return
    shape, stride = change.form
    if isinstance(leaf, Placeholder):
        leaf.data = Placeholder.of_form(shape, stride, leaf.dtype, leaf.device)
    else:
        leaf.data = leaf.new_empty_strided(shape, stride)
