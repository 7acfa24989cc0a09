"""What the compiled core shows to Python (csrc/torch/bindings.cpp, csrc/pipeline/mailbox_bindings.cpp)."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch._C._distributed_c10d import Backend, ProcessGroup, Store, Work

# --- shared memory ------------------------------------------------------------------------------------------

class ArenaShape:
    """How large an arena is: for how many ranks, and the bytes of zero-copy memory of each."""

    size: int
    heap_bytes: int

    def __init__(self) -> None: ...

class ArenaFile:
    """An arena as its creator has it."""

    @property
    def fd(self) -> int: ...
    @property
    def path(self) -> str:
        """Where others open it."""

    @property
    def token(self) -> int:
        """What they must find in it."""

def create_arena_file(shape: ArenaShape, named: bool, /) -> ArenaFile:
    """A new arena, in memory alone or, ``named``, as a file in /dev/shm."""

def open_arena_file(path: str, token: int, /) -> int:
    """The descriptor of an arena that another process has created."""

def unlink_arena_file(file: ArenaFile, /) -> None:
    """Take the name from an arena that has one."""

def default_heap_bytes(size: int, /) -> int:
    """Zero-copy memory of each rank in a group of ``size``, if the user has not said otherwise."""

# --- groups -------------------------------------------------------------------------------------------------

class RecordEntry(TypedDict):
    """One operation on record."""

    sequence: int
    operation: str
    dtype: str
    reduction: str
    root: int
    tag: int
    count: int
    bytes: int
    start_ns: int
    end_ns: int
    text: str
    description: str

class Status(TypedDict):
    """Where a member is."""

    state: str
    entered: int
    completed: int
    last: RecordEntry

class Group:
    """The members of a group that share an arena.

    Made, it has joined: the others see whether this process lives. ``names`` are all members'; ``cores`` says
    how many cores they may use at the same time.
    """

    def __init__(
        self, *, fd: int, names: Sequence[str], rank: int, timeout: timedelta, cores: int
    ) -> None: ...
    def size(self) -> int: ...
    def status(self, member: int, /) -> Status: ...
    def record(self, member: int, /) -> list[RecordEntry]: ...
    def message_record(self, member: int, /) -> list[RecordEntry]: ...
    def heap_contains(self, tensor: Tensor, /) -> bool: ...

class Options(Backend.Options):
    """The options of a group."""

    def __init__(self, timeout: timedelta = ..., compression: str = "none") -> None: ...
    def __deepcopy__(self, memo: dict[Any, Any], /) -> Options: ...

class SmddpBackend(Backend):
    """The backend of a group, for torch."""

    @property
    def shared_group(self) -> Group: ...
    @property
    def options(self) -> Options: ...
    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor: ...
    def supports_tensor_alloc(self, device: torch.device) -> bool: ...
    def register_mem_pool(self, pool: torch.cuda.MemPool, *args: Any, **kwargs: Any) -> None: ...
    def deregister_mem_pool(self, pool: torch.cuda.MemPool) -> None: ...
    def record_as(self, group: int) -> None: ...
    def spans_hosts(self) -> bool: ...
    def abort_with(self, reason: str) -> None: ...
    def lost_members(self) -> dict[int, str]:
        """Those of this host that have died, become another program or left the group, with their states."""

    def all_reduce_compressed(
        self, tensor: Tensor, *, average: bool, compression: str, residual: Tensor | None
    ) -> Work: ...
    def perform_nocolor_split(self, device: object, /) -> None: ...
    def _set_default_timeout(self, timeout: timedelta, /) -> None: ...

class DirectGroup:
    """The collectives of one group, called at once."""

    def __init__(self, group: ProcessGroup, /) -> None: ...
    def all_reduce_(self, tensor: Tensor, op: str = "sum") -> None: ...
    def broadcast_(self, tensor: Tensor, root: int = 0) -> None: ...
    def all_gather_into_(self, output: Tensor, input: Tensor) -> None: ...
    def reduce_scatter_into_(self, output: Tensor, input: Tensor, op: str = "sum") -> None: ...
    def all_to_all_into_(self, output: Tensor, input: Tensor) -> None: ...

def make_shared_backend(
    *,
    group: Group,
    names: Sequence[str],
    rank: int,
    size: int,
    options: Options,
    device_backend: Callable[[], Backend],
    meet_on_device: Callable[[], None],
    split: Callable[[Store, int, Sequence[int], Options], Backend],
) -> SmddpBackend:
    """The backend of a group on one host."""

def make_gloo_backend(
    *,
    gloo: Backend,
    connections: int,
    store: Store,
    local: Group | None,
    hosts: Sequence[Sequence[int]],
    names: Sequence[str],
    rank: int,
    size: int,
    options: Options,
    device_backend: Callable[[], Backend],
    meet_on_device: Callable[[], None],
    split: Callable[[Store, int, Sequence[int], Options], Backend],
    carried: int,
    ring_from: int,
    turns_from: int,
    least_part: int,
    piece: int,
    tree_from: int,
) -> SmddpBackend:
    """The backend of a group that spans ``hosts``, given by their ranks; ``local``: of those of this one.

    ``gloo`` has so many ``connections`` between any two of them.

    The sizes in bytes are those of :class:`~opensmd.collectives.hosts.choices.Thresholds`.
    """

# --- events for the timeline --------------------------------------------------------------------------------

def record_events(alarm: int, /) -> None:
    """Note what ends from now on, and write a byte to ``alarm``, a descriptor, when half the room is gone."""

def stop_events() -> None:
    """Note nothing more."""

def add_event_group(name: str, /) -> int:
    """The number of a group that is made now, and of what torch's own backends do in one of that name."""

