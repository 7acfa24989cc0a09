"""A partial checkpoint's model in one piece, made by one process, as the last scripts convert theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from opensmd.modelparallel.checkpoint.newest import read_newest
from opensmd.modelparallel.checkpoint.save_load import load_whole

__all__ = ["get_full_state_dict_from_sharded_data_parallel_checkpoint"]


def get_full_state_dict_from_sharded_data_parallel_checkpoint(
    dir: str, tag: str | None = None, dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """Return the plain model's state dict from a partial checkpoint of ``smp.save_checkpoint``.

    Needs neither ``smp.init`` nor other processes. The checkpoint may have any number of partitions.

    Args:
        dir: the folder passed to ``save_checkpoint``.
        tag: which checkpoint, with or without ``_partial``; None takes the newest.
        dtype: convert floating-point tensors to this type; None leaves them.

    Raises:
        FileNotFoundError: no such checkpoint, or one without a model.
        SMPCheckpointError: a file is damaged or missing, the newest checkpoint is a full one, or
            tensor-parallel ranks shared single tensors.
    """
    folder = Path(dir)
    tag = read_newest(folder, partial=True) if tag is None else tag.removesuffix("_partial")
    whole: dict[str, Any] = load_whole(str(folder / f"{tag}_partial" / "model"), suffix=".pt")
    return {name: _converted(value, dtype) for name, value in whole.items()}


def _converted(value: Any, dtype: torch.dtype | None) -> Any:
    is_number = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if is_number and dtype is not None else value
