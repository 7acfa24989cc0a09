"""The benchmarks run and count right: tiny settings, and the arithmetic of their tables."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from benchmarks.cuda import __main__ as cuda_benchmark
from benchmarks.harness import launch
from benchmarks.harness.contestants import after_a_call
from benchmarks.harness.results import Results, human_bytes, human_time, row
from benchmarks.harness.table import Ratio, markdown
from benchmarks.hosts.networks import two_networks
from benchmarks.limits import NO_COMMUNICATION, allowed, least_time, ranks_a_core
from benchmarks.memory import rank as memory_rank
from benchmarks.memory.__main__ import FULLEST, TIMES
from benchmarks.memory.__main__ import grid as memory_grid
from benchmarks.memory.cases import CASES
from benchmarks.pipeline.breakdown import lines as pipeline_breakdown
from benchmarks.pipeline.breakdown_rank import PARTS, stage
from benchmarks.pipeline.cases import OURS
from benchmarks.resident.__main__ import KEPT, LIVE, PEAK, PREDICTED
from benchmarks.resident.__main__ import STEP as RESIDENT_STEP
from benchmarks.resident.__main__ import grid as resident_grid
from benchmarks.saving import rank as saving_rank
from benchmarks.saving.__main__ import CALL, LOST, STEP, STOP
from benchmarks.saving.__main__ import grid as saving_grid
from benchmarks.targets import Found, Target, verdict, worst

from opensmd.modelparallel.init import shutdown
from tests.support.forked_jobs import run_job
from tests.support.forks import ForkedProcess, as_main
from tests.support.patience import wait_until
from tests.support.ranks import ROOT, RankPool

QUICK = ["--seconds", "0.01", "--rounds", "1", "--patience", "0", "--out"]


@pytest.fixture
def run_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run the command of a benchmark in this process; results in ``tmp_path``.

    Its ranks are forks, unless another program starts them.
    """
    start, said = launch._start, []

    def fork(command: Sequence[str], env: dict[str, str]) -> subprocess.Popen[bytes] | ForkedProcess:
        network = command[3] if command[:3] == ["ip", "netns", "exec"] else None
        program, flag, *rest = command[4:] if network else command
        if (program, flag) != (sys.executable, "-m"):
            return start(command, env)
        said.append(tmp_path / f"stderr-{len(said)}")
        main = (as_main, rest[0], rest[1:])
        return ForkedProcess(*main, cwd=ROOT, env=env, stderr=said[-1], network=network)

    def run(name: str, *args: str) -> None:
        monkeypatch.setattr(launch, "_start", fork)
        monkeypatch.setattr(sys, "argv", [f"benchmarks.{name}", *QUICK, str(tmp_path), *args])
        try:
            package = (ROOT / "benchmarks" / name).is_dir()
            importlib.import_module(f"benchmarks.{name}{'.__main__' * package}").main()
        except RuntimeError as error:
            pytest.fail("\n".join([str(error), *(path.read_text() for path in said)]))

    return run


def test_a_run_removes_what_killed_runs_have_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    for owner in (gone.pid, os.getpid()):
        (tmp_path / f"bench-{owner}-abc").mkdir()
        (tmp_path / f"bench-{owner}-abc" / "results.json").touch()
    monkeypatch.setattr(launch, "FOLDERS", tmp_path)
    with pytest.raises(RuntimeError, match="the ranks ended with"):
        launch.run("no.such.module", ranks=1, mpi=None)
    assert [path.name for path in tmp_path.iterdir()] == [f"bench-{os.getpid()}-abc"]


def test_allreduce_measures_every_candidate_and_finds_right_sums(
    run_benchmark: Callable[..., None], tmp_path: Path
) -> None:
    options = ["--ranks", "2", "--sizes", "4", "40000"]
    run_benchmark("allreduce", *options, "--mpi", "MPICH")
    results = Results.load(tmp_path / "allreduce-2-mpich.json")
    names = {"smddp", "smddp zero-copy", "gloo", "do-nothing", "MPICH (C)", "MPICH (mpi4py)"}
    floors = {"floor", "floor zero-copy"}
    assert set(results.candidates()) == names | floors | {after_a_call(floor) for floor in floors}
    assert all(0 < one.p50 <= one.p99 for one in results.rows)
    assert (tmp_path / "allreduce-2-mpich.png").exists()


