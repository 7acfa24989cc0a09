"""What ssh starts on each host: smdrun with an order from its input, for as long as that input stays open.

When the input ends, so does the job on this host: the command that started it has closed it, or has died, or
the connection is lost. ssh itself ends no process on the other side.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from opensmd.launch.hosts.order import Order

__all__ = ["main"]


def main() -> None:
    """Run the order from standard input."""
    line = b""
    while not line.endswith(b"\n"):
        received = os.read(0, 65536)
        if not received:
            raise SystemExit("smdrun: the connection was closed before it said what to run")
        line += received
    order = Order.from_line(line)
    os.environ.update(order.variables)
    os.chdir(order.folder)
    _end_with(_keep_input_from_ranks())
    from opensmd.launch import cli

    sys.argv = ["smdrun", *order.arguments]
    cli.main(args=order.arguments, prog_name="smdrun")


def _keep_input_from_ranks() -> int:
    """Move this process's input to a descriptor that no child inherits, so that ranks read nothing."""
    own = os.dup(0)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    return own


def _end_with(descriptor: int) -> None:
    def watch() -> None:
        while os.read(descriptor, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="smdrun-connection", daemon=True).start()


if __name__ == "__main__":
    main()
