"""Any file becomes data: each format, plain or packed, here or elsewhere, gives its documents."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from tests.services import LoopbackHub, LoopbackS3
from tests.sources.forms import CELLS, FORMS, TEXTS, built, file_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file for each cell of the table in docs/sources.md."""
    root = tmp_path_factory.mktemp("forms")
    for cell in CELLS:
        name, data = file_of(*cell)
        (root / name).write_bytes(data)
    return root


@pytest.fixture(scope="module")
def bucket(folder: Path) -> Iterator[str]:
    for package in ("s3fs", "moto", "flask_cors"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: S3 is not tested")
    with LoopbackS3() as s3, pytest.MonkeyPatch.context() as patched:
        for name, value in s3.environment().items():
            patched.setenv(name, value)
        s3.make_bucket("forms")
        fs = fsspec.filesystem("s3")
        for path in folder.iterdir():
            fs.pipe_file(f"forms/{path.name}", path.read_bytes())
        yield "s3://forms"
        fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.fixture(scope="module")
def from_hub(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], list[str]]:
    """What stores of the files of a dataset of the hub hold."""
    home = tmp_path_factory.mktemp("hub")
    with LoopbackHub() as hub:
        hub.publish("own/forms", folder)
        command = [sys.executable, "-m", "tests.sources.forms", str(home / "stores")]
        done = subprocess.run(
            [*command, "hf://datasets/own/forms"],
            env={**hub.environment(home), "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return dict(zip(CELLS, map(json.loads, done.stdout.splitlines()), strict=True))


def documents(form: str) -> list[str]:
    """What a store of such a file holds, and the ids of its drops."""
    if form in ("text", "code"):
        return TEXTS[1:2]
    dropped = {"jsonl": ":4", "json": ":record 3", "parquet": ":row 3", "webdataset": ":s/3"}
    dropped |= dict.fromkeys(("arrow file", "arrow stream"), ":4")
    dropped |= dict.fromkeys(("tar", "zip"), ":texts/x.py")
    return [*TEXTS, *(file_of(form, "")[0] + id for id in [dropped.get(form)] if id)]


@pytest.mark.parametrize(("form", "packing"), CELLS)
def test_a_local_file_gives_its_documents(
    form: str, packing: str, folder: Path, tmp_path: Path
) -> None:
    path = folder / file_of(form, packing)[0]
    assert built(str(path), tmp_path / "store", FORMS[form][2]) == documents(form)


@pytest.mark.parametrize(("form", "packing"), CELLS)
def test_a_file_in_a_bucket_gives_its_documents(
    form: str, packing: str, bucket: str, tmp_path: Path
) -> None:
    url = f"{bucket}/{file_of(form, packing)[0]}"
    assert built(url, tmp_path / "store", FORMS[form][2]) == documents(form)


@pytest.mark.parametrize(("form", "packing"), CELLS)
def test_a_file_of_the_hub_gives_its_documents(
    form: str, packing: str, from_hub: dict[tuple[str, str], list[str]]
) -> None:
    assert from_hub[form, packing] == documents(form)


def test_the_table_in_the_guide_has_the_cells_that_are_tested() -> None:
    text = (ROOT / "docs" / "sources.md").read_text()
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| `form:")]
    found = {}
    for name, *cells in rows:
        found[name.strip().removeprefix("`form:").rstrip("`")] = [cell.strip() for cell in cells]
    wanted = {
        form: ["yes", *("yes" if one in packings else "no" for one in ("gz", "zst")), "yes", "yes"]
        for form, (*_, packings) in FORMS.items()
    }
    assert found == wanted
