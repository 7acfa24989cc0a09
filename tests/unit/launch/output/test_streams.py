"""The launcher's standard streams lose nothing."""

from __future__ import annotations

import os
import threading

from opensmd.launch.output import streams


def test_a_full_pipe_that_does_not_block_is_waited_for() -> None:
    """Some programs make the pipe or terminal that they share with smdrun non-blocking."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    found: list[bytes] = []

    def receive() -> None:
        with os.fdopen(read, "rb") as pipe:
            found.append(pipe.read())

    reader = threading.Thread(target=receive)
    text = "a line that is not short\n" * 10_000  # more than fits into a pipe
    out = streams.patient(write)
    threading.Timer(0.1, reader.start).start()
    assert streams.put(out, text) is None
    os.close(write)
    reader.join()
    assert found == [text.encode()]
