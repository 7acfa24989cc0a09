"""What is compiled, and that each change of it changes the keys that it should and no others."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from opensmd.native import recipe


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the sources to change."""
    copy = tmp_path / "csrc"
    shutil.copytree(recipe.SOURCES, copy)
    monkeypatch.setattr(recipe, "SOURCES", copy)
    return copy


def keys() -> dict[tuple[bool, str], str]:
    return {(unit.core, unit.sources[0].name): recipe.object_key(unit, "g++ 14") for unit in recipe.units()}


def changed(path: Path) -> dict[bool, int]:
    """How many units of the core, and of the others, a comment at the end of a file lets compile again."""
    before = keys()
    with path.open("a") as file:
        file.write("// changed\n")
    after = keys()
    count = {True: 0, False: 0}
    for unit, key in before.items():
        count[unit[0]] += after[unit] != key
    return count


def test_every_source_is_compiled_once_and_the_longest_first() -> None:
    every = recipe.units()
    compiled = [source for unit in every for source in unit.sources]
    assert sorted(compiled) == sorted(recipe.SOURCES.rglob("*.cpp"))
    assert [unit.seconds for unit in every] == sorted((unit.seconds for unit in every), reverse=True)
    assert all(unit.core for unit in recipe.units(core_only=True))


def test_the_core_sees_neither_torch_nor_python() -> None:
    for unit in recipe.units():
        flags = recipe.compile_flags(unit)
        assert any(flag.startswith("-isystem") for flag in flags) is not unit.core
        assert ("-O3" in flags) is unit.core


def test_a_unit_includes_its_sources_by_their_place_below_csrc() -> None:
    unit = next(unit for unit in recipe.units() if unit.core)
    assert unit.text.splitlines()[0] == f'#include "{unit.sources[0].relative_to(recipe.SOURCES)}"'
    assert unit.text.count("#include") == len(unit.sources)


def test_a_header_of_the_core_lets_all_be_compiled_again_and_others_only_what_knows_torch(
    sources: Path,
) -> None:
    core = sum(unit.core for unit in recipe.units())
    others = len(recipe.units()) - core
    header = next((sources / "core").rglob("*.hpp"))
    outside = next(path for path in sources.rglob("*.hpp") if recipe.CORE not in path.parts[-3:])
    assert changed(header) == {True: core, False: others}
    assert changed(outside) == {True: 0, False: others}


def test_a_source_lets_its_own_unit_alone_be_compiled_again(sources: Path) -> None:
    kernels = next(sources.rglob("kernels.cpp"))
    assert changed(kernels) == {True: 1, False: 0}


def test_the_library_depends_on_every_source_and_the_objects_on_compiler_and_flags(sources: Path) -> None:
    before = recipe.base_key()
    with next(sources.rglob("*.cpp")).open("a") as file:
        file.write("// changed\n")
    assert recipe.base_key() != before
    unit = recipe.units()[0]
    assert (
        len(
            {
                recipe.object_key(unit, "g++ 14"),
                recipe.object_key(unit, "g++ 15"),
                recipe.object_key(unit, "g++ 14", ["-g"]),
            }
        )
        == 3
    )
