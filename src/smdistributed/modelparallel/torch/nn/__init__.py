"""Stand-ins for apex's fused modules, and the modules of tensor parallelism."""

from opensmd.modelparallel.tensor_parallel.distributed_module import DistributedModule
from opensmd.modelparallel.tensor_parallel.layers.cross_entropy import VocabularyCrossEntropy
from opensmd.modelparallel.tensor_parallel.layers.embedding import DistributedEmbedding
from opensmd.modelparallel.tensor_parallel.layers.layer_norm import DistributedLayerNorm
from opensmd.modelparallel.tensor_parallel.layers.linear import DistributedLinear
from opensmd.modelparallel.tensor_parallel.transformer.attention import DistributedAttentionLayer
from opensmd.modelparallel.tensor_parallel.transformer.flash_attention import FlashAttentionLayer
from opensmd.modelparallel.tensor_parallel.transformer.layer import DistributedTransformerLayer
from opensmd.modelparallel.tensor_parallel.transformer.lm_head import DistributedTransformerLMHead
from opensmd.modelparallel.tensor_parallel.transformer.output import DistributedTransformerOutputLayer
from opensmd.modelparallel.tensor_parallel.transformer.stack import DistributedTransformer
from opensmd.nn import FusedLayerNorm
from smdistributed.modelparallel.torch.nn import huggingface, utils

__all__ = [
    "FusedLayerNorm",
    "DistributedAttentionLayer",
    "DistributedEmbedding",
    "DistributedLayerNorm",
    "DistributedLinear",
    "DistributedModule",
    "DistributedTransformer",
    "DistributedTransformerLayer",
    "DistributedTransformerLMHead",
    "DistributedTransformerOutputLayer",
    "FlashAttentionLayer",
    "VocabularyCrossEntropy",
    "huggingface",
    "utils",
]
