"""``smdrun --device cpu``: scripts that hard-code CUDA run unmodified on the CPU.

A rank's process installs this before the script starts, and only at the user's request. Every change is one
entry of a table: the place in torch, the name, and the replacement; :func:`uninstall` restores the originals.
Tensors are on the CPU and say so: ``x.cuda()`` and ``x.to("cuda")`` are ``x.to("cpu")``. docs/launch.md lists
what is mapped and what cannot be.
"""

from __future__ import annotations

import contextlib
import multiprocessing.spawn
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial, wraps
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.utils._device import DeviceContext

import opensmd.legacy
from opensmd.launch.mapped_cuda.batch_norm import normalize_together
from opensmd.launch.mapped_cuda.cpu_device import device_index, on_cpu, translated, without_cuda
from opensmd.launch.mapped_cuda.cuda_calls import (
    CALLS,
    current_accelerator_stream,
    memory_history,
    nccl_version,
    raw_stream,
)
from opensmd.launch.mapped_cuda.generators import Generator
from opensmd.launch.mapped_cuda.nccl_class import ProcessGroupNCCL
from opensmd.launch.mapped_cuda.numbered import forget_numbers, number_devices
from opensmd.launch.mapped_cuda.precision import precision_places
from opensmd.launch.mapped_cuda.scripted import forget_scripted, script_as
from opensmd.launch.mapped_cuda.sharded import forget_import, on_cpu_alone, when_imported
from opensmd.launch.mapped_cuda.spawned import told_to_map
from opensmd.legacy.parallel import DistributedDataParallel as LegacyDistributedDataParallel

__all__ = ["install", "uninstall"]

BACKEND = "smddp"
LEGACY_BACKEND = "gloo"  # for torch.distributed.deprecated, which uses smddp for CPU tensors even then
_Place = tuple[Any, str, Any]  # owner, name, replacement

_FACTORIES = (
    "arange",
    "asarray",
    "as_tensor",
    "bartlett_window",
    "blackman_window",
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "hamming_window",
    "hann_window",
    "kaiser_window",
    "linspace",
    "logspace",
    "normal",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "range",
    "scalar_tensor",
    "sparse_bsc_tensor",
    "sparse_bsr_tensor",
    "sparse_compressed_tensor",
    "sparse_coo_tensor",
    "sparse_csc_tensor",
    "sparse_csr_tensor",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
    "zeros_like",
)
_CUDA = (torch.cuda.memory, torch.cuda.profiler, torch.cuda.random, torch.cuda.streams, torch.cuda)
_NEW = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
_TYPES = ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")

_ABSENT = object()  # for an original that this torch lacks
_originals: list[_Place] = []


def install() -> None:
    """Make CUDA mean the CPU in this process. Calling it again changes nothing.

    Raises:
        RuntimeError: CUDA is already in use, so tensors may live there.
    """
    if _originals:
        return
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise RuntimeError("--device cpu was asked for after the process had started to use CUDA")
    # the first such context makes torch list the functions with a device, which must be the originals
    with torch.device("cpu"):
        torch.empty(0)
    _replace(_places())
    number_devices()
    when_imported(lambda module: _replace(_sharding(module)))
    # DataLoader(pin_memory=True) warns that it pins nothing, which is intended here.
    warnings.filterwarnings("ignore", message=".*'pin_memory' argument is set as true but no accelerator")


def _replace(places: Iterable[_Place]) -> None:
    for owner, name, replacement in places:
        original = getattr(owner, name, _ABSENT)
        _originals.append((owner, name, original))
        setattr(owner, name, replacement)
        script_as(original, replacement)


def uninstall() -> None:
    """Restore everything."""
    forget_import()
    forget_numbers()
    forget_scripted()
    while _originals:
        owner, name, original = _originals.pop()
        if original is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


