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
from opensmd.modelparallel.exceptions import SMPCheckpointError
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
        self.optimizer = smp.DistributedOptimizer(torch.optim.Adam(self.model.parameters(), lr=0.01))

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


def save_and_resume(folder: str) -> None:
    undisturbed = Job(2, 2)
    undisturbed.train(range(2))
    smp.save_checkpoint(folder, "parts", model=undisturbed.model, optimizer=undisturbed.optimizer)
    smp.save_checkpoint(folder, "whole", partial=False, model=undisturbed.model)
    state = undisturbed.optimizer.state_dict()
    if smp.rank() == 0:
        smp.save(state, f"{folder}/optimizer.pt", partial=False)
    wanted = undisturbed.train(range(2, 4))
    smp.barrier()
    names = {file.name for file in Path(folder, "parts_partial").glob("model_*")}
    assert names == {f"model_{stage}_{part}.pt" for stage in range(2) for part in range(2)}

    resumed = Job(2, 2, seed=1)
    smp.resume_from_checkpoint(folder, "parts")
    torch.testing.assert_close(resumed.train(range(2, 4)), wanted, rtol=1e-6, atol=0.0)

    for tensor, stages in ((1, 2), (2, 1), (2, 2)):
        other = Job(tensor, stages, seed=1)
        smp.resume_from_checkpoint(folder, "whole", partial=False)
        other.optimizer.load_state_dict(smp.load(f"{folder}/optimizer.pt", partial=False))
        torch.testing.assert_close(other.train(range(2, 4)), wanted, rtol=2e-6, atol=0.0)

    Job(2, 1)
    with pytest.raises(SMPCheckpointError, match=r"4 files are slices of tensors .*4 ranks a replica"):
        smp.resume_from_checkpoint(folder, "parts")


def test_training_goes_on_from_parts_and_from_the_whole_at_other_degrees(pool: Pools, tmp_path: Path) -> None:
    pool(4).run(save_and_resume, str(tmp_path))
    names = torch.load(tmp_path / "whole", weights_only=True).keys()
    assert {"transformer.wte.weight", "transformer.h.1.attn.c_attn.bias", "lm_head.weight"} <= names


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
