"""Shared models are saved whole and in parts, and go on training where they were, also at other degrees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

import smdistributed.modelparallel.torch as smp
from tests.support.partitioned import restart
from tests.support.ranks import RankPool
from tests.support.tensor_parallel import batch, own_rows

Pools = Callable[[int], RankPool]
WORDS, VOCABULARY = 6, 37


class Job:
    """A script that trains a tiny GPT-2 from one batch to the next."""

    def __init__(self, tensor: int, stages: int, seed: int = 0, **config: Any) -> None:
        restart(tensor_parallel_degree=tensor, partitions=stages, ddp=True, prescaled_batch=True, **config)
        torch.manual_seed(seed)
        sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 8, "vocab_size": VOCABULARY}
        dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        with smp.tensor_parallelism():
            module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropout))
        self.model = smp.DistributedModel(module)
        # fused: it would notice state that does not lie in memory as its parameter does
        adam = torch.optim.Adam(self.model.parameters(), lr=0.01, fused=True)
        self.optimizer = smp.DistributedOptimizer(adam)

        @smp.step
        def step_function(model: Any, ids: Tensor) -> Tensor:
            loss: Tensor = model(input_ids=ids, labels=ids).loss
            model.backward(loss)
            return loss

        self.step_function = step_function

    def train(self, steps: range) -> list[float]:
        """The losses, the mean over replicas."""
        losses = []
        for step in steps:
            ids = own_rows(batch(WORDS, VOCABULARY, step)[0])
            self.optimizer.zero_grad()
            loss = self.step_function(self.model, ids).reduce_mean()
            self.optimizer.step()
            dist.all_reduce(loss, group=smp.get_dp_process_group())
            losses.append(loss.item() / smp.dp_size())
        return losses


# Tensor-parallel ranks, stages and settings of four ranks; the rest are replicas.
DEGREES: list[tuple[int, int, dict[str, Any]]] = [
    (2, 2, {}),
    (1, 2, {"shard_optimizer_state": True}),
    (2, 1, {"shard_optimizer_state": True}),
    (1, 4, {}),
    (1, 1, {}),
]


def save_and_resume(folder: str, saved: int) -> None:
    """Saved at one of the degrees, loaded at that and the next two, from parts and from the whole."""
    tensor, stages, settings = DEGREES[saved]
    undisturbed = Job(tensor, stages, **settings)
    undisturbed.train(range(2))
    both: dict[str, Any] = {"model": undisturbed.model, "optimizer": undisturbed.optimizer}
    smp.save_checkpoint(folder, "parts", **both)
    smp.save_checkpoint(folder, "whole", partial=False, **both)
    wanted = undisturbed.train(range(2, 4))
    smp.barrier()
    for number in range(saved, saved + 3):
        tensor, stages, settings = DEGREES[number % len(DEGREES)]
        for tag, partial in (("parts", True), ("whole", False)):
            resumed = Job(tensor, stages, seed=1, **settings)
            if tag == "whole":  # placed already, with state of other numbers
                resumed.train(range(1))
            smp.resume_from_checkpoint(folder, tag, partial=partial)
            torch.testing.assert_close(resumed.train(range(2, 4)), wanted, rtol=2e-6, atol=0.0)


@pytest.mark.parametrize("saved", range(len(DEGREES)))
def test_training_goes_on_from_parts_and_from_the_whole_at_other_degrees(
    pool: Pools, tmp_path: Path, saved: int
) -> None:
    pool(4).run(save_and_resume, str(tmp_path), saved)
    names = torch.load(tmp_path / "whole", weights_only=True).keys()
    assert {"transformer.wte.weight", "transformer.h.1.attn.c_attn.bias", "lm_head.weight"} <= names
    tensor, stages, _ = DEGREES[saved]
    files = {file.name for file in (tmp_path / "parts_partial").glob("model_*")}
    shared = {f"model_{stage}_{part}.pt" for stage in range(stages) for part in range(tensor)}
    assert files == (shared if tensor > 1 else {f"model_{stage}.pt" for stage in range(stages)})


def masters_at_other_degrees(folder: str) -> None:
    """The state of 16-bit training, masters and loss scale with it, is bitwise what was saved."""
    job = Job(2, 2, fp16=True)
    job.train(range(2))
    smp.save_checkpoint(folder, "parts", model=job.model, optimizer=job.optimizer)
    wanted, weights = job.optimizer.state_dict(), job.model.state_dict()
    for tensor, stages in ((1, 2), (2, 1), (2, 2)):
        other = Job(tensor, stages, seed=1, fp16=True)
        smp.resume_from_checkpoint(folder)
        other.step_function(other.model, own_rows(batch(WORDS, VOCABULARY, 0)[0]))
        found = other.optimizer.state_dict()
        torch.testing.assert_close(found["state"], wanted["state"], rtol=0.0, atol=0.0)
        assert found["loss_scale"] == wanted["loss_scale"]
        torch.testing.assert_close(other.model.state_dict(), weights, rtol=0.0, atol=0.0)


def test_masters_and_the_loss_scale_load_at_other_degrees(pool: Pools, tmp_path: Path) -> None:
    pool(4).run(masters_at_other_degrees, str(tmp_path))


def half_precision() -> None:
    """FP32 masters are of slices, too, and all ranks of a replica skip a step together."""
    job = Job(2, 2, bf16=True)
    losses = [job.train(range(1))[0] for _ in range(3)]
    assert losses[-1] < losses[0]
    masters = job.optimizer.state_dict()["state"]
    names = [name for name, _ in job.model.get_module().named_parameters()]
    shapes = {name: masters[number]["master_weight"].shape for number, name in enumerate(names)}
    assert shapes["word_embedding.weight"] == (VOCABULARY, 16)
    assert shapes["transformer.seq_layers.0.attention.query_key_value.weight"] == (3, 16, 16)
    assert job.optimizer.clip_master_grads(1.0) > 0


def test_half_precision_and_shared_tensors_go_together(pool: Pools) -> None:
    pool(4).run(half_precision)
