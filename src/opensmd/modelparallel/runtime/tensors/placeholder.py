"""Placeholders: tensors with a shape but no data, because that is on another rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from opensmd.modelparallel.compatibility.clipping import ClippingWarning
from opensmd.modelparallel.exceptions import SMPUnsupportedError
from opensmd.modelparallel.ranks.composite import empty_parts, is_composite, take_parts
from opensmd.modelparallel.runtime.tensors.answers import WITHOUT_DATA
from opensmd.modelparallel.runtime.tensors.functions import getter, setter

__all__ = [
    "DataElsewhere",
    "Placeholder",
    "RemoteTensor",
    "emptied",
    "give_data",
    "make_remote",
    "out_of_mapping",
]

_GRAD = getter("grad")
_CLIPPING = "_opensmd_clipping"


class DataElsewhere(SMPUnsupportedError):
    """An operation has reached placeholders.

    Attributes:
        tensor: the first of them.
    """

    def __init__(self, operation: Any, tensor: Placeholder) -> None:
        super().__init__(
            f"{operation} was called on a tensor whose data is on another pipeline rank, by code that model "
            "parallelism does not see (torch.vmap, operations after the step). Put that code into an "
            "nn.Module of its own, which runs as a whole where its data is, or return the tensor from the "
            "step function and use the result"
        )
        self.tensor = tensor


class Placeholder(Tensor):
    """Shape, strides, dtype and device of a tensor whose data is on another pipeline rank.

    Every operation on it should be intercepted. One that is not ends here, with an error instead of a
    silently wrong result.
    """

    # Glue sees operations as a mode; intercepting again here would only cost time.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of_form(
        shape: Sequence[int], stride: Sequence[int] | None, dtype: torch.dtype, device: torch.device
    ) -> Placeholder:
        """Create a placeholder; ``stride`` is None for a contiguous one."""
        # No constructor: a rank creates one for nearly every call, and each Python frame costs.
        placeholder: Placeholder = Tensor._make_wrapper_subclass(
            Placeholder, shape, strides=stride, dtype=dtype, device=device
        )
        return placeholder

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: torch._ops.OpOverload, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        # At least one is: otherwise torch would not have come here.
        leaves = tree_leaves((args, kwargs))
        raise DataElsewhere(func, next(each for each in leaves if isinstance(each, Placeholder)))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Placeholder(shape={tuple(self.shape)}, dtype={self.dtype})"


class RemoteTensor(Tensor):
    """A tensor whose data is on another pipeline rank: its memory is freed, its shape stays.

    Outside steps, reading it raises; looking at its shape, dtype or ``grad`` (None) does not. The results of
    ``detach`` and ``data`` are guarded in the same way, because reading missing memory would crash the
    process.
    """

    _ALLOWED = WITHOUT_DATA | {
        *map(getter, ("requires_grad", "grad", "grad_fn", "is_leaf", "data", "_version")),
        *map(setter, ("requires_grad", "grad", "data")),
        Tensor.detach, Tensor.requires_grad_, Tensor.untyped_storage, Tensor.is_set_to,
        Tensor.register_hook, Tensor.register_post_accumulate_grad_hook,
        Tensor.__deepcopy__, Tensor.__dir__,
    }  # fmt: skip
    _made_of: ClassVar[type[Tensor] | None] = None  # the class of a composite tensor
    # the class of what ``detach`` and ``data`` return, if not this
    _no_parameter: ClassVar[type[RemoteTensor] | None] = None
    _why_not = (
        "whose data is on another pipeline rank. To run the model, "
        "call it in a smp.step function; outside of steps use model.local_parameters() for what is here, "
        "or state_dict(), load_state_dict(), to() or cpu() of the DistributedModel for all of it. In a "
        "step, a module or autograd function of one partition has used another's: place both on one with "
        "smp.set_partition"
    )

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in cls._ALLOWED:
            if func == _GRAD and (clipping := args[0].__dict__.get(_CLIPPING)) is not None:
                clipping.gradient_was_read()
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **(kwargs or {}))
            # The next operation would read a plain tensor over the emptied storage, and crash the process.
            if type(result) is Tensor and not result.untyped_storage().nbytes():
                result.__class__ = cls._no_parameter or RemoteTensor
            elif cls._made_of is not None and type(result) is cls._made_of:
                result.__class__ = cls
            return result
        name = torch.overrides.resolve_name(func) or func
        raise SMPUnsupportedError(f"{name} was called on a parameter {cls._why_not}")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"


class RemoteParameter(RemoteTensor, nn.Parameter):
    """A parameter whose data is on another pipeline rank."""


class RemoteDTensor(RemoteTensor, DTensor):
    """A parameter split by torch's own tensor parallelism, whose data is on another pipeline rank."""

    __slots__ = ()  # the same layout, so that the object can change its class


@cache
def _remote_composite(made_of: type[Tensor]) -> type[RemoteTensor]:
    """Return the class of a composite parameter whose data is on another pipeline rank."""
    # the same layout, so that the object can change its class
    return type(f"Remote{made_of.__name__}", (RemoteTensor, made_of), {"__slots__": (), "_made_of": made_of})


def make_remote(parameter: nn.Parameter, clipping: ClippingWarning | None = None) -> None:
    """Free the data of ``parameter``, which stays the same object with the same shape and strides.

    ``clipping`` is notified when its gradient, which is on another rank, is read.

    It gets its own empty storage. Its old one may belong to a mapped file or NumPy, which cannot shrink, or
    hold other parameters, too; it is freed with its last tensor.
    """
    parameter.grad = None
    if isinstance(parameter, DTensor):
        own: Tensor = parameter.to_local()
        own.untyped_storage().resize_(0)
        parameter.__class__ = RemoteDTensor  # type: ignore[assignment]
        return
    if is_composite(parameter):
        empty_parts(parameter)
        parameter.__class__ = _remote_composite(type(parameter))  # type: ignore[assignment]
        return
    shape, strides = parameter.shape, parameter.stride()
    parameter.data = parameter.new_empty(0)  # first, so that making an empty storage needs no full one
    parameter.data = emptied(shape, strides, parameter.dtype, parameter.device)
    parameter.__class__ = RemoteParameter
    parameter.__dict__[_CLIPPING] = clipping


def give_data(parameter: Tensor, data: Tensor) -> None:
    """Give this data to ``parameter``, which may have been on another rank."""
    if is_composite(data):
        take_parts(parameter, data)
        if isinstance(parameter, RemoteTensor):
            parameter.__class__ = type(data)  # type: ignore[assignment]
        return
    if isinstance(parameter, RemoteParameter):
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
    parameter.data = data


def emptied(shape: torch.Size, strides: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor over an empty storage; reading it would crash the process."""
    tensor = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    tensor.untyped_storage().resize_(0)
    return tensor


def out_of_mapping(buffer: Tensor) -> Tensor:
    """Return a buffer of another rank that keeps no mapped file open: itself, or a copy if it is in one.

    The copy is another tensor, because loading such files creates views, and a view keeps its base alive.
    """
    if buffer.layout is not torch.strided or buffer.untyped_storage().resizable():
        return buffer
    return buffer.detach().clone()
