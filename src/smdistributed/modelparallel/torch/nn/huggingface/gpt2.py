"""State dicts of GPT-2: the layout is Hugging Face's own."""

from opensmd.modelparallel.compatibility.parameter_layout import (
    same_layout as translate_hf_state_dict_to_smdistributed,
)
from opensmd.modelparallel.compatibility.parameter_layout import (
    same_layout as translate_hf_state_dict_to_smdistributed_gpt2,
)
from opensmd.modelparallel.compatibility.parameter_layout import (
    same_layout as translate_state_dict_to_hf_gpt2,
)

__all__ = [
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_gpt2",
    "translate_state_dict_to_hf_gpt2",
]
