"""Stand-ins for apex's fused modules; names of later versions, which say that they do not exist here."""

from opensmd.modelparallel.compatibility.later_versions import (
    DistributedAttentionLayer,
    DistributedEmbedding,
    DistributedLinear,
    DistributedModule,
    DistributedTransformer,
    DistributedTransformerLayer,
    DistributedTransformerLMHead,
    DistributedTransformerOutputLayer,
    FlashAttentionLayer,
)
from opensmd.nn import FusedLayerNorm
from smdistributed.modelparallel.torch.nn import huggingface

__all__ = [
    "FusedLayerNorm",
    "DistributedAttentionLayer",
    "DistributedEmbedding",
    "DistributedLinear",
    "DistributedModule",
    "DistributedTransformer",
    "DistributedTransformerLayer",
    "DistributedTransformerLMHead",
    "DistributedTransformerOutputLayer",
    "FlashAttentionLayer",
    "huggingface",
]