def test_collectives_measure_every_operation_without_mpi(
    run_benchmark: Callable[..., None], tmp_path: Path
) -> None:
    run_benchmark("collectives", "--sizes", "4096", "--mpi")
    results = Results.load(tmp_path / "collectives-2-none.json")
    assert {case for case, _ in results.cases()} == {
        "broadcast",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "send and back",
    }
    assert set(results.candidates()) == {"smddp", "gloo", "do-nothing", "floor", after_a_call("floor")}


@pytest.fixture
def networks() -> None:
    """Skip the test where this user may not make networks."""
    try:
        with two_networks():
            pass
    except PermissionError as error:
        pytest.skip(str(error))


def test_collectives_between_hosts_are_measured_beside_the_networks_own_time(
    run_benchmark: Callable[..., None], networks: None, tmp_path: Path
) -> None:
    run_benchmark("hosts", "--sizes", "4", "100000", "--operations", "all_reduce", "gather")
    results = Results.load(tmp_path / "hosts-2-2-float32.json")
    assert {case for case, _ in results.cases()} == {"all_reduce", "gather"}
    assert results.p50("all_reduce", 100_000, "network's own time") == 800  # so many bytes leave each host
    crossed = results.p50("all_reduce", 100_000, "smddp: bytes over the busiest link")
    assert crossed is not None and 100_000 <= crossed < 150_000  # the second: with all that the others need


def test_steps_between_hosts_are_measured_beside_computing_and_the_cable(
    run_benchmark: Callable[..., None], networks: None, tmp_path: Path
) -> None:
    run_benchmark("hosts.step", "--mebibytes", "1", "--layers", "2", "--shares", "1")
    results = Results.load(tmp_path / "hosts-step-1-1.json")
    assert results.cases() == [("8 ms of computing", 1 << 20)]
    assert set(results.candidates()) == {"computing alone", "the cable", "smddp", "gloo"}
    assert results.p50(*results.cases()[0], "the cable") == pytest.approx((8 << 20) / 1000)


def test_ddp_measures_a_small_model(run_benchmark: Callable[..., None], tmp_path: Path) -> None:
    run_benchmark("ddp", "--widths", "16")
    names = {"smddp", "smddp zero-copy", "gloo", "do-nothing"}
    assert set(Results.load(tmp_path / "ddp-2.json").candidates()) == names


def test_calls_with_cuda_tensors_are_measured_over_smddp_and_nccl(
    run_benchmark: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_benchmark, "RANK", "tests.support.mapped_benchmark")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    run_benchmark("cuda")
    results = Results.load(tmp_path / "cuda-2.json")
    assert set(results.candidates()) == {"smddp", "torch's NCCL"}
    assert len(results.cases()) == 7


def test_the_pipeline_is_measured_beside_torchs_and_one_process(
    run_benchmark: Callable[..., None], tmp_path: Path
) -> None:
    run_benchmark("pipeline", "--cases", "tiny", "--microbatches", "2")
    names = {"one process", "torch 1F1B", "opensmd", "stages alone"}
    assert set(Results.load(tmp_path / "pipeline-2.json").candidates()) == names


def test_what_a_step_of_two_stages_takes_is_broken_down_into_terms(
    run_benchmark: Callable[..., None], tmp_path: Path
) -> None:
    run_benchmark("pipeline.breakdown", "--cases", "tiny", "--microbatches", "2")
    results = Results.load(tmp_path / "pipeline-breakdown.json")
    [(_, _, *cells)] = pipeline_breakdown(results)
    *terms, whole = map(float, cells[:7])
    assert sum(terms) == pytest.approx(whole, abs=0.4)  # rounded
    assert len(cells[7:]) == len(PARTS)
    # The one step that counts is rank 0's, whichever rank the table is about.
    parts = [results.p50(*results.cases()[0], stage(part, 0)) or 0.0 for part in PARTS]
    assert sum(parts) == pytest.approx(results.p50(*results.cases()[0], OURS))


