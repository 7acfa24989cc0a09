"""What a backend cannot do, said in one way: the backend, the function, and the backends that can."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["BACKENDS", "check_tensors", "unsupported"]

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


def check_tensors(
    backend: str, function: str, tensors: Sequence[torch.Tensor], more: Sequence[torch.Tensor] | None = None
) -> None:
    """Refuse what the backend cannot move: ``nccl`` takes dense CUDA tensors only, the others all dense ones.

    Raises:
        TypeError: one is no tensor, or a list of them is a tensor.
        RuntimeError: one is sparse; or naming the backend, the function and the backends that can.
    """
    if isinstance(more, torch.Tensor):
        raise TypeError(f"{function}: expected a list of tensors, got a tensor of shape {tuple(more.shape)}")
    for tensor in (*tensors, *(more or ())):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{function}: expected a torch.Tensor, got {tensor!r}")
        if tensor.layout is not torch.strided:
            raise RuntimeError(f"{function}: expected dense tensors, got one of layout {tensor.layout}")
        if backend == "nccl" and not tensor.is_cuda:
            raise RuntimeError(
                unsupported("nccl", f"{function} of {tensor.device.type} tensors", ("tcp", "gloo", "mpi"))
            )