def _places() -> Iterator[_Place]:
    """Every change, as (owner, name, replacement)."""
    for name, call in CALLS.items():
        for owner in _CUDA:
            if getattr(owner, name, None) is getattr(torch.cuda, name):
                yield owner, name, call
    yield torch.cuda, "default_generators", (torch.default_generator,) * CALLS["device_count"]()
    yield torch, "Generator", Generator
    for name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
        yield torch.cuda.nvtx, name, CALLS["synchronize"]
    for name in ("start", "stop"):
        yield torch.cuda.profiler, name, CALLS["synchronize"]
    profile = torch.autograd.profiler.profile
    yield profile, "__init__", _profiling_the_cpu(profile.__init__)
    yield torch.cuda.memory, "_record_memory_history", CALLS["synchronize"]
    yield torch.cuda.memory, "_snapshot", memory_history
    yield torch.cuda.nccl, "version", nccl_version
    # bitsandbytes reads it on import, and peft and others import bitsandbytes
    yield torch._C, "_cuda_getCurrentRawStream", raw_stream
    # torch itself asks for an accelerator first, in optimizers at every step: answer like a build without one
    yield torch.accelerator, "current_accelerator", _no_accelerator
    yield torch.accelerator, "is_available", _not_available
    # except DDP in mixed precision, which takes streams of any device for granted
    yield torch, "Event", CALLS["Event"]
    yield torch, "Stream", CALLS["Stream"]
    yield torch.accelerator, "current_stream", current_accelerator_stream
    for name in _TYPES:
        yield torch.cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor")
    for name in _FACTORIES:
        yield torch, name, on_cpu(getattr(torch, name))
    for name in ("fftfreq", "rfftfreq"):
        yield torch.fft, name, on_cpu(getattr(torch.fft, name))
    for name in ("as_nested_tensor", "nested_tensor"):
        yield torch.nested, name, on_cpu(getattr(torch.nested, name))
    for name in _NEW:
        yield torch.Tensor, name, on_cpu(getattr(torch.Tensor, name))
    starts = multiprocessing.spawn
    yield starts, "get_preparation_data", told_to_map(starts.get_preparation_data, install)
    yield from _moves()
    yield from precision_places()
    yield from _groups()
    yield from _modules()


def _no_accelerator(check_available: bool = False) -> None:
    return None


def _not_available() -> bool:
    return False


def _moves() -> Iterator[_Place]:
    """Tensors, modules and files that are moved to a device."""
    yield torch.Tensor, "to", translated(torch.Tensor.to, 1)
    yield torch.Tensor, "cuda", _tensor_cuda
    yield torch.Tensor, "type", _with_cpu_types(torch.Tensor.type)
    yield torch.Tensor, "pin_memory", _same
    yield torch.Tensor, "record_stream", _same
    # for functions that torch.load gets as map_location
    yield torch.UntypedStorage, "cuda", _same
    yield torch.nn.Module, "to", translated(torch.nn.Module.to, 1)
    yield torch.nn.Module, "cuda", _same
    for owner in (torch, torch.jit):
        yield owner, "load", _load_on_cpu(owner.load)
    yield torch, "set_default_device", translated(torch.set_default_device, 0)
    # for ``with torch.device("cuda")``
    yield DeviceContext, "__init__", translated(DeviceContext.__init__, 1)
    for wrapper in (torch.nn.parallel.DistributedDataParallel, LegacyDistributedDataParallel):
        yield wrapper, "__init__", _without_device_ids(wrapper)


def _modules() -> Iterator[_Place]:
    """Modules that torch has only for accelerators."""
    yield torch.nn.SyncBatchNorm, "forward", normalize_together
    # torch refuses such layers on the CPU
    yield torch.nn.parallel.DistributedDataParallel, "_passing_sync_batchnorm_handle", CALLS["synchronize"]
    # without devices, a DataParallel just calls its module
    yield import_module(torch.nn.DataParallel.__module__), "_get_available_device_type", _no_accelerator
    yield torch.nn.parallel, "data_parallel", _called


def _groups() -> Iterator[_Place]:
    """Process groups: NCCL is smddp, and CUDA meshes are CPU meshes."""
    begin = _with_smddp(dist.init_process_group, 0, default=BACKEND)
    make = _with_smddp(dist.new_group, 2)
    for owner in (dist, distributed_c10d, device_mesh):
        yield owner, "init_process_group", begin
        yield owner, "new_group", make
    for owner in (dist, distributed_c10d):
        yield owner, "barrier", _barrier_without_devices(dist.barrier)
    # not in distributed_c10d, which would then use the class that only torch built for CUDA has
    yield dist, "is_nccl_available", CALLS["is_available"]
    yield dist, "ProcessGroupNCCL", ProcessGroupNCCL
    for owner in (opensmd.legacy, opensmd.legacy.api):
        yield owner, "init_process_group", _legacy_without_nccl(opensmd.legacy.init_process_group)
    yield device_mesh.DeviceMesh, "__init__", translated(device_mesh.DeviceMesh.__init__, 1, "device_type")


