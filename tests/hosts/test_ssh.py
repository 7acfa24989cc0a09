"""smdrun over ssh itself, to a server of this user's own that a job on one machine takes for two hosts."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scripts.test_smddp_scripts import BIN, environment
from tests.support.patience import PATIENCE
from tests.support.ports import free_port

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")
HOSTS = ("127.0.0.1", "127.0.0.2")
SCRIPT = """
import os, sys
os.environ["OPENSMD_HOST_ID"] = "host " + os.environ["GROUP_RANK"]
import torch, torch.distributed as dist
dist.init_process_group("smddp")
tensor = torch.ones(1000)
dist.all_reduce(tensor)
print("sum", tensor[0].item(), flush=True)
if sys.argv[1:] == ["fails"] and dist.get_rank() == 1:
    raise ValueError("the batch is empty")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def ssh(tmp_path: Path) -> Iterator[str]:
    """The command that reaches the server."""
    if SSHD is None:
        pytest.skip("there is no sshd here (Debian's package openssh-server has one)")
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / key)], check=True)
    (tmp_path / "user.pub").rename(tmp_path / "authorized")
    port = free_port()
    listening = "".join(f"ListenAddress {host}\n" for host in HOSTS)
    (tmp_path / "config").write_text(
        f"Port {port}\n{listening}HostKey {tmp_path / 'host'}\nAuthorizedKeysFile {tmp_path / 'authorized'}\n"
        "PidFile none\nPasswordAuthentication no\nUsePAM no\nStrictModes no\n"
    )
    server = subprocess.Popen([SSHD, "-D", "-e", "-f", str(tmp_path / "config")], stderr=subprocess.PIPE)
    try:
        wait_for(port, server)
        yield (
            f"ssh -p {port} -i {tmp_path / 'user'} -o BatchMode=yes -o StrictHostKeyChecking=no "
            f"-o UserKnownHostsFile={tmp_path / 'known'}"
        )
    finally:
        server.terminate()
        server.wait(PATIENCE)


def wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if server.poll() is not None:
            assert server.stderr is not None
            pytest.skip(f"this user may not run sshd: {server.stderr.read().decode().strip()}")
        try:
            socket.create_connection((HOSTS[1], port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise AssertionError("sshd does not listen")


def run(ssh: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    place = [
        "--hosts",
        ",".join(f"{host}:1" for host in HOSTS),
        "--ssh",
        ssh,
        "--master-port",
        str(free_port()),
    ]
    return subprocess.run(
        [sys.executable, str(BIN / "smdrun"), *place, "train.py", *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_a_job_runs_on_both_hosts_and_a_failure_on_one_is_told(ssh: str, tmp_path: Path) -> None:
    done = run(ssh, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] sum 2.0", "[1] sum 2.0"]
    done = run(ssh, tmp_path, "fails")
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"smdrun on {HOSTS[1]}: rank 1 failed first: ValueError: the batch is empty" in done.stderr
    assert f"smdrun: {HOSTS[1]} failed first; all hosts have ended" in done.stderr
