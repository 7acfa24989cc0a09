"""What a DistributedModel knows about its parts, and its state dicts: the base of ``smp.DistributedModel``.

Parameters keep their objects and names when the model is partitioned; those of other ranks merely lose their
data. A full state dict is therefore the plain module's, in its order, collected from where the data is.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from opensmd.modelparallel._torch_internals import without_interception
from opensmd.modelparallel.checkpoint.gather import collect, gather_full
from opensmd.modelparallel.checkpoint.merge import PARTIAL, is_partial, marked, with_versions
from opensmd.modelparallel.compatibility.parameter_layout import name_original_forwards
from opensmd.modelparallel.exceptions import SMPCheckpointError, SMPError, SMPUnsupportedError
from opensmd.modelparallel.planning.plan import Plan, ancestors
from opensmd.modelparallel.ranks.grid import CommGroup
from opensmd.modelparallel.ranks.sendable import sendable
from opensmd.modelparallel.runtime.tensors.placeholder import Placeholder, RemoteParameter
from opensmd.modelparallel.state import state
from opensmd.modelparallel.state_dicts.missing_tensors import has_data, loads_by_itself, stand_ins

__all__ = ["ModelState"]

Hook = Callable[[Any, Any], Any]


class ModelState(nn.Module):
    """A module that knows which of its parts live on this rank.

    Args:
        module: the user's module.

    Attributes:
        module: the user's module.
        plan: where everything lives; None before the first step.
        gathered: :meth:`cpu` has put the whole model on every rank.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        name_original_forwards(module)
        self.module = module
        self.plan: Plan | None = None
        self.gathered = False
        self._everywhere: dict[str, weakref.ref[Tensor]] = {}  # and the buffer that it was first
        self._pending_local: dict[str, Any] | None = None
        self._post_partition_hooks: dict[int, Hook] = OrderedDict()
        self._post_step_hooks: dict[int, Hook] = OrderedDict()

    def __getattr__(self, name: str) -> Any:
        """As torch's; for what the user's module has, the error says where to find it.

        Raises:
            AttributeError: there is no such attribute.
        """
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or not hasattr(module, name):
                raise
            raise AttributeError(
                f"DistributedModel has no attribute {name!r}, but the {type(module).__name__} in it has: use "
                f"model.module.{name}"
            ) from error

    @property
    def partitioned(self) -> bool:
        """False until the first step has placed the model's parts."""
        return self.plan is not None

    def get_module(self) -> nn.Module:
        """The user's module."""
        return self.module

    # --- what lives here -------------------------------------------------------------------------------

    def is_local(self, name: str) -> bool:
        """Whether the parameter or buffer of this full name, or the module, has its data on this rank."""
        if self.plan is None:
            return True
        homes = self.plan.homes
        found = next(each for each in (name, *ancestors(name)) if each in homes)
        return homes[found] == state.groups.rank_in(CommGroup.PP_GROUP)

    def is_here(self, name: str) -> bool:
        """As :meth:`is_local`; also for buffers of split modules, of which every rank has its own copy."""
        return name in self._everywhere or self.is_local(name)

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank with their full names; may be empty."""
        self._require_partitioned("local_named_parameters")
        return ((name, each) for name, each in self.module.named_parameters() if self.is_local(name))

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank; may be empty."""
        return (each for _, each in self.local_named_parameters())

    def local_named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers of this rank with their full names."""
        self._require_partitioned("local_named_buffers")
        return ((name, each) for name, each in self.module.named_buffers() if self.is_local(name))

    def local_buffers(self) -> Iterator[Tensor]:
        """The buffers of this rank."""
        return (each for _, each in self.local_named_buffers())

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules of this rank with their full names."""
        self._require_partitioned("local_named_modules")
        return ((name, each) for name, each in self.module.named_modules() if self.is_local(name))

    def local_modules(self) -> Iterator[nn.Module]:
        """The modules of this rank."""
        return (each for _, each in self.local_named_modules())

    # --- state dicts -----------------------------------------------------------------------------------

    def local_state_dict(self) -> dict[str, Any]:
        """This rank's part of the state dict, and ``_smp_is_partial: True``.

        Raises:
            SMPError: the model has not been partitioned yet.
        """
        self._require_partitioned("local_state_dict")
        own = self._own_entries()
        return with_versions({**own, PARTIAL: True}, own)

    def state_dict(  # type: ignore[override]  # one keyword more than torch's
        self, *args: Any, gather_to_rank0: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """The whole model's state dict, with the plain module's names and order.

        After partitioning it is collected from all ranks of the replica, so all of them must call it (those
        with ``dp_rank() == 0`` are enough).

        Args:
            destination, prefix, keep_vars: as torch's; ``keep_vars`` only before partitioning.
            gather_to_rank0: only rank 0 of the replica gets it; the others get an empty dict.

        Raises:
            SMPUnsupportedError: ``keep_vars`` of a model that is split: the parameters are on several ranks.
        """
        if not self.partitioned or state.groups.size(CommGroup.MP_GROUP) == 1:
            plain: dict[str, Any] = self.module.state_dict(*args, **kwargs)
            return plain
        destination, prefix = _into(*args, **kwargs)
        group = state.groups[CommGroup.MP_GROUP]
        whole = collect(self._entries_of_all(), self._home_of, group=group, only_first=gather_to_rank0)
        if destination is None and not prefix:
            return whole
        destination = OrderedDict() if destination is None else destination
        destination.update({prefix + name: each for name, each in whole.items()})
        return destination

    def orig_state_dict(self) -> dict[str, Any]:
        """The module's own ``state_dict`` without asking other ranks; what lives elsewhere is left out."""
        if not self.partitioned:
            plain: dict[str, Any] = self.module.state_dict()
            return plain
        return self._own_entries()

    def _entries(self) -> dict[str, Any]:
        """All entries of the state dict; meta tensors are those of other ranks.

        Raises:
            SMPUnsupportedError: code of the module needs tensors of several ranks at once.
        """
        with stand_ins(self.module, self.is_here):
            try:
                whole: dict[str, Any] = self.module.state_dict()
            except (RuntimeError, NotImplementedError) as error:  # torch's, of meta tensors
                raise SMPUnsupportedError(
                    f"state_dict of {type(self.module).__name__} is code of its own, which needs data of "
                    f"several partitions at once ({error}). Place the part that it belongs to whole on one "
                    "partition with smp.set_partition"
                ) from error
        return whole

    def _entries_of_all(self) -> dict[str, Any]:
        """As :meth:`_entries`, called on all ranks: if one raises, all do."""
        failure: SMPUnsupportedError | None = None
        whole: dict[str, Any] = {}
        try:
            whole = self._entries()
        except SMPUnsupportedError as error:
            failure = error
        group = state.groups[CommGroup.MP_GROUP]
        failures: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(failures, failure and str(failure), group=group)
        if failed := [f"mp_rank {rank}: {text}" for rank, text in enumerate(failures) if text]:
            raise SMPUnsupportedError("; ".join(failed)) from failure
        return whole

    def _own_entries(self) -> dict[str, Any]:
        """What a partial state dict has of this rank.

        That is what lives here, what hooks of the module have made of it, and buffers of split modules that
        the forward has replaced by what this rank has computed.
        """
        names = {name for name, _ in self.module.named_parameters(remove_duplicate=False)}
        buffers = dict(self.module.named_buffers(remove_duplicate=False))
        whole = self._entries()
        own = {
            name: each
            for name, each in whole.items()
            if has_data(each)
            and (
                self.is_local(name)
                or (isinstance(each, Tensor) and name not in names and name not in buffers)
                or (name in self._everywhere and self._everywhere[name]() is not buffers.get(name))
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

        A partial one is first put together from all ranks, whatever partitions it came from. Names and shapes
        are checked before anything is changed. After partitioning each rank keeps its part.

        Args:
            strict: as torch's: False lets names be missing or unknown.
            same_partition_load: a partial dict comes from the same partition, so it is not put together; it
                is loaded when the model has been partitioned.
            assign: as torch's; only before partitioning.

        Returns:
            torch's named tuple of missing and unexpected keys.

        Raises:
            TypeError: ``state_dict`` is no dict.
            RuntimeError: names or shapes do not fit; the message is torch's.
            SMPCheckpointError: the partial dicts of the ranks do not belong together.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"model.load_state_dict: expected a state dict, got {type(state_dict).__name__}")
        given = with_versions(state_dict, state_dict)
        if is_partial(given):
            if same_partition_load:
                return self._load_same_partition(given)
            given = gather_full(given, group=state.require("load_state_dict").groups[CommGroup.MP_GROUP])
        given = marked(given)
        self._check(given, strict=strict and self.partitioned)
        if not self.partitioned:
            return self.module.load_state_dict(given, strict=strict, assign=assign)
        if assign:
            raise ValueError(
                "assign=True would undo the partition; load before the first step, or without it"
            )
        with stand_ins(self.module, self.is_here):
            return self.module.load_state_dict(given, strict=strict)

    def _load_same_partition(self, given: dict[str, Any]) -> Any:
        if not self.partitioned:
            self._pending_local = given
            return torch.nn.modules.module._IncompatibleKeys([], [])
        local = set(self._own_entries())
        own = marked(given)
        if set(own) != local:
            raise SMPCheckpointError(
                f"rank {state.rank}: this partial state dict comes from another partition: missing "
                f"{sorted(local - set(own))[:3]}, unknown {sorted(set(own) - local)[:3]}. Load it without "
                "same_partition_load=True"
            )
        self._check(own, strict=False)
        with stand_ins(self.module, self.is_here):
            self.module.load_state_dict(with_versions({**self.module.state_dict(), **own}, own), strict=False)
        self._share_what_is_everywhere()
        return torch.nn.modules.module._IncompatibleKeys([], [])

    def _check(self, given: Mapping[str, Any], *, strict: bool) -> None:
        """Names (``strict``) and shapes, before torch changes anything; own code of modules does it."""
        if loads_by_itself(self.module):
            return
        own = self._entries() if self.partitioned else self.module.state_dict()
        missing = [name for name in own if name not in given]
        unexpected = [name for name in given if name not in own]
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(self.module).__name__}: missing keys {missing}, "
                f"unexpected keys {unexpected}"
            )
        wrong = [
            f"{name}: {tuple(value.shape)} in the checkpoint, {tuple(own[name].shape)} in the model"
            for name, value in given.items()
            if isinstance(value, Tensor)
            and isinstance(own.get(name), Tensor)
            and not is_lazy(own[name])
            and value.shape != own[name].shape
        ]
        if wrong:
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(self.module).__name__}: size mismatch for "
                + "; ".join(wrong)
            )

    def _home_of(self, name: str) -> int:
        """The rank in the replica that holds an entry of the state dict."""
        assert self.plan is not None
        homes = self.plan.homes
        return homes[next(each for each in (name, *ancestors(name)) if each in homes)]

    @property
    def running(self) -> int:
        """The number of microbatches of the step that runs; 0 outside steps, which a subclass has."""
        return 0

    def require_whole_batch(self, name: str) -> None:
        """Refuse what must wait for the gradients of a whole batch, called by one of several microbatches.

        Raises:
            SMPError: a step with several microbatches runs.
        """
        if self.running > 1:
            raise SMPError(
                f"{name} was called inside a smp.step function, which runs for each of {self.running} "
                "microbatches, whose gradients add up. Call it before or after the step"
            )

    def require_other_parameters(self, optimizer: torch.optim.Optimizer, name: str) -> None:
        """Refuse ``name`` of an optimizer, wrapped or not, that has parameters of this model.

        Raises:
            SMPError: it has, and a step with several microbatches runs.
        """
        own = {id(each) for each in self.module.parameters()}
        if any(id(each) in own for group in optimizer.param_groups for each in group["params"]):
            self.require_whole_batch(name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's, between steps.

        Raises:
            SMPError: inside a step with several microbatches.
        """
        self.require_whole_batch("model.zero_grad")
        with without_interception():
            super().zero_grad(set_to_none)

    # --- moments ---------------------------------------------------------------------------------------

    def register_post_partition_hook(self, hook: Hook) -> RemovableHandle:
        """Run ``hook(model, optimizer)`` after partitioning, before the first forward.

        A hook that is registered later runs at once.

        Raises:
            TypeError: ``hook`` is no function.
        """
        _check_hook("register_post_partition_hook", hook)
        handle = RemovableHandle(self._post_partition_hooks)
        if self.partitioned:
            hook(self, state.optimizer)
        else:
            self._post_partition_hooks[handle.id] = hook
        return handle

    def register_post_step_hook(self, hook: Hook) -> RemovableHandle:
        """Run ``hook(model, optimizer)`` once, at the end of the next step.

        Raises:
            TypeError: ``hook`` is no function.
        """
        _check_hook("register_post_step_hook", hook)
        handle = RemovableHandle(self._post_step_hooks)
        self._post_step_hooks[handle.id] = hook
        return handle

    def finish_partition(self, plan: Plan) -> None:
        """Told by the engine when parts are in place: load what waited, cut the optimizer, run the hooks."""
        self.plan = plan
        homes = {self._home_of(name) for name, _ in self.module.named_parameters(remove_duplicate=False)}
        if homes:
            state.groups.split_off_owners(sorted(homes))
        split = plan.split()
        self._everywhere = {
            name: weakref.ref(buffer)
            for name, buffer in self.module.named_buffers()
            if name.rpartition(".")[0] in split
        }
        self._share_what_is_everywhere()
        if self._pending_local is not None:
            pending, self._pending_local = self._pending_local, None
            self._load_same_partition(pending)
        state.cut_optimizers()
        hooks = list(self._post_partition_hooks.values())
        self._post_partition_hooks.clear()
        for hook in hooks:
            hook(self, state.optimizer)

    def _share_what_is_everywhere(self) -> None:
        """Make all copies of a buffer what the rank has that it is said to live on.

        They may have been drawn at random, or a checkpoint have told that rank alone. Called on all ranks.
        """
        group = state.groups[CommGroup.PP_GROUP]
        for name, buffer in self.module.named_buffers():
            if name in self._everywhere:
                data = sendable(buffer)
                dist.broadcast(data, group=group, group_src=self._home_of(name))
                buffer.detach().copy_(data)

    def finish_step(self) -> None:
        """Told by the engine at the end of each step: run the hooks that wait for it."""
        hooks = list(self._post_step_hooks.values())
        self._post_step_hooks.clear()
        for hook in hooks:
            hook(self, state.optimizer)

    def to(self, *args: Any, **kwargs: Any) -> ModelState:
        """As torch's; after partitioning for what lives here alone, and without effect but on placement.

        Raises:
            SMPError: it would change the dtype or the kind of device of a partitioned model, whose other
                ranks were told what they are.
        """
        if not self.partitioned or self.gathered:
            return super().to(*args, **kwargs)
        tensors = [*self.local_parameters(), *self.local_buffers()]
        moved = [each.detach().to(*args, **kwargs) for each in tensors]
        for each, new in zip(tensors, moved, strict=True):
            same_dtype = new.dtype == each.dtype or not each.is_floating_point()
            if not same_dtype or new.device.type != each.device.type:
                raise SMPError(
                    f"model.to: the model is partitioned and cannot go from {each.dtype} on "
                    f"{each.device.type} to {new.dtype} on {new.device.type} any more; do it before the "
                    "first step"
                )
        for each, new in zip(tensors, moved, strict=True):
            if new.dtype == each.dtype:
                each.data = new
        return self

    def cuda(self, device: int | torch.device | None = None) -> ModelState:
        """As torch's; after partitioning ``to`` that device, which moves what lives here."""
        if not self.partitioned or self.gathered:
            return super().cuda(device)
        return self.to(torch.device("cuda", device) if isinstance(device, int) else device or "cuda")

    def float(self) -> ModelState:
        """As torch's; after partitioning ``to(torch.float32)``."""
        return self.to(torch.float32) if self.partitioned else super().float()

    def double(self) -> ModelState:
        """As torch's; after partitioning ``to(torch.float64)``."""
        return self.to(torch.float64) if self.partitioned else super().double()

    def half(self) -> ModelState:
        """As torch's; after partitioning ``to(torch.float16)``."""
        return self.to(torch.float16) if self.partitioned else super().half()

    def bfloat16(self) -> ModelState:
        """As torch's; after partitioning ``to(torch.bfloat16)``."""
        return self.to(torch.bfloat16) if self.partitioned else super().bfloat16()

    def cpu(self) -> ModelState:
        """Gather all parameters and buffers on every rank of the replica, on the CPU.

        The model is whole again on each rank, for example to be used without model parallelism through
        :meth:`get_module`; it cannot be trained in steps any more.
        """
        if self.partitioned and not self.gathered:
            with stand_ins(self.module, self.is_here):
                tensors = dict([*self.module.named_parameters(), *self.module.named_buffers()])
            whole = collect(tensors, self._home_of, group=state.groups[CommGroup.MP_GROUP])
            self.gathered = True
            with torch.no_grad():
                for name, tensor in [*self.module.named_parameters(), *self.module.named_buffers()]:
                    if isinstance(tensor, RemoteParameter):
                        tensor.__class__ = nn.Parameter  # type: ignore[assignment]
                    found = whole[name].detach().cpu().clone()
                    if isinstance(tensor, Placeholder):
                        owner, _, last = name.rpartition(".")
                        self.module.get_submodule(owner)._buffers[last] = found
                    else:
                        tensor.data = found
        return super().cpu()

    # --- answers that later versions of the interface ask for ------------------------------------------

    def distributed_modules(self) -> Iterator[nn.Module]:
        """Modules split by tensor parallelism: none."""
        return iter(())

    def is_distributed_parameter(self, parameter: nn.Parameter) -> bool:
        """Whether tensor parallelism splits it: no."""
        return False

    def is_distributed_buffer(self, buffer: Tensor) -> bool:
        """Whether tensor parallelism splits it: no."""
        return False

    def is_scaled_batch_parameter(self, parameter: nn.Parameter) -> bool:
        """Whether it works on the batch of a whole tensor-parallel group: no, such groups have one rank."""
        return False

    def is_scaled_batch_buffer(self, buffer: Tensor) -> bool:
        """Whether it works on the batch of a whole tensor-parallel group: no, such groups have one rank."""
        return False

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters whose gradients are reduced over the data-parallel group: all local ones."""
        return self.local_named_parameters()

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters whose gradients are reduced over the reduced-data-parallel group only: none."""
        return iter(())

    def _require_partitioned(self, name: str) -> None:
        if not self.partitioned:
            raise SMPError(
                f"{name}() works once the model is partitioned, which the first call of a smp.step function "
                "does; use register_post_partition_hook to act right then"
            )


def _into(
    destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
) -> tuple[dict[str, Any] | None, str]:
    """The arguments of torch's ``state_dict`` for a model that is split."""
    if keep_vars:
        raise SMPUnsupportedError(
            "model.state_dict(keep_vars=True) would give the parameters, which are on several ranks; "
            "use model.local_named_parameters()"
        )
    return destination, prefix


def _check_hook(name: str, hook: object) -> None:
    if not callable(hook):
        raise TypeError(f"model.{name}: expected a function of (model, optimizer), got {hook!r}")
