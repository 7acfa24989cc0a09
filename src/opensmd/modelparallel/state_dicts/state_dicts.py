"""The state dicts of a split model.

A full state dict is that of the plain module, in its order, collected from the ranks that have the data.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from opensmd.modelparallel.communicate import meet_for, require_meeting
from opensmd.modelparallel.exceptions import SMPCheckpointError, SMPError, SMPUnsupportedError
from opensmd.modelparallel.planning.saved_places import saved_places
from opensmd.modelparallel.ranks.exchange import exchange
from opensmd.modelparallel.ranks.grid import CommGroup
from opensmd.modelparallel.runtime.tensors.before_writing import before_writing
from opensmd.modelparallel.runtime.tensors.tags import tag_of
from opensmd.modelparallel.state import state
from opensmd.modelparallel.state_dicts.distributed_parts import (
    DistributedParts,
    cut_entry,
    slices_in,
    whole_entries,
)
from opensmd.modelparallel.state_dicts.gather import collect, gather_full
from opensmd.modelparallel.state_dicts.merge import PARTIAL, SLICES, is_partial, marked, with_versions
from opensmd.modelparallel.state_dicts.missing_tensors import has_data, loads_by_itself, stand_ins

__all__ = ["StateDicts"]


class StateDicts(DistributedParts):
    """A module that can be saved and loaded whole or in parts, wherever its parts live.

    Args:
        module: the user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._pending_local: dict[str, Any] | None = None
        self._pending_full: tuple[dict[str, Any], bool, dict[str, int]] | None = None

    @property
    def running(self) -> int:
        """The number of microbatches of the running step, if a subclass has steps; 0 outside steps."""
        return 0

    def local_state_dict(self) -> dict[str, Any]:
        """Return this stage's part of the state dict, with ``_smp_is_partial: True``.

        With sharded parameters, all replicas must call, because they send each other their parts.

        Raises:
            SMPError: the model has not been partitioned yet, or it is split and a step is running.
        """
        require_meeting("model.local_state_dict()")
        self._require_partitioned("local_state_dict")
        own = self._own_entries()
        whole = whole_entries(own, {}) if state.cfg.shards_parameters else own
        marks: dict[str, Any] = {PARTIAL: True}
        if state.cfg.tensor_parallel_degree > 1:
            marks[SLICES] = slices_in(whole, self.shards)
        return with_versions({**whole, **marks}, own)

    def state_dict(  # type: ignore[override]  # one keyword more than torch's
        self, *args: Any, gather_to_rank0: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """Return the whole model's state dict, with the plain module's names and order.

        After partitioning, it is collected from all ranks of the replica, so all of them must call (those
        with ``dp_rank() == 0`` are enough); with sharded parameters, all ranks must.

        Args:
            destination, prefix, keep_vars: as in torch; ``keep_vars`` only before partitioning.
            gather_to_rank0: only rank 0 of the replica gets it; the others get an empty dict.

        Raises:
            SMPError: delayed parameters have not had their first step, or the model is split and a step is
                running.
            SMPUnsupportedError: ``keep_vars`` for a split model, whose parameters are on several ranks.
        """
        if self.delayed:
            raise SMPError(
                "model.state_dict() before the first step: the parameters' initialization is delayed until "
                "then. Call it after a step, or in model.register_post_partition_hook"
            )
        require_meeting("model.state_dict()")
        split = self.partitioned and state.groups.size(CommGroup.PP_GROUP) > 1
        if not split and state.cfg.tensor_parallel_degree == 1 and not state.cfg.shards_parameters:
            plain: dict[str, Any] = self.get_module().state_dict(*args, **kwargs)
            return plain
        meet_for("model.state_dict()", shards=state.cfg.shards_parameters)
        destination, prefix = _into(*args, **kwargs)
        whole = self._collected(only_first=gather_to_rank0) if split else self._unsliced(self._entries())
        if gather_to_rank0 and state.groups.rank_in(CommGroup.MP_GROUP) != 0:
            whole = {}
        if destination is None and not prefix:
            return whole
        destination = OrderedDict() if destination is None else destination
        destination.update({prefix + name: value for name, value in whole.items()})
        return destination

    def _collected(self, *, only_first: bool) -> dict[str, Any]:
        group = state.groups[CommGroup.PP_GROUP]
        entries = self._unsliced(self._entries_of_all())
        return collect(entries, self.home_of, group=group, only_first=only_first)

    def _unsliced(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Return entries with whole tensors instead of the slices of tensor-parallel ranks."""
        return with_versions(whole_entries(entries, self.shards), entries)

    def _sliced(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a full state dict with this rank's slices of split tensors."""
        own = {
            name: tensor
            for name, tensor in self._named_tensors()
            if self.is_here(name) or not isinstance(tensor, DTensor)
        }
        sliced = {
            name: cut_entry(value, self.shards.get(name), own.get(name)) for name, value in state_dict.items()
        }
        return with_versions(sliced, state_dict)

    def orig_state_dict(self) -> dict[str, Any]:
        """Return the module's own ``state_dict`` without asking other ranks, so without what lives there."""
        if not self.partitioned:
            plain: dict[str, Any] = self.get_module().state_dict()
            return plain
        return self._own_entries()

    def _entries(self) -> dict[str, Any]:
        """Return all entries of the state dict, with meta tensors for those of other ranks.

        Raises:
            SMPUnsupportedError: the module's code needs tensors of several ranks at once.
        """
        module = self.get_module()
        with stand_ins(module, self.is_here):
            try:
                whole: dict[str, Any] = module.state_dict()
            except (RuntimeError, NotImplementedError) as error:  # torch's errors about meta tensors
                raise SMPUnsupportedError(
                    f"state_dict of {type(module).__name__} is custom code that needs data of "
                    f"several partitions at once ({error}). Place the part that it belongs to whole on one "
                    "partition with smp.set_partition"
                ) from error
        for name, value in whole.items():
            # Some modules, such as torch's observers, put in their buffers undetached, with our tags.
            if isinstance(value, Tensor) and tag_of(value) is not None:
                whole[name] = value.detach()
        return whole

    def _entries_of_all(self) -> dict[str, Any]:
        """Like :meth:`_entries`, but on all ranks: if one raises, all do."""
        failure: SMPUnsupportedError | None = None
        whole: dict[str, Any] = {}
        try:
            whole = self._entries()
        except SMPUnsupportedError as error:
            failure = error
        group = state.groups[CommGroup.PP_GROUP]
        failures = exchange(failure and str(failure), group)
        if failed := [f"pp_rank {rank}: {text}" for rank, text in enumerate(failures) if text]:
            raise SMPUnsupportedError("; ".join(failed)) from failure
        return whole

    def _own_entries(self) -> dict[str, Any]:
        """Return this rank's entries for a partial state dict.

        That is what lives here, and what the module's hooks have made of it.
        """
        module = self.get_module()
        me = state.groups.rank_in(CommGroup.PP_GROUP)
        names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        buffers = dict(module.named_buffers(remove_duplicate=False))
        whole = self._entries()
        own = {
            name: value
            for name, value in whole.items()
            if has_data(value)
            and (
                self._home_of_buffer(name, buffers[name]) == me
                if name in buffers
                else self.is_local(name) or (isinstance(value, Tensor) and name not in names)
            )
        }
        return with_versions(own, whole)

    def load_state_dict(  # type: ignore[override]  # one keyword more than torch's
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        *,
        same_partition_load: bool = False,
        assign: bool = False,
    ) -> Any:
        """Load a full state dict (also a plain module's) or, on all ranks of the replica, a partial one.

        A partial one is first merged from all ranks, whatever partitions it came from. Names and shapes are
        checked before anything is changed. After partitioning, each rank keeps its part.

        Args:
            strict: as in torch; False allows missing and unknown names.
            same_partition_load: a partial dict comes from the same partition, so it is not merged; it is
                loaded when the model has been partitioned.
            assign: as in torch; only before partitioning.

        Returns:
            torch's named tuple of missing and unexpected keys.

        Raises:
            TypeError: ``state_dict`` is not a dict.
            RuntimeError: names or shapes do not fit; the message is torch's.
            SMPCheckpointError: the partial dicts of the ranks do not belong together.
            SMPError: inside a step of a split model.
        """
        require_meeting("model.load_state_dict")
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"model.load_state_dict: expected a state dict, got {type(state_dict).__name__}")
        before_writing()
        entries = with_versions(state_dict, state_dict)
        if self.partitioned or (is_partial(entries) and not same_partition_load):
            meet_for("model.load_state_dict()")
        if is_partial(entries):
            if same_partition_load:
                return self._load_same_partition(entries)
            entries = gather_full(entries, group=state.require("load_state_dict").groups[CommGroup.PP_GROUP])
        if self.delayed:
            return self._load_into_delayed(entries, strict=strict, assign=assign)
        entries = self._sliced(marked(entries))
        self._check(entries, strict=strict and self.partitioned)
        module = self.get_module()
        if not self.partitioned:
            return module.load_state_dict(entries, strict=strict, assign=assign)
        if assign:
            raise ValueError(
                "assign=True would undo the partition; load before the first step, or without it"
            )
        with stand_ins(module, self.is_here):
            keys = module.load_state_dict(entries, strict=strict)
        state.follow_model()
        return keys

    def _load_into_delayed(self, entries: dict[str, Any], *, strict: bool, assign: bool) -> Any:
        """Keep a full state dict until the first step, which gives parameters their memory."""
        if assign:
            raise ValueError(
                "assign=True would make parameters of other ranks, too, before the first step knows where "
                "they live; load without it"
            )
        self._check(self._sliced(marked(entries)), strict=strict)
        own = self.get_module().state_dict()
        self._pending_full = entries, strict, _versions_of(entries)
        return torch.nn.modules.module._IncompatibleKeys(
            [name for name in own if name not in entries], [name for name in entries if name not in own]
        )

    def _load_same_partition(self, entries: dict[str, Any]) -> Any:
        if not self.partitioned:
            self._pending_local = entries
            return torch.nn.modules.module._IncompatibleKeys([], [])
        own = self._sliced(marked(entries))
        sources = self._require_same_partition(set(own))
        self.share_what_is_everywhere()  # forwards may have left the data of buffers on other ranks
        self._check(own, strict=False)
        module = self.get_module()
        with stand_ins(module, self.is_here):
            module.load_state_dict(with_versions({**module.state_dict(), **own}, own), strict=False)
        self.share_what_is_everywhere(sources)
        state.follow_model()
        return torch.nn.modules.module._IncompatibleKeys([], [])

    def _require_same_partition(self, own: Collection[str]) -> dict[str, int]:
        """Raise on all ranks if the names in some rank's partial state dict are not those that live there.

        Returns:
            The ranks that have the buffers of split modules: any of them may have computed one.
        """
        group, local = state.groups[CommGroup.PP_GROUP], set(self._own_entries())
        wanted, given = ([name for name in names if self._is_of_split(name)] for names in (local, own))
        missing, unknown = sorted(local - set(own) - set(wanted)), sorted(set(own) - local - set(given))
        answers = exchange((state.rank, missing, unknown, wanted, given), group)
        sources = {name: source for source, (*_, given) in reversed([*enumerate(answers)]) for name in given}
        for rank, missing, unknown, wanted, _ in answers:
            missing = [*missing, *sorted(set(wanted) - set(sources))]
            if missing or unknown:
                raise SMPCheckpointError(
                    f"rank {rank}: this partial state dict comes from another partition: missing "
                    f"{missing[:3]}, unknown {unknown[:3]}. Load it without same_partition_load=True"
                )
        return sources

    def _check(self, entries: Mapping[str, Any], *, strict: bool) -> None:
        """Check names (if ``strict``) and shapes before torch changes anything, unless module code does."""
        module = self.get_module()
        if loads_by_itself(module):
            return
        own = self._entries() if self.partitioned else module.state_dict()
        missing = [name for name in own if name not in entries]
        unexpected = [name for name in entries if name not in own]
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(module).__name__}: missing keys {missing}, "
                f"unexpected keys {unexpected}"
            )
        wrong = [
            f"{name}: {tuple(value.shape)} in the checkpoint, {tuple(own[name].shape)} in the model"
            for name, value in entries.items()
            if isinstance(value, Tensor)
            and isinstance(own.get(name), Tensor)
            and not is_lazy(own[name])
            and value.shape != own[name].shape
        ]
        if wrong:
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(module).__name__}: size mismatch for "
                + "; ".join(wrong)
            )

    def places_of_waiting(self) -> dict[str, int]:
        """Return where the partial state dict that waits for the plan has modules; all ranks must call.

        Raises:
            SMPCheckpointError: it was given to some ranks of the pipeline only.
        """
        group = state.groups[CommGroup.PP_GROUP]
        if dist.get_world_size(group) == 1:
            return {}
        own = None if self._pending_local is None else list(marked(self._pending_local))
        answers = exchange((state.rank, own), group)
        lacking = [rank for rank, names in answers if names is None]
        if len(lacking) == len(answers):
            return {}
        if lacking:
            raise SMPCheckpointError(
                f"rank {lacking[0]} was given no partial state dict, but other ranks of its pipeline were: "
                "call model.load_state_dict(..., same_partition_load=True) on all of them"
            )
        return saved_places([names for _, names in answers])

    def _load_what_waited(self) -> None:
        """Load the state dicts that were given before the model was placed."""
        if self._pending_full is not None:
            (entries, strict, versions), self._pending_full = self._pending_full, None
            if _versions_of(entries) != versions:
                raise SMPError(
                    "tensors of the state dict that model.load_state_dict was given have been changed before "
                    "the first step, which loads them into parameters whose initialization was delayed. Give "
                    "it copies of tensors that go on changing"
                )
            self.load_state_dict(entries, strict)
        if self._pending_local is not None:
            pending, self._pending_local = self._pending_local, None
            self._load_same_partition(pending)


def _versions_of(state_dict: Mapping[str, Any]) -> dict[str, int]:
    """Return how often the tensors of a state dict have been changed."""
    tensors = {name: value for name, value in state_dict.items() if isinstance(value, Tensor)}
    return {name: tensor._version for name, tensor in tensors.items() if not tensor.is_inference()}


def _into(
    destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
) -> tuple[dict[str, Any] | None, str]:
    """Apply the arguments of torch's ``state_dict`` for a split model."""
    if keep_vars:
        raise SMPUnsupportedError(
            "model.state_dict(keep_vars=True) would give the parameters, which are on several ranks; "
            "use model.local_named_parameters()"
        )
    return destination, prefix
