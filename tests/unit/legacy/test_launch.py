"""Command lines and environments of the old launcher."""

from __future__ import annotations

from opensmd.legacy.launch import _parser, command_of, environment_of


def test_the_launcher_writes_command_lines_and_environments_as_documented() -> None:
    options = _parser().parse_args(
        [
            "--nnodes=2",
            "--node_rank=1",
            "--nproc_per_node=4",
            "--master_addr=10.0.0.1",
            "train.py",
            "--lr",
            "1",
        ]
    )
    assert command_of(options, 3)[1:] == ["-u", "train.py", "--local_rank=3", "--lr", "1"]
    environment = environment_of(options, 3, {"HOME": "/root", "RANK": "77"})
    assert environment == {
        "HOME": "/root",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "WORLD_SIZE": "8",
        "RANK": "7",
        "LOCAL_RANK": "3",
        "LOCAL_WORLD_SIZE": "4",
        "OMP_NUM_THREADS": "1",
    }
    kept = environment_of(options, 0, {"OMP_NUM_THREADS": "3"})
    assert kept["OMP_NUM_THREADS"] == "3"
