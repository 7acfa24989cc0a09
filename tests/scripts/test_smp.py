"""Whole scripts against smp, started as users start them, and the names that scripts import."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE

import pytest
import torch

from tests.scripts.smp import digits
from tests.support.forked_jobs import start_job
from tests.support.forks import ForkedProcess, as_main
from tests.support.jobs import both
from tests.support.patience import PATIENCE
from tests.support.ranks import ROOT, RankPool
from tests.support.scripts import run_script

SCRIPT = ROOT / "tests" / "scripts" / "smp" / "digits.py"
SMDRUN = Path(sys.executable).with_name("smdrun")
Pools = Callable[[int], RankPool]


def run(*options: str, ranks: int) -> str:
    """What the script printed under smdrun, or as a lone process."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    if ranks == 1:
        main = (as_main, str(SCRIPT), options)
        process = ForkedProcess(*main, cwd=ROOT, env=environ, stdout=PIPE, stderr=PIPE)
    else:
        process = start_job([SMDRUN, "-n", ranks, SCRIPT, *options], cwd=ROOT, env=environ)
    printed = "".join(process.communicate(PATIENCE))
    assert process.wait() == 0, printed
    return printed


def losses(printed: str) -> list[float]:
    return [float(match) for match in re.findall(r"loss ([\d.]+)", printed)]


def plain_losses() -> list[float]:
    """The losses of the same training without smp, and the first batch's loss after it."""
    torch.manual_seed(1)
    model = digits.Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=8, gamma=0.7)
    found = []
    for data, target in digits.batches(8, 16):
        optimizer.zero_grad()
        loss = torch.nn.functional.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        scheduler.step()
        found.append(loss.item())
    data, target = next(digits.batches(1, 16))
    return [*found, torch.nn.functional.nll_loss(model(data), target).item()]


def test_the_mnist_like_script_learns_like_plain_pytorch_alone_and_over_two_replicas(
    pool: Pools, tmp_path: Path
) -> None:
    *expected, afterwards = plain_losses()
    alone, split = both(
        lambda: run("--save", str(tmp_path / "a.pt"), ranks=1),
        lambda: run("--mp_parameters", "partitions=2", ranks=2),
    )
    assert losses(alone) == pytest.approx(expected, rel=1e-4)
    assert losses(split) == pytest.approx(expected, rel=1e-4)
    assert "correct 32/32" in alone and "correct 32/32" in split
    full = torch.load(tmp_path / "a.pt_full")["model_state_dict"]
    digits.Net().load_state_dict(full)
    replicas = run_script(pool(2), SCRIPT, "--mp_parameters", "microbatches=4")
    assert losses(replicas) == pytest.approx(expected, rel=1e-4)
    resumed = run_script(pool(2), SCRIPT, "--resume", tmp_path / "a.pt")
    assert losses(resumed)[0] == pytest.approx(afterwards, rel=1e-4)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_mnist_like_script_learns_like_plain_pytorch_split_in_two(
    pool: Pools, tmp_path: Path, ranks: int
) -> None:
    *expected, afterwards = plain_losses()
    options = ["--mp_parameters", "partitions=2", "--save", tmp_path / "a.pt"]
    split = run_script(pool(ranks), SCRIPT, *options)
    assert losses(split) == pytest.approx(expected, rel=1e-4)
    assert "correct 32/32" in split
    digits.Net().load_state_dict(torch.load(tmp_path / "a.pt_full")["model_state_dict"])
    resumed = run_script(pool(1), SCRIPT, "--resume", tmp_path / "a.pt")
    assert losses(resumed)[0] == pytest.approx(afterwards, rel=1e-4)


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (
            "smdistributed.modelparallel.torch",
            "init step StepOutput DistributedModel DistributedOptimizer partition set_partition is_tracing "
            "is_initialized save load save_checkpoint resume_from_checkpoint set_activation_checkpointing "
            "checkpoint checkpoint_sequential random "
            "broadcast send recv_from allgather barrier dp_barrier mp_barrier CommGroup RankType WORLD "
            "MP_GROUP DP_GROUP PP_GROUP TP_GROUP RDP_GROUP rank size local_rank local_size mp_rank mp_size "
            "dp_rank dp_size pp_rank pp_size tp_rank tp_size rdp_rank rdp_size get_mp_group get_dp_group "
            "get_pp_group get_tp_group get_rdp_group get_world_process_group get_mp_process_group "
            "get_dp_process_group get_pp_process_group get_tp_process_group get_rdp_process_group "
            "state model nn optimizers amp random utils "
            "tensor_parallelism set_tensor_parallelism tp_register tp_register_with_module model_creation "
            "delay_param_initialization",
        ),
        ("smdistributed.modelparallel", "__version__"),
        ("smdistributed.modelparallel.backend.exceptions", "SMPError"),
        ("smdistributed.modelparallel.torch.exceptions", "SMPError SMPUnsupportedError"),
        ("smdistributed.modelparallel.torch.model", "DistributedModel"),
        ("smdistributed.modelparallel.torch.state_mod", "state"),
        ("smdistributed.modelparallel.torch.amp", "GradScaler"),
        ("smdistributed.modelparallel.torch.utils", "rmsg get_distribution_axis"),
        ("smdistributed.modelparallel.test.torch.utils", "verify dump_model"),
        ("smdistributed.modelparallel.torch.patches.checkpoint", "checkpoint checkpoint_sequential"),
        (
            "smdistributed.modelparallel.torch.sharded_data_parallel_checkpoint",
            "get_full_state_dict_from_sharded_data_parallel_checkpoint",
        ),
        ("smdistributed.modelparallel.torch.optimizers", "FusedLAMB FusedLamb FusedNovoGrad FusedAdam"),
        (
            "smdistributed.modelparallel.torch.nn",
            "FusedLayerNorm DistributedLinear DistributedTransformerLMHead DistributedTransformer "
            "DistributedTransformerLayer DistributedAttentionLayer DistributedTransformerOutputLayer "
            "DistributedEmbedding DistributedModule DistributedLayerNorm FlashAttentionLayer utils",
        ),
    ],
)
def test_every_name_that_scripts_import_is_there(module: str, names: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in names.split() if not hasattr(found, name)] == []
