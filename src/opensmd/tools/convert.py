"""``smd convert``: converting a model's checkpoint without starting any rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

__all__ = ["convert"]


@click.command()
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option(
    "--to", type=click.Choice(["torch", "safetensors", "dcp"]), default="torch", show_default=True,
    help="The target's format.",
)  # fmt: skip
@click.option("--tag", help="Which checkpoint of a folder of smp.save_checkpoint; default: the newest.")
@click.option(
    "--family", type=click.Choice(["gpt2", "gptj", "gptneo", "bert", "roberta"]),
    help="Translate the names of this architecture.",
)  # fmt: skip
@click.option(
    "--names", type=click.Choice(["huggingface", "smp"]), default="huggingface", show_default=True,
    help="Whose names --family translates to: Hugging Face's or those of distributed modules.",
)  # fmt: skip
@click.option("--dtype", help="Of floating-point tensors, such as bfloat16; default: as they are.")
def convert(source: Path, target: Path, *, dtype: str | None, **options: Any) -> None:
    """Convert the model of a checkpoint to another format.

    SOURCE is a folder of smp.save_checkpoint (partial checkpoints of any degrees are merged), a file that
    torch.save or smp.save(partial=False) wrote, a file or folder of safetensors, or a folder of
    torch.distributed.checkpoint. TARGET is the file (torch) or folder (safetensors, dcp) to create. Only one
    layer's tensors are in memory at a time; the disk needs room for the target twice.
    """
    import torch

    from opensmd.modelparallel.checkpoint.conversion.convert import convert as converted
    from opensmd.modelparallel.exceptions import SMPCheckpointError

    kind = None if dtype is None else getattr(torch, dtype, None)
    if dtype is not None and not isinstance(kind, torch.dtype):
        raise click.BadParameter(f"{dtype!r} is not a dtype of torch", param_hint="--dtype")
    try:
        names = converted(source, target, dtype=kind, **options)
    except (OSError, SMPCheckpointError) as error:
        raise click.ClickException(str(error)) from error
    except ModuleNotFoundError as error:
        raise click.ClickException(f"{error}: pip install 'opensmd[convert]'") from error
    click.echo(f"{target}: {len(names)} tensors")
