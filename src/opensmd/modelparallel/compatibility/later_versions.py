"""Names of later versions of the library whose features do not exist here: each says so when it is used.

Scripts that import them but leave the feature off run; nothing is silently absent.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from opensmd.modelparallel.exceptions import SMPUnsupportedError

__all__ = [
    "DistributedAttentionLayer",
    "DistributedEmbedding",
    "DistributedLinear",
    "DistributedModule",
    "DistributedTransformer",
    "DistributedTransformerLayer",
    "DistributedTransformerLMHead",
    "DistributedTransformerOutputLayer",
    "FlashAttentionLayer",
    "delay_param_initialization",
    "dump_model",
    "model_creation",
    "set_tensor_parallelism",
    "tensor_parallelism",
    "tp_register",
    "tp_register_with_module",
    "verify",
]

TENSOR_PARALLELISM = (
    "tensor parallelism does not exist here; split the model over more partitions (pipeline_parallel_degree) "
    "or use torch.distributed.tensor.parallel without smp"
)
TEST_HELPER = (
    "this helper of the original library's own tests was never documented and does not exist here; compare "
    "model.state_dict() and optimizer.state_dict(), which are whole on every rank"
)
FLASH_ATTENTION = (
    "it does not exist here; torch.nn.functional.scaled_dot_product_attention chooses a fused kernel itself"
)

# of tensor parallelism's modules; without it they say nothing
CREATION_KEYWORDS = {
    "attention_in_fp32",
    "distribute_embedding",
    "flash_attention",
    "fp32_residual_addition",
    "fused_bias_gelu",
    "fused_dropout",
    "fused_softmax",
    "query_key_layer_scaling",
    "use_alibi",
    "zero_init",
}


def _absent(name: str, reason: str = TENSOR_PARALLELISM) -> Any:
    """A class called ``name`` that can be imported and named, and whose use raises SMPUnsupportedError."""

    def refuse(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
        raise SMPUnsupportedError(f"smp.nn.{name}: {reason}")

    return type(name, (), {"__new__": refuse, "__doc__": f"Not available: {reason}"})


DistributedAttentionLayer = _absent("DistributedAttentionLayer")
DistributedEmbedding = _absent("DistributedEmbedding")
DistributedLinear = _absent("DistributedLinear")
DistributedModule = _absent("DistributedModule")
DistributedTransformer = _absent("DistributedTransformer")
DistributedTransformerLayer = _absent("DistributedTransformerLayer")
DistributedTransformerLMHead = _absent("DistributedTransformerLMHead")
DistributedTransformerOutputLayer = _absent("DistributedTransformerOutputLayer")
FlashAttentionLayer = _absent("FlashAttentionLayer", FLASH_ATTENTION)


@contextlib.contextmanager
def tensor_parallelism(enabled: bool = True, **kwargs: Any) -> Iterator[None]:
    """Does nothing with ``enabled=False``; otherwise raises SMPUnsupportedError."""
    if enabled:
        raise SMPUnsupportedError(f"smp.tensor_parallelism: {TENSOR_PARALLELISM}")
    yield


def set_tensor_parallelism(module: torch.nn.Module, enabled: bool = True, **kwargs: Any) -> None:
    """Does nothing with ``enabled=False``; otherwise raises SMPUnsupportedError."""
    if enabled:
        raise SMPUnsupportedError(f"smp.set_tensor_parallelism: {TENSOR_PARALLELISM}")


def tp_register(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises SMPUnsupportedError."""
    raise SMPUnsupportedError(f"smp.tp_register: {TENSOR_PARALLELISM}")


def tp_register_with_module(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises SMPUnsupportedError."""
    raise SMPUnsupportedError(f"smp.tp_register_with_module: {TENSOR_PARALLELISM}")


def verify(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises SMPUnsupportedError."""
    raise SMPUnsupportedError(f"smdistributed.modelparallel.test.torch.utils.verify: {TEST_HELPER}")


def dump_model(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises SMPUnsupportedError."""
    raise SMPUnsupportedError(f"smdistributed.modelparallel.test.torch.utils.dump_model: {TEST_HELPER}")


@contextlib.contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Has no effect: parameters are initialised at once, which gives the same model.

    Warns:
        UserWarning: ``enabled`` is True.
    """
    if enabled:
        warnings.warn(
            "smp.delay_param_initialization has no effect: parameters are initialised at once, so each rank "
            "needs memory for the whole model until the first step",
            stacklevel=3,
        )
    yield


@contextlib.contextmanager
def model_creation(
    tensor_parallelism: bool = False, dtype: torch.dtype | None = None, **tensor_parallel_config: Any
) -> Iterator[None]:
    """Create a model inside with ``dtype`` as torch's default floating-point type.

    Raises:
        SMPUnsupportedError: ``tensor_parallelism=True``.
        TypeError: a keyword that the original does not have, such as a misspelt one.
    """
    unknown = sorted(tensor_parallel_config.keys() - CREATION_KEYWORDS)
    if unknown:
        raise TypeError(
            f"smp.model_creation: unexpected keywords {', '.join(unknown)}; the valid ones are "
            f"tensor_parallelism, dtype, {', '.join(sorted(CREATION_KEYWORDS))}"
        )
    if tensor_parallelism:
        raise SMPUnsupportedError(f"smp.model_creation(tensor_parallelism=True): {TENSOR_PARALLELISM}")
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
