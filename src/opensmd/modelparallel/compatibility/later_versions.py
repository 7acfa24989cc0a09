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
from opensmd.modelparallel.tensor_parallel import contexts

__all__ = ["delay_param_initialization", "dump_model", "model_creation", "verify"]

TEST_HELPER = (
    "this helper of the original library's own tests was never documented and does not exist here; compare "
    "model.state_dict() and optimizer.state_dict(), which are whole on every rank"
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

    With ``tensor_parallelism`` it is distributed, as by ``smp.tensor_parallelism(**tensor_parallel_config)``.

    Raises:
        TypeError: a keyword that the original does not have, such as a misspelt one.
    """
    unknown = sorted(tensor_parallel_config.keys() - CREATION_KEYWORDS)
    if unknown:
        raise TypeError(
            f"smp.model_creation: unexpected keywords {', '.join(unknown)}; the valid ones are "
            f"tensor_parallelism, dtype, {', '.join(sorted(CREATION_KEYWORDS))}"
        )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        with contextlib.ExitStack() as opened:
            if tensor_parallelism:
                opened.enter_context(contexts.tensor_parallelism(**tensor_parallel_config))
            yield
    finally:
        torch.set_default_dtype(before)
