"""What a backend cannot do, said in one way: the backend, the function, and the backends that can."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["BACKENDS", "check_devices", "unsupported"]

BACKENDS = ("tcp", "mpi", "gloo", "nccl")
_CHANNELS = {
    "tcp": "DataChannelTCP",
    "mpi": "DataChannelMPI",
    "gloo": "DataChannelGloo",
    "nccl": "DataChannelNccl",
}


def unsupported(backend: str, what: str, able: Sequence[str]) -> str:
    """The text of the error for something that ``backend`` cannot do and ``able`` can."""
    return (
        f"{_CHANNELS[backend]} does not support {what} (backend {backend!r}); these backends do: "
        f"{', '.join(able)}"
    )


def check_devices(
    backend: str, function: str, tensors: Sequence[torch.Tensor], more: Sequence[torch.Tensor] | None = None
) -> None:
    """Refuse tensors that the backend cannot move: ``nccl`` takes CUDA tensors only, the others take all.

    Raises:
        RuntimeError: naming the backend, the function and the backends that can.
    """
    if backend != "nccl":
        return
    for tensor in (*tensors, *(more or ())):
        if not tensor.is_cuda:
            raise RuntimeError(
                unsupported("nccl", f"{function} of {tensor.device.type} tensors", ("tcp", "gloo", "mpi"))
            )
