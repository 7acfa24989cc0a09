"""The tensors of a model in a checkpoint of any kind, each read on demand by one process.

The kinds are a folder of ``smp.save_checkpoint`` (the newest checkpoint, or the one with a given tag), a
torch file, a file or folder of safetensors, and a folder of ``torch.distributed.checkpoint``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from opensmd.modelparallel.checkpoint.files import read
from opensmd.modelparallel.checkpoint.newest import read_newest
from opensmd.modelparallel.checkpoint.save_load import read_parts
from opensmd.modelparallel.exceptions import SMPCheckpointError
from opensmd.modelparallel.state_dicts.merge import whole_later

__all__ = ["LazyTensors", "lazy_tensors"]

LazyTensors = dict[str, Callable[[], Tensor]]


def lazy_tensors(source: Path, tag: str | None = None) -> LazyTensors:
    """Return the model's tensors by name.

    Args:
        source: file or folder.
        tag: which partial checkpoint of a folder of ``smp.save_checkpoint``; None takes the newest.

    Raises:
        FileNotFoundError: nothing is there, or nothing of a known kind.
        SMPCheckpointError: a file is damaged, foreign or missing from its set.
    """
    if source.is_file():
        return _of_safetensors([source]) if source.suffix == ".safetensors" else _of_torch(source)
    if not source.is_dir():
        raise FileNotFoundError(f"there is no checkpoint {source}")
    if (source / ".metadata").is_file():
        return _of_dcp(source)
    if files := sorted(source.glob("*.safetensors")):
        return _of_safetensors(files)
    return _of_smp(source, tag)


def _of_smp(folder: Path, tag: str | None) -> LazyTensors:
    tag = read_newest(folder, partial=True) if tag is None else tag.removesuffix("_partial")
    parts, tensor = read_parts(str(folder / f"{tag}_partial" / "model"), suffix=".pt")
    return _tensors_in(whole_later(parts, tensor=tensor))


def _of_torch(path: Path) -> LazyTensors:
    content = read(path, map_location="cpu", mmap=True)
    for key in ("model", "module", "model_state_dict", "state_dict"):  # where scripts nest it
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping):
        raise SMPCheckpointError(f"{path} has a {type(content).__name__}; expected a model's state dict")
    return _tensors_in({name: partial(_given, value) for name, value in content.items()})


def _of_safetensors(files: list[Path]) -> LazyTensors:
    from safetensors import safe_open

    tensors: LazyTensors = {}
    for path in files:
        file: Any = safe_open(path, framework="pt")
        tensors |= {name: partial(file.get_tensor, name) for name in file.keys()}  # noqa: SIM118  # no mapping
    return tensors


def _of_dcp(folder: Path) -> LazyTensors:
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata

    def loaded(name: str, known: TensorStorageMetadata) -> Tensor:
        found = {name: torch.empty(known.size, dtype=known.properties.dtype, device="cpu")}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # intended
            load(found, checkpoint_id=folder, no_dist=True)
        return found[name]

    tensors: LazyTensors = {
        name: partial(loaded, name, known)
        for name, known in metadata.items()
        if isinstance(known, TensorStorageMetadata)
    }
    nested = {name.removeprefix("model."): value for name, value in tensors.items()}
    return nested if all(name.startswith("model.") for name in tensors) else tensors


def _tensors_in(values: Mapping[str, Callable[[], Any]]) -> LazyTensors:
    """Return the tensors of a state dict; other formats have no place for modules' extra state."""
    return {name: value for name, value in values.items() if isinstance(value(), Tensor)}


def _given(value: Any) -> Any:
    return value
