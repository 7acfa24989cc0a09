"""State dicts of GPT-Neo, in Hugging Face's layout and that of distributed modules."""

from opensmd.modelparallel.tensor_parallel.huggingface.gptneo import (
    translate_hf_state_dict_to_smdistributed_gptneo,
    translate_state_dict_to_hf_gptneo,
)

__all__ = [
    "translate_hf_state_dict_to_smdistributed_gptneo",
    "translate_state_dict_to_hf_gptneo",
]
