"""The start of a step: making all ranks of a pipeline call the same function with the same arguments.

Usually every rank loads the same batch, and comparing fingerprints is enough. If batches differ, the first
rank's counts, as in the original, where the others may pass empty tensors. Nonempty tensors that differ from
the first rank's are most likely a mistake, so they cause a warning.
"""

from __future__ import annotations

import functools
import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensmd.modelparallel.exceptions import SMPUnsupportedError
from opensmd.modelparallel.ranks.meeting import meet
from opensmd.modelparallel.ranks.sendable import sendable
from opensmd.modelparallel.runtime.stable_hash import stable_hash
from opensmd.modelparallel.runtime.tensors import structure
from opensmd.modelparallel.runtime.tensors.pieces import is_one_piece, pieces_of
from opensmd.modelparallel.runtime.tensors.structure import Arguments
from opensmd.script_level import script_level

__all__ = ["StepInputs", "agreed_inputs", "fingerprint", "program"]

_LINE_BYTES, _LINES = 64, 1024  # the size of a cache line, and how many are read from a large tensor
# dtypes that NumPy can view as bytes
_NUMPY = frozenset({torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool})


class StepInputs(NamedTuple):
    """What all ranks of a pipeline begin a step with.

    Attributes:
        arguments: those of its function.
        seed: for the random numbers that all ranks draw alike.
        same_modes: whether all ranks gave the same number for the modes of their models.
    """

    arguments: Arguments
    seed: int
    same_modes: bool


def agreed_inputs(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    seed: int,
    modes: int,
) -> StepInputs:
    """Return the arguments of the step ``function`` with which all ranks of ``group`` continue, and a seed.

    Objects other than tensors, plain values and containers of these stay each rank's own. ``device`` is where
    small tensors must be for the group to carry them. Of the ranks' ``seed``, the first one's counts.
    ``modes`` is what :meth:`.StepModes.number` returns.

    Raises:
        SMPError: the ranks called different functions, or only some of them without gradients.
        RuntimeError: a rank did not come within the group's timeout.
    """
    leaves = structure.tensors_in((args, kwargs))
    everyone = meet(program(function), group, device, (_form(args, kwargs), fingerprint(leaves), seed, modes))
    forms, data = {numbers[0] for numbers in everyone}, {numbers[1] for numbers in everyone}
    seed, same_modes = everyone[0][2], len({numbers[3] for numbers in everyone}) == 1
    if len(forms) == len(data) == 1:
        return StepInputs((args, kwargs), seed, same_modes)
    # Empty tensors on later ranks have another shape and are intended; different data of the same shape is
    # not.
    if len(forms) == 1:
        warnings.warn(
            "the ranks of a pipeline called the step with different data of the same shapes; the data of the "
            "first rank is used. Give all ranks of smp.get_mp_group() the same batches (a sampler over "
            "smp.dp_rank(), not smp.rank())",
            stacklevel=script_level(),
        )
    return StepInputs(_first_rank_arguments(args, kwargs, group, device), seed, same_modes)


def program(function: Callable[..., Any]) -> str:
    """Describe what a rank is about to run."""
    name = f"the step {getattr(function, '__qualname__', type(function).__qualname__)!r}"
    if torch.is_inference_mode_enabled():
        return f"{name} in inference mode"
    return name if torch.is_grad_enabled() else f"{name} without gradients"


