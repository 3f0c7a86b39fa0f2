"""What the documentation site needs beside docs/: pages that live elsewhere, and links to them.

In: the repository.  Out: README.md as the home page, FORMAT.md, CHANGELOG.md and CONTRIBUTING.md as
pages; links between files of the repository as links between pages.
Promise: every text has one place, and its links work there and on the site; a link to a file that
is no page, a source for instance, becomes its name.
Not here: the reference, which is made from docstrings (docs_modules.py).
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
ELSEWHERE = {
    "index.md": "README.md",
    "format.md": "shardmill/store/FORMAT.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
}
"""Page of the site -> file of the repository."""
LINK = re.compile(r"\[([^\]\[]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, path in ELSEWHERE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: Any) -> str:
    """The text with the links of the site; blocks of code are left as they are."""
    here = _place(page.file.src_uri)
    pages = {_place(file.src_uri): file.src_uri for file in files}
    parts, at = [], 0
    for block in FENCE.finditer(markdown):
        parts += [_relink(markdown[at : block.start()], here, page, pages), block.group()]
        at = block.end()
    return "".join([*parts, _relink(markdown[at:], here, page, pages)])


def _place(page: str) -> Path:
    """The file of the repository that a page shows."""
    return ROOT / ELSEWHERE.get(page, f"docs/{page}")


def _relink(text: str, here: Path, page: Page, pages: dict[Path, str]) -> str:
    def link(found: re.Match[str]) -> str:
        name, target, anchor = found.group(1), found.group(2), found.group(3) or ""
        if "://" in target:
            return found.group()
        path = (here.parent / target).resolve()
        if path in pages:
            up = len(PurePosixPath(page.file.src_uri).parts) - 1
            return f"[{name}]({'../' * up}{pages[path]}{anchor})"
        return name if path.exists() else found.group()  # mkdocs reports dead links

    return LINK.sub(link, text)
