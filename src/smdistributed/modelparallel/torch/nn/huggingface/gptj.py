"""State dicts of GPT-J: the layout is Hugging Face's own."""

from opensmd.modelparallel.compatibility.parameter_layout import (
    same_layout as translate_hf_gptj_state_dict_to_smdistributed,
)
from opensmd.modelparallel.compatibility.parameter_layout import (
    same_layout as translate_hf_state_dict_to_smdistributed_gptj,
)
from opensmd.modelparallel.compatibility.parameter_layout import (
    same_layout as translate_state_dict_to_hf_gptj,
)

__all__ = [
    "translate_hf_gptj_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_gptj",
    "translate_state_dict_to_hf_gptj",
]