def _form(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return _hash((tuple(map(_shape, args)), tuple((k, _shape(v)) for k, v in kwargs.items())))


@functools.lru_cache(maxsize=256)
def _hash(form: Any) -> int:
    return stable_hash(form, 63)


def _shape(value: Any) -> Any:
    """Return the argument without data."""
    if isinstance(value, Tensor):
        parts = () if is_one_piece(value) else tuple(map(_shape, pieces_of(value)))
        # The shape of a composite tensor may be named differently in each process.
        return (parts or tuple(value.shape), value.dtype, value.device.type, value.requires_grad)
    if isinstance(value, (str, int, float, bool, type(None), torch.dtype)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return tuple(map(_shape, value))
    if isinstance(value, dict):
        return tuple((repr(key), _shape(entry)) for key, entry in value.items())
    return type(value).__qualname__


def fingerprint(leaves: Sequence[Tensor]) -> int:
    """Return a checksum of tensors' elements; for those over 64 KiB, only of evenly spaced pieces.

    Reading everything would take as long as a small stage. For batches of up to 1024 samples, every sample
    has a piece.
    """
    checksum = 0
    for leaf in leaves:
        if not is_one_piece(leaf):
            checksum = zlib.crc32(fingerprint(pieces_of(leaf)).to_bytes(4, "little"), checksum)
            continue
        if leaf.is_cpu and leaf.dtype in _NUMPY and leaf.nbytes <= _LINES * _LINE_BYTES:
            checksum = zlib.crc32(leaf.contiguous().numpy(force=True).data, checksum)
            continue
        # NumPy has no bfloat16, which does not matter for bytes.
        raw = sendable(leaf).view(-1).view(torch.uint8)
        if raw.numel() > _LINES * _LINE_BYTES:
            raw = _pieces(raw)
        checksum = zlib.crc32(raw.cpu().numpy().data, checksum)
    return checksum


def _pieces(raw: Tensor) -> Tensor:
    lines = raw[: raw.numel() // _LINE_BYTES * _LINE_BYTES].view(-1, _LINE_BYTES)
    some = lines[:: lines.shape[0] // _LINES]
    return torch.cat([some.reshape(-1), raw[lines.numel() :]])


class _Announced(NamedTuple):
    """The first rank's arguments without their tensors' data, which follows.

    Attributes:
        positional, named: each argument; None for what stays every rank's own.
        tensors: shape, dtype, kind of device and ``requires_grad`` of each tensor in them.
        forms: the shapes of the tensors in each argument, by its name.
    """

    positional: list[bytes | None]
    named: dict[str, bytes | None]
    tensors: list[tuple[tuple[int, ...], torch.dtype, str, bool]]
    forms: dict[str, list[torch.Size]]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> _Announced:
        """Return what to announce; tensors are appended to ``tensors``."""
        positional = [_dumped(argument, tensors) for argument in args]
        named = {name: _dumped(argument, tensors) for name, argument in kwargs.items()}
        known = [
            (tuple(tensor.shape), tensor.dtype, tensor.device.type, tensor.requires_grad)
            for tensor in tensors
        ]
        return cls(positional, named, known, _forms(args, kwargs))

    def with_data(self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Arguments:
        """Return the arguments with these tensors; ``args`` and ``kwargs`` are this rank's own.

        Raises:
            ValueError: this rank lacks an argument that stays every rank's own.
        """
        if any(dumped is None for dumped in self.positional[len(args) :]):
            raise ValueError(
                "the first rank of the pipeline called the step with more arguments than this one: "
                "pass the same arguments on all ranks"
            )
        return (
            tuple(
                args[place] if dumped is None else structure.load(dumped, tensors)
                for place, dumped in enumerate(self.positional)
            ),
            {
                name: kwargs[name] if dumped is None else structure.load(dumped, tensors)
                for name, dumped in self.named.items()
            },
        )


def _first_rank_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], group: dist.ProcessGroup, device: torch.device
) -> Arguments:
    tensors: list[Tensor] = []
    is_first = dist.get_rank(group) == 0
    can_be_sent = is_first and all(map(is_one_piece, structure.tensors_in((args, kwargs))))
    sent: list[Any] = [_Announced.of(args, kwargs, tensors) if can_be_sent else None]
    dist.broadcast_object_list(sent, group=group, group_src=0)
    if sent[0] is None:
        raise SMPUnsupportedError(
            "the ranks of a pipeline called the step with different data, and among that of the first rank "
            "is a tensor that is made of several (sparse, nested), which is not sent to the others: pass "
            "the same on all ranks"
        )
    announced: _Announced = sent[0]
    if not is_first:
        _warn_of_other_forms(_forms(args, kwargs), announced.forms)
        tensors = [
            torch.empty(shape, dtype=dtype, device=kind) for shape, dtype, kind, _ in announced.tensors
        ]
    for tensor, (*_, requires_grad) in zip(tensors, announced.tensors, strict=True):
        data = sendable(tensor)
        data = data.to(device) if data.is_cpu else data  # NCCL cannot carry CPU tensors
        dist.broadcast(data, group=group, group_src=0)
        if not is_first:
            # What was sent from another layout, dtype or device has come into a copy.
            if data is not tensor:
                tensor.copy_(data)
            tensor.requires_grad_(requires_grad)
    return (args, kwargs) if is_first else announced.with_data(args, kwargs, tensors)


def _forms(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, list[torch.Size]]:
    """Return the shapes of the tensors in each argument."""
    arguments = {f"argument {place + 1}": value for place, value in enumerate(args)}
    arguments.update({f"argument {name!r}": value for name, value in kwargs.items()})
    return {name: [leaf.shape for leaf in structure.tensors_in(value)] for name, value in arguments.items()}


def _warn_of_other_forms(mine: dict[str, list[torch.Size]], first: dict[str, list[torch.Size]]) -> None:
    for name, shapes in mine.items():
        for shape, wanted in zip(shapes, first.get(name, ()), strict=False):
            if shape != wanted and shape.numel() > 0:
                warnings.warn(
                    f"{name} of the step is a tensor of shape {tuple(shape)} on rank {dist.get_rank()}, and "
                    f"of shape {tuple(wanted)} on the first rank of the pipeline, whose data is used. Give "
                    "all ranks of smp.get_mp_group() the same batches, or empty tensors to those after the "
                    "first",
                    stacklevel=script_level(),
                )
                return


def _dumped(argument: Any, tensors: list[Tensor]) -> bytes | None:
    """Pickle an argument; return None for what stays each rank's own."""
    opaque: list[Any] = []
    structure.opaque_objects(argument, opaque)
    if opaque or isinstance(argument, nn.Module) or (callable(argument) and not isinstance(argument, Tensor)):
        return None
    return structure.dump(argument, tensors)
