"""What the build of the native core depends on, and where it looks."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path

import pytest

from opensmd.environment.settings import Settings
from opensmd.native import build, objects, recipe
from opensmd.native.progress import BuildProgress, expected_pace
from opensmd.native.toolchain import find_compiler
from tests.support.patience import PATIENCE


def fake_compiler(folder: Path, version: str) -> Settings:
    path = folder / "cxx"
    path.write_text(f"#!/bin/sh\necho {version}\n")
    path.chmod(0o755)
    return Settings(cache_dir=folder / "cache", compiler=str(path))


def small_tree(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("// nothing")


def test_the_key_depends_on_flags_and_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    key = recipe.base_key()
    assert recipe.base_key() == key
    monkeypatch.setattr(recipe, "FLAGS", (*recipe.FLAGS, "-DMORE"))
    assert recipe.base_key() != key
    monkeypatch.undo()
    monkeypatch.setattr(recipe.torch, "__version__", "9.9")
    assert recipe.base_key() != key


def test_the_key_depends_on_every_source_and_header_however_deep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_tree(tmp_path, "core/a.cpp", "core/memory/a.hpp", "torch/a.cpp", "torch/x/y/a.hpp")
    monkeypatch.setattr(recipe, "SOURCES", tmp_path)
    keys = {recipe.base_key()}
    for file in tmp_path.rglob("*.?pp"):
        file.write_text(file.read_text() + "// changed")
        keys.add(recipe.base_key())
    assert len(keys) == 5


def test_every_source_is_compiled_once_and_torch_s_headers_are_read_once() -> None:
    compiled = [source for unit in recipe.units() for source in unit.sources]
    assert sorted(compiled) == sorted(recipe.SOURCES.rglob("*.cpp"))
    assert [unit.core for unit in recipe.units()].count(False) == 1
    for unit in recipe.units():
        assert len({source.relative_to(recipe.SOURCES).parts[0] == "core" for source in unit.sources}) == 1


def test_a_changed_source_changes_the_keys_of_what_contains_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_tree(tmp_path, "core/memory/a.cpp", "core/memory/b.cpp", "core/memory/a.hpp")
    small_tree(tmp_path, "core/kernels/kernels.cpp", "pipeline/d.cpp", "torch/e.cpp", "torch/hosts/f.cpp")
    small_tree(tmp_path, "torch/e.hpp")
    monkeypatch.setattr(recipe, "SOURCES", tmp_path)

    def keys() -> dict[str, str]:
        return {
            " ".join(source.stem for source in unit.sources): recipe.object_key(unit, "cxx 1")
            for unit in recipe.units()
        }

    def changed_by(name: str) -> set[str]:
        before = keys()
        (tmp_path / name).write_text((tmp_path / name).read_text() + "int a;")
        return {sources for sources, key in keys().items() if key != before[sources]}

    everything = {"a b", "kernels", "d e f"}
    assert set(keys()) == everything and len(set(keys().values())) == 3
    assert changed_by("core/memory/b.cpp") == {"a b"}
    assert changed_by("core/kernels/kernels.cpp") == {"kernels"}
    assert changed_by("pipeline/d.cpp") == {"d e f"}
    assert changed_by("torch/e.hpp") == {"d e f"}
    assert changed_by("core/memory/a.hpp") == everything


def test_only_what_is_outside_the_core_sees_torch() -> None:
    for unit in recipe.units():
        flags = " ".join(recipe.compile_flags(unit))
        assert ("torch/csrc/api/include" in flags) is not unit.core
        assert "-march" not in flags, "the core would run on this machine alone"


def test_objects_that_no_build_has_used_for_long_are_removed(tmp_path: Path) -> None:
    used, recent, forgotten = (tmp_path / f"{name}.o" for name in ("used", "recent", "forgotten"))
    for one in (used, recent, forgotten):
        one.write_text("")
    long_ago = time.time() - (objects.UNUSED_DAYS + 1) * 86400
    os.utime(used, (long_ago, long_ago))
    os.utime(forgotten, (long_ago, long_ago))
    objects._prune(tmp_path, used={used})
    assert sorted(tmp_path.iterdir()) == [recent, used]
    objects._prune(tmp_path, used=set())
    assert used.exists(), "its use is not noted"


def test_without_a_compiler_a_finished_build_of_another_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    settings = Settings(cache_dir=tmp_path / "cache")
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler was found"):
        build.build(settings)
    library = tmp_path / "cache" / f"{recipe.base_key()}-abcd" / f"{build.MODULE}.so"
    library.parent.mkdir(parents=True)
    library.write_text("built elsewhere")
    assert build.build(settings) == library


def test_a_cache_that_cannot_be_written_to_names_the_variable(tmp_path: Path) -> None:
    settings = fake_compiler(tmp_path, "1.0")
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(build.BuildError, match="OPENSMD_CACHE_DIR"):
        build.build(settings)


def test_another_system_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build.sys, "platform", "darwin")
    with pytest.raises(build.BuildError, match="Linux only; this is darwin"):
        build.build(Settings(cache_dir=tmp_path))


def test_a_broken_library_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "_loaded", [])  # as in a fresh process
    settings = fake_compiler(tmp_path, "2.0")
    base, compiler = recipe.base_key(), find_compiler(settings.compiler)
    assert compiler is not None
    folder = settings.cache_dir / f"{base}-{recipe.digest([compiler.key])[:8]}"
    folder.mkdir(parents=True)
    (folder / f"{build.MODULE}.so").write_text("not a library")
    with pytest.raises(build.BuildError, match="cannot be loaded"):
        build.load(settings)


def test_a_process_keeps_its_core_when_another_compiler_is_set(tmp_path: Path) -> None:
    """A second core would give torch the same operators again, which ends the process."""
    core = build.load()
    assert build.load(fake_compiler(tmp_path, "4.0")) is core


@pytest.mark.parametrize("cxx", ["/bin/false", "no-such-compiler", "/bin/false -m64"])
def test_a_compiler_that_is_asked_for_and_is_none_is_an_error(
    cxx: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENSMD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", cxx)
    with pytest.raises(build.BuildError, match=f"CXX={cxx}.*\n?.*unset it"):
        build.compile_core()


def test_a_compiler_may_be_several_words(tmp_path: Path) -> None:
    one = fake_compiler(tmp_path, "3.0").compiler
    found = find_compiler(f"env {one} -flag")
    assert found is not None and found.version == "3.0"
    assert [Path(found.command[0]).name, *found.command[1:]] == ["env", one, "-flag"]


class Clock:
    """Time that a test turns forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("opensmd.native.progress.time.monotonic", lambda: self.now)


