"""Warning scripts that clip the gradients of a split model with torch's own functions.

``torch.nn.utils.clip_grad_norm_`` finds no gradients on parameters of other ranks and takes the norm of one
partition, so every partition would be scaled by its own factor. Parameters that live elsewhere notice when
their gradient is read, and check by whom. ``get_total_norm`` is given gradients: then the code that calls it
counts, if that has also read gradients of such parameters.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import CodeType
from typing import Any

from torch import Tensor

from opensmd.modelparallel.compatibility.quirks import reader_of_gradient
from opensmd.modelparallel.redirection._torch_internals import replaced_total_norm

__all__ = ["ClippingWarning", "watch_total_norms"]

_INNER = ("<listcomp>", "<genexpr>", "<setcomp>", "<dictcomp>", "<lambda>")
_readers: set[CodeType] = set()  # code that has read gradients of parameters on other ranks


class ClippingWarning:
    """The warning of a placed model, given once; its parameters on other ranks share this object.

    Args:
        stages: how many stages have parameters; with one, the norm of its gradients is that of all.
    """

    def __init__(self, stages: int) -> None:
        self._is_due = stages > 1

    def gradient_was_read(self) -> None:
        """Warn if the caller's caller is torch's function; otherwise note which code that is."""
        # Five levels up to the script, including the function that torch wraps with no_grad.
        frame = sys._getframe(2)
        level = reader_of_gradient(frame, 5)
        if level is None:
            outer = frame.f_back if frame.f_code.co_name in _INNER else None
            _readers.update(reader.f_code for reader in (frame, outer) if reader is not None)
        if level is None or not self._is_due:
            return
        self._is_due = False
        warnings.warn(
            "torch.nn.utils.clip_grad_norm_ sees the gradients of this rank alone, so each partition is "
            "clipped by a norm of its own, not by that of the whole model. Call "
            "optimizer.clip_master_grads(max_norm) of the smp.DistributedOptimizer on all ranks",
            stacklevel=level,
        )


def watch_total_norms() -> Callable[[], None]:
    """Warn once of norms of the gradients of all parameters; for models with parameters on several stages.

    Returns:
        A function that undoes this.
    """
    _readers.clear()
    is_due = True

    def total_norm(plain: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        nonlocal is_due
        norm = plain(*args, **kwargs)
        caller = sys._getframe(2).f_code  # of the function that torch wraps with no_grad
        # A generator is run by torch itself.
        if is_due and (caller in _readers or getattr(plain, "__code__", None) in _readers):
            is_due = False
            warnings.warn(
                "torch.nn.utils.get_total_norm sees the gradients of this rank alone, so its norm is not "
                "that of the whole model. Call optimizer.clip_master_grads(max_norm) of the "
                "smp.DistributedOptimizer on all ranks, or take the norm over model.local_parameters() and "
                "add up the squares over smp.get_mp_process_group()",
                stacklevel=3,
            )
        return norm

    return replaced_total_norm(total_norm)
