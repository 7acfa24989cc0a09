"""The factor for losses that keeps small gradients from vanishing in 16 bits, and how it changes.

Pure, apart from :meth:`LossScale.follow_owners`. A dynamic scale falls after an overflow and rises after a
while without one::

    overflow        scale / scale_factor, once delayed_shift overflows have come
    scale_window    steps without an overflow: scale * scale_factor
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.precision.owners import from_owners
from opensmd.modelparallel.state import state
from opensmd.script_level import script_level

__all__ = [
    "DYNAMIC_ARGUMENTS",
    "LossScale",
    "dynamic_arguments",
    "require_one_scale",
    "shared_loss_scale",
]

DYNAMIC_ARGUMENTS: dict[str, Any] = {
    "init_scale": 2.0**32,
    "scale_factor": 2.0,
    "scale_window": 1000,
    "min_scale": 1.0,
    "delayed_shift": 1,
    "consecutive_hysteresis": False,
}
_CHANGING = ("loss_scale", "steps", "last_overflow", "hysteresis")


class LossScale:
    """The scale of a training's losses, the same on all ranks.

    Args:
        dynamic: adapt the scale to overflows.
        loss_scale: the scale; the initial one if ``dynamic``.
        scale_factor: the factor by which a dynamic scale rises and falls.
        scale_window: steps without an overflow until it rises.
        min_scale: the lower bound.
        delayed_shift: overflows until it falls.
        consecutive_hysteresis: only overflows of consecutive steps count for ``delayed_shift``.

    Attributes:
        settings: what it was created with.
        backwards: how many losses have been scaled.
        applied: the factor of the last loss.

    Raises:
        ValueError: a number that is impossible for a scale.
    """

    def __init__(
        self,
        *,
        dynamic: bool = False,
        loss_scale: float = 1.0,
        scale_factor: float = 2.0,
        scale_window: int = 1000,
        min_scale: float = 1.0,
        delayed_shift: int = 1,
        consecutive_hysteresis: bool = False,
    ) -> None:
        _require(loss_scale > 0, f"a loss scale must be positive, got {loss_scale!r}")
        _require(scale_factor > 1, f"scale_factor must be more than 1, got {scale_factor!r}")
        _require(scale_window >= 1, f"scale_window must be at least 1, got {scale_window!r}")
        _require(min_scale > 0, f"min_scale must be positive, got {min_scale!r}")
        _require(delayed_shift >= 1, f"delayed_shift must be at least 1, got {delayed_shift!r}")
        self.dynamic = dynamic
        self.loss_scale = float(loss_scale)
        self.scale_factor = float(scale_factor)
        self.scale_window = scale_window
        self.min_scale = float(min_scale)
        self.delayed_shift = delayed_shift
        self.consecutive_hysteresis = consecutive_hysteresis
        self.settings = {
            "dynamic": dynamic,
            "loss_scale": self.loss_scale,
            **{name: getattr(self, name) for name in DYNAMIC_ARGUMENTS if name != "init_scale"},
        }
        self.steps = 0
        self.last_overflow = 0
        self.hysteresis = delayed_shift
        self.backwards = 0
        self.applied = self.loss_scale
        self._warned = False

    @property
    def cur_scale(self) -> float:
        """The scale, under the name that scripts print it with."""
        return self.loss_scale

    def apply(self) -> float:
        """Return the current factor for a loss, and count the loss."""
        self.backwards += 1
        self.applied = self.loss_scale
        return self.loss_scale

    def update(self, overflow: bool) -> None:
        """Update after an optimizer step, which was skipped if there was an ``overflow``.

        Warns:
            UserWarning: once, if gradients overflow at the smallest scale.
        """
        if not self.dynamic:
            return
        if overflow:
            self._fall()
        else:
            if self.consecutive_hysteresis:
                self.hysteresis = self.delayed_shift
            if (self.steps + 1 - self.last_overflow) % self.scale_window == 0:
                self.hysteresis = self.delayed_shift
                self.loss_scale *= self.scale_factor
        self.steps += 1

    def _fall(self) -> None:
        self.last_overflow = self.steps + 1
        if self.hysteresis > 1:
            self.hysteresis -= 1
            return
        if self.loss_scale == self.min_scale and not self._warned:
            self._warned = True
            warnings.warn(
                f"gradients overflow at the smallest loss scale, {self.min_scale:g}, so steps are skipped "
                "and nothing is learned: the loss itself is infinite or NaN, or values of the model "
                "exceed 65504, the largest of fp16",
                stacklevel=script_level(),
            )
        self.loss_scale = max(self.loss_scale / self.scale_factor, self.min_scale)

    def state_dict(self) -> dict[str, Any]:
        """Return what changes in training, as plain numbers."""
        return {name: getattr(self, name) for name in _CHANGING}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``; a static scale keeps its own value."""
        if self.dynamic:
            for name in _CHANGING:
                setattr(self, name, type(getattr(self, name))(state_dict[name]))
        self.applied = self.loss_scale

    def follow_owners(self) -> None:
        """Adopt the scale of the ranks with parameters; called on all ranks when a step starts."""
        values = torch.tensor(
            [float(getattr(self, name)) for name in _CHANGING], dtype=torch.float64, device="cpu"
        )
        taken = from_owners(values).tolist()
        for name, value in zip(_CHANGING, taken, strict=True):
            setattr(self, name, type(getattr(self, name))(value))


