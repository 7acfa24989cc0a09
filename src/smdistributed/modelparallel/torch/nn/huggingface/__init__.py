"""State dicts between Hugging Face's models and distributed ones."""

from smdistributed.modelparallel.torch.nn.huggingface import bert, gpt2, gptj, gptneo, roberta

__all__ = ["bert", "gpt2", "gptj", "gptneo", "roberta"]
