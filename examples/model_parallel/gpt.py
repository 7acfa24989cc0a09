"""What the scripts of this folder share: the character GPT of ../data_parallel, its text, and a comparison.

Nothing in here knows of smp: it is what a script had before it was split.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1] / "data_parallel"))
from char_gpt import CONTEXT, CharGPT, batch, read_text  # from the folder above

Batch = tuple[Tensor, Tensor]


def options(description: str) -> argparse.ArgumentParser:
    """The options that all scripts have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="a text file or a folder of them; default Python's library")
    parser.add_argument("--pattern", default="*.py", help="files to read of a folder")
    parser.add_argument("--characters", type=int, default=500_000, help="at most so many are read")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=32, help="pieces of text a step, over all ranks")
    parser.add_argument("--microbatches", type=int, default=4)
    return parser


class Text:
    """The text of ``--data`` as numbers, in the same random pieces on every rank."""

    def __init__(self, args: argparse.Namespace) -> None:
        text = read_text(args.data, args.pattern, args.characters)
        if len(text) < CONTEXT + 2:
            raise SystemExit(f"{args.data}: {len(text)} characters in files like {args.pattern} are too few")
        self.letters = sorted(set(text))
        number = {letter: i for i, letter in enumerate(self.letters)}
        self.numbers = torch.tensor([number[letter] for letter in text])
        self.batch_size = args.batch_size

    def batches(self, first: int, last: int) -> Iterator[Batch]:
        """The batches of the steps from ``first`` to before ``last``."""
        for step in range(first, last):
            yield batch(self.numbers, self.batch_size, torch.Generator().manual_seed(step))


def build(args: argparse.Namespace, characters: int) -> nn.Module:
    """The model, with the same parameters on every rank."""
    torch.manual_seed(0)
    return CharGPT(characters, width=args.width, layers=args.layers)


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of the next characters."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def train_alone(args: argparse.Namespace, text: Text) -> list[float]:
    """The losses of the same training in one process, without smp."""
    model = build(args, len(text.letters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for inputs, targets in text.batches(0, args.steps):
        loss = loss_of(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def compare(losses: list[float], alone: list[float]) -> None:
    """Print both loss curves' ends and how far they are apart."""
    apart = max(abs(one - other) / abs(other) for one, other in zip(losses, alone, strict=True))
    print(f"first loss {losses[0]:.6f}, in one process {alone[0]:.6f}")
    print(f"last loss  {losses[-1]:.6f}, in one process {alone[-1]:.6f}")
    print(f"the {len(losses)} losses differ from those of one process by at most {apart:.1e} of their value")
    if apart > 1e-4:
        raise SystemExit("the losses are not those of one process")
