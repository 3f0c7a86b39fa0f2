"""The files of the page hold nothing that could run a text of the data, or ask another place."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "shardmill" / "inspect" / "page"
FILES = sorted(PAGE.iterdir())
FORBIDDEN = [
    *("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "createContextualFragment"),
    *("DOMParser", "srcdoc", "eval(", "new Function", "setHTMLUnsafe", "javascript:"),
]
SVG = "http://www.w3.org/2000/svg"


def test_there_is_a_page_and_all_of_it_is_installed():
    assert {"index.html", "main.js", "base.css"} <= {path.name for path in FILES}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["shardmill"]
    missing = [path for path in FILES if not any(_fits(path, pattern) for pattern in patterns)]
    assert missing == []


def _fits(path: Path, pattern: str) -> bool:
    return path.relative_to(ROOT / "shardmill").match(pattern)


def test_no_file_makes_markup_or_code_of_a_text():
    found = [(path.name, word) for path in FILES for word in FORBIDDEN if word in path.read_text()]
    assert found == []


def test_no_file_names_another_place():
    for path in FILES:
        assert set(re.findall(r"\w+://[^\"' )]+", path.read_text())) <= {SVG}, path.name


def test_the_document_has_no_inline_script_style_or_handler():
    text = (PAGE / "index.html").read_text()
    assert re.findall(r"<script(?![^>]*\bsrc=)", text) == []
    assert re.findall(r"<style|\sstyle=|\son\w+=", text) == []


def test_every_import_is_a_file_that_gives_the_name():
    checked = 0
    for path in PAGE.glob("*.js"):
        for names, file in re.findall(r"import \{([^}]*)\} from \"\./([^\"]+)\"", path.read_text()):
            given = (PAGE / file).read_text()
            for name in (part.split(" as ")[0].strip() for part in names.split(",")):
                if name:
                    pattern = rf"export (async )?(function|const|class) {re.escape(name)}\b"
                    assert re.search(pattern, given), f"{path.name}: {name} of {file}"
                    checked += 1
    assert checked > 50


def test_every_module_begins_with_what_it_is_for_and_is_plain_ascii():
    for path in FILES:
        text = path.read_text()
        assert text.isascii(), path.name
        if path.suffix == ".js":
            assert text.startswith("// "), path.name
