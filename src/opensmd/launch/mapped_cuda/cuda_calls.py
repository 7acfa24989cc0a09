"""What ``torch.cuda.*`` answers under ``--device cpu``: one device per rank of this host, each the CPU.

Memory figures are those of the process (resident and peak). Streams run immediately, and events measure wall
time. The only random generator is the CPU's, so seeding CUDA seeds it.
"""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from opensmd.launch.mapped_cuda.cpu_device import device_index

__all__ = [
    "CALLS",
    "Device",
    "Event",
    "Stream",
    "StreamContext",
    "current_accelerator_stream",
    "memory_history",
    "nccl_version",
    "raw_stream",
]


class _Current:
    """The device number that the script has selected."""

    index = 0


def device_count() -> int:
    """As many devices as this host has ranks, or as CUDA_VISIBLE_DEVICES names, whichever is more."""
    devices = [number for number in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if number.strip()]
    return max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), len(devices))


def current_device() -> int:
    """The number last passed to :func:`set_device`, initially 0."""
    return _Current.index


def set_device(device: Any) -> None:
    """Select a device; its number is remembered, nothing else."""
    _Current.index = device_index(device, _Current.index, device_count())


class Device:
    """``torch.cuda.device``: a device selected for a while."""

    def __init__(self, device: Any) -> None:
        self._index = device_index(device, _Current.index, device_count())
        self._before = 0

    def __enter__(self) -> None:
        self._before, _Current.index = _Current.index, self._index

    def __exit__(self, *_: object) -> None:
        _Current.index = self._before


@dataclass(frozen=True)
class DeviceProperties:
    """``torch.cuda.get_device_properties``: the machine's memory and cores."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    gcnArchName: str = ""  # torch.compile reads it if torch was not built for CUDA


def get_device_name(device: Any = None) -> str:
    """The processor's name."""
    return f"{platform.processor() or platform.machine()} (CPU in place of CUDA)"


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """(0, 0): no kernel for a CUDA architecture runs here."""
    return (0, 0)


def get_device_properties(device: Any = None) -> DeviceProperties:
    """The machine's properties in the shape of a CUDA device's."""
    cores = psutil.cpu_count(logical=False) or 1
    return DeviceProperties(get_device_name(), 0, 0, psutil.virtual_memory().total, cores)


def memory_allocated(device: Any = None) -> int:
    """Resident memory of this process in bytes."""
    return int(psutil.Process().memory_info().rss)


def max_memory_allocated(device: Any = None) -> int:
    """Peak resident memory of this process in bytes; it cannot be reset."""
    # The kernel updates both figures lazily; the peak may lag behind.
    return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, memory_allocated())


def memory_stats(device: Any = None) -> Counter[str]:
    """Resident and peak memory under the names of CUDA's figures; those without a counterpart are 0."""
    now = {"current": memory_allocated(), "peak": max_memory_allocated()}
    kinds = ("allocated", "reserved", "active")
    return Counter({f"{kind}_bytes.all.{when}": size for kind in kinds for when, size in now.items()})


def host_memory_stats() -> Counter[str]:
    """Return only zeros: no memory is pinned."""
    return Counter()


def get_allocator_backend() -> str:
    """Return the name of torch's own allocator, the default."""
    return "native"


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Available and total memory of the machine in bytes."""
    memory = psutil.virtual_memory()
    return int(memory.available), int(memory.total)


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """Resident and peak memory in words."""
    return f"resident {memory_allocated() >> 20} MiB, peak {max_memory_allocated() >> 20} MiB (process)"


def memory_snapshot(*_: Any, **__: Any) -> list[Any]:
    """No segments: nothing is allocated on a device."""
    return []


def memory_history(*_: Any, **__: Any) -> dict[str, list[Any]]:
    """Return what CUDA's allocator has recorded, which is nothing, in the shape in which scripts save it."""
    return {"segments": [], "device_traces": []}


def manual_seed(seed: int) -> None:
    """Seed the CPU's generator."""
    torch.default_generator.manual_seed(int(seed))


def get_rng_state(device: Any = None) -> torch.Tensor:
    """State of the CPU's generator."""
    return torch.get_rng_state()


def get_rng_state_all() -> list[torch.Tensor]:
    """State of the CPU's generator, once per device."""
    return [torch.get_rng_state() for _ in range(device_count())]


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    """Set the state of the CPU's generator."""
    torch.set_rng_state(new_state)


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Set the CPU generator's state to that of the selected device."""
    torch.set_rng_state([*new_states][_Current.index])


