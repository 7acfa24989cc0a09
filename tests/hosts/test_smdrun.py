"""smdrun for several hosts, which are network namespaces: one command starts them, and starts them again."""

from __future__ import annotations

from pathlib import Path

from benchmarks.hosts.networks import ADDRESSES

from tests.scripts.test_several_hosts import SSH
from tests.scripts.test_smddp_scripts import BIN, job
from tests.support.launchers import BOTH, assert_trained
from tests.support.ports import free_port

FAILS_ONCE = f"""
import os, runpy, sys
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "1":
        raise ValueError("the batch is empty")
    import time
    time.sleep(1000)  # and does not notice that the other host's rank has failed
sys.path.insert(0, {str(Path(BOTH).parent)!r})
runpy.run_path({BOTH!r})
"""


def test_both_scripts_train_on_hosts_of_one_command_which_starts_all_ranks_again_after_a_failure(
    hosts: tuple[str, str], tmp_path: Path
) -> None:
    (tmp_path / "-train.py").write_text(FAILS_ONCE)
    (tmp_path / "hosts").write_text(f"{ADDRESSES[0]} slots=1\n{ADDRESSES[1]} slots=1\n")
    place = ["--hostfile", "hosts", "--ssh", SSH, "--master-port", str(free_port())]
    namespaces = ",".join(f"{address}={name}" for address, name in zip(ADDRESSES, hosts, strict=True))
    command = [str(BIN / "smdrun"), *place, "--max-restarts", "1", "--", "-train.py"]
    done = job(command, cwd=tmp_path, SSH_NAMESPACES=namespaces)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[1] ValueError: the batch is empty" in done.stderr
    assert_trained(done.stdout, [1, 1])