def event_operations() -> list[str]:
    """Names of operations, by the number that events have for them."""

def take_events() -> tuple[bytes, int, int]:
    """What was noted since the last time (as opensmd.timeline.frames.CALL), how many events had no room, and
    when the first of these began."""

def record_calls_of_torch() -> None:
    """Note what torch's own backends do for CPU tensors, too."""

def leave_calls_of_torch() -> None:
    """Leave these alone again; nothing may be under way."""

def record_device_calls(backend: Backend, group: int, /) -> None:
    """And what a backend for CUDA tensors does, which must be torch's NCCL."""

# --- messages and the edges of autograd ---------------------------------------------------------------------

class Mailbox:
    """One rank's end of a group's messages."""

    def __init__(self, backend: SmddpBackend, /) -> None: ...
    def send(self, member: int, tag: int, tensor: Tensor, /) -> None: ...
    def ready(self, member: int, tag: int, /) -> bool: ...
    def receive(
        self, source: int, tag: int, count: int, dtype: torch.dtype, timeout: timedelta = ...
    ) -> Tensor: ...
    def take(
        self, member: int, tag: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, /
    ) -> Tensor | None: ...
    def wait_any(self, wanted: Sequence[tuple[int, int]], timeout: timedelta = ...) -> int: ...
    def flush(self, timeout: timedelta = ...) -> None: ...
    def sent(self) -> list[tuple[int, int, int]]:
        """The latest messages: nanoseconds of the monotonic clock, member, tag."""

def send_edge(
    sent: Tensor, mailbox: Mailbox, member: int, tag: int, missing: int, expect: Callable[[], None], /
) -> Tensor:
    """An edge of autograd to another rank; returns the token at which backward begins."""

def receive_edge(
    received: Tensor, mailbox: Mailbox, member: int, tag: int, missing: int, /
) -> tuple[Tensor, Tensor]:
    """The other end: the tensor as part of the graph, and a token."""

def keeps_gradient(token: Tensor, /) -> bool:
    """Of such a token: whether backwards have found a gradient that none has sent back."""

class SplitBackward:
    """A backward in two parts."""

    @property
    def leaves_everything(self) -> bool:
        """Whether the first part adds to no weight's gradient, for all that can be known."""

    def run_first(self) -> None:
        """Send what leads to other ranks."""

    def run_weights(self) -> None:
        """Add to the weights' gradients."""

def split_backward(
    roots: Sequence[Tensor],
    gradients: Sequence[Tensor],
    everything: bool,
    begins_backward: Callable[[Any], bool],
    /,
) -> SplitBackward | None:
    """A backward of which something can wait; None, and nothing has run, where nothing can."""

def are_apart(legs: Sequence[Sequence[Tensor]], weights_too: bool, /) -> bool:
    """Whether backwards from each of ``legs`` run no node twice."""

# --- memory of tensors --------------------------------------------------------------------------------------

class TensorMemory:
    """Bytes of large CPU tensors: in use, kept for others, the most in use at once in the last two steps."""

    @property
    def in_use(self) -> int: ...
    @property
    def kept(self) -> int: ...
    @property
    def most(self) -> int: ...

def keep_tensor_memory() -> None:
    """Let torch take large CPU tensors from blocks that are kept when freed; may be called again."""

def end_step_of_tensor_memory() -> None:
    """Let what was needed before the step that ends now count no longer."""

def tensor_memory() -> TensorMemory:
    """What there is; all 0 before :func:`keep_tensor_memory`."""

# --- devices ------------------------------------------------------------------------------------------------

def number_cuda_devices(on: bool, /) -> None:
    """Whether ``torch.device(0)`` is ``cuda:0`` in a torch that has found no accelerator."""