def test_the_rest_is_estimated_from_the_steps_that_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    progress = BuildProgress([10, 10, 20], workers=1, what="a core")
    assert progress.remaining() == pytest.approx(40)
    with progress.step(10):
        clock.now += 5
        assert progress.remaining() == pytest.approx(35)
        clock.now += 25  # three times as long as expected
        assert progress.remaining() >= 3 * 30
    assert progress.remaining() == pytest.approx(90)
    with pytest.raises(ZeroDivisionError), progress.step(10):
        raise ZeroDivisionError
    assert progress.remaining() == pytest.approx(90), "a failed step counts as done"


def test_beside_other_processes_a_build_is_expected_to_take_longer_from_the_start() -> None:
    assert expected_pace(2, running=0.1, processors=4) == 1.0
    assert expected_pace(2, running=6.0, processors=2) == 4.0
    out = io.StringIO()
    assert BuildProgress([10], workers=1, what="a core", pace=4.0, out=out).remaining() == pytest.approx(40)


def test_steps_side_by_side_take_less_time_but_no_less_than_the_longest() -> None:
    assert BuildProgress([10, 10], workers=2, what="a core").remaining() == pytest.approx(10)


def shown(monkeypatch: pytest.MonkeyPatch, *, terminal: bool, pace: float = 1.0) -> str:
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: terminal)
    monkeypatch.setattr("opensmd.native.progress.QUIET", 0.0)
    monkeypatch.setattr("opensmd.native.progress.FIRST", 0.02)
    with BuildProgress([1, 1], workers=1, what="a core", pace=pace, out=out) as progress:
        for said in ("s left", "s left" if terminal else "1 of 2 steps done"):
            wait_until_said(out, said)
            with progress.step(1):
                pass
    return out.getvalue()


def wait_until_said(out: io.StringIO, text: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while text not in out.getvalue():
        assert time.monotonic() < deadline, out.getvalue()
        time.sleep(0.01)


def test_without_a_terminal_progress_is_a_few_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(monkeypatch, terminal=False).splitlines()
    assert lines[0] == "opensmd: compiling a core, about 2 s left"
    assert any(line.startswith("opensmd: compiling: 1 of 2 steps done, about ") for line in lines)
    assert lines[-1].startswith("opensmd: compiled in ")
    assert len(lines) < 20  # each pause is twice the one before
    busy = shown(monkeypatch, terminal=False, pace=2.0).splitlines()
    assert busy[0] == "opensmd: compiling a core, about 4 s left (other processes keep the machine busy)"


def test_on_a_terminal_progress_is_one_line_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    text = shown(monkeypatch, terminal=True)
    assert "compiling a core" in text and "s left" in text and "\x1b[2K" in text


def test_a_quick_build_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with BuildProgress([1], workers=1, what="a core") as progress, progress.step(1):
        pass
    assert capsys.readouterr().err == ""