def shared_loss_scale(static: float | None, dynamic: bool, arguments: Mapping[str, Any]) -> LossScale:
    """Return the scale that all optimizers share, created as the first one requests.

    Args:
        static: the scale; None is 1.
        dynamic: start at ``arguments["init_scale"]`` instead, and adapt.
        arguments: from :data:`DYNAMIC_ARGUMENTS`; the rest have their defaults.

    Raises:
        ValueError: a number that is impossible for a scale, or another optimizer requests a different scale.
    """
    wanted = {**DYNAMIC_ARGUMENTS, **arguments}
    first = wanted.pop("init_scale")
    if not dynamic:
        first = 1.0 if static is None else static
    scale = LossScale(dynamic=dynamic, loss_scale=first, **wanted)
    shared = state.loss_scale
    if not isinstance(shared, LossScale):
        state.loss_scale = state.scalers[id(scale)] = scale
        return scale
    if shared.settings != scale.settings:
        raise ValueError(
            "smp.DistributedOptimizer: all optimizers of a training share one loss scale, because "
            f"model.backward scales a loss once; asked for are {shared.settings} and {scale.settings}"
        )
    return shared


def require_one_scale() -> None:
    """Refuse a GradScaler together with the settings ``fp16`` and ``bf16``.

    It would find no gradients to divide, because masters get theirs in the optimizer's step.

    Raises:
        SMPError: one of them is set.
    """
    if state.initialized and state.cfg.half_dtype is not None:
        raise SMPError(
            "a GradScaler multiplies the loss, but does not find the gradients of the FP32 masters, which "
            "get theirs in optimizer.step and would stay too large. With fp16, model.backward(loss) applies "
            "the loss scale of smp.DistributedOptimizer, and bf16 needs none: leave the scaler out, and call "
            "optimizer.step()"
        )


def dynamic_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a dynamic loss scale, given as keywords or as one dict."""
    arguments = dict(given)
    arguments.update(arguments.pop("dynamic_loss_args", None) or {})
    unknown = sorted(set(arguments) - set(DYNAMIC_ARGUMENTS))
    if unknown:
        raise TypeError(
            f"smp.DistributedOptimizer takes no {', '.join(unknown)}; besides the optimizer it takes "
            f"static_loss_scale, dynamic_loss_scale, dynamic_loss_args, {', '.join(DYNAMIC_ARGUMENTS)}"
        )
    return arguments


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(f"smp.DistributedOptimizer: {message}")
