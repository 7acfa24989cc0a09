"""What scripts of later versions ask about the layout of parameters: it is the plain model's, everywhere.

Later versions replaced modules by tensor-parallel ones and so needed translations between two layouts of a
state dict, and the axis along which a parameter is split. Here modules are never replaced and parameters are
never split, so the answers are short, and scripts that ask can go on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opensmd.modelparallel.state import state

__all__ = ["get_distribution_axis", "rank_message", "same_layout"]


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
