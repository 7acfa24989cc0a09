"""For mkdocs: what GitHub shows in Markdown as it is, and mkdocs does not.

That is links that leave docs/, to examples and sources, and the words after ``python`` by which examples say
how they are run as tests.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<path>\.\./[^)#\s]*)(?P<anchor>#[^)\s]*)?\)")
FENCE = re.compile(r"^```python .*$", re.MULTILINE)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page's text for the site; a link that leaves docs/ becomes its text and the path in the repository.

    Raises:
        ValueError: Nothing lies where a link points to.
    """
    here = Path(page.file.abs_src_path).parent

    def replaced(link: re.Match[str]) -> str:
        target = (here / link["path"]).resolve()
        if not target.exists():
            raise ValueError(f"{page.file.src_path} links to {link['path']}, which does not exist")
        if target.is_relative_to(ROOT / "docs"):
            return link[0]
        path = str(target.relative_to(ROOT))
        return f"`{path}`" if link["text"] in (path, target.name) else f"{link['text']} (`{path}`)"

    return FENCE.sub("```python", LINK.sub(replaced, markdown))
