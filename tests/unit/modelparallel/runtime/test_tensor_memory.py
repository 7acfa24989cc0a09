"""Large tensors come from kept memory, which never passes what a step needs and a sixteenth.

In processes of their own: torch's allocator is changed for good.
"""

from __future__ import annotations

import os
import textwrap
from subprocess import PIPE

import pytest

from tests.support.forks import ForkedProcess
from tests.support.patience import PATIENCE
from tests.support.ranks import ROOT

pytestmark = pytest.mark.processes

MIB = 1 << 20


def execute(lines: str) -> None:
    exec(lines, {})


def run(script: str, *, keep: str = "1", native: str = "1") -> None:
    start = f"""
        import os
        import torch
        from opensmd.modelparallel.planning.rank_bytes import KEPT  # the share that plans count with
        from opensmd.modelparallel.runtime import tensor_memory
        from opensmd.native import core
        tensor_memory.keep()
        MIB = {MIB}

        def tensor(mib): return torch.full((mib * MIB,), 3, dtype=torch.uint8)
        def memory(): return core.tensor_memory()
    """
    lines = textwrap.dedent(start) + textwrap.dedent(script)
    env = {**os.environ, "OPENSMD_KEEP_TENSORS": keep, "OPENSMD_NATIVE": native}
    process = ForkedProcess(execute, lines, cwd=ROOT, env=env, stdout=PIPE, stderr=PIPE)
    _, errors = process.communicate(PATIENCE)
    assert process.wait() == 0, errors


def test_a_freed_block_serves_the_next_tensor_of_its_size() -> None:
    run("""
        first = tensor(8)
        address = first.data_ptr()
        del first
        assert memory().kept == 8 * MIB and memory().in_use == 0
        again = tensor(8)
        assert again.data_ptr() == address and memory().in_use == 8 * MIB and memory().kept == 0
    """)


def test_what_is_kept_and_in_use_never_passes_the_most_in_use_and_a_sixteenth() -> None:
    run("""
        import random
        draw, tensors = random.Random(0), []
        for number in range(400):
            if tensors and draw.random() < 0.5:
                one, value = tensors.pop(draw.randrange(len(tensors)))
                assert one[0] == one[-1] == value
            else:
                one = torch.empty(MIB + draw.randrange(8) * 65536 + number, dtype=torch.uint8)
                one[0] = one[-1] = number % 251
                tensors.append((one, number % 251))
                tensors = tensors[-20:]
            del one
            now = memory()
            assert now.in_use + now.kept <= now.most * (1 + KEPT), (now.in_use, now.kept, now.most)
            assert now.in_use >= sum(each.numel() for each, _ in tensors)
    """)


def test_what_was_needed_before_the_last_two_steps_is_given_back() -> None:
    run("""
        whole = tensor(64)
        del whole
        part = tensor(4)
        for _ in range(2):
            tensor_memory.end_step()
        assert memory().most == 4 * MIB
        assert memory().in_use + memory().kept <= 4.25 * MIB
    """)


def test_small_tensors_are_torchs_and_any_thread_may_free() -> None:
    run("""
        import threading
        small, large = torch.ones(10), [tensor(2)]
        assert memory().in_use == 2 * MIB
        thread = threading.Thread(target=large.clear)
        thread.start(), thread.join()
        assert memory().in_use == 0 and small.sum() == 10
        grown = tensor(1)
        grown.resize_(6 * MIB)
        assert (grown[:MIB] == 3).all() and memory().in_use == 6 * MIB
    """)


def test_a_forked_child_may_allocate_while_others_do() -> None:
    run("""
        import threading
        torch.set_num_threads(1)  # a child has no pool
        kept = tensor(4)
        going = threading.Event()
        def work(): [tensor(1) for _ in iter(going.is_set, True)]
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads: thread.start()
        for _ in range(20):
            child = os.fork()
            if child == 0:
                os._exit(0 if tensor(2)[-1] == 3 == kept[-1] else 1)
            assert os.waitpid(child, 0)[1] == 0
        going.set()
        for thread in threads: thread.join()
    """)


def test_memory_that_cannot_be_had_is_torchs_own_error() -> None:
    run("""
        import resource
        kept = tensor(64)
        del kept
        limit = int(open("/proc/self/statm").read().split()[0]) * 4096 + 96 * MIB
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        assert tensor(128)[-1] == 3, "what is kept is given back first"
        try:
            tensor(512)
        except RuntimeError as error:
            assert "DefaultCPUAllocator" in str(error), error
            assert memory().most == 128 * MIB, "what was not there is no reason to keep more"
        else:
            raise AssertionError("no error")
    """)


def test_torchs_profiler_sees_kept_blocks() -> None:
    run("""
        from torch.profiler import ProfilerActivity, profile
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            one = torch.empty(4 * MIB, dtype=torch.uint8)
            del one
        sizes = {event.self_cpu_memory_usage for event in found.events()}
        assert {4 * MIB, -4 * MIB} <= sizes, sizes
    """)


def test_nothing_changes_unless_the_environment_says_so() -> None:
    run("one = tensor(8); tensor_memory.end_step(); assert memory().most == 0", keep="")


def test_nothing_changes_where_the_core_is_switched_off() -> None:
    run("one = tensor(8); tensor_memory.end_step(); assert memory().most == 0", native="0")
