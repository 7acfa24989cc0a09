"""State dicts of BERT: the layout is Hugging Face's own."""

from opensmd.modelparallel.compatibility.parameter_layout import (
    same_layout as translate_hf_state_dict_to_smdistributed_bert,
)
from opensmd.modelparallel.compatibility.parameter_layout import (
    same_layout as translate_state_dict_to_hf_bert,
)

__all__ = [
    "translate_hf_state_dict_to_smdistributed_bert",
    "translate_state_dict_to_hf_bert",
]
