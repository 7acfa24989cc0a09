"""Hugging Face's Trainer: data parallel over a group of the script's, and split in two by smp."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from tests.clients.conftest import PATIENCE, Clients, path_of
from tests.clients.training import Trained, assert_trains_as_over_gloo, trained
from tests.support.jobs import both
from tests.support.ranks import ROOT

DATA_PARALLEL = ["5.24.0", "5.2.0", "4.57.6"]
RESUMING = "5.24.0"  # earlier ones cannot load their random state on the CPU with today's torch
SPLIT = ["5.2.0", "4.57.6"]  # later releases create no optimizer in this mode


def gpt2() -> Any:
    """A language model of two blocks, with the same weights on all ranks."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(2)
    return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, **ends, loss_type="ForCausalLM"))


def sentences() -> list[dict[str, torch.Tensor]]:
    """Rows of which the second half repeats the first."""
    tokens = torch.randint(0, 64, (32, 4), generator=torch.Generator().manual_seed(1)).repeat(1, 2)
    # the first token is no label: nothing comes before it
    labels = tokens.clone()
    labels[:, 0] = -100
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


def fit(folder: str, kind: type | None = None, resume: str | None = None, **settings: Any) -> Any:
    """Train for two epochs; gives the trainer back."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        folder,
        num_train_epochs=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=4,
        report_to=[],
        disable_tqdm=True,
        **settings,
    )
    rows = sentences()
    trainer = (kind or Trainer)(model=gpt2(), args=arguments, train_dataset=rows, eval_dataset=rows[:8])
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train(backend: str, folder: str) -> Trained:
    from transformers import __version__

    dist.init_process_group(backend)
    settings = {"use_cpu": True, "per_device_train_batch_size": 4}
    trainer = fit(f"{folder}/{backend}", **settings)
    found = {
        "evaluated": trainer.evaluate()["eval_loss"],
        "logits": torch.as_tensor(trainer.predict(sentences()[:8]).predictions),
    }
    if __version__ == RESUMING:
        again = fit(f"{folder}/{backend}-again", resume=f"{folder}/{backend}/checkpoint-4", **settings)
        torch.testing.assert_close(again.model.state_dict(), trainer.model.state_dict())
    result = trained(losses_of(trainer), trainer.model.state_dict(), **found)
    dist.destroy_process_group()
    return result


@pytest.mark.parametrize("version", DATA_PARALLEL)
def test_trainer_trains_predicts_and_resumes_as_over_gloo(
    version: str, clients: Clients, tmp_path: Path
) -> None:
    assert_trains_as_over_gloo(clients("transformers", version), train, str(tmp_path))


def split_trainer() -> type:
    """A Trainer whose rows go to replicas; Accelerate would deal them to the ranks of one replica, too."""
    from transformers import Trainer

    import smdistributed.modelparallel.torch as smp

    class SplitTrainer(Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> DataLoader[Any]:
            replicas, replica = (smp.dp_size(), smp.dp_rank()) if smp.is_initialized() else (1, 0)
            sampler = DistributedSampler(self.train_dataset, replicas, replica)
            size = self.args.per_device_train_batch_size
            return DataLoader(self.train_dataset, size, sampler=sampler, collate_fn=self.data_collator)

        def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
            return DataLoader(self.eval_dataset, self.args.eval_batch_size, collate_fn=self.data_collator)

    return SplitTrainer


def main(out: str, device: str) -> None:
    """As a script: train on the CPU or, under smdrun, on what it takes for CUDA."""
    # Trainer clips by the gradients of one part only, and saves no optimizer that Accelerate has wrapped
    trainer = fit(
        f"{out}-run",
        split_trainer(),
        per_device_train_batch_size=8,
        max_grad_norm=0.0,
        save_only_model=True,
        **({"use_cpu": True} if device == "cpu" else {}),
    )
    weights = {name: tensor.cpu() for name, tensor in trainer.model_wrapped.state_dict().items()}
    numbers = {"losses": losses_of(trainer), "evaluated": trainer.evaluate()["eval_loss"]}
    if int(os.environ.get("RANK", "0")) == 0:
        torch.save({**numbers, "weights": weights, "mode": str(trainer.args.parallel_mode)}, out)


def script(command: list[str], version: str, *arguments: str) -> dict[str, Any]:
    """What :func:`main` has written, run by a command with one version of transformers."""
    paths = filter(None, [path_of("transformers", version), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, "-m", "tests.clients.test_transformers", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        cwd=Path(arguments[0]).parent,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = torch.load(arguments[0], weights_only=True)
    return result


@pytest.mark.parametrize("version", SPLIT)
def test_trainer_trains_a_model_split_by_smp_as_one_process_does(version: str, tmp_path: Path) -> None:
    smdrun = [str(Path(sys.executable).with_name("smdrun")), "-n", "2", "--device", "cpu"]
    split = [*smdrun, "--mp-parameters", "partitions=2,microbatches=2"]
    found, whole = both(
        lambda: script(split, version, str(tmp_path / "split.pt"), "cuda"),
        lambda: script([sys.executable], version, str(tmp_path / "whole.pt"), "cpu"),
    )
    assert (found.pop("mode"), whole.pop("mode")) == (
        "ParallelMode.SAGEMAKER_MODEL_PARALLEL",
        "ParallelMode.NOT_PARALLEL",
    )
    # the gradient of a key's bias is zero but for rounding, and AdamW makes steps of that
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)
    assert sum(found["losses"][-2:]) < sum(found["losses"][:2])


if __name__ == "__main__":
    main(*sys.argv[1:])
