"""Whole training scripts, split over processes, against the same training in plain PyTorch.

Each is started with ``smdrun`` once; its other runs are those of ranks of the pool.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import BertForPreTraining, GPT2LMHeadModel

from opensmd.optim import FusedLAMB
from tests.scripts.smp import bert, gpt2, own_masters, trainer
from tests.support.forked_jobs import run_job
from tests.support.jobs import both
from tests.support.ranks import ROOT, RankFailed, RankPool
from tests.support.scripts import run_script

SCRIPTS = ROOT / "tests" / "scripts" / "smp"
SMDRUN = Path(sys.executable).with_name("smdrun")
Pools = Callable[[int], RankPool]


def run(script: str, *options: object, ranks: int) -> str:
    """What the script printed under smdrun."""
    command = [SMDRUN, "-n", ranks, SCRIPTS / script, *options]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = run_job(command, cwd=ROOT, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def losses(printed: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss ([\d.]+)", printed)}


def evaluation(printed: str) -> float:
    found = re.search(r"evaluation ([\d.]+)", printed)
    assert found is not None, printed
    return float(found[1])


# --- GPT-2 ---------------------------------------------------------------------------------------------


def plain_gpt2(steps: int, replicas: int) -> tuple[dict[int, float], float, dict[str, Any]]:
    """Losses by step, the evaluation after the last, and the model, of plain PyTorch on the same data."""
    torch.manual_seed(7)
    model = GPT2LMHeadModel(gpt2.configuration())
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    size = 4 * replicas
    found = {}
    data = gpt2.Sentences(6 * size, 1234)
    for step in range(steps):
        ids = data.ids[step * size : (step + 1) * size]
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        found[step + 1] = loss.item()
    ids = gpt2.Sentences(2 * size, 99).ids
    with torch.no_grad():
        model.eval()
        return found, model(input_ids=ids, labels=ids).loss.item(), model.state_dict()


def test_the_gpt2_like_script_learns_like_plain_pytorch_and_resumes(pool: Pools, tmp_path: Path) -> None:
    options = ["--checkpoint_dir", tmp_path, "--checkpoint_steps", 2, 4]
    full = tmp_path / "full.pt"
    saving = ["--logits_output", 1, "--save_final_full_model", full]
    printed, (wanted, evaluated, parameters) = both(
        lambda: run("gpt2.py", *options, *saving, ranks=2), lambda: plain_gpt2(6, replicas=1)
    )
    assert losses(printed) == pytest.approx(wanted, rel=2e-5)
    assert evaluation(printed) == pytest.approx(evaluated, rel=2e-5)
    assert "Partition assignments:" in printed
    assert len(re.findall(r"\[\d\] stage \d has [1-9]\d* parameters", printed)) == 2
    saved = torch.load(full)["model_state_dict"]
    assert list(saved) == list(parameters)
    for name, value in parameters.items():
        if not name.endswith("c_attn.bias"):  # a key's bias has no gradient but rounding, which Adam enlarges
            torch.testing.assert_close(saved[name], value, rtol=1e-3, atol=1e-5, msg=name)

    resume = ["--load_partial", 1, "--pipeline_parallel_degree", 4]
    resumed = run_script(pool(4), SCRIPTS / "gpt2.py", *options, *resume)
    assert losses(resumed) == pytest.approx({step: wanted[step] for step in (5, 6)}, rel=2e-5)
    assert evaluation(resumed) == pytest.approx(evaluated, rel=2e-5)


def test_the_gpt2_like_script_learns_with_replicas_checkpointing_and_places_by_hand(pool: Pools) -> None:
    options = ["--activation_checkpointing", 1, "--manual", 1, "--microbatches", 4]
    printed = run_script(pool(4), SCRIPTS / "gpt2.py", *options)
    wanted, evaluated, _ = plain_gpt2(6, replicas=2)
    assert losses(printed) == pytest.approx(wanted, rel=2e-5)
    assert evaluation(printed) == pytest.approx(evaluated, rel=2e-5)


# --- GPT-2 of 16 bits whose FP32 copies are the script's ------------------------------------------------


def plain_own_masters(steps: int) -> tuple[dict[int, float], dict[int, float], dict[str, torch.Tensor]]:
    """Losses and norms by step, and the masters, of plain PyTorch: a model of FP16, and FP32 copies."""
    torch.manual_seed(7)
    model = GPT2LMHeadModel(own_masters.configuration()).half()
    pairs = dict(model.named_parameters())
    masters = {name: torch.nn.Parameter(each.detach().float()) for name, each in pairs.items()}
    optimizer = torch.optim.AdamW(masters.values(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    found, norms = {}, {}
    for step in range(steps):
        found[step + 1] = 0.0
        for ids in own_masters.batch(step).chunk(2):
            loss = model(input_ids=ids, labels=ids).loss.float()
            (loss * (2.0**10 / 2)).backward()
            found[step + 1] += loss.item() / 2
        for name, parameter in pairs.items():
            masters[name].grad, parameter.grad = parameter.grad.float() / 2.0**10, None
        norms[step + 1] = float(torch.nn.utils.clip_grad_norm_(masters.values(), 1.0))
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for name, parameter in pairs.items():
                parameter.copy_(masters[name])
    return found, norms, {name: each.detach() for name, each in masters.items()}


def test_a_script_with_its_own_masters_learns_like_plain_pytorch_and_resumes(
    pool: Pools, tmp_path: Path
) -> None:
    script = SCRIPTS / "own_masters.py"
    folder = ["--checkpoint_dir", tmp_path]
    wanted, norms, masters = plain_own_masters(6)
    for degrees in (["--delayed_param", 1], ["--pipeline_parallel_degree", 2]):
        full = tmp_path / "full.pt"
        printed = run_script(pool(4), script, *folder, *degrees, "--save_at", 3, "--full", full)
        assert losses(printed) == pytest.approx(wanted, rel=5e-3)
        assert losses(printed)[6] < losses(printed)[1]
        first = re.search(r"step 1 loss [\d.]+ norm ([\d.]+)", printed)
        assert first is not None and float(first[1]) == pytest.approx(norms[1], rel=5e-3)
        saved = torch.load(full)
        for name, value in masters.items():
            assert saved[name].dtype is torch.float32 and saved[name].shape == value.shape
            far = float((saved[name] - value).norm() / value.norm())
            assert far < 0.1 or name.endswith("c_attn.bias"), (name, far)
        resumed = run_script(pool(4), script, *folder, *degrees, "--load_from", 3)
        assert losses(resumed) == {step: losses(printed)[step] for step in (4, 5, 6)}


# --- A trainer class, and files that are converted ---------------------------------------------------------


def plain_trainer(model_type: str, pretrained: Path) -> dict[int, float]:
    """Losses by step of plain PyTorch, from the weights that are also the script's."""
    torch.manual_seed(3)
    model = trainer.make_model(argparse.Namespace(model_type=model_type))
    torch.save(model.state_dict(), pretrained)
    optimizer = torch.optim.AdamW(trainer.param_groups(model), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    found = {}
    for step in range(6):
        ids = trainer.whole_batch(step)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        found[step + 1] = loss.item()
    return found


@pytest.mark.parametrize(
    ("model_type", "settings", "margin"),
    [
        (
            "gptj",
            "tensor_parallel_degree=2,pipeline_parallel_degree=2,microbatches=4,active_microbatches=2,"
            "memory_weight=0.5,prescaled_batch=True,ddp=True",
            2e-5,
        ),
        ("gpt2", "partitions=2,microbatches=2,shard_optimizer_state=True,ddp=True", 2e-5),
        ("gpt2", "sharded_data_parallel_degree=2,bf16=True,ddp=True", 5e-2),
    ],
    ids=["tensor-parallel", "sharded optimizer", "sharded parameters"],
)
def test_the_script_with_a_trainer_class_learns_resumes_and_converts_its_files(
    pool: Pools, tmp_path: Path, model_type: str, settings: str, margin: float
) -> None:
    pretrained = tmp_path / "pretrained.bin"
    wanted = plain_trainer(model_type, pretrained)
    words = ["--mp_parameters", settings, "--model_type", model_type, "--model_dir", tmp_path]
    script = SCRIPTS / "trainer.py"
    printed = run_script(pool(4), script, *words, "--pretrained", pretrained, "--save_at", 3)
    assert losses(printed) == pytest.approx(wanted, rel=margin)
    assert losses(printed)[6] < losses(printed)[1]
    resumed = run_script(pool(4), script, *words, "--resume_from", tmp_path / "checkpoint-3")
    rest = {step: losses(printed)[step] for step in (4, 5, 6)}
    assert losses(resumed) == pytest.approx(rest, rel=margin / 10)
    assert evaluation(resumed) == pytest.approx(evaluation(printed), rel=margin / 10)


# --- BERT ----------------------------------------------------------------------------------------------


def plain_bert(steps: int, *, autocast: bool = False) -> dict[int, float]:
    """Losses by step of plain PyTorch on the same data; with autocast in the pieces of two microbatches."""
    torch.manual_seed(3)
    model = BertForPreTraining(bert.configuration())
    bare = ("bias", "gamma", "beta", "LayerNorm")
    named = [(name, parameter) for name, parameter in model.named_parameters()]
    groups = [
        {"params": [p for n, p in named if not any(one in n for one in bare)], "weight_decay": 0.01},
        {"params": [p for n, p in named if any(one in n for one in bare)], "weight_decay": 0.0},
    ]
    optimizer = FusedLAMB(groups, lr=0.02)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.1, 1 - step / 20))
    found = {}
    for step, batch in enumerate(bert.batches(steps, 8)):
        found[step + 1] = 0.0
        for ids, segments, mask, labels, following in _halves(batch):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                output = model(input_ids=ids, token_type_ids=segments, attention_mask=mask)
                masked = F.cross_entropy(
                    output[0].float().view(-1, bert.VOCABULARY), labels.view(-1), ignore_index=-1
                )
                loss = masked + F.cross_entropy(output[1].float(), following)
            (loss / 2).backward()
            found[step + 1] += loss.item() / 2
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return found


