"""The documentation site: it builds with every warning an error, and asks nobody for anything."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "shardmill/store/FORMAT.md"])
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
"""Elements of a page that make a browser ask for something."""


class Fetches(HTMLParser):
    """The addresses a page makes a browser ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if FETCHED.get(tag) == name]


def foreign(html: str) -> list[str]:
    parser = Fetches()
    parser.feed(html)
    return [address for address in parser.addresses if urlsplit(address).netloc]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("docs") / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(out)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.mark.slow
def test_the_site_builds_and_fetches_nothing_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > len(list(ROOT.glob("docs/**/*.md")))
    for page in pages:
        assert foreign(page.read_text("utf-8")) == [], page.relative_to(site)
    for sheet in site.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//", sheet.read_text("utf-8")) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("index.html", "What you can count on"),  # README.md
        ("format/index.html", "meta.json"),  # shardmill/store/FORMAT.md
        ("changelog/index.html", "unreleased"),
        ("reference/build/index.html", 'id="shardmill.building.build_store"'),
        ("reference/testing/index.html", 'id="shardmill.testing.packing.assert_packer_laws"'),
        # a field's comment is its sentence in the reference
        ("reference/records/index.html", "input rows or files consumed by this batch"),
    ],
)
def test_a_text_that_lives_elsewhere_has_its_page(site: Path, page: str, words: str) -> None:
    assert words in (site / page).read_text("utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/reference/*.md")), ids=lambda p: p.stem)
def test_every_public_name_of_a_room_is_in_the_reference(site: Path, path: Path) -> None:
    html = (site / "reference" / path.stem / "index.html").read_text("utf-8")
    for room in re.findall(r"^::: ([\w.]+)$", path.read_text(), re.MULTILINE):
        module = importlib.import_module(room)
        own = [name for name, value in vars(module).items() if is_own(module, name, value)]
        told = [name for name in getattr(module, "__all__", own) if is_told(module, name)]
        missing = [name for name in told if f'id="{room}.{name}"' not in html]
        assert missing == [], f"{path.name} does not show these names of {room}"


def is_own(module: ModuleType, name: str, value: object) -> bool:
    """Whether a module without `__all__` defines this name for others."""
    return getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")


def is_told(module: ModuleType, name: str) -> bool:
    """Whether a name has a sentence of its own. Data and types under another name have that of
    their type; a dataclass without one has its signature; a function that is called as the file it
    is in is shown as that file."""
    value = getattr(module, name)
    words = (getattr(value, "__doc__", "") or "").strip()
    own = callable(value) and not value.__module__.startswith(("typing", "builtins"))
    is_file = getattr(value, "__module__", "").rpartition(".")[2] == name
    is_file = is_file or Path(module.__file__ or "").with_name(f"{name}.py").exists()
    return own and bool(words) and not words.startswith(f"{name}(") and not is_file


def test_every_room_has_a_page_in_the_reference() -> None:
    shown = set[str]()
    for path in ROOT.glob("docs/reference/*.md"):
        shown |= set(re.findall(r"^::: shardmill\.?(\w*)", path.read_text(), re.MULTILINE))
    rooms = {path.parent.name for path in ROOT.glob("shardmill/*/__init__.py")}
    assert rooms - {"cli", "storage"} <= shown  # nothing in these is for callers


def test_foreign_addresses_are_noticed() -> None:
    html = '<script src="a.js"></script><link href="https://x.example/a.css"><img src="//y/z.png">'
    assert foreign(html) == ["https://x.example/a.css", "//y/z.png"]
    assert foreign('<a href="https://x.example/">words</a>') == []


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_to_files_that_exist(path: Path) -> None:
    for target in LINK.findall(path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{path.name} links to {target}"
