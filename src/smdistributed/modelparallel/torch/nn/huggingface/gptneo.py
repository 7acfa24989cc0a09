"""State dicts of GPT-Neo: the layout is Hugging Face's own."""

from opensmd.modelparallel.compatibility.parameter_layout import (
    same_layout as translate_hf_state_dict_to_smdistributed_gptneo,
)
from opensmd.modelparallel.compatibility.parameter_layout import (
    same_layout as translate_state_dict_to_hf_gptneo,
)

__all__ = [
    "translate_hf_state_dict_to_smdistributed_gptneo",
    "translate_state_dict_to_hf_gptneo",
]
