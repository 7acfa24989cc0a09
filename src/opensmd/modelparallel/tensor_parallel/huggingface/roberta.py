"""RoBERTa: the distributed counterpart of its encoder, and its state dicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opensmd.modelparallel.tensor_parallel.huggingface.encoder import FAMILY
from opensmd.modelparallel.tensor_parallel.huggingface.encoder import encoder as distributed
from opensmd.modelparallel.tensor_parallel.huggingface.translation import from_huggingface, to_huggingface

__all__ = [
    "TRANSLATIONS",
    "distributed",
    "translate_hf_state_dict_to_smdistributed_roberta",
    "translate_state_dict_to_hf_roberta",
]


def translate_state_dict_to_hf_roberta(
    state_dict: Mapping[str, Any], max_seq_len: int | None = None
) -> dict[str, Any]:
    """A RoBERTa's full state dict, whose encoder is distributed, with Hugging Face's names and shapes.

    Args:
        max_seq_len: accepted; nothing depends on it.
    """
    return to_huggingface(FAMILY, state_dict)


def translate_hf_state_dict_to_smdistributed_roberta(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A Hugging Face RoBERTa's state dict for one whose encoder is distributed."""
    return from_huggingface(FAMILY, state_dict)


TRANSLATIONS = (translate_state_dict_to_hf_roberta, translate_hf_state_dict_to_smdistributed_roberta)