class Event:
    """``torch.cuda.Event``: a point in time. Work on the CPU is done when the call returns."""

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        self._time: float | None = None

    def record(self, stream: object = None) -> None:
        """Note the present moment."""
        self._time = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to ``end_event``."""
        if self._time is None or end_event._time is None:
            raise RuntimeError("elapsed_time needs two events that have been recorded")
        return (end_event._time - self._time) * 1000.0

    def query(self) -> bool:
        """True: nothing is ever pending."""
        return True

    def synchronize(self) -> None:
        """Return at once: nothing is ever pending."""

    def wait(self, stream: object = None) -> None:
        """Return at once: nothing is ever pending."""


class Stream:
    """``torch.cuda.Stream``: everything runs in call order."""

    device = torch.device("cpu")
    cuda_stream = 0

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.priority = priority

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: there is no context to leave."""

    def record_event(self, event: Event | None = None) -> Event:
        """Record ``event``, or a new one."""
        event = event or Event()
        event.record()
        return event

    def query(self) -> bool:
        """True: nothing is ever pending."""
        return True

    def synchronize(self) -> None:
        """Return at once: nothing is ever pending."""

    def wait_event(self, event: Event) -> None:
        """Return at once: nothing is ever pending."""

    def wait_stream(self, stream: Stream) -> None:
        """Return at once: nothing is ever pending."""


_DEFAULT_STREAM = Stream()


def current_stream(device: Any = None) -> Stream:
    """The only stream, on which everything runs in order."""
    return _DEFAULT_STREAM


def current_accelerator_stream(device: Any = None) -> Stream:
    """Return that stream for torch.accelerator: torch.compile tells functions apart by their identity."""
    return _DEFAULT_STREAM


class StreamContext(contextlib.nullcontext[None]):
    """``torch.cuda.StreamContext``: changes nothing. A class, because torch.compile asks what is one."""

    def __init__(self, stream: Stream | None) -> None:
        super().__init__()
        self.stream = stream


def stream_context(stream: Stream | None) -> Stream:
    """``torch.cuda.stream``: a context that changes nothing."""
    return stream or _DEFAULT_STREAM


def nccl_version() -> tuple[int, int, int]:
    """(0, 0, 0): nothing that needs a version of NCCL runs here."""
    return (0, 0, 0)


def raw_stream(device: Any = None) -> int:
    """0: the number of the default stream, the only one."""
    return 0


class Runtime:
    """``torch.cuda.cudart()``, through which scripts control CUDA's profiler."""

    def cudaProfilerStart(self) -> int:
        """Success: there is no such profiler here."""
        return 0

    def cudaProfilerStop(self) -> int:
        """Success: there is no such profiler here."""
        return 0


def synchronizes_silently() -> int:
    """0: nothing is said of calls that wait for the device, because none has to."""
    return 0


def nothing(*_: Any, **__: Any) -> None:
    """Replace calls without a counterpart on the CPU: there is nothing to wait for or to free."""


def yes(*_: Any, **__: Any) -> bool:
    """True, for questions that the CPU can answer with yes."""
    return True


def no(*_: Any, **__: Any) -> bool:
    """False, for questions about what only CUDA has."""
    return False


CALLS: dict[str, Any] = {
    "is_available": yes,
    "is_initialized": yes,
    "is_bf16_supported": yes,
    "is_tf32_supported": no,
    "is_current_stream_capturing": no,
    "can_device_access_peer": yes,
    "init": nothing,
    "_lazy_init": nothing,
    "device_count": device_count,
    "current_device": current_device,
    "set_device": set_device,
    "device": Device,
    "get_device_name": get_device_name,
    "get_device_capability": get_device_capability,
    "get_device_properties": get_device_properties,
    "check_error": nothing,
    "cudart": Runtime,
    "synchronize": nothing,
    "_sleep": nothing,
    "empty_cache": nothing,
    "ipc_collect": nothing,
    "memory_allocated": memory_allocated,
    "memory_reserved": memory_allocated,
    "memory_cached": memory_allocated,
    "max_memory_allocated": max_memory_allocated,
    "max_memory_reserved": max_memory_allocated,
    "max_memory_cached": max_memory_allocated,
    "memory_stats": memory_stats,
    "memory_summary": memory_summary,
    "mem_get_info": mem_get_info,
    "get_allocator_backend": get_allocator_backend,
    "host_memory_stats": host_memory_stats,
    "reset_accumulated_host_memory_stats": nothing,
    "reset_peak_host_memory_stats": nothing,
    "memory_snapshot": memory_snapshot,
    "reset_accumulated_memory_stats": nothing,
    "reset_peak_memory_stats": nothing,
    "reset_max_memory_allocated": nothing,
    "reset_max_memory_cached": nothing,
    "set_per_process_memory_fraction": nothing,
    "manual_seed": manual_seed,
    "manual_seed_all": manual_seed,
    "seed": torch.seed,
    "seed_all": torch.seed,
    "initial_seed": torch.initial_seed,
    "get_rng_state": get_rng_state,
    "get_rng_state_all": get_rng_state_all,
    "set_rng_state": set_rng_state,
    "set_rng_state_all": set_rng_state_all,
    "Event": Event,
    "Stream": Stream,
    "stream": stream_context,
    "StreamContext": StreamContext,
    "current_stream": current_stream,
    "default_stream": current_stream,
    "set_stream": nothing,
    "get_sync_debug_mode": synchronizes_silently,
    "set_sync_debug_mode": nothing,
}
