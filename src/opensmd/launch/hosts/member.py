"""What ssh starts on each host: smdrun with an order from its input, for as long as that input stays open.

The end of the input is the end of the job here: the command that started it has closed it, or is gone, or the
connection is. ssh ends no process on the other side by itself.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from opensmd.launch.hosts.order import Order

__all__ = ["main"]


def main() -> None:
    """Run the order that comes in standard input."""
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
    """This process's input under a number that no other process has; ranks read nothing."""
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
