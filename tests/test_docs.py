"""What the documents show works: every Python block runs, every link leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "shardmill/shards/FORMAT.md"]
)
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def with_blocks() -> list[Path]:
    # FORMAT.md's reader needs a store to read: tests/shards runs it on one.
    return [
        path for path in DOCUMENTS if path.name != "FORMAT.md" and BLOCK.search(path.read_text())
    ]


def test_the_readme_shows_python() -> None:
    assert ROOT / "README.md" in with_blocks()


@pytest.mark.parametrize("path", with_blocks(), ids=lambda p: p.name)
def test_the_python_blocks_of_a_document_run(path: Path, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__docs__"}
    for block in BLOCK.findall(path.read_text()):
        exec(compile(block, path.name, "exec"), names)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_links_lead_to_files_that_exist(path: Path) -> None:
    for target in LINK.findall(path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{path.name} links to {target}"
