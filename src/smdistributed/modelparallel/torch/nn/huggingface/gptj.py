"""State dicts of GPT-J, in Hugging Face's layout and that of distributed modules."""

from opensmd.modelparallel.tensor_parallel.huggingface.gptj import (
    translate_hf_state_dict_to_smdistributed_gptj,
    translate_state_dict_to_hf_gptj,
)

# an older spelling
translate_hf_gptj_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptj

__all__ = [
    "translate_hf_gptj_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_gptj",
    "translate_state_dict_to_hf_gptj",
]
