"""The benchmark of reading runs, judges itself honestly, names absent peers, and cleans up."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("torch")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "read.py"
TINY = ["--tokens", "400000", "--rounds", "2", "--calls", "3"]
PEERS = [
    *("datatrove", "datasets", "litdata"),
    *("mosaicml-streaming", "megatron-core", "ai2-olmo-core"),
]


def run_alone(place: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The benchmark, with the packages of all peers looking as if they were not installed."""
    code = f"""
import importlib.metadata, runpy, sys
real = importlib.metadata.version
def version(name):
    if name in {PEERS!r}:
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)
importlib.metadata.version = version
sys.argv = {[str(SCRIPT), *options]!r}
sys.path.insert(0, {str(SCRIPT.parent)!r})
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": str(place)},
    )


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    place = tmp_path_factory.mktemp("read")
    finished = run_alone(place, *TINY, "--json")
    assert finished.stderr == ""
    assert list(place.iterdir()) == []
    return finished, json.loads(finished.stdout)


def names(result, case):
    return [row["name"] for row in result["cases"][case]]


@pytest.mark.slow
def test_every_case_has_the_limit_ours_and_a_peer(done):
    _, result = done
    limit = "copy and cast in order (the limit)"
    assert names(result, "random") == [
        limit,
        "TokenSpace.gather, inputs and labels",
        "get_batch of nanoGPT",
        "get_batch of nanoGPT, map kept",
    ]
    assert names(result, "epoch") == [
        limit,
        "Loader",
        "Loader, ahead=2",
        "DataLoader over MemoryMappedDataset",
        "DataLoader over MemoryMappedDataset, default collate",
        "DataLoader, memmap, x and y a sample",
        "DataLoader, memmap, shifted once a batch",
    ]
    assert names(result, "documents") == [
        limit,
        "Loader, documents",
        "Loader, documents, ahead=2",
        "DataLoader over MemoryMappedDataset, packed",
        "DataLoader, memmap, documents a sample",
    ]
    assert names(result, "trainer") == [
        "the step alone (the limit)",
        "Loader, a busy trainer",
        "Loader, ahead=2, a busy trainer",
    ]
    assert all(rows[0]["of_limit"] == 1.0 for rows in result["cases"].values())


def test_the_exit_code_says_whether_every_wanted_number_was_reached(done):
    finished, result = done
    assert [(said["name"], said["wanted"]) for said in result["wanted"]] == [
        ("TokenSpace.gather, inputs and labels", 0.30),
        ("TokenSpace.gather, inputs and labels", 8.0),
        ("Loader", 0.30),
        ("Loader", 8.0),
        ("DataLoader over MemoryMappedDataset", 4.0),
        ("Loader, documents", 4.0),
    ]
    passed = [said["reached"] >= said["wanted"] for said in result["wanted"]]
    assert [said["passed"] for said in result["wanted"]] == passed
    assert result["passed"] == all(passed)
    assert finished.returncode == (0 if all(passed) else 1)


def test_peers_that_are_not_installed_are_named_with_the_way_to_get_them(done):
    _, result = done
    assert result["absent"] == {
        "datatrove": "not installed (pip install datatrove)",
        "Hugging Face datasets": "not installed (pip install datasets)",
        "LitData": "not installed (pip install litdata)",
        "MosaicML Streaming": "not installed (pip install mosaicml-streaming)",
        "Megatron Core": "not installed (pip install megatron-core)",
        "OLMo-core": "not installed (pip install ai2-olmo-core)",
    }


@pytest.mark.slow
def test_a_peer_that_fails_is_reported_and_the_others_run(tmp_path):
    broken = tmp_path / "packages" / "datatrove"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise RuntimeError('needs a moon base')\n")
    installed = broken.parent / "datatrove-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: datatrove\nVersion: 1.0\n")
    place = tmp_path / "place"
    place.mkdir()
    options = [*TINY, "--only", "random", "--peers", "datatrove", "--json"]
    path = os.pathsep.join([str(broken.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), *options],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": str(place), "PYTHONPATH": path},
    )
    assert finished.stderr == ""
    result = json.loads(finished.stdout)
    reason = "does not run here: RuntimeError: needs a moon base"
    assert result["absent"]["datatrove"] == reason
    assert result["absent"]["memmap by hand"] == "not asked for"
    assert names(result, "random") == [
        "copy and cast in order (the limit)",
        "TokenSpace.gather, inputs and labels",
    ]
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("options", [["--tokens", "5"], ["--only", "nothing"], ["--calls", "0"]])
def test_impossible_options_are_refused(monkeypatch, capsys, options):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    read = importlib.import_module("read")
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options])
    with pytest.raises(SystemExit) as refusal:
        read.main()
    assert refusal.value.code == 2
    assert options[0] in capsys.readouterr().err.splitlines()[-1]
