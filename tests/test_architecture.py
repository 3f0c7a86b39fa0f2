"""Who may import whom: the house of the design, as a table that fails on any other import."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GROUND = {
    "records",
    "messages",
    "protocols",
    "errors",
    "arguments",
    "machine",
    "threads",
    "urls",
    "lazy",
    "storage",
}
CORE = {"sources", "tokenizers", "chat", "packing", "sampling", "store", "building", "loading"}

# package -> packages of shardmill it may import. Lazy imports count.
MAY_IMPORT: dict[str, set[str]] = {
    "records": set(),
    "messages": set(),
    "urls": set(),
    "lazy": set(),
    "threads": {"errors"},
    "errors": {"urls"},  # no message holds a secret
    "protocols": {"records"},
    "arguments": {"errors"},
    "machine": {"errors"},
    "storage": GROUND,
    "sources": GROUND,
    "tokenizers": GROUND,
    "chat": GROUND,
    "packing": GROUND,
    "sampling": GROUND,
    "store": GROUND | {"packing"},  # a stored plan names the packer that made it
    # remote: a build whose target is a URL pushes the finished store
    "building": GROUND | {"sources", "tokenizers", "chat", "packing", "store", "remote"},
    # sources and tokenizers: streams read text, and a config names a tokenizer
    # trainers: `to="torch"` of load and stream names the module that makes tensors
    "loading": GROUND | (CORE - {"building"}) | {"trainers"},
    "trainers": GROUND | {"loading"},
    "formats": GROUND | {"packing", "store"},
    "remote": GROUND | {"store", "formats"},
    "compat": GROUND | (CORE - {"building"}) | {"formats", "remote", "trainers"},
    # build: blame cuts and counts the input as the build did
    "inspect": GROUND | CORE,
    "testing": GROUND | CORE,
    "cli": GROUND | CORE | {"formats", "remote", "inspect", "compat", "trainers"},
    "__init__": GROUND | CORE | {"remote", "inspect"},  # inspect: `look`, before a build
    "__main__": {"cli"},
}

# optional dependency -> the only files that may import it
ONE_IMPORTER: dict[str, set[str]] = {
    "sentencepiece": {"tokenizers/sentencepiece.py"},
    "tokenizers": {"tokenizers/huggingface.py"},
    "transformers": {"tokenizers/huggingface.py"},
    "jinja2": {"chat/jinja/"},  # each file of it is about templates
    "fastokens": {"tokenizers/engines.py"},
    "gigatoken": {"tokenizers/engines.py"},
    "datasets": {"storage/hub.py"},
    "huggingface_hub": {"storage/hub.py"},
    "grain": {"trainers/grain.py"},
    "yaml": {"loading/config_reader.py"},
    "starlette": {"inspect/server.py"},
    "uvicorn": {"inspect/server.py"},
    "ray": {"building/engines/ray.py"},
    # each file of these packages names tensors
    "torch": {"trainers/", "compat/"},
}


def modules() -> list[Path]:
    return sorted((ROOT / "shardmill").rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(ROOT / "shardmill").parts[0].removesuffix(".py")


@cache
def imports(path: Path) -> list[tuple[int, str]]:
    """Every imported module name with its line, also inside functions and TYPE_CHECKING blocks."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            if node.module == "shardmill":
                found += [(node.lineno, f"shardmill.{alias.name}") for alias in node.names]
            else:
                found.append((node.lineno, node.module))
    return found


def test_there_are_rooms_to_check() -> None:
    assert {"records", "protocols", "errors", "storage"} <= {room_of(path) for path in modules()}


def test_a_room_imports_only_what_the_table_allows() -> None:
    wrong = []
    for path in modules():
        room, here = room_of(path), path.relative_to(ROOT)
        if room not in MAY_IMPORT:
            wrong.append(f"{here}: add the room {room!r} to the table and to the design")
            continue
        for line, name in imports(path):
            parts = name.split(".")
            if parts[0] == "niels_gpt":
                wrong.append(f"{here}:{line}: shardmill must not import the recipe")
            elif (
                parts[0] == "shardmill" and parts[1:] and parts[1] not in MAY_IMPORT[room] | {room}
            ):
                wrong.append(f"{here}:{line}: {room} may not import {parts[1]}")
    assert wrong == [], "\n".join(wrong)


def test_an_optional_dependency_has_one_importer() -> None:
    wrong = []
    for path in modules():
        here = path.relative_to(ROOT / "shardmill").as_posix()
        if here.startswith("testing/"):
            continue
        for line, name in imports(path):
            allowed = ONE_IMPORTER.get(name.split(".")[0], {here})
            if not any(here == one or (one[-1] == "/" and here.startswith(one)) for one in allowed):
                wrong.append(f"shardmill/{here}:{line}: {name} belongs in {allowed}")
    assert wrong == [], "\n".join(wrong)


def test_nothing_in_the_library_names_the_recipe() -> None:
    for path in (ROOT / "shardmill").rglob("*"):
        if path.suffix in {".py", ".md"}:
            assert "niels" not in path.read_text().lower(), path


@pytest.mark.parametrize(
    "module",
    [
        f"shardmill{package}"
        for package in (
            *("", ".store.readers", ".loading", ".sampling", ".building"),
            *(".sources", ".loading.streaming", ".cli", ".inspect.api"),
        )
    ],
)
def test_the_core_imports_without_any_extra(module: str) -> None:
    blocked = [*ONE_IMPORTER]
    code = f"import sys\nfor name in {blocked!r}: sys.modules[name] = None\nimport {module}\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
