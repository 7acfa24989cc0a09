"""Two hosts, as two network namespaces joined by a cable of their own: IPv4 and IPv6, unicast and multicast.

Nothing leaves the namespaces; the loopback interface alone cannot do IPv6 multicast.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]

NETWORK = """
set -e
ip link set lo up
ip link add v0 type veth peer name v1
unshare --net sleep 1000 &
there=$!
trap 'kill $there' EXIT
until [ "$(readlink /proc/$there/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do sleep 0.05; done
ip link set v1 netns $there
ip addr add 10.77.0.1/24 dev v0
ip addr add fd77::1/64 dev v0 nodad
ip link set v0 up
nsenter -t $there -n sh -c 'ip link set lo up; ip addr add 10.77.0.2/24 dev v1
    ip addr add fd77::2/64 dev v1 nodad; ip link set v1 up'
"""
JOB = """
job() {
    export GLOO_SOCKET_IFNAME=$1 OPENSMD_LEGACY_INTERFACE=$1
    $2 "$PYTHON" -m tests.scripts.legacy.across 3 $3 $METHODS
}
job v0 env 0 & first=$!
job v0 env 1 & second=$!
job v1 "nsenter -t $there -n" 2 & third=$!
wait $first; wait $second; wait $third
"""


def can_make_namespaces() -> bool:
    tools = all(shutil.which(tool) for tool in ("unshare", "nsenter", "ip"))
    probe = ["unshare", "-rn", "ip", "link", "add", "v0", "type", "veth", "peer", "name", "v1"]
    return tools and subprocess.run(probe, capture_output=True).returncode == 0


@pytest.mark.skipif(
    not can_make_namespaces(), reason="this system does not let tests make network namespaces"
)
def test_a_job_spans_two_hosts_by_every_method(tmp_path: Path) -> None:
    methods = [
        "tcp://10.77.0.1:23456?rank",
        "tcp://[fd77::1]:23456?rank",
        "tcp://239.255.77.9:23456",
        "tcp://[ff15:1e18:5d4c:4cf0:d02d:b659:53ba:b0a7]:23456",
        f"file://{tmp_path}/rendezvous",
    ]
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "METHODS": " ".join(methods),
        "OMP_NUM_THREADS": "1",
        "OPENSMD_LEGACY_ENGINE": "gloo",
        "OPENSMD_LEGACY_TIMEOUT": str(PATIENCE),
    }
    done = subprocess.run(
        ["unshare", "-rn", "sh", "-c", NETWORK + JOB],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = sorted(done.stdout.splitlines())
    assert lines == sorted(
        [f"tcp {rank} of 3" for rank in range(3)] * 4 + [f"file {rank} of 3" for rank in range(3)]
    )
