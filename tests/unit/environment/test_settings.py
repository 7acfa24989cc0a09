"""Settings of the backend: read from the environment, and refused where they make no sense."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import pytest

import opensmd
from opensmd.environment.settings import VARIABLES, Settings, misspelt


def test_settings_come_from_the_environment() -> None:
    settings = Settings.from_environment(
        {"OPENSMD_CACHE_DIR": "/tmp/x", "OPENSMD_NATIVE": "0", "OPENSMD_HEAP_BYTES": "4096", "CXX": "clang++"}
    )
    assert settings == Settings(Path("/tmp/x"), False, "clang++", None, 4096)
    assert Settings.from_environment({}).native
    assert Settings.from_environment({}).compression is None
    assert not Settings.from_environment({}).keep_tensors
    assert Settings.from_environment({"OPENSMD_KEEP_TENSORS": "1"}).keep_tensors
    assert Settings.from_environment({"OPENSMD_COMPRESSION": "INT8"}).compression == "int8"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("OPENSMD_NATIVE", "maybe"),
        ("OPENSMD_HEAP_BYTES", "1 GiB"),
        ("OPENSMD_HEAP_BYTES", "-1"),
        ("OPENSMD_HEAP_BYTES", str(2**64 - 4096)),
        ("OPENSMD_COMPRESSION", "4bit"),
        ("OPENSMD_KEEP_TENSORS", "some"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=name):
        Settings.from_environment({name: text})


def test_misspelt_variables_are_known_by_what_they_resemble() -> None:
    environment = dict.fromkeys(
        (*VARIABLES, "OPENSMD_NATVE", "OPENSMD_HEAP_BYTE", "OPENSMD_OF_A_SCRIPT"), "1"
    )
    assert misspelt(environment) == {
        "OPENSMD_HEAP_BYTE": "OPENSMD_HEAP_BYTES",
        "OPENSMD_NATVE": "OPENSMD_NATIVE",
    }


def test_all_variables_of_the_package_are_known() -> None:
    sources = [path.read_text() for path in Path(opensmd.__file__).parent.rglob("*.py")]
    names = {name for source in sources for name in re.findall(r'"(OPENSMD_[A-Z_]+)"', source)}
    assert names - {"OPENSMD_"} == VARIABLES


def test_an_empty_home_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "")
    found = [Settings.from_environment(each).cache_dir for each in ({}, {"OPENSMD_CACHE_DIR": "~/x"})]
    monkeypatch.delenv("HOME")
    assert found == [Path("~/.cache/opensmd").expanduser(), Path("~/x").expanduser()]


@pytest.mark.parametrize("home", [None, ""])
def test_a_user_without_a_home_has_a_folder_of_his_own_for_the_core(
    monkeypatch: pytest.MonkeyPatch, home: str | None
) -> None:
    monkeypatch.delenv("HOME", raising=False)
    if home is not None:
        monkeypatch.setenv("HOME", home)
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
    folder = Path(tempfile.gettempdir()) / f"opensmd-{os.geteuid()}"
    assert Settings.from_environment({}).cache_dir == folder
    assert Settings.from_environment({"OPENSMD_CACHE_DIR": "/tmp/x"}).cache_dir == Path("/tmp/x")


def test_speeds_of_the_network_are_taken_in_the_units_of_smd_plan_comm() -> None:
    settings = Settings.from_environment(
        {"OPENSMD_NETWORK": "link=8, delay=20", "OPENSMD_NETWORK_REPORT": "1"}
    )
    assert settings.network == pytest.approx({"link": 1e9, "delay": 20e-6}) and settings.network_report
    for wrong in ("link", "link=", "speed=1", "link=0", "delay=-1", "link=inf", "link=nan"):
        with pytest.raises(ValueError, match="OPENSMD_NETWORK="):
            Settings.from_environment({"OPENSMD_NETWORK": wrong})
