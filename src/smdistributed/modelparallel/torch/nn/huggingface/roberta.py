"""State dicts of RoBERTa, in Hugging Face's layout and that of distributed modules."""

from opensmd.modelparallel.tensor_parallel.huggingface.roberta import (
    translate_hf_state_dict_to_smdistributed_roberta,
    translate_state_dict_to_hf_roberta,
)

__all__ = [
    "translate_hf_state_dict_to_smdistributed_roberta",
    "translate_state_dict_to_hf_roberta",
]
