"""``smd``: each check of the doctor told from its opposite, and commands that load only when called."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from opensmd import tested_torch
from opensmd.native import build
from opensmd.tools import checks, cli, doctor
from opensmd.tools.bench import COLLECTIVES
from opensmd.tools.bench_operations import OPERATIONS, Buffers
from opensmd.tools.bench_rank import Result
from opensmd.tools.bench_rank import as_lines as as_table
from opensmd.tools.doctor import as_lines


@pytest.mark.processes
def test_help_lists_every_command_without_loading_torch() -> None:
    code = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from opensmd.tools.cli import main\n"
        "print(CliRunner().invoke(main, ['--help']).output)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    for name in ("bench", "doctor", "plan", "timeline"):
        assert f"  {name} " in done.stdout


@pytest.mark.parametrize("name", ["bench", "doctor", "plan", "timeline"])
def test_every_listed_command_exists(name: str) -> None:
    result = CliRunner().invoke(cli.main, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert "Usage:" in result.output


def test_an_unknown_command_is_refused() -> None:
    assert CliRunner().invoke(cli.main, ["cure"]).exit_code == 2


def test_sizes_that_are_no_sizes_are_refused() -> None:
    result = CliRunner().invoke(cli.main, ["bench", "--bytes", "4,two"])
    assert result.exit_code == 2
    assert "numbers of at least 4" in result.output


def test_a_missing_compiler_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert checks.check_compiler().state == "good"
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    found = checks.check_compiler()
    assert found.state == "bad"
    assert "apt-get install g++" in found.mend
    monkeypatch.setenv("CXX", "/bin/false")
    assert checks.check_compiler().state == "bad"
    assert "CXX=/bin/false" in checks.check_compiler().mend


def test_what_keeps_the_core_from_being_built_is_said_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("OPENSMD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    build._load.cache_clear()
    text = "\n".join(as_lines([checks.check_compiler(), checks.check_core()]))
    assert text.count("apt-get install g++") == 1
    assert text.count("no C++ compiler") == 1


def test_findings_keep_their_brackets_and_are_never_wrapped() -> None:
    path = "/home/" + "very-long-name/" * 30 + "opensmd_native.so"
    lines = as_lines([checks.Finding("MPI", "note", path, "pip install 'opensmd[mpi]'")])
    assert lines[0].endswith(path)
    assert lines[1].endswith("to do: pip install 'opensmd[mpi]'")


def test_the_doctors_findings_can_be_read_by_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = checks.Finding("torch", "bad", "none", "pip install 'torch[x]'")
    monkeypatch.setattr(doctor, "CHECKS", (lambda: bad,))
    result = CliRunner().invoke(cli.main, ["doctor", "--json"])
    assert result.exit_code == 1
    assert json.loads(result.output) == [
        {"what": "torch", "state": "bad", "text": "none", "mend": "pip install 'torch[x]'"}
    ]


def test_one_core_is_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.affinity, "local_cores", lambda: [[0]])
    monkeypatch.setattr(checks.affinity, "allowed_cpus", lambda: [0])
    monkeypatch.setattr(checks, "cpu_quota", lambda path: None)
    assert checks.check_cores().text.startswith("1 core, 1 of ")


def test_a_missing_and_a_small_shared_memory_are_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert checks.check_shm(str(tmp_path / "none")).state == "note"
    monkeypatch.setattr(checks, "ENOUGH_SHM", 1 << 60)
    small = checks.check_shm(str(tmp_path))
    assert small.state == "note"
    assert "--shm-size" in small.mend
    monkeypatch.setattr(checks, "ENOUGH_SHM", 1)
    assert checks.check_shm(str(tmp_path)).state == "good"


@pytest.mark.parametrize(
    ("text", "cpus"), [("max 100000", None), ("150000 100000", 1.5), ("nonsense", None), (None, None)]
)
def test_a_containers_quota_is_read(text: str | None, cpus: float | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "cpu.max").write_text(text)
    assert checks.cpu_quota(tmp_path / "cpu.max") == cpus


def test_thread_settings_are_told() -> None:
    assert "pins nothing" in checks.check_threads({"GOMP_CPU_AFFINITY": "0-3"}).text
    assert "OMP_NUM_THREADS=4" in checks.check_threads({"OMP_NUM_THREADS": "4"}).text
    assert checks.check_threads({}).state == "good"


def test_another_torch_than_the_tested_one_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.check_torch().state == "good"
    monkeypatch.setattr(torch, "__version__", "2.12.1+cpu")
    assert checks.check_torch().state == "note"
    assert f"pip install '{tested_torch.REQUIREMENT}'" in checks.check_torch().mend


def test_the_quick_checks_pass_on_this_machine_and_the_list_says_so() -> None:
    quick = [check for check in checks.CHECKS if check is not checks.check_core]
    findings = [check() for check in quick]
    assert [each.what for each in findings if each.state == "bad"] == []
    text = "\n".join(as_lines(findings))
    for finding in findings:
        assert finding.what in text


@pytest.mark.processes
def test_bench_measures_and_checks_every_collective(tmp_path: Path) -> None:
    words = ["bench", "all", "-n", "3", "--bytes", "4,4096", "--seconds", "0.02", "--json"]
    command = [sys.executable, "-m", "opensmd.tools.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ranks"] == 3
    cases = [(row["collective"], row["bytes"], row["backend"]) for row in found["results"]]
    parts = ("all_gather", "reduce_scatter", "gather", "scatter", "all_to_all")  # a part for each rank
    for name in OPERATIONS:
        sizes = (12, 4104) if name in parts else (4, 4096)
        assert [case for case in cases if case[0] == name] == [*product([name], sizes, ("gloo", "smddp"))]
    assert "Warning" not in done.stderr
    for row in found["results"]:
        assert row["wrong"] == 0
        assert row["microseconds"] > 0 and row["bus_gb_per_s"] > 0


def test_wrong_elements_are_counted() -> None:
    buffers = Buffers(6, rank=1, size=2)
    for operation in OPERATIONS.values():
        buffers.reset()
        expected = operation.expected(buffers)
        if expected is not None:
            operation.result(buffers).copy_(expected)
            assert operation.wrong(buffers) == 0
            operation.result(buffers)[0] += 1
            assert operation.wrong(buffers) == 1


def test_bus_bandwidth_is_counted_as_nccl_tests_does() -> None:
    shares = {name: operation.share(4) for name, operation in OPERATIONS.items()}
    assert shares["all_reduce"] == 1.5
    for name in ("all_gather", "reduce_scatter", "gather", "scatter", "all_to_all"):
        assert shares[name] == 0.75
    for name in ("broadcast", "reduce", "send_recv"):
        assert shares[name] == 1


def test_the_benchs_table_has_a_line_a_case() -> None:
    rows = [Result("reduce", 4, "gloo", 30.0, 0.5, 0), Result("reduce", 4, "smddp", 10.0, 1.5, 2)]
    lines = as_table(rows)
    assert lines[1].split() == ["reduce", "4", "30.0", "0.500", "10.0", "1.500", "3.0x", "2"]
    assert {len(line) for line in lines} == {len(lines[0])}


def test_bench_knows_its_collectives_without_loading_torch() -> None:
    assert list(OPERATIONS) == list(COLLECTIVES)
    result = CliRunner().invoke(cli.main, ["bench", "gossip"])
    assert result.exit_code == 2
    assert "no collective 'gossip'; there are all_reduce, " in result.output