def test_one_partition_is_measured_beside_plain_pytorch(tmp_path: Path) -> None:
    command = f"{sys.executable} -m benchmarks.one_partition --cases tiny --microbatches 1 2".split()
    done = run_job([*command, *QUICK, tmp_path], cwd=ROOT, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    results = Results.load(tmp_path / "one-partition.json")
    assert set(results.candidates()) == {"plain PyTorch", "opensmd"}
    assert [microbatches for _, microbatches in results.cases()] == [1, 2]


def test_sharded_parameters_are_measured_beside_torchs_own(
    run_benchmark: Callable[..., None], tmp_path: Path
) -> None:
    run_benchmark("sharded", "--widths", "64")


def test_small_messages_are_measured_beside_torch_distributed(
    run_benchmark: Callable[..., None], tmp_path: Path
) -> None:
    run_benchmark("small_messages", "--sizes", "4", "4096")
    names = Results.load(tmp_path / "small-messages-2.json").candidates()
    assert names[:3] == ["direct", "torch.ops.opensmd", "torch.distributed"]


def give_turns(folder: Path, steps: int) -> None:
    """What a benchmark does for each of its jobs."""
    wait_until(lambda: (folder / "ready").exists())
    for _ in range(steps):
        (folder / "go").touch()
        wait_until(lambda: not (folder / "go").exists())
    (folder / "end").touch()


def memory_and_times(name: str, folder: Path) -> list[float]:
    """Of small blocks with one of the settings, on a rank: the memory, and the times of three steps."""
    memory_rank.WIDTH, memory_rank.BLOCKS, memory_rank.ROWS = 16, 2, 32
    found: list[float] = []
    for measure, steps in ((memory_rank.memory, 1), (memory_rank.times, 3)):
        shutdown()
        own = folder / f"{name}-{steps}"
        job = memory_rank.Job(name)
        if dist.get_rank() == 0:
            own.mkdir()
            threading.Thread(target=give_turns, args=(own, steps)).start()
        found += measure(job, own)
    return found


def test_memory_and_time_are_measured_with_each_setting(
    pool: Callable[[int], RankPool], tmp_path: Path
) -> None:
    results = Results("memory", "2 processes")
    for case, number in zip(CASES, range(len(CASES)), strict=True):
        measured = [FULLEST, TIMES]
        is_run = number % 4 == 1
        values = pool(2).run(memory_and_times, case, tmp_path)[0] if is_run else [100.0, 5.0, 5.0, 5.0]
        assert len(values) == 4 and min(values[1:]) > 0
        results.rows += [
            row(case, 0, what, [value]) for what, value in zip(measured, values[:2], strict=True)
        ]
        results.rows.append(row(case, 0, "ratio", [2.0]))
    lines = memory_grid(results).lines
    assert list(lines[0]) == ["two replicas", "100", "5", "2.00x"]
    assert [line[0] for line in lines] == list(CASES)


def saves(layout: str, folder: str) -> dict[str, list[saving_rank.Turn]]:
    """Of one small block, on a rank."""
    shutdown()
    return saving_rank.measure(saving_rank.Job(layout, folder, rows=16, blocks=1), 0.01)


def test_every_way_of_saving_is_measured(pool: Callable[[int], RankPool], tmp_path: Path) -> None:
    found = pool(2).run(saves, "two partitions", str(tmp_path))[0]
    assert list(found) == list(saving_rank.WAYS)
    assert all(list(turn) == sorted(turn) for turns in found.values() for turn in turns)
    assert (tmp_path / "newest").read_text() == "now_partial\n"
    results = Results("saving", "one thread a process")
    for layout in saving_rank.RANKS:
        results.rows.append(row(layout, 0, STEP, [500.0]))
        for way in saving_rank.WAYS[1:]:
            results.rows += [row(f"{layout}: {way}", 0, what, [10.0]) for what in (CALL, STOP, LOST)]
    line = list(saving_grid(results).lines[1])
    assert line == ["one process, a core free", "500", "copied at once", "10.0", "10.0", "2.0%", "10"]


def test_resident_memory_is_shown_beside_what_is_live_and_what_was_predicted() -> None:
    results = Results("resident", "one thread a process")
    for rank, size in enumerate((100.0, 200.0)):
        results.rows.append(row("GPT-2, 124 M", 0, f"{PREDICTED} of rank {rank}", [size]))
        results.rows.append(row("GPT-2, 124 M", 0, f"{KEPT}: {LIVE} of rank {rank}", [size]))
        results.rows.append(row("GPT-2, 124 M", 0, f"{KEPT}: {PEAK} of rank {rank}", [size + 20]))
    results.rows.append(row("GPT-2, 124 M", 0, f"{KEPT}: {RESIDENT_STEP}", [5.0]))
    expected = ["GPT-2, 124 M", KEPT, "5", "120, 220", "100, 200", "100, 200", "1.20"]
    assert list(map(list, resident_grid(results).lines)) == [expected]


def test_tensor_parallelism_is_measured_beside_torchs_own(
    run_benchmark: Callable[..., None], tmp_path: Path
) -> None:
    run_benchmark("tensor_parallel", "--widths", "64")
    names = {"opensmd over smddp", "DTensor over gloo", "DTensor over smddp", NO_COMMUNICATION}
    assert set(Results.load(tmp_path / "tensor-parallel-2.json").candidates()) == names


def test_steps_are_measured_without_and_with_a_timeline(
    run_benchmark: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_benchmark("timeline", "--rounds", "2", "--steps", "DDP, width 64", "split, tiny")
    results = Results.load(tmp_path / "timeline-2.json")
    assert [case for case, _ in results.cases()] == ["DDP, width 64", "split, tiny"]
    turns = ["without", *2 * ["with --timeline"], "without"]
    assert [one.candidate for one in results.rows][:4] == turns
    assert len(results.rows) % 4 == 0
    assert len(re.findall(r"[+-]\d+\.\d\d% to [+-]\d+\.\d\d%", capsys.readouterr().out)) == 2


def test_ratios_compare_with_the_best_rival_and_above_a_base() -> None:
    results = Results("claim", "layout")
    for name, p50 in {"mine": 3.0, "slow": 60.0, "fast": 30.0, "base": 1.0}.items():
        results.rows.append(row("case", 4096, name, [p50] * 3))
    plain = Ratio("plain", "mine", ["slow", "fast", "absent"])
    above = Ratio("above", "mine", ["fast"], above="base")
    last = markdown(results, [plain, above]).splitlines()[-1]
    assert last.endswith("| 10x | 14.5x |")
    over = [Ratio("over", "mine", ["slow"], above="fast"), Ratio("none", "mine", ["base"], above="fast")]
    header, _, line = markdown(results, over).splitlines()
    assert header.endswith("| over |") and line.endswith("| ∞ |")


def test_a_target_counts_its_worst_case_within_its_sizes() -> None:
    results = Results("claim", "layout")
    for nbytes, mine, rival in ((4, 1.0, 1.0), (1024, 1.0, 30.0), (2048, 1.0, 20.0)):
        results.rows.append(row("case", nbytes, "mine", [mine]))
        results.rows.append(row("case", nbytes, "rival", [rival]))
    target = Target("stem", "mine", ["rival"], factor=15, low=1024)
    assert worst(target, [results]) == Found(20.0, "case, 2 KiB", allowed=None)
    assert worst(Target("stem", "mine", ["rival"], factor=1, low=4096), [results]) is None


def limited(**times: float) -> Results:
    """One case of every candidate, whose do-nothing backend copies, beside one in which it does nothing."""
    results = Results("claim", "layout")
    for name, p50 in (times | {"do-nothing": 50.0}).items():
        results.rows.append(row("gather", 4096, name, [p50]))
    results.rows.append(row("broadcast", 4096, "do-nothing", [4.0]))
    results.rows.append(row("broadcast", 64, "do-nothing", [2.0]))
    return results


@pytest.mark.parametrize(
    ("floor", "mpi", "least"), [(8.0, 9.0, 8.0), (1.0, 2.0, 4.0), (90.0, 95.0, 20.0), (8.0, 6.0, 6.0)]
)
def test_the_machines_limit_is_the_fastest_mover_or_the_call_but_never_more_than_was_reached(
    floor: float, mpi: float, least: float
) -> None:
    results = limited(smddp=20.0, floor=floor, mpi=mpi, gloo=80.0)
    results.rows.append(row("gather", 4096, "floor zero-copy", [0.5]))
    assert least_time(results, "gather", 4096, "smddp") == least
    assert allowed(results, "gather", 4096, Ratio("", "smddp", ["gloo", "absent"])) == 80.0 / least


def test_ranks_that_share_a_core_call_one_after_the_other() -> None:
    layouts = ["2 ranks on 2 cores", "4 ranks on 2 cores", "3 ranks on 1 core"]
    assert [ranks_a_core(layout) for layout in layouts] == [1, 2, 3]
    results = limited(smddp=20.0, floor=1.0)
    results.layout = "4 ranks on 2 cores"
    assert least_time(results, "gather", 4096, "smddp") == 8.0


@pytest.mark.parametrize(
    ("floor", "mpi", "least"), [(9.0, 30.0, 9.0), (9.0, 3.0, 7.0), (35.0, 31.0, 20.0), (2.0, 30.0, 2.0)]
)
def test_a_floor_measured_through_torch_is_the_limit_unless_somebody_does_better(
    floor: float, mpi: float, least: float
) -> None:
    results = limited(smddp=20.0, floor=1.0, gloo=80.0)
    results.rows.append(row("gather", 4096, after_a_call("floor"), [floor]))
    results.rows.append(row("gather", 4096, "some MPI (C)", [mpi]))
    assert least_time(results, "gather", 4096, "smddp") == least


def test_zero_copy_has_a_floor_of_its_own_measured_through_torch() -> None:
    results = limited(smddp=20.0, floor=1.0)
    times = {"smddp zero-copy": 10.0, "floor zero-copy": 0.5, after_a_call("floor zero-copy"): 6.0}
    for name, p50 in times.items():
        results.rows.append(row("gather", 4096, name, [p50]))
    assert least_time(results, "gather", 4096, "smddp zero-copy") == 6.0
    assert least_time(results, "gather", 4096, "smddp") == 4.0  # nothing measured through torch: the old rule


@pytest.mark.parametrize(("computing", "least"), [(8.0, 8.0), (11.0, 10.0)])
def test_a_step_that_ranks_share_takes_at_least_what_it_computes(computing: float, least: float) -> None:
    results, ours = Results("claim", "layout"), "opensmd over smddp"
    for name, p50 in {ours: 10.0, NO_COMMUNICATION: computing, "rival": 16.0}.items():
        results.rows.append(row("2 layers", 0, name, [p50]))
    assert allowed(results, "2 layers", 0, Ratio("", ours, ["rival"])) == 16.0 / least


def test_without_a_floor_of_its_kind_a_candidate_has_no_limit() -> None:
    results = limited(smddp=20.0, floor=8.0, gloo=80.0)
    results.rows.append(row("gather", 4096, "smddp zero-copy", [10.0]))
    assert allowed(results, "gather", 4096, Ratio("", "smddp zero-copy", ["gloo"])) is None
    assert allowed(results, "gather", 4096, Ratio("", "smddp", ["absent"])) is None
    assert allowed(results, "gather", 4096, Ratio("", "smddp", ["gloo"], above="do-nothing")) is None


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([Found(8.0, "a", 9.0)], "yes"),
        ([Found(4.0, "a", 4.6), Found(9.0, "b", 30.0)], "no, the best found reaches 4.6x"),
        ([Found(4.0, "a", 8.5), Found(5.0, "b", 6.0)], "no"),
        ([Found(4.0, "a")], "no"),
        ([Found(4.0, "a", 5.0), Found(7.0, "b", 20.0)], "no, and at 7x (b) the best found reaches 20x"),
    ],
)
def test_a_missed_target_is_the_machines_limit_only_if_every_miss_is(found: list[Found], said: str) -> None:
    assert verdict(8, found) == said


@pytest.mark.parametrize(("nbytes", "text"), [(4, "4 B"), (1 << 18, "256 KiB"), (64 << 20, "64 MiB")])
def test_sizes_read_well(nbytes: int, text: str) -> None:
    assert human_bytes(nbytes) == text


def test_times_read_well() -> None:
    assert [human_time(t) for t in (3.312, 178.0, 12400.0)] == ["3.31 µs", "178 µs", "12.4 ms"]
