"""Converting a model's checkpoint to another format, in one process, with one layer in memory at a time.

The writers of the formats want all tensors at once. So tensors are first written to files in a folder beside
the target and mapped from there, instead of being held in memory.
"""

from __future__ import annotations

import json
import re
import tempfile
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save

from opensmd.environment.process_memory import give_back_freed
from opensmd.modelparallel.checkpoint.conversion.lazy_tensors import LazyTensors, lazy_tensors
from opensmd.modelparallel.checkpoint.files import Caller, commit, write_aside
from opensmd.modelparallel.checkpoint.seal import Label
from opensmd.modelparallel.tensor_parallel.huggingface import encoder, gpt2, gptj, gptneo
from opensmd.modelparallel.tensor_parallel.huggingface.translation import (
    Family,
    from_huggingface,
    to_huggingface,
)

__all__ = ["FAMILIES", "Format", "Names", "convert"]

Format = Literal["torch", "safetensors", "dcp"]
Names = Literal["huggingface", "smp"]
FAMILIES: dict[str, Family] = {
    "gpt2": gpt2.FAMILY,
    "gptj": gptj.FAMILY,
    "gptneo": gptneo.FAMILY,
    "bert": encoder.FAMILY,
    "roberta": encoder.FAMILY,
}
SHARD = 5 << 30  # bytes of one safetensors file, as in Hugging Face's library


def convert(
    source: Path,
    target: Path,
    *,
    to: Format,
    tag: str | None = None,
    family: str | None = None,
    names: Names = "huggingface",
    dtype: torch.dtype | None = None,
    shard: int = SHARD,
) -> list[str]:
    """Convert the model of a checkpoint to another format.

    Args:
        source: a folder of ``smp.save_checkpoint``, a torch file, safetensors, or a folder of torch's
            distributed checkpoint.
        target: the file (torch) or folder (the others) to write.
        to: its format.
        tag: which checkpoint of a folder of ``smp.save_checkpoint``; None takes the newest.
        family: an architecture whose names are translated; None keeps names as they are.
        names: whose names to translate to: Hugging Face's, or those of distributed modules.
        dtype: convert floating-point tensors to this type; None leaves them.
        shard: bytes of tensors in one safetensors file; more go to several files with an index.

    Returns:
        The names of the tensors.

    Raises:
        FileExistsError: the target exists.
        FileNotFoundError, SMPCheckpointError: the source cannot be read.
        OSError: the target cannot be written.
    """
    if target.exists():
        raise FileExistsError(f"{target} exists; name another target")
    found = lazy_tensors(source, tag)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
        folder = Path(scratch)
        mapped: dict[str, Tensor] = {}
        for name, tensor in _translated(found, family, names):
            wide = tensor.is_floating_point() and dtype is not None
            mapped[name] = _mapped(tensor.to(dtype) if wide else tensor, folder / str(len(mapped)))
            del tensor
            give_back_freed()  # perhaps the memory of several tensors
        if to == "torch":
            label = Label(save=uuid.uuid4().hex, part=0, parts=1)
            commit(write_aside(mapped, target, label, caller=Caller(save="smd convert")), target, alone=True)
            return list(mapped)
        made = folder / "made"
        made.mkdir()
        if to == "dcp":
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # intended
                save(mapped, checkpoint_id=made, no_dist=True)
        else:
            _write_safetensors(mapped, made, shard)
        made.rename(target)
    return list(mapped)


def _translated(found: LazyTensors, family: str | None, names: Names) -> Iterator[tuple[str, Tensor]]:
    if family is None:
        for name, tensor in found.items():
            yield name, tensor()
        return
    known, has_head = FAMILIES[family], any(name.startswith("lm_head.") for name in found)
    layers: dict[str, list[str]] = {}  # by layer: query, key and value may become one
    for name in found:
        match = re.match(r"(?:.*\.)?\d+\.", name)
        layers.setdefault(match[0] if match else name, []).append(name)
    for own in layers.values():
        given = {name: found[name]() for name in own}
        if names == "smp":
            yield from from_huggingface(known, given).items()
        else:
            yield from to_huggingface(known, given, has_head=has_head).items()


def _mapped(tensor: Tensor, path: Path) -> Tensor:
    """Return a tensor that is mapped from a file, so that only what is in use takes memory."""
    if tensor.numel() == 0:
        return tensor.clone()
    whole = tensor.detach().contiguous()
    made = torch.from_file(str(path), shared=True, size=whole.numel(), dtype=whole.dtype)
    return made.view(whole.shape).copy_(whole)


def _write_safetensors(tensors: dict[str, Tensor], folder: Path, limit: int) -> None:
    """Write tensors in Hugging Face's layout: one file, or several and an index."""
    from safetensors.torch import save_file

    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    places: dict[str, str] = {}
    for number, own in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(own, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(own, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
