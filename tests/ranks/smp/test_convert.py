"""Checkpoints of shared and split models in other formats, which other libraries read."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from click.testing import CliRunner, Result
from safetensors.torch import load_file
from torch import Tensor

import smdistributed.modelparallel.torch as smp
from opensmd.environment.process_memory import anonymous_bytes
from opensmd.modelparallel.checkpoint.conversion.convert import convert
from opensmd.tools.cli import main
from tests.support.partitioned import restart
from tests.support.ranks import RankPool, run_once

Pools = Callable[[int], RankPool]
SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 8, "vocab_size": 37}
SIZES |= {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}


def made() -> transformers.GPT2LMHeadModel:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES))


def save_in_parts(folder: str) -> None:
    restart(tensor_parallel_degree=2, partitions=2, ddp=True, prescaled_batch=True)
    with smp.tensor_parallelism():
        module = made()
    model = smp.DistributedModel(module)

    @smp.step
    def step(ids: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        return loss

    step(torch.arange(16).reshape(2, 8))
    smp.save_checkpoint(folder, "parts", model=model)


def load_converted(file: str) -> float:
    """The loss of a split and shared model with what a conversion has made."""
    restart(tensor_parallel_degree=2, partitions=2, ddp=True, prescaled_batch=True)
    with smp.tensor_parallelism():
        module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES))
    model = smp.DistributedModel(module)
    model.load_state_dict(smp.load(file, partial=False))

    @smp.step
    def step(ids: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        return loss

    return step(torch.arange(16).reshape(2, 8)).reduce_mean().item()  # type: ignore[no-any-return]


def smd(*words: object) -> Result:
    return CliRunner().invoke(main, ["convert", *map(str, words)])


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(found[name].equal(wanted[name]) for name in wanted)


def test_a_checkpoint_of_shared_tensors_goes_to_every_format_and_back(pool: Pools, tmp_path: Path) -> None:
    pool(4).run(save_in_parts, str(tmp_path / "saved"))
    plain = made()
    wanted = plain.state_dict()

    full = smd(tmp_path / "saved", tmp_path / "full.pt", "--family=gpt2")
    assert full.exit_code == 0 and f"{len(wanted)} tensors" in full.output, full.output
    assert same(torch.load(tmp_path / "full.pt"), wanted)
    assert smd(tmp_path / "saved", tmp_path / "st", "--family=gpt2", "--to=safetensors").exit_code == 0
    assert same(load_file(tmp_path / "st" / "model.safetensors"), wanted)
    plain.config.save_pretrained(tmp_path / "st")
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "st")
    assert same(again.state_dict(), wanted)
    # Torch's own distributed checkpoint, as plain PyTorch reads it.
    assert smd(tmp_path / "st", tmp_path / "dcp", "--to=dcp").exit_code == 0
    found = {name: torch.zeros_like(value) for name, value in wanted.items()}
    dcp.load(found, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert same(found, wanted)
    # And from it to names of distributed modules, as one file and as several.
    assert smd(tmp_path / "dcp", tmp_path / "smp.pt", "--family=gpt2", "--names=smp").exit_code == 0
    ids = torch.arange(16).reshape(2, 8)
    loss = plain(input_ids=ids, labels=ids).loss.item()
    assert pool(4).run(load_converted, str(tmp_path / "smp.pt")) == [pytest.approx(loss, rel=1e-6)] * 4

    convert(tmp_path / "full.pt", tmp_path / "several", to="safetensors", dtype=torch.bfloat16, shard=4000)
    assert len(list((tmp_path / "several").glob("model-*.safetensors"))) > 2
    assert (tmp_path / "several" / "model.safetensors.index.json").is_file()
    convert(tmp_path / "several", tmp_path / "half.pt", to="torch")
    assert same(torch.load(tmp_path / "half.pt"), {name: each.bfloat16() for name, each in wanted.items()})


MIB, LAYERS = 2**20, 24


def most_anonymous_while(call: Callable[[], object]) -> int:
    """Bytes beyond those at the beginning, looked at all the time."""
    before, most, done = anonymous_bytes(), [0], threading.Event()

    def look() -> None:
        while not done.is_set():
            most[0] = max(most[0], anonymous_bytes() - before)
            time.sleep(0.0005)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        call()
    finally:
        done.set()
        thread.join()
    return most[0]


def conversions_of_a_large_model(folder: Path) -> dict[str, int]:
    """How many bytes each of them needed; small ones come first, for what is imported by then."""
    found = {}
    for size, name in ((8, "small"), (1024, "large")):
        values = {f"layers.{number}.weight": torch.ones(size, 1024) for number in range(LAYERS)}
        torch.save(values, folder / f"{name}.pt")
        del values
        formats: list[Any] = ["safetensors", "dcp", "torch"]
        for number, to in enumerate(formats):
            source = folder / (f"{name}.{formats[number - 1]}" if number else f"{name}.pt")
            target = folder / f"{name}.{to}"
            found[to] = most_anonymous_while(
                lambda source=source, target=target, to=to: convert(source, target, to=to)
            )  # type: ignore[misc]
    return found


def test_a_conversion_has_a_few_tensors_in_memory_at_a_time(tmp_path: Path) -> None:
    """Of 24 of 4 MiB each: from a file of torch's to safetensors, from these to torch's DCP, and back."""
    (outcome,) = run_once(1, conversions_of_a_large_model, tmp_path)
    assert outcome.kind == "value", outcome.text
    assert all(most < 16 * MIB for most in outcome.value.values()), outcome.value
    assert load_file(tmp_path / "large.safetensors" / "model.safetensors").keys() == {
        f"layers.{number}.weight" for number in range(LAYERS)
    }


def test_a_conversion_that_cannot_be_says_why(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    (tmp_path / "empty").mkdir()
    for words, told in (
        (("a.pt", "a.pt"), "a.pt exists; name another target"),
        (("empty", "b.pt"), "has no file 'newest'"),
        (("a.pt", "b.pt", "--dtype=float17"), "'float17' is not a dtype of torch"),
    ):
        result = smd(*(tmp_path / word if not word.startswith("--") else word for word in words))
        assert result.exit_code != 0 and told in result.output, result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "empty"]
