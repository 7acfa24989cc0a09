"""What the build of the native core depends on, and where it looks."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from opensmd.environment.settings import Settings
from opensmd.native import build


def fake_compiler(folder: Path, version: str) -> Settings:
    path = folder / "cxx"
    path.write_text(f"#!/bin/sh\necho {version}\n")
    path.chmod(0o755)
    return Settings(cache_dir=folder / "cache", compiler=str(path))


def test_the_key_depends_on_flags_and_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    key = build._base_key()
    assert build._base_key() == key
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DMORE"))
    assert build._base_key() != key
    monkeypatch.undo()
    monkeypatch.setattr(build.torch, "__version__", "9.9")
    assert build._base_key() != key


def test_the_key_depends_on_every_source_and_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for room in ("core", "torch"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "a.cpp").write_text("int a;")
        (tmp_path / room / "a.hpp").write_text("extern int a;")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    keys = {build._base_key()}
    for file in tmp_path.glob("*/*"):
        file.write_text(file.read_text() + "// changed")
        keys.add(build._base_key())
    assert len(keys) == 5


def test_a_changed_source_changes_the_keys_of_what_contains_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for room in ("core", "torch"):
        (tmp_path / room).mkdir()
        for name in ("a.cpp", "b.cpp", "a.hpp"):
            (tmp_path / room / name).write_text("// nothing")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    toolchain = build.Toolchain("cxx", "1")

    def keys() -> dict[tuple[str, ...], str]:
        return {
            tuple(source.name for source in unit.sources): build._object_key(unit, toolchain)
            for unit in build._units()
        }

    def changed_by(path: Path) -> set[tuple[str, ...]]:
        before = keys()
        path.write_text(path.read_text() + "int a;")
        return {sources for sources, key in keys().items() if key != before[sources]}

    adapter, a, b = ("a.cpp", "b.cpp"), ("a.cpp",), ("b.cpp",)
    assert len(set(keys().values())) == 3
    assert changed_by(tmp_path / "core" / "a.cpp") == {a}
    assert changed_by(tmp_path / "torch" / "b.cpp") == {adapter}
    assert changed_by(tmp_path / "torch" / "a.hpp") == {adapter}
    assert changed_by(tmp_path / "core" / "a.hpp") == {adapter, a, b}


def test_objects_that_no_build_has_used_for_long_are_removed(tmp_path: Path) -> None:
    used, recent, forgotten = (tmp_path / f"{name}.o" for name in ("used", "recent", "forgotten"))
    for each in (used, recent, forgotten):
        each.write_text("")
    long_ago = time.time() - (build.UNUSED_DAYS + 1) * 86400
    os.utime(used, (long_ago, long_ago))
    os.utime(forgotten, (long_ago, long_ago))
    build._prune(tmp_path, used={used})
    assert sorted(tmp_path.iterdir()) == [recent, used]
    build._prune(tmp_path, used=set())
    assert used.exists(), "its use is not noted"


def test_without_a_compiler_a_finished_build_of_another_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    settings = Settings(cache_dir=tmp_path / "cache")
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler was found"):
        build.build(settings)
    library = tmp_path / "cache" / f"{build._base_key()}-abcd" / f"{build.MODULE}.so"
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


def test_a_broken_library_says_what_to_do(tmp_path: Path) -> None:
    settings = fake_compiler(tmp_path, "2.0")
    base, compiler = build._base_key(), build._find_compiler(settings)
    assert compiler is not None
    folder = settings.cache_dir / f"{base}-{build._digest([compiler.version])[:8]}"
    folder.mkdir(parents=True)
    (folder / f"{build.MODULE}.so").write_text("not a library")
    with pytest.raises(build.BuildError, match="cannot be loaded"):
        build.load(settings)
