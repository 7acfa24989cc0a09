"""Each check of the doctor, told from its opposite."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from opensmd import tested_torch
from opensmd.native import build
from opensmd.tools import checks
from opensmd.tools.doctor import as_lines


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
    monkeypatch.setattr(build, "_loaded", [])  # as in a fresh process
    text = "\n".join(as_lines([checks.check_compiler(), checks.check_core()]))
    assert text.count("apt-get install g++") == 1
    assert text.count("no C++ compiler") == 1


def test_one_core_is_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.affinity, "local_cores", lambda: [[0]])
    monkeypatch.setattr(checks, "allowed_cpus", lambda: [0])
    monkeypatch.setattr(checks, "cpu_quota", lambda: None)
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


def test_thread_settings_are_told() -> None:
    assert "pins nothing" in checks.check_threads({"GOMP_CPU_AFFINITY": "0-3"}).text
    assert "OMP_NUM_THREADS=4" in checks.check_threads({"OMP_NUM_THREADS": "4"}).text
    assert checks.check_threads({}).state == "good"


def test_another_torch_than_the_tested_one_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.check_torch().state == "good"
    monkeypatch.setattr(torch, "__version__", "2.12.1+cpu")
    assert checks.check_torch().state == "note"
    assert f"pip install '{tested_torch.REQUIREMENT}'" in checks.check_torch().mend


def test_a_host_whose_name_dns_cannot_know_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.socket, "gethostname", lambda: "h" * 64)
    assert checks.check_network().state == "note"
    assert "does not resolve" in checks.check_network().text
