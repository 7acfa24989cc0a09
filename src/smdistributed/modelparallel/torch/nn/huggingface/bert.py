"""State dicts of BERT, in Hugging Face's layout and that of distributed modules."""

from opensmd.modelparallel.tensor_parallel.huggingface.bert import (
    translate_hf_state_dict_to_smdistributed_bert,
    translate_state_dict_to_hf_bert,
)

__all__ = [
    "translate_hf_state_dict_to_smdistributed_bert",
    "translate_state_dict_to_hf_bert",
]
