"""Stands in for ssh where there is no server of it: runs a line of shell as another host would.

Like ssh, it passes its input on, and what it has started sees the end of its input when it is killed, and no
signal. Where SSH_NAMESPACES says ``host=name,...``, the line runs in the network namespace of its host.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading

__all__ = ["namespace_of"]


def namespace_of(host: str) -> str | None:
    """The network namespace that is this host."""
    namespaces = dict(pair.split("=") for pair in os.environ.get("SSH_NAMESPACES", "").split(",") if pair)
    return namespaces[host] if namespaces else None


def main() -> None:
    """Run ``ssh.py HOST LINE``; exit as the line does."""
    host, line = sys.argv[1:]
    namespace = namespace_of(host)
    inside = ["ip", "netns", "exec", namespace] if namespace is not None else []
    env = {**os.environ, "OPENSMD_HOST_ID": host}
    child = subprocess.Popen(
        [*inside, "sh", "-c", line], stdin=subprocess.PIPE, env=env, start_new_session=True
    )

    def pass_on() -> None:
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            while data := os.read(0, 65536):
                child.stdin.write(data)
                child.stdin.flush()
            child.stdin.close()

    threading.Thread(target=pass_on, daemon=True).start()
    code = child.wait()
    sys.stdout.flush()
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
