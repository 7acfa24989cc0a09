"""Parameters that ranks on two hosts share out train as in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.networks import assert_each_prints_ok

TRAIN = """
import smdistributed.modelparallel.torch as smp
from opensmd.collectives import _torch_internals
from tests.ranks.replicas.test_sharded_model import BY_BLOCK, trains_as_one_process

trains_as_one_process({partitions}, {degree}, BY_BLOCK | {settings})
shards = smp.state.groups.shards
assert shards.size() == {degree}
assert _torch_internals.cpu_backend(shards).spans_hosts() is {spans_hosts}
print("ok", smp.rank(), flush=True)
"""
ALIKE = {"partitions": 1, "degree": 4, "spans_hosts": True, "settings": {}}
BY_STAGE = {"partitions": 2, "degree": 2, "spans_hosts": False}


@pytest.mark.parametrize(
    "case",
    [
        {**ALIKE, "settings": {"sdp_hierarchical_allgather": True}},
        {**ALIKE, "degree": 2, "spans_hosts": False},
        {**ALIKE, "partitions": 2, "degree": 2},
        {**BY_STAGE, "settings": {"placement_strategy": "spread"}},
    ],
    ids=["over all ranks", "within each host", "replicas on each host", "a stage on each host"],
)
def test_parameters_shared_out_over_hosts_train_as_in_one_process(
    hosts: tuple[str, str], tmp_path: Path, case: dict[str, object]
) -> None:
    assert_each_prints_ok(hosts, tmp_path / "script.py", TRAIN.format(**case), size=4)
