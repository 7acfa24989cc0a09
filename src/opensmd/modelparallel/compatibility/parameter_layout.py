"""What scripts of later versions ask about the layout of parameters: it is the plain model's, everywhere.

Later versions replaced modules by tensor-parallel ones and so needed translations between two layouts of a
state dict, and the axis along which a parameter is split. Here modules are never replaced and parameters are
never split, so the answers are short, and scripts that ask get on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from opensmd.modelparallel.state import state

__all__ = ["get_distribution_axis", "name_original_forwards", "rank_message", "same_layout"]


def same_layout(state_dict: Mapping[str, Any], max_seq_len: int | None = None) -> dict[str, Any]:
    """A copy of a state dict: the layouts of Hugging Face and of a model here are the same.

    Args:
        state_dict: of the whole model; a Hugging Face model keeps its own names here.
        max_seq_len: accepted; no buffer depends on it.
    """
    return dict(state_dict)


def get_distribution_axis(parameter: Any) -> int | None:
    """The axis along which tensor parallelism splits the parameter: None, as it splits none here."""
    return None


def rank_message(message: object) -> str:
    """``message`` with this process's global rank in front, for logs."""
    return f"[{state.require('rmsg').rank}] {message}"


def name_original_forwards(module: nn.Module) -> None:
    """Let ``super()._orig_forward(...)`` work in the classes of ``module``'s modules that say so.

    The original's documentation tells users to write this in a module that extends another one, because
    there ``super().forward`` recursed. Here both do the same.
    """
    for cls in {type(each) for each in module.modules()}:
        if not any(_mentions(each, "_orig_forward") for each in cls.__mro__):
            continue
        for parent in cls.__mro__[: cls.__mro__.index(nn.Module)]:
            if "forward" in vars(parent) and "_orig_forward" not in vars(parent):
                parent._orig_forward = vars(parent)["forward"]  # type: ignore[attr-defined]


def _mentions(cls: type, name: str) -> bool:
    functions = (getattr(each, "__code__", None) for each in vars(cls).values())
    return any(code is not None and name in code.co_names for code in functions)
