"""Slurm itself, as nodes of this machine; ``python -m tests.support.slurm`` unpacks it into ``out/slurm``.

Debian's packages are not installed: neither a service nor a user account is made. The daemons need no munge.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.patience import PATIENCE
from tests.support.ports import free_port
from tests.support.ranks import ROOT

__all__ = ["SRUN", "Slurm", "slurm"]

FOLDER = ROOT / "out" / "slurm"
SRUN = FOLDER / "usr" / "bin" / "srun"
DAEMONS = FOLDER / "usr" / "sbin"
LIBRARIES = FOLDER / "usr" / "lib" / "x86_64-linux-gnu"
PLUGINS = LIBRARIES / "slurm-wlm"
PACKAGES = ["slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "libmunge2", "libhwloc15"]
PACKAGES += ["liblz4-1", "libjson-c5", "liblua5.1-0", "libnuma1", "libyaml-0-2", "libdbus-1-3", "libpam0g"]

NODES = ("node0", "node1")  # names that do not resolve: ranks must be told where to meet
CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/none
CredType=cred/none
PluginDir={plugins}
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
SelectType=select/linear
MpiDefault=none
SlurmdParameters=config_overrides
{nodes}
PartitionName=all Nodes=ALL Default=YES OverSubscribe=YES
"""


@dataclass(frozen=True)
class Slurm:
    """A cluster that runs.

    Attributes:
        environment: of its commands.
    """

    environment: Mapping[str, str]

    def srun(
        self, options: Sequence[str], command: Sequence[str], cwd: Path
    ) -> subprocess.CompletedProcess[str]:
        """Run a step."""
        return subprocess.run(
            [str(SRUN), *options, *command],
            cwd=cwd,
            env=dict(self.environment),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )


@contextlib.contextmanager
def slurm(folder: Path, environment: Mapping[str, str]) -> Iterator[Slurm]:
    """A cluster of the :data:`NODES`, whose files are in ``folder``."""
    nodes = [
        f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={free_port()} CPUs=2"
        for name in NODES
    ]
    text = CONFIGURATION.format(
        host=socket.gethostname(),
        port=free_port(),
        plugins=PLUGINS,
        folder=folder,
        user=os.environ.get("USER", "root"),
        nodes="\n".join(nodes),
    )
    (folder / "slurm.conf").write_text(text)
    (folder / "state").mkdir()
    commands = [[str(DAEMONS / "slurmctld-wlm"), "-D"]]
    step_daemon = str(DAEMONS / "slurmstepd-wlm")
    commands += [[str(DAEMONS / "slurmd-wlm"), "-D", "-N", name, "-d", step_daemon] for name in NODES]
    env = {
        **environment,
        "SLURM_CONF": str(folder / "slurm.conf"),
        "LD_LIBRARY_PATH": f"{LIBRARIES}:{PLUGINS}:{FOLDER / 'lib' / 'x86_64-linux-gnu'}",
    }
    with contextlib.ExitStack() as stack:
        for number, command in enumerate(commands):
            log = stack.enter_context((folder / f"daemon-{number}").open("w"))
            process = stack.enter_context(subprocess.Popen(command, env=env, stdout=log, stderr=log))
            stack.callback(process.terminate)
        _wait_for_nodes(env, folder)
        yield Slurm(env)


def _wait_for_nodes(env: Mapping[str, str], folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    command = [str(SRUN.with_name("sinfo")), "--noheader", "--states=idle", "--format=%D"]
    while True:
        run = subprocess.run(command, env=dict(env), capture_output=True, text=True, check=False)
        if run.stdout.strip() == str(len(NODES)):
            return
        daemon_logs = "".join(log.read_text() for log in folder.glob("daemon-*"))
        assert time.monotonic() < deadline and "fatal:" not in daemon_logs, daemon_logs + run.stderr
        time.sleep(0.2)


def install() -> None:
    """Unpack the packages, unless they are there."""
    if SRUN.exists():
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", "-q", *PACKAGES], cwd=FOLDER, check=True)
    for package in FOLDER.glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(package), str(FOLDER)], check=True)
        package.unlink()


if __name__ == "__main__":
    install()
