"""State dicts of GPT-2, in Hugging Face's layout and that of distributed modules."""

from opensmd.modelparallel.tensor_parallel.huggingface.gpt2 import (
    translate_hf_state_dict_to_smdistributed_gpt2,
    translate_state_dict_to_hf_gpt2,
)

translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gpt2  # an older spelling

__all__ = [
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_gpt2",
    "translate_state_dict_to_hf_gpt2",
]
