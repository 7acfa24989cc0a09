"""Unit tests lie where what they test lies, so that whoever changes a file finds them."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
UNIT = ROOT / "tests" / "unit"
# tests of what is no package: this test, the docs, the benchmarks, the tests' own support
PROJECT = "project"


def test_unit_tests_mirror_the_source_tree() -> None:
    strays = {
        str(path.relative_to(UNIT))
        for path in UNIT.rglob("test_*.py")
        if path.parent.name != PROJECT and not _has_a_source(path.relative_to(UNIT))
    }
    assert strays == set(), (
        "tests/unit/FOLDER/test_NAME.py tests src/opensmd/FOLDER/NAME.py; what comes after NAME_ is free, "
        "and test_FOLDER.py tests what several files of the folder do together"
    )


def _has_a_source(test: Path) -> bool:
    """Whether a file or a folder of the sources has the name of a test file, in the folder of that name."""
    folder = test.parent
    source = (
        ROOT / "src" / folder if folder.parts[:1] == ("smdistributed",) else ROOT / "src/opensmd" / folder
    )
    name = test.stem.removeprefix("test_")
    names = {path.stem.removeprefix("_") for path in source.glob("*.py")}
    names |= {path.name for path in source.iterdir() if path.is_dir()} if source.is_dir() else set()
    words = name.split("_")
    return name == folder.name or any("_".join(words[:count]) in names for count in range(1, len(words) + 1))