def _halves(batch: tuple[torch.Tensor, ...]) -> Iterator[tuple[torch.Tensor, ...]]:
    yield from zip(*(one.chunk(2) for one in batch), strict=True)


def test_the_bert_like_script_learns_like_plain_pytorch_and_resumes_on_another_split(
    pool: Pools, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    split = "partitions=2,microbatches=2,ddp=True"
    printed, wanted = both(
        lambda: run("bert.py", "--mp_parameters", split, "--output_dir", first, ranks=2),
        lambda: plain_bert(4),
    )
    assert losses(printed) == pytest.approx(wanted, rel=2e-5)
    assert "scale 1024.0" in printed
    kept = sorted(path.name for path in first.glob("ckpt_*_*"))
    assert kept == ["ckpt_3.pt_0", "ckpt_3.pt_1", "ckpt_4.pt_0", "ckpt_4.pt_1"]
    shutil.copytree(first, second)  # both resumed jobs save again
    resume = ["--resume_step", 3, "--output_dir"]
    replicas = "partitions=2,microbatches=1,ddp=True,placement_strategy=spread"
    whole = ["--mp_parameters", "partitions=1,microbatches=2", "--partial_checkpoint", 0]
    for resumed in (
        run_script(pool(4), SCRIPTS / "bert.py", "--mp_parameters", replicas, *resume, first),
        run_script(pool(1), SCRIPTS / "bert.py", *whole, *resume, second),
    ):
        assert losses(resumed) == pytest.approx({4: wanted[4]}, rel=5e-5)


def test_the_bert_like_script_learns_under_autocast(pool: Pools) -> None:
    options = ["--mp_parameters", "partitions=2,microbatches=2,ddp=True", "--autocast", 1]
    printed = run_script(pool(2), SCRIPTS / "bert.py", *options)
    assert losses(printed) == pytest.approx(plain_bert(4, autocast=True), rel=1e-3)


def test_the_bert_like_script_hears_why_its_debugging_helpers_do_not_exist(pool: Pools) -> None:
    why = "dump_model: this helper of the original library's own tests was never documented"
    with pytest.raises(RankFailed, match=why):
        run_script(pool(1), SCRIPTS / "bert.py", "--debug")


# --- MNIST with CUDA hard-coded -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "settings", "ranks"),
    [
        (["--amp", 1], "partitions=2,microbatches=2,ddp=True", 4),
        (["--amp", 1, "--compile", 1], "partitions=2,microbatches=2", 2),  # one partition gets nothing
    ],
)
def test_the_mnist_like_script_that_hard_codes_cuda_learns_on_the_cpu(
    options: list[object], settings: str, ranks: int
) -> None:
    command = [SMDRUN, "-n", ranks, "--device", "cpu", "--mp-parameters", settings, SCRIPTS / "mnist_cuda.py"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = run_job([*command, *options], cwd=ROOT, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    accuracies = [float(match) for match in re.findall(r"accuracy ([\d.]+)", done.stdout)]
    assert len(accuracies) == ranks // 2
    assert min(accuracies) > 0.9
    assert ("nothing of the model lives on partition 0 of 2" in done.stderr) == ("--compile" in options)
