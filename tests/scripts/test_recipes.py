"""Recipes of 2022 and 2023: each trains, saves, and goes on at the same and at other degrees."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.scripts.smp import recipe
from tests.support.forked_jobs import run_job
from tests.support.ranks import ROOT, RankPool

Pools = Callable[[int], RankPool]
Flags = dict[str, Any]

TP2: Flags = {"tensor_parallel_degree": 2, "prescaled_batch": 1}
PP2: Flags = {"pipeline_parallel_degree": 2, "microbatches": 2}
FUSED: Flags = {"fused_softmax": 1, "fused_dropout": 1, "fused_bias_gelu": 1, "query_key_layer_scaling": 0}
CHECKPOINTS: Flags = {"activation_checkpointing": 1}
GROUPED: Flags = {"num_layers": 4}  # two a stage
SHARDED: Flags = {"sharded_data_parallel_degree": 2, "bf16": 1, "flash_attention": 1, "skip_tracing": 1}

# How each is trained and saved, and the degrees at which it goes on besides.
RECIPES: dict[str, tuple[Flags, Flags]] = {
    "gpt2": (
        {
            **TP2,
            **PP2,
            **CHECKPOINTS,
            "activation_strategy": "group_2",
            "logits_output": 1,
            **FUSED,
            **GROUPED,
        },
        {**PP2, "tensor_parallel_degree": 1, **GROUPED},
    ),
    "gptj": (
        {**TP2, **CHECKPOINTS, "bf16": 1, "flash_attention": 1, "offload_activations": 1, "delayed_param": 1},
        {**PP2, "bf16": 1, "skip_tracing": 1, "placement_strategy": "spread"},
    ),
    "gptj plain": (
        {**PP2, "use_distributed_transformer": 0, "shard_optimizer_state": 1},
        {"use_distributed_transformer": 0},
    ),
    "gpt_neox": (
        {**PP2, **CHECKPOINTS, "bf16": 1, "manual_partition": 1, "save_in_background": 1},
        {"bf16": 1},
    ),
    "t5": ({**PP2, **CHECKPOINTS, "offload_activations": 1}, {}),
    "falcon": ({**PP2, **CHECKPOINTS, "use_alibi": 1, "delayed_param": 1}, {"use_alibi": 1}),
}
# As the notebooks of 2023 train: 16 bits, everything sharded, made without memory, layers computed again.
PUBLISHED_ALL: Flags = {**SHARDED, **CHECKPOINTS, "delayed_param": 1, "max_steps": 5}
PUBLISHED: dict[str, tuple[Flags, Flags]] = {
    "gpt2": ({"activation_strategy": "contiguous", "zero_init": 0}, {**TP2, "offload_activations": 1}),
    "gptj": ({**TP2}, {"sharded_data_parallel_degree": 4}),
    "gpt_neox": ({"offload_activations": 1, "save_in_background": 1}, {**PP2, "skip_tracing": 0}),
    "t5": ({}, {"sharded_data_parallel_degree": 1, "skip_tracing": 0}),
    "falcon": ({"use_alibi": 1}, {"use_alibi": 1, "sharded_data_parallel_degree": 4, "delayed_param": 0}),
    "gpt2 fp16": (
        {**TP2, "bf16": 0, "fp16": 1, "attention_in_fp32": 1},
        {"tensor_parallel_degree": 1, "bf16": 0, "fp16": 1},
    ),
}
ROUNDING = {"fp16": 2e-2, "bf16": 5e-2}  # losses of 16 bits at other degrees


def words(name: str, flags: Flags, folder: Path, **more: Any) -> list[str]:
    given = {**flags, **more, "model_type": name.split()[0], "checkpoint_dir": folder, "model_dir": folder}
    return [f"--{key}={value}" for key, value in given.items()]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_and_goes_on_at_the_same_and_at_other_degrees(
    pool: Pools, tmp_path: Path, name: str
) -> None:
    flags, other = RECIPES[name]

    def run(flags: Flags, **more: Any) -> tuple[list[float], list[float], float]:
        found = pool(4).run(recipe.main, words(name, flags, tmp_path, **more))
        assert all(one[0] == found[0][0] for one in found)
        return found[0]  # type: ignore[no-any-return]

    losses, norms, evaluation = run(flags, checkpoint_freq=3, save_final_full_model=1)
    assert losses[-1] < losses[0] and all(norm > 0 for norm in norms)
    assert len(list(tmp_path.glob("*_partial"))) == 2
    tag = "trained_gpt_nparams-3"
    resumed = run(flags, load_partial=1, load_tag=tag)
    assert (resumed[0], resumed[2]) == (losses[3:], evaluation)
    margin = next((ROUNDING[key] for key in ROUNDING if flags.get(key)), 1e-5)
    elsewhere = run(other, load_partial=1, load_tag=tag)
    assert elsewhere[0] == pytest.approx(losses[3:], rel=margin)
    assert elsewhere[2] == pytest.approx(evaluation, rel=margin)
    if name == "gpt2":
        plain = AutoModelForCausalLM.from_config(
            recipe.model_config(recipe.parse(words(name, other, tmp_path)))
        )
        plain.load_state_dict(torch.load(tmp_path / "fullmodel.pt"))
        again = run(other, load_full=1, load_tag="fullmodel.pt", max_steps=6)
        assert again[2] == pytest.approx(evaluation, rel=1e-5)


def run_all(lines: list[list[str]], folder: Path) -> list[dict[str, float]]:
    """What each of these command lines printed, all of them in one job under smdrun."""
    words = [word for line in lines for word in ("--then", *line)][1:]
    command = ["smdrun", "-n", 4, ROOT / "tests/scripts/smp/recipe.py", *words]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "OPENSMD_OFFLOAD_DIR": str(folder)}
    done = run_job(command, cwd=ROOT, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    runs: list[dict[str, float]] = [{}]
    for batch, loss, evaluation in re.findall(
        r"Batch (\d+) Loss: ([\d.]+),|successfully, evaluation ([\d.]+)", done.stdout
    ):
        runs[-1][batch or "evaluation"] = float(loss or evaluation)
        if evaluation:
            runs.append({})
    assert len(runs) == len(lines) + 1
    return runs[:-1]


def test_published_recipes_train_under_smdrun_and_go_on_from_every_kind_of_checkpoint(tmp_path: Path) -> None:
    def line(name: str, flags: Flags, **more: Any) -> list[str]:
        return words(name, {**PUBLISHED_ALL, **flags}, tmp_path / name.replace(" ", "_"), **more)

    saving = [line(name, own, checkpoint_freq=3, save_full_too=1) for name, (own, _) in PUBLISHED.items()]
    undisturbed = dict(zip(PUBLISHED, run_all(saving, tmp_path), strict=True))
    partial = {"load_partial": 1, "load_tag": "trained_gpt_nparams-3"}
    full = {"load_full": 1, "load_tag": "full_gpt_nparams-3"}
    going_on = [
        line(name, flags, **kind)
        for name, (own, other) in PUBLISHED.items()
        for flags, kind in ((own, partial), (other, partial), (other, full))
    ]
    found = iter(run_all(going_on, tmp_path))
    for name, losses in undisturbed.items():
        assert list(losses) == ["0", "1", "2", "3", "4", "evaluation"] and losses["4"] < losses["0"], name
        wanted = {batch: losses[batch] for batch in ("3", "4", "evaluation")}
        margin = ROUNDING["fp16" if "fp16" in name else "bf16"]
        assert next(found) == wanted, name
        assert next(found) == pytest.approx(wanted, rel=margin), name
        assert next(found) == pytest.approx(wanted, rel=margin), name
