"""Workarounds for habits of single libraries, one function each: which library, which version, and why.

Those for torch itself are in the files named ``_torch_internals.py``.
"""

from __future__ import annotations

import functools
import gc
import inspect
from collections import OrderedDict, defaultdict, deque
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

__all__ = [
    "PLAIN_CONTAINERS",
    "forget_fake_results",
    "holds_fakes",
    "name_original_forwards",
    "reader_of_gradient",
    "reads_inner_weights",
    "records_outputs",
]

# Not their subclasses: those of transformers import what they are asked for.
PLAIN_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)
_DEPTH = 4  # of containers in a result; those that contain themselves must end somewhere
_PEFT_LAYER = "peft.tuners.tuners_utils.BaseTunerLayer"
_CALLING_PEFT_LAYERS = (
    "peft.tuners.lora.layer.Linear",
    "peft.tuners.adalora.layer.SVDLinear",
    "peft.tuners.ia3.layer.Linear",
)
_CLIPPING = inspect.unwrap(torch.nn.utils.clip_grad_norm_).__code__


def records_outputs(module: nn.Module) -> bool:
    """Whether a module of transformers (4.56 to 5.24) may record what inner modules return.

    Its forward registers the hooks for that on the first request (``output_attentions=True``), so none can be
    seen before. ``can_record_outputs`` tells which there can be.
    """
    return bool(getattr(module, "can_record_outputs", None))


def forget_fake_results() -> None:
    """Clear the caches of functions that have fake tensors among their results.

    transformers (since 4.30, in vision and detection models) keeps index tensors and positional embeddings in
    ``functools.lru_cache``. Those that the dry run has left there have no data, but later calls would get
    them.
    """
    for candidate in gc.get_objects():
        if type(candidate) is functools._lru_cache_wrapper and holds_fakes(gc.get_referents(candidate)):
            candidate.cache_clear()


def reads_inner_weights(module: nn.Module) -> bool:
    """Whether a layer of PEFT (0.10 to 0.21) computes with the weights of the modules in it.

    Some kinds only call these; DoRA, which is an option of LoRA's layers, does more than that.
    """
    if not any(_full_name(kind) == _PEFT_LAYER for kind in type(module).__mro__):
        return False
    variants = [getattr(module, name, {}) for name in ("lora_variant", "use_dora")]
    has_variant = any(value for variant in variants for value in variant.values())
    return has_variant or _full_name(type(module)) not in _CALLING_PEFT_LAYERS


def name_original_forwards(module: nn.Module) -> None:
    """Make ``super()._orig_forward(...)`` work in the classes of modules in ``module`` that call it.

    SageMaker's documentation (smdistributed.modelparallel 1.6 to 1.15) tells users to write this in a module
    that extends another one, because ``super().forward`` recursed there. Here both do the same.
    """
    for cls in {type(submodule) for submodule in module.modules()}:
        if not any(_mentions(base, "_orig_forward") for base in cls.__mro__):
            continue
        for parent in cls.__mro__[: cls.__mro__.index(nn.Module)]:
            if "forward" in vars(parent) and "_orig_forward" not in vars(parent):
                parent._orig_forward = vars(parent)["forward"]  # type: ignore[attr-defined]


def reader_of_gradient(frame: FrameType, level: int) -> int | None:
    """Return the level of the script's frame if torch's ``clip_grad_norm_`` (2.13 to 2.15) reads a gradient.

    It does so in a list comprehension, which has its own frame before Python 3.12.

    Args:
        frame: where a gradient is read.
        level: that of the frame's caller, as ``warnings.warn`` counts.
    """
    if frame.f_code.co_name == "<listcomp>" and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    return level if frame.f_code is _CLIPPING else None


def holds_fakes(value: Any, depth: int = _DEPTH) -> bool:
    """Whether a value is a fake tensor, or a container with one."""
    if type(value) is FakeTensor:
        return True
    if not depth or (type(value) not in PLAIN_CONTAINERS and type(value) is not tuple):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return any(holds_fakes(item, depth - 1) for item in list(inner))


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _mentions(cls: type, name: str) -> bool:
    functions = (getattr(attribute, "__code__", None) for attribute in vars(cls).values())
    return any(code is not None and name in code.co_names for code in functions)
