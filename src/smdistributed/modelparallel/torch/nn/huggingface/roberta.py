"""State dicts of RoBERTa: the layout is Hugging Face's own."""

from opensmd.modelparallel.compatibility.parameter_layout import (
    same_layout as translate_hf_state_dict_to_smdistributed_roberta,
)
from opensmd.modelparallel.compatibility.parameter_layout import (
    same_layout as translate_state_dict_to_hf_roberta,
)

__all__ = [
    "translate_hf_state_dict_to_smdistributed_roberta",
    "translate_state_dict_to_hf_roberta",
]
