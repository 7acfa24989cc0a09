"""``smp.delay_param_initialization`` and ``smp.model_creation``, with which later scripts create models."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from opensmd.modelparallel.delayed.delayed_parameter import records_modules
from opensmd.modelparallel.delayed.recording import Recording
from opensmd.modelparallel.state import state
from opensmd.modelparallel.tensor_parallel import contexts
from opensmd.said_once import warn_once

__all__ = ["delay_param_initialization", "model_creation"]

# of modules of tensor parallelism; meaningless without it
CREATION_KEYWORDS = {
    "attention_in_fp32",
    "distribute_embedding",
    "flash_attention",
    "fp32_residual_addition",
    "fused_bias_gelu",
    "fused_dropout",
    "fused_softmax",
    "gather_logits",
    "query_key_layer_scaling",
    "use_alibi",
    "vocab_parallel",
    "zero_init",
}
_local = threading.local()


@contextlib.contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Create the modules inside without memory for their parameters; the innermost context counts.

    The first call of a smp.step function fills each parameter on the rank where it lives, with the same
    values as without this context. Until then, parameters can be neither read nor changed. State dicts can be
    loaded into the ``smp.DistributedModel``, which takes over their tensors in the first step. Buffers, and
    parameters of less than a page, are created at once.

    Args:
        enabled: False creates parameters at once, even within a context that delays them.
    """
    outer: Recording | None = getattr(_local, "recording", None)
    if outer is not None:
        before, outer.paused = outer.paused, not enabled
        try:
            yield
        finally:
            outer.paused = before
    elif enabled:
        _local.recording = Recording()
        try:
            with records_modules(_local.recording):
                yield
        finally:
            _local.recording = None
    else:
        yield


@contextlib.contextmanager
def model_creation(
    tensor_parallelism: bool = False, dtype: torch.dtype | None = None, **tensor_parallel_config: Any
) -> Iterator[None]:
    """Create a model inside with ``dtype`` as torch's default floating-point type.

    With ``tensor_parallelism``, it is distributed, as by
    ``smp.tensor_parallelism(**tensor_parallel_config)``. With the setting
    ``delayed_parameter_initialization``, it is created as in :func:`delay_param_initialization`.

    Raises:
        TypeError: a keyword that no distributed module has, such as a misspelt one, or a ``dtype`` that is
            not a dtype.

    Warns:
        UserWarning: ``zero_init=True``, which has no effect.
    """
    unknown = sorted(tensor_parallel_config.keys() - CREATION_KEYWORDS)
    if unknown:
        raise TypeError(
            f"smp.model_creation: unexpected keywords {', '.join(unknown)}; the valid ones are "
            f"tensor_parallelism, dtype, {', '.join(sorted(CREATION_KEYWORDS))}"
        )
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"smp.model_creation: dtype={dtype!r} is no torch.dtype, such as torch.float16")
    if tensor_parallel_config.get("zero_init"):
        warn_once(
            "smp.model_creation: zero_init=True has no effect: parameters begin with the values that their "
            "modules give them"
        )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        with contextlib.ExitStack() as opened:
            if tensor_parallelism:
                opened.enter_context(contexts.tensor_parallelism(**tensor_parallel_config))
            if state.initialized and state.cfg.delayed_parameter_initialization:
                opened.enter_context(delay_param_initialization())
            yield
    finally:
        torch.set_default_dtype(before)
