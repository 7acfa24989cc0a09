"""A small GPT that learns to write Python, character by character, from the standard library's own sources.

    smdrun -n 2 examples/data_parallel/char_gpt.py
    smdrun -n 2 examples/data_parallel/char_gpt.py --data my_book.txt --steps 2000 --resume

``--data`` is a text file, or a folder whose text files (``--pattern``) are read in order of their names.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import trange

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401  # registers the backend "smddp"

CONTEXT = 64


class CharGPT(nn.Module):
    """A transformer that predicts the next character."""

    def __init__(self, characters: int, width: int = 128, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(characters, width)
        self.place = nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, characters)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Scores [batch, length, characters] for character numbers [batch, length]."""
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.token(text) + self.place.weight[:length]
        return self.head(self.blocks(hidden, mask=mask, is_causal=True))


def read_text(path: Path | None, pattern: str, limit: int) -> str:
    """At most ``limit`` characters of the file, of the folder's files, or of the standard library."""
    folder = path or Path(sysconfig.get_paths()["stdlib"])
    files = [folder] if folder.is_file() else sorted(folder.glob(pattern))
    parts, length = [], 0
    for file in files:
        parts.append(file.read_text(errors="ignore"))
        length += len(parts[-1])
        if length >= limit:
            break
    return "".join(parts)[:limit]


def batch(text: torch.Tensor, size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random pieces of the text, and the same moved on by one character."""
    starts = torch.randint(len(text) - CONTEXT - 1, (size, 1), generator=generator)
    pieces = text[starts + torch.arange(CONTEXT + 1)]
    return pieces[:, :-1], pieces[:, 1:]


@torch.no_grad()
def accuracy(model: nn.Module, text: torch.Tensor, generator: torch.Generator) -> float:
    """Share of characters foretold rightly in text not trained on, over all ranks."""
    inputs, targets = batch(text, 128, generator)
    share = (model(inputs).argmax(-1) == targets).float().mean()
    dist.all_reduce(share, op=dist.ReduceOp.AVG)
    return float(share)


@torch.no_grad()
def write(model: nn.Module, start: torch.Tensor, length: int) -> list[int]:
    """Go on writing after ``start``."""
    text = start
    for _ in range(length):
        scores = model(text[None, -CONTEXT:])[0, -1]
        text = torch.cat([text, torch.multinomial((scores / 0.7).softmax(-1), 1)])
    return text.tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--backend", default="smddp", help="smddp or gloo")
    parser.add_argument("--data", type=Path, help="a text file or a folder of them")
    parser.add_argument("--pattern", default="*.py", help="files to read of a folder")
    parser.add_argument("--characters", type=int, default=4_000_000, help="at most so many are read")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32, help="pieces a step, all ranks together")
    parser.add_argument("--checkpoint", type=Path, default=Path("out/char_gpt.pt"))
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    args = parser.parse_args()

    dist.init_process_group(args.backend)
    run(args)  # returns, and frees what holds the group, before the group is destroyed
    dist.destroy_process_group()


def run(args: argparse.Namespace) -> None:
    """Train, save, and say how good the model is on what it was not trained on."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    text = read_text(args.data, args.pattern, args.characters)
    letters = sorted(set(text))
    number = {letter: i for i, letter in enumerate(letters)}
    data = torch.tensor([number[letter] for letter in text])
    held = max(CONTEXT + 2, len(data) // 10)
    if len(data) < 2 * held:
        raise SystemExit(f"{args.data}: {len(data)} characters in files like {args.pattern}; need {2 * held}")
    train, test = data[:-held], data[-held:]

    torch.manual_seed(0)
    model = CharGPT(len(letters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    first_step = 0
    if args.resume:
        saved = torch.load(args.checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first_step = saved["step"]
    ddp = DistributedDataParallel(model)
    generator = torch.Generator().manual_seed(1000 * first_step + rank)
    share = max(1, args.batch_size // world_size)

    bar = trange(first_step, args.steps, desc="steps", disable=rank != 0)
    start = time.perf_counter()
    for step in bar:
        inputs, targets = batch(train, share, generator)
        loss = nn.functional.cross_entropy(ddp(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and (step % 50 == 0 or step == args.steps - 1):
            rate = (step + 1 - first_step) * share * world_size * CONTEXT / (time.perf_counter() - start)
            bar.write(f"step {step}: loss {float(loss.detach()):.4f}, {rate:,.0f} characters/s")
    score = accuracy(model.eval(), test, generator)
    if rank == 0:
        args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": args.steps}
        torch.save(state, args.checkpoint)
        print(f"next character right in text not trained on: {score:.2%}; saved {args.checkpoint}")
        print("".join(letters[i] for i in write(model, test[:CONTEXT], 200)))


if __name__ == "__main__":
    main()
