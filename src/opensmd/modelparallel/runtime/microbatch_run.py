"""One microbatch's pass through the user's step function on this rank.

Here tensors move between ranks and operations run at their home. Everything that counts (program points,
copies, edges) counts on every rank, whether or not the rank takes part, so that all agree without a word.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from opensmd.modelparallel._torch_internals import without_mode
from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.runtime import structure
from opensmd.modelparallel.runtime.descriptions import (
    Description,
    Hidden,
    TensorDescription,
    WatchForData,
    check_result,
    describe,
    version_of,
)
from opensmd.modelparallel.runtime.edges import receive_edge, send_edge
from opensmd.modelparallel.runtime.effects import Effects, apply
from opensmd.modelparallel.runtime.keys import argument_key, modes_key, stable_hash
from opensmd.modelparallel.runtime.layout import arranged, in_memory_order
from opensmd.modelparallel.runtime.shared import Shared
from opensmd.modelparallel.runtime.tags import Family, Tag, highest_home, put_tag, tag_of
from opensmd.modelparallel.runtime.transport import Kind, gradient_messages, make_tag

__all__ = ["Call", "MicrobatchRun"]

Function = Callable[..., Any]


@dataclass(slots=True)
class Call:
    """One intercepted call.

    Attributes:
        name: for messages, and part of the key.
        key: what makes two calls alike besides their arguments.
        leaves: the tensors in ``args`` and ``kwargs``.
        whole: it runs as a whole: nothing inside is intercepted.
        destination: the argument that it writes into.
        depends_on_data: its result's shape does.
        owner: the module whose attributes it may set.
    """

    name: str
    key: Any
    function: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Tensor]
    whole: bool = False
    destination: Tensor | None = None
    depends_on_data: bool = False
    owner: Any = None


class MicrobatchRun:
    """The state of one microbatch.

    Args:
        shared: what the microbatches of a pipeline have in common.
        index: which one this is.

    Attributes:
        inside: a module is running as a whole; nothing is intercepted.
        checkpointing: how many activation checkpoints are open around the current program point.
        point: where in the program it is, for messages.
    """

    def __init__(self, shared: Shared, index: int) -> None:
        self.shared = shared
        self.index = index
        self.rank = shared.rank
        self.transport = shared.transport
        self.inside = False
        self.checkpointing = 0
        self.point = "the beginning of the step function"
        self.mode = TorchFunctionMode()
        self._counter = 0
        self._copies: dict[tuple[Tag, int, bool], tuple[int, Tensor | None]] = {}
        self._edges: dict[Tag, list[int]] = {}
        self._tokens: dict[int, Tensor | None] = {}
        self._gradients: dict[int, list[tuple[int, int]]] = {}
        self._memories: dict[int, tuple[int, Family, Any]] = {}

    # --- tensors with homes ----------------------------------------------------------------------------

    def adopt(self, leaves: Sequence[Tensor]) -> None:
        """Tag tensors whose memory has got a home since they were made: a homed value was written into it."""
        for leaf in leaves:
            if tag_of(leaf) is None and leaf.layout is torch.strided:
                found = self._memories.get(leaf.untyped_storage()._cdata)
                if found is not None:
                    put_tag(leaf, Tag(found[0], family=found[1]))

    @property
    def adopts(self) -> bool:
        """Whether :meth:`adopt` has anything to look for."""
        return bool(self._memories)

    def real(self, tensor: Tensor) -> Tensor:
        """At its home, the tensor that has the data."""
        tag = tag_of(tensor)
        return tensor if tag is None or tag.real is None else tag.real

    def is_replicated_memory(self, tensor: Tensor) -> bool:
        """Whether this is a buffer that all ranks keep alike, or a view of one."""
        found = self.shared.replicated_memory
        return bool(found) and tensor.layout is torch.strided and tensor.untyped_storage()._cdata in found

    def bring(self, tensor: Tensor, target: int) -> Tensor | None:
        """The tensor on rank ``target``: None on the others. All ranks call it at the same program point."""
        tag = tag_of(tensor)
        if tag is None:
            return tensor
        if tag.family.memory.lost is not None:
            raise SMPError(tag.family.memory.lost)
        if tag.home == target:
            return self.real(tensor) if self.rank == target else None
        return self._transfer(tensor, tag, target)

    def _transfer(self, tensor: Tensor, tag: Tag, target: int) -> Tensor | None:
        grad = tag.requires_grad and torch.is_grad_enabled()
        changes = tag.family.memory.changes
        known = self._copies.get((tag, target, grad))
        if known is not None and known[0] == changes:
            return known[1]
        number = self._next()
        if grad:
            self._edges.setdefault(tag, []).append(number)
        copy: Tensor | None = None
        if self.rank == tag.home:
            self._send(self.real(tensor), tag, target, number, grad)
        elif self.rank == target:
            copy = self._receive(tensor, tag.home, number, grad)
        self._copies[(tag, target, grad)] = (changes, copy)
        return copy

    def _send(self, real: Tensor, tag: Tag, target: int, number: int, grad: bool) -> None:
        if real.requires_grad != tag.requires_grad:
            raise SMPError(
                f"a tensor of shape {tuple(real.shape)} has requires_grad={real.requires_grad}, but the "
                f"other pipeline ranks were told {tag.requires_grad}; do not change it inside a step"
            )
        check = _shape_check(real.shape)
        with torch.no_grad():
            data = in_memory_order(real.detach())
        if grad:
            back = make_tag(Kind.GRADIENT, self.index, number, check)
            shape, dtype = real.shape, real.dtype
            self._gradients[number] = gradient_messages(target, back)
            self._tokens[number] = send_edge(
                real, lambda: self._wait_for_gradient(target, back, shape, dtype)
            )
        self.transport.send(target, make_tag(Kind.TENSOR, self.index, number, check), data)
        self.shared.sent_since_flush = True

    def _receive(self, like: Tensor, source: int, number: int, grad: bool) -> Tensor:
        check = _shape_check(like.shape)
        message = (source, make_tag(Kind.TENSOR, self.index, number, check))
        self._wait([message])
        received = arranged(self.transport.receive(*message, like.numel(), like.dtype), like)
        if not grad:
            return received
        back = make_tag(Kind.GRADIENT, self.index, number, check)
        result, token = receive_edge(
            received, lambda gradient: self.transport.send_gradient(source, back, gradient)
        )
        self._tokens[number] = token
        return result

    def _wait_for_gradient(
        self, source: int, tag: int, shape: torch.Size, dtype: torch.dtype
    ) -> Tensor | None:
        self.point = f"the gradient of a tensor of shape {tuple(shape)} from pipeline rank {source}"
        self._wait(gradient_messages(source, tag))
        gradient = self.transport.receive_gradient(source, tag, shape.numel(), dtype)
        return None if gradient is None else gradient.view(shape)

    def _wait(self, messages: list[tuple[int, int]]) -> None:
        if not any(map(self.transport.ready, messages)):
            self.shared.wait(self, messages)

    def _next(self) -> int:
        """The number of this program point; advances alike on all ranks."""
        self._counter += 1
        return self._counter

    # --- values and random numbers ---------------------------------------------------------------------

    def value(self, call: Call) -> Any:
        """Run at the highest home something that yields a Python value, and tell it to all."""
        home = highest_home(call.leaves)
        assert home is not None
        tensors = [self.bring(leaf, home) for leaf in call.leaves]
        number = self._next()
        self.point = f"the value of {call.name} from pipeline rank {home}"
        tag = make_tag(Kind.OBJECT, self.index, number, stable_hash(call.name, 10))
        if self.rank != home:
            self._wait([(home, tag)])
            return self.transport.receive_object(home, tag)
        result = self._run(call, tensors)
        for rank in self.shared.others:
            self.transport.send_object(rank, tag, result)
        return result

    def replicated_random(self, call: Call) -> Any:
        """Draw the same numbers on every rank, from a generator of the step and microbatch."""
        with self.shared.random.of(self.index):
            return call.function(*call.args, **call.kwargs)

    def run_everywhere(self, call: Call) -> Any:
        """Run on every rank, with copies of what has a home: for writing into replicated memory."""
        self.shared.wait_for_earlier(self)
        tensors: list[Tensor | None] = []
        for leaf in call.leaves:
            copies = [self.bring(leaf, rank) for rank in range(self.shared.size)]
            tensors.append(copies[self.rank])
        return self._run(call, tensors)

    # --- calls -----------------------------------------------------------------------------------------

    def run_at(self, home: int, call: Call) -> Any:
        """Run a call at ``home``; elsewhere make placeholders of its results."""
        tensors = [self.bring(leaf, home) for leaf in call.leaves]
        key = (call.key, argument_key(call.args), argument_key(call.kwargs), modes_key(), self.shared.epoch)
        known = self.shared.descriptions.get(key)
        number = self._next()
        self.point = f"{call.name} on pipeline rank {home}"
        if self.rank == home:
            result, description = self._run_here(home, call, tensors, key, known, number)
        else:
            description = self._description(home, key, known, number)
            result = None
        parents = self._parents(call)
        for index, requires_grad in description.changed:
            self._changed(call, index, home, requires_grad, parents, tensors[index])
        if self.rank != home:
            made = [self._placeholder(each, call, home, parents) for each in description.tensors]
            result = description.build(made)
            if description.left is not None:
                apply(
                    description.left,
                    (call.args, call.kwargs),
                    call.leaves,
                    call.owner,
                    lambda told: self._placeholder(told, call, home, parents),
                )
        return result

    def _parents(self, call: Call) -> tuple[Tag, ...]:
        if not torch.is_grad_enabled():
            return ()
        tags = [tag_of(leaf) for leaf in call.leaves]
        return tuple([tag for tag in tags if tag is not None and tag.requires_grad])

    def _description(self, home: int, key: Any, known: Description | None, number: int) -> Description:
        """What the home tells of the result."""
        if known is None:
            tag = make_tag(Kind.DESCRIPTION, 0, 0) | stable_hash(key, 26)
            # Another microbatch may get it while this one waits for it.
            self._wait_until_known(home, tag, key)
            known = self.shared.descriptions[key]
        if known.depends_on_data:
            tag = make_tag(Kind.OBJECT, self.index, number)
            self._wait([(home, tag)])
            told: Description = self.transport.receive_object(home, tag)
            return told
        return known

    def _wait_until_known(self, home: int, tag: int, key: Any) -> None:
        while key not in self.shared.descriptions:
            if self.transport.ready((home, tag)):
                told_key, told = self.transport.receive_object(home, tag)
                if told_key != stable_hash(key, 64):
                    raise SMPError(
                        f"microbatch {self.index}: pipeline rank {home} described another operation than "
                        f"{self.point}: the ranks do not run the same program"
                    )
                self.shared.descriptions[key] = told
            else:
                self.shared.wait(self, [(home, tag)], until=lambda: key in self.shared.descriptions)

    def _run_here(
        self,
        home: int,
        call: Call,
        tensors: Sequence[Tensor | None],
        key: Any,
        known: Description | None,
        number: int,
    ) -> tuple[Any, Description]:
        real = [each for each in tensors if each is not None]
        assert len(real) == len(tensors)
        if self.shared.sent_since_flush and (known is None or known.changed or call.destination is not None):
            self.transport.flush()
            self.shared.sent_since_flush = False
        buffers = list(call.owner.buffers()) if known is None and isinstance(call.owner, nn.Module) else []
        if buffers or key in self.shared.stateful:
            self.shared.wait_for_earlier(self)
            known = self.shared.descriptions.get(key)  # an earlier one may have told it meanwhile
        buffer_versions = list(map(version_of, buffers))
        watch, effects, versions = None, None, []
        if known is None or known.depends_on_data:
            effects = Effects((call.args, call.kwargs), call.leaves, call.owner)
            versions = list(map(version_of, real))
            if known is None or torch.is_inference_mode_enabled():
                watch = WatchForData()
        with watch or contextlib.nullcontext():
            result = self._run(call, real)
        if buffers and _changed_buffers(call.owner, buffers, buffer_versions):
            self.shared.stateful.add(key)
        parts = Hidden.of(result, call.name)
        found = effects.found() if effects is not None else None
        if known is not None and not known.depends_on_data:
            check_result(known, parts, call.name)
            description = known
        else:
            description = describe(
                parts,
                real,
                versions=versions,
                foreign=[each is not leaf for each, leaf in zip(real, call.leaves, strict=True)],
                depends_on_data=(
                    known is not None
                    or call.depends_on_data
                    or found is not None
                    or (watch is not None and watch.seen)
                ),
                destination=_place_of(call.destination, call.leaves),
                written=watch.written if watch is not None else (),
                left=found,
            )
            self._tell(description, key, known, number)
        made = found[1] if found is not None else []
        return self._tagged(call, home, parts, description, result, made), description

    def _tell(self, description: Description, key: Any, known: Description | None, number: int) -> None:
        if known is None:
            tag = make_tag(Kind.DESCRIPTION, 0, 0) | stable_hash(key, 26)
            for rank in self.shared.others:
                self.transport.send_object(rank, tag, (stable_hash(key, 64), description))
            self.shared.descriptions[key] = description
        if description.depends_on_data:
            tag = make_tag(Kind.OBJECT, self.index, number)
            for rank in self.shared.others:
                self.transport.send_object(rank, tag, description)

    def _run(self, call: Call, tensors: Sequence[Tensor | None]) -> Any:
        """Call the function on the tensors that are here."""
        if all(mine is leaf for mine, leaf in zip(tensors, call.leaves, strict=True)):
            args, kwargs = call.args, call.kwargs
        else:
            replacements = iter(tensors)
            args = structure.substitute(call.args, replacements)  # type: ignore[arg-type]
            kwargs = structure.substitute(call.kwargs, replacements)  # type: ignore[arg-type]
        if not call.whole:
            return call.function(*args, **kwargs)
        self.inside = True
        try:
            if self.checkpointing and torch.is_grad_enabled():
                return checkpoint(call.function, *args, use_reentrant=False, **kwargs)
            return call.function(*args, **kwargs)
        finally:
            self.inside = False

    @contextlib.contextmanager
    def as_a_whole(self) -> Iterator[None]:
        """Intercept nothing; for what a mode's own handler does, setting ``inside`` is enough."""
        self.inside = True
        try:
            with without_mode(self.mode):
                yield
        finally:
            self.inside = False

    def _tagged(
        self,
        call: Call,
        home: int,
        parts: Hidden,
        description: Description,
        result: Any,
        left: Sequence[Tensor],
    ) -> Any:
        """The result with its tensors tagged, at home."""
        parents = self._parents(call)
        handles = []
        for tensor, told in zip(parts.tensors, description.tensors, strict=True):
            if told.argument is not None:
                handles.append(call.leaves[told.argument])
                continue
            if tag_of(tensor) is None:
                put_tag(tensor, self._new_tag(told, call, home, parents))
            handles.append(tensor)
        for tensor in left:
            if tag_of(tensor) is None:
                put_tag(tensor, Tag(home, tensor.requires_grad, parents=parents))
        if all(handle is tensor for handle, tensor in zip(handles, parts.tensors, strict=True)):
            return result
        return description.build(handles)

    def _placeholder(
        self, told: TensorDescription, call: Call, home: int, parents: tuple[Tag, ...]
    ) -> Tensor:
        if told.argument is not None:
            return call.leaves[told.argument]
        made = told.placeholder()
        put_tag(made, self._new_tag(told, call, home, parents))
        return made

    def _new_tag(self, told: TensorDescription, call: Call, home: int, parents: tuple[Tag, ...]) -> Tag:
        family: Family | None = None
        shared = tag_of(call.leaves[told.shares]) if told.shares is not None else None
        if shared is not None and shared.home == home:
            family = shared.family if told.is_view else Family(shared.family.memory)
        return Tag(home, told.requires_grad, family=family, parents=parents)

    def _changed(
        self,
        call: Call,
        index: int,
        home: int,
        requires_grad: bool,
        parents: tuple[Tag, ...],
        real: Tensor | None,
    ) -> None:
        """Argument ``index`` was changed in place at ``home``."""
        leaf = call.leaves[index]
        tag = tag_of(leaf)
        if tag is not None and tag.home == home:
            tag.family.memory.changes += 1
            tag.family.parents += parents
            if requires_grad != tag.requires_grad:
                if torch.is_grad_enabled() and requires_grad and parents:
                    tag.family.requires_grad = True
                else:
                    tag.requires_grad = requires_grad
            return
        moved = Tag(home)
        moved.family.requires_grad = requires_grad
        moved.family.parents = parents
        if tag is None:
            storage = leaf.untyped_storage()
            self._memories[storage._cdata] = (home, moved.family, storage)
        else:
            tag.family.memory.lost = (
                f"microbatch {self.index}: {call.name}, on pipeline rank {home}, changed in place a tensor "
                f"of pipeline rank {tag.home}, and another view of that tensor was used afterwards. Change a "
                "copy instead (inplace=False), or place both on one partition with smp.set_partition"
            )
        if real is not None and real is not leaf:
            moved.real = real
        put_tag(leaf, moved)

    # --- backward --------------------------------------------------------------------------------------

    def edges_of(self, roots: Sequence[Tensor]) -> list[int]:
        """The edges at this rank that ``roots`` depend on, in order of creation."""
        ancestry: set[Tag] = set()
        for root in roots:
            tag = tag_of(root)
            if tag is not None:
                ancestry |= tag.ancestry()
        numbers = (number for tag in ancestry for number in self._edges.get(tag, ()))
        return sorted(number for number in numbers if number in self._tokens)

    def tokens(self, edges: Sequence[int], *, keep: bool) -> list[Tensor]:
        """The tokens of edges, which backward begins at.

        Raises:
            RuntimeError: backward has been through one of them already.
        """
        found = []
        for number in edges:
            token = self._tokens[number]
            if token is None:
                raise RuntimeError(
                    "Trying to backward through the graph a second time: specify retain_graph=True in the "
                    "first backward of this microbatch"
                )
            found.append(token)
            if not keep:
                self._tokens[number] = None
        return found

    def first_gradient(self, edges: Sequence[int]) -> list[tuple[int, int]]:
        """The messages of which the latest edge waits for one, if that edge is a sent tensor's."""
        return self._gradients.get(edges[-1], []) if edges else []

    def release(self) -> None:
        """Let go of copies and tokens."""
        self._copies.clear()
        self._tokens.clear()
        self._memories.clear()


def _changed_buffers(owner: nn.Module, before: Sequence[Tensor], versions: Sequence[int]) -> bool:
    """Whether a module's buffers have been written or replaced."""
    now = list(owner.buffers())
    return len(now) != len(before) or any(
        each is not old or version_of(each) != version
        for each, old, version in zip(now, before, versions, strict=True)
    )


def _place_of(destination: Tensor | None, leaves: Sequence[Tensor]) -> int | None:
    return next((place for place, leaf in enumerate(leaves) if leaf is destination), None)


def _shape_check(shape: Sequence[int]) -> int:
    return hash(tuple(shape)) & 1023
