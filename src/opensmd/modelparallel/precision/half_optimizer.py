"""What ``smp.DistributedOptimizer`` does with the settings ``fp16`` and ``bf16``: FP32 masters, a loss scale.

From the first step on, which places the parameters, the groups have masters instead of parameters::

    smp.step            model.backward(loss) multiplies the loss by the scale
    clip_master_grads   copies gradients to the masters, divided by the scale; then clips
    step                skipped if any rank found an infinity; else trains masters, rounds them into the model

State dicts have each master as ``master_weight`` in its parameter's state, and the loss scale next to that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.precision.layout import Layout
from opensmd.modelparallel.precision.loss_scale import LossScale
from opensmd.modelparallel.precision.master_weights import MasterWeights, dense_gradients
from opensmd.modelparallel.precision.masters_in_state_dicts import MASTER, SCALE, split_masters
from opensmd.modelparallel.precision.optimizer_attributes import PrecisionAttributes
from opensmd.modelparallel.precision.owners import device_of, share_among_owners, share_over_replicas
from opensmd.modelparallel.runtime.tensors.before_writing import before_writing
from opensmd.modelparallel.state import state
from opensmd.modelparallel.wrapped import WrappedModel
from opensmd.optim.param_groups import group_settings, params_of
from opensmd.upcast import upcast

__all__ = ["HalfMethods"]


class HalfMethods(PrecisionAttributes):
    """A mixin that precedes a distributed optimizer's own class."""

    state: Any
    _smp_scale: LossScale
    _smp_masters: MasterWeights | None = None
    _smp_fresh = False  # whether the masters have the model's current gradients
    _smp_updated_at = 0  # the number of backwards when the masters got them

    @property
    def loss_scaler(self) -> LossScale:
        """The loss scale and how it changes."""
        return self._smp_scale

    @property
    def fp16_groups(self) -> list[list[nn.Parameter]]:
        """The model's 16-bit parameters on this rank, by parameter group."""
        return [
            [self._smp_model_parameter(pair[0]) for pair in self._smp_pairs(group)]
            for group in self.param_groups
        ]

    @property
    def fp32_from_fp16_groups(self) -> list[list[nn.Parameter]]:
        """Their masters, by parameter group."""
        return [[pair[1] for pair in self._smp_pairs(group)] for group in self.param_groups]

    @property
    def fp32_from_fp32_groups(self) -> list[list[nn.Parameter]]:
        """The parameters of other types, which are their own masters, by parameter group."""
        mastered = {id(master) for _, master in self._smp_masters or ()}
        return [[own for own in group["params"] if id(own) not in mastered] for group in self.param_groups]

    def update_master_grads(self) -> None:
        """Copy the gradients to the masters, divided by the loss scale, and check for infinities (fp16).

        Raises:
            SMPError: before the first step, or if the gradients are not from ``model.backward``.
        """
        masters, scaler = self._smp_require_masters("update_master_grads"), self.loss_scaler
        self._smp_collect_gradients()
        masters.take_gradients()
        grads = dense_gradients(self.master_params)
        if grads and scaler.backwards == self._smp_updated_at and scaler.applied != 1.0:
            raise SMPError(
                "the gradients have not been multiplied by the loss scale: with fp16, call "
                "model.backward(loss) in the step function instead of loss.backward()"
            )
        self._smp_updated_at = scaler.backwards
        self._smp_fresh = True
        if grads and scaler.applied != 1.0:
            torch._foreach_mul_(grads, 1 / scaler.applied)
        if state.cfg.fp16:
            self.overflow = self._smp_found_infinity(grads)

    def clip_master_grads(self, max_norm: float) -> float:
        """Clip the masters' gradients of all partitions together, as without fp16 and bf16."""
        self._smp_update_if_due()
        norm = super().clip_master_grads(max_norm)
        if state.cfg.fp16 and (self.overflow or not math.isfinite(norm)):
            self.overflow = True  # a rank without parameters knows it only from the norm
            return -1.0
        return norm

    def init_master_params(self) -> None:
        """Set the masters to the model's parameters."""
        before_writing()
        if self._smp_masters is not None:
            self._smp_masters.reload()

    def step(self, closure: None = None) -> float | None:
        """Train the masters and round them into the model; skipped if gradients overflowed (fp16).

        Raises:
            SMPError: before the first step, or inside one with several microbatches.
            ValueError: a closure was given, which would compute the loss outside a step.
        """
        if closure is not None:
            raise ValueError(
                "optimizer.step takes no closure with fp16 and bf16: the smp.step function computes the loss"
            )
        masters = self._smp_require_masters("step")
        self._smp_update_if_due()
        result: float | None = None
        if not self.overflow:
            self._smp_before_training()
            result = super().step()  # type: ignore[misc]
            masters.round_into_model()
            self._smp_complete_model()
        if state.cfg.fp16:
            self.loss_scaler.update(self.overflow)
        self._smp_fresh = False
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients of the masters and the model's parameters, as in torch."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        self._smp_fresh = False
        self._smp_zero([parameter for parameter, _ in self._smp_masters or ()], set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; after the first step its parameters get masters."""
        super().add_param_group(param_group)  # type: ignore[misc]
        if self._smp_masters is not None:
            self._smp_replace(self.param_groups[-1], self._smp_masters)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load as without fp16 and bf16, but before the first step wait for the masters.

        A state dict without masters sets them to the model's parameters.
        """
        fitting = self._smp_fitting(state_dict)  # type: ignore[attr-defined]
        if self._smp_masters is None:
            self._smp_waiting = fitting
            for own, saved in zip(self.param_groups, fitting["param_groups"], strict=True):
                own.update(group_settings(saved))
            return
        self._smp_load(fitting, self._smp_masters)

    def _smp_after_partition(self, model: WrappedModel) -> None:
        super()._smp_after_partition(model)
        if self._smp_masters is None and self._smp_layout is not None:
            self._smp_masters = masters = MasterWeights(self._smp_layout.local)
            for group in self.param_groups:
                self._smp_replace(group, masters)
            if self._smp_waiting is not None:
                waiting, self._smp_waiting = self._smp_waiting, None
                self._smp_load({**waiting, "param_groups": self._smp_groups_since(waiting)}, masters)

    def _smp_groups_since(self, waiting: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return a pending state dict's groups, with what scripts have changed in them and added since."""
        saved = [group["params"] for group in waiting["param_groups"]]
        count = max((number for numbers in saved for number in numbers), default=-1) + 1
        for size in self._smp_group_sizes()[len(saved) :]:  # type: ignore[attr-defined]
            saved.append(list(range(count, count + size)))
            count += size
        return [{**own, "params": numbers} for own, numbers in zip(self.param_groups, saved, strict=True)]

    def _smp_plain_state_dict(self) -> dict[str, Any]:
        waiting = self._smp_waiting
        if waiting is None:
            plain: dict[str, Any] = super()._smp_plain_state_dict()  # type: ignore[misc]
            return plain
        return {**waiting, "param_groups": self._smp_groups_since(waiting)}

    def _smp_follow_model(self) -> None:
        if self._smp_masters is not None:
            self._smp_masters.follow_model()

    def _smp_renumbered(self, layout: Layout) -> dict[str, Any]:
        own: dict[str, Any] = super()._smp_renumbered(layout)  # type: ignore[misc]
        for _, master in self._smp_masters or ():
            number = layout.local[id(master)]
            own["state"].setdefault(number, {})[MASTER] = self._smp_whole(number, master.detach())
        if state.cfg.fp16:
            own[SCALE] = self.loss_scaler.state_dict()
        return own

    def _smp_load(self, state_dict: dict[str, Any], masters: MasterWeights) -> None:
        stored = params_of(state_dict["param_groups"])
        values, rest = split_masters(state_dict)
        pairs = []
        for _, master in masters:
            number = masters.number(master)
            value = values.get(stored[number])
            pairs.append((master, None if value is None else self._smp_own_part(number, value)))
        for master, value in pairs:
            if value is not None and value.shape != master.shape:
                raise ValueError(
                    f"the loaded optimizer state does not fit the parameters: a master weight of shape "
                    f"{tuple(value.shape)} in the checkpoint, {tuple(master.shape)} here. Nothing has been "
                    "changed"
                )
        before_writing()
        super().load_state_dict(rest)  # type: ignore[misc]
        with torch.no_grad():
            for master, value in pairs:
                if value is not None:
                    master.copy_(value)
        if state.cfg.fp16 and SCALE in state_dict:
            self.loss_scaler.load_state_dict(state_dict[SCALE])

    def _smp_pairs(self, group: dict[str, Any]) -> list[tuple[nn.Parameter, nn.Parameter]]:
        pairs = {id(master): (parameter, master) for parameter, master in self._smp_masters or ()}
        return [pairs[id(master)] for master in group["params"] if id(master) in pairs]

    def _smp_replace(self, group: dict[str, Any], masters: MasterWeights) -> None:
        parameters = list(group["params"])
        masters.replace(group)
        for parameter, trained in zip(parameters, group["params"], strict=True):
            if trained is not parameter and parameter in self.state:  # some create it before the first step
                self.state[trained] = _widened(self.state.pop(parameter))
        self._smp_lay_out(group)

    def _smp_require_masters(self, name: str) -> MasterWeights:
        if state.model is not None:
            state.model.require_whole_batch(f"optimizer.{name}")
        if self._smp_masters is None:
            raise SMPError(
                f"optimizer.{name} was called before the first smp.step function, which makes gradients and, "
                "with fp16 and bf16, the FP32 master weights"
            )
        return self._smp_masters

    def _smp_update_if_due(self) -> None:
        if not self._smp_fresh or self.loss_scaler.backwards != self._smp_updated_at:
            self.update_master_grads()

    def _smp_found_infinity(self, grads: list[torch.Tensor]) -> bool:
        """Whether a gradient on any rank of the model is infinite or NaN."""
        overflows = torch.zeros((), device=device_of(self.master_params))
        grads = [grad for grad in grads if grad.numel()]  # a rank may have no part of a small parameter
        if grads:
            largest = torch.stack([norm.to(overflows) for norm in torch._foreach_norm(grads, math.inf)])
            overflows += ~largest.isfinite().all()
        share_among_owners(overflows, name="optimizer.step")
        if state.model is None or not state.model.joining:  # otherwise some replicas may have finished
            share_over_replicas(overflows)
        return bool(overflows.item())


def _widened(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the state of a 16-bit parameter to its master's."""
    return {
        key: upcast(value) if isinstance(value, torch.Tensor) else value for key, value in entries.items()
    }
