"""BERT: the distributed counterpart of its encoder, and its state dicts."""

from __future__ import annotations

from opensmd.modelparallel.tensor_parallel.huggingface.encoder import FAMILY
from opensmd.modelparallel.tensor_parallel.huggingface.encoder import encoder as distributed
from opensmd.modelparallel.tensor_parallel.huggingface.translation import translations_of

__all__ = [
    "TRANSLATIONS",
    "distributed",
    "translate_hf_state_dict_to_smdistributed_bert",
    "translate_state_dict_to_hf_bert",
]

TRANSLATIONS = translations_of(FAMILY)
translate_state_dict_to_hf_bert, translate_hf_state_dict_to_smdistributed_bert = TRANSLATIONS