def _sharding(module: ModuleType) -> Iterator[_Place]:
    """Patches of what ``module`` shards with, including a check that refuses to broadcast from the CPU."""
    sharded = module.FullyShardedDataParallel
    yield sharded, "__init__", on_cpu_alone(sharded.__init__)
    details = import_module("torch.distributed.fsdp._init_utils")
    yield details, "_check_module_states_for_sync_module_states", CALLS["synchronize"]
    # FSDP moves what it saves to the CPU and frees the original, which here is the same memory.
    handle = import_module("torch.distributed.fsdp._flat_param").FlatParamHandle
    yield handle, "to_cpu", contextlib.nullcontext
    # Ranks without a part of it ask CUDA for the device.
    parts = import_module("torch.distributed._shard.sharded_tensor").ShardedTensor
    yield parts, "device", property(_cpu)
    yield parts, "_get_preferred_device", _cpu


def _cpu(_: object) -> torch.device:
    return torch.device("cpu")


def _same(value: Any, *_: Any, **__: Any) -> Any:
    """Return the tensor or module itself, which is where it should be."""
    return value


def _called(
    module: torch.nn.Module,
    inputs: Any,
    device_ids: Any = None,
    output_device: Any = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
) -> Any:
    """``data_parallel`` without devices: call the module."""
    return module(*(inputs if isinstance(inputs, tuple) else (inputs,)), **(module_kwargs or {}))


def _tensor_cuda(tensor: torch.Tensor, *_: Any, **kwargs: Any) -> torch.Tensor:
    return tensor.to("cpu", memory_format=kwargs.get("memory_format", torch.preserve_format))


def _with_cpu_types(function: Callable[..., Any]) -> Callable[..., Any]:
    """``Tensor.type``, with which old scripts move tensors: ``"torch.cuda.FloatTensor"``."""

    @wraps(function)
    def call(tensor: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return function(tensor, dtype, *args, **kwargs)

    return call


def _load_on_cpu(load: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(load)
    def call(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(map_location, dict):
            map_location = {where: without_cuda(to) for where, to in map_location.items()}
        elif not callable(map_location):
            map_location = "cpu" if map_location is None else without_cuda(map_location)
        return load(f, map_location, *args, **kwargs)

    return call


def _profiling_the_cpu(init: Callable[..., None]) -> Callable[..., None]:
    """``profile.__init__`` for the CPU alone: torch would say at every call that it cannot time CUDA."""

    @wraps(init)
    def call(*args: Any, **kwargs: Any) -> None:
        if kwargs.pop("use_cuda", False) or kwargs.get("use_device") == "cuda":
            kwargs.update(use_device=None, use_cpu=True)
        init(*args, **kwargs)

    return call


def _without_device_ids(wrapper: type[torch.nn.Module]) -> Callable[..., None]:
    original: Callable[..., None] = wrapper.__init__

    @wraps(original)
    def init(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *rest: Any, **kw: Any
    ) -> None:
        original(self, module, None, None, *rest, **kw)
        if device_ids:
            index = partial(device_index, current=CALLS["current_device"](), count=sys.maxsize)
            self.device_ids = GivenDevices(map(index, device_ids))
            self.output_device = index(device_ids[0] if output_device is None else output_device)

    return init


class GivenDevices(list[int]):
    """The ``device_ids`` that a script has given and may read; false, so that torch moves no inputs there."""

    def __bool__(self) -> bool:
        return False


def _with_smddp(
    function: Callable[..., Any], position: int, *, default: str | None = None
) -> Callable[..., Any]:
    """Wrap ``function`` to use smddp wherever its backends mention NCCL, without NCCL's device and options.

    ``default`` is the backend if the script names none and torch would add NCCL.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        from opensmd.collectives.backend import register

        register()
        if len(args) > position:
            args = (*args[:position], _without_nccl(args[position], default), *args[position + 1 :])
        else:
            kwargs["backend"] = _without_nccl(kwargs.get("backend"), default)
        for of_nccl in ("device_id", "pg_options"):
            kwargs.pop(of_nccl, None)
        return function(*args, **kwargs)

    return call


def _without_nccl(backend: Any, default: str | None = None) -> Any:
    """Return a backend string for CPU tensors only: ``"cpu:gloo,cuda:nccl"`` becomes ``"smddp"``."""
    if backend is None:
        return default
    if isinstance(backend, str) and ("nccl" in backend.lower() or "cuda:" in backend.lower()):
        return BACKEND
    return backend


def _legacy_without_nccl(init_process_group: Callable[..., None]) -> Callable[..., None]:
    @wraps(init_process_group)
    def call(backend: Any, *args: Any, **kwargs: Any) -> None:
        init_process_group(LEGACY_BACKEND if str(backend).lower() == "nccl" else backend, *args, **kwargs)

    return call


def _barrier_without_devices(barrier: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(barrier)
    def call(
        group: Any = None, async_op: bool = False, device_ids: Any = None, timeout: timedelta | None = None
    ) -> Any:
        return barrier(group=group, async_op=async_op, timeout=timeout)

    return call
