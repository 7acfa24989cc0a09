"""The site of the documentation shows every page: mkdocs refuses to build it otherwise."""

from __future__ import annotations

import re

from tests.support.ranks import ROOT

PAGE = re.compile(r"^ +- [^:\n]+: ([\w./-]+\.md)$", re.MULTILINE)


def test_every_page_is_in_the_navigation_and_every_entry_is_a_page() -> None:
    docs = ROOT / "docs"
    pages = {str(path.relative_to(docs)) for path in docs.rglob("*.md")}
    entries = PAGE.findall((ROOT / "mkdocs.yml").read_text())
    assert sorted(entries) == sorted(pages)
