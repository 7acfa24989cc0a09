"""The launcher's standard streams lose nothing."""

from __future__ import annotations

import os
import re
import signal
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


def test_nothing_is_written_twice_when_signals_interrupt() -> None:
    class Interrupt(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupt

    read, write = os.pipe()
    out = streams.patient(write)
    usual = signal.signal(signal.SIGALRM, interrupt)
    interrupts = 0
    for number in range(3000):  # fewer bytes than a pipe takes
        try:
            signal.setitimer(signal.ITIMER_REAL, 1e-5 * (1 + number % 5))
            print(f"<{number}>", file=out)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Interrupt:
            interrupts += 1
    signal.signal(signal.SIGALRM, usual)
    out.flush()
    os.close(write)
    with os.fdopen(read) as pipe:
        numbers = re.findall("<[0-9]+>", pipe.read())
    assert interrupts
    assert len(numbers) == len(set(numbers))
