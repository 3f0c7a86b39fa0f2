"""build-all against a local hub that serves the recipe's datasets, with and without faults."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from niels_gpt.cache import read_meta
from shardmill.store import verify
from tests.helpers import folder_digest
from tests.niels_gpt.conftest import EXAMPLES
from tests.services import Fault, LoopbackHub

pytest.importorskip("datasets")
pytestmark = pytest.mark.slow

CONFIG = """\
---
configs:
- config_name: {config}
  data_files:
  - split: train
    path: data/train*
  - split: validation
    path: data/validation*
---
"""


def publish_all(hub: LoopbackHub, root: Path) -> dict[str, str]:
    """The four datasets of the recipe, small, under their own names. Name to commit."""
    notes = [path.read_text() for path in sorted((EXAMPLES / "notes").glob("*.md"))]
    pages = [f"page {n}\n{note}" for n in range(8) for note in notes]
    lines = [
        f" = Article {n} = \n" if k == 0 else f" line {k} \n" for n in range(6) for k in range(4)
    ]
    commits = {}
    for name, config, texts in (
        ("HuggingFaceFW/fineweb-edu", "CC-MAIN-2024-10", pages),
        ("Salesforce/wikitext", "wikitext-103-raw-v1", lines),
    ):
        folder = root / name
        (folder / "data").mkdir(parents=True)
        (folder / "README.md").write_text(CONFIG.format(config=config))
        for split, part in (("train", texts), ("validation", texts[:8])):
            path = folder / "data" / f"{split}-00000-of-00001.parquet"
            pq.write_table(pa.table({"text": part}), path, row_group_size=16)
        commits[name] = hub.publish(name, folder)
    for name, file in (
        ("databricks/databricks-dolly-15k", "questions.jsonl"),
        ("OpenAssistant/oasst1", "trees.jsonl"),
    ):
        folder = root / name
        folder.mkdir(parents=True)
        (folder / "train.jsonl").write_bytes((EXAMPLES / "chats" / file).read_bytes())
        commits[name] = hub.publish(name, folder)
    return commits


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackHub]:
    with LoopbackHub() as running:
        yield running


@pytest.fixture(scope="module")
def commits(hub: LoopbackHub, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return publish_all(hub, tmp_path_factory.mktemp("hub"))


def build(
    hub: LoopbackHub, folder: Path, model: Path, *more: str
) -> subprocess.CompletedProcess[str]:
    home = folder.parent / "home"
    home.mkdir(exist_ok=True)
    command = [
        *(sys.executable, "-W", "ignore", "-m", "niels_gpt.cache.cli", "build-all"),
        *("--cache-dir", str(folder), "--seed", "42", "--tokenizer", str(model)),
        *("--roam-dir", str(EXAMPLES / "notes"), "--engine", "reference"),
        *("--fineweb-train-tokens", "6000", "--fineweb-val-tokens", "500", *more),
    ]
    environment = {**hub.environment(home), "COLUMNS": "200"}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, cwd=home
    )


@pytest.fixture(scope="module")
def undisturbed(
    hub: LoopbackHub,
    commits: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
    model: Path,
) -> Path:
    """The cache as an undisturbed hub gives it."""
    folder = tmp_path_factory.mktemp("undisturbed") / "cache"
    done = build(hub, folder, model)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_prescribed_command_streams_every_set(
    undisturbed: Path, commits: dict[str, str]
) -> None:
    for store, name, config in (
        ("pretrain/fineweb_edu", "HuggingFaceFW/fineweb-edu", "CC-MAIN-2024-10"),
        ("pretrain/wikitext", "Salesforce/wikitext", "wikitext-103-raw-v1"),
        ("sft/dolly15k", "databricks/databricks-dolly-15k", None),
        ("sft/oasst1", "OpenAssistant/oasst1", None),
    ):
        meta = read_meta(str(undisturbed / store / "meta.json"))
        assert (meta["dataset_name"], meta["dataset_config"]) == (name, config)
        assert (meta["streaming"], meta["dataset_revision"]) == (True, commits[name])
        assert verify(undisturbed / store).problems == []
    fineweb = read_meta(str(undisturbed / "pretrain" / "fineweb_edu" / "meta.json"))
    assert (fineweb["train_tokens"], fineweb["val_tokens"]) == (6000, 500)
    assert fineweb["shuffle_buffer"] == 10_000
    wikitext = read_meta(str(undisturbed / "pretrain" / "wikitext" / "meta.json"))
    assert (wikitext["train_documents"], wikitext["val_documents"]) == (6, 2)


def test_dropped_connections_and_refusals_change_no_byte(
    hub: LoopbackHub, undisturbed: Path, tmp_path: Path, model: Path
) -> None:
    hub.faults += [
        Fault(path="fineweb-edu/resolve", method="GET", drop_after=300, times=1, skip=1),
        Fault(path="dolly-15k/resolve", status=503, times=2),
    ]
    faulty = build(hub, tmp_path / "faulty", model)
    assert faulty.returncode == 0, faulty.stderr
    assert [fault.times for fault in hub.faults] == [0, 0]
    assert folder_digest(tmp_path / "faulty") == folder_digest(undisturbed)


def test_a_hub_that_is_gone_loses_nothing(
    hub: LoopbackHub, undisturbed: Path, tmp_path: Path, model: Path
) -> None:
    hub.faults.clear()
    hub.stop()
    gone = build(hub, tmp_path / "late", model, "--hub-retries", "0")
    assert gone.returncode == 1
    assert gone.stdout.count("failed: HubError") == 4
    assert (tmp_path / "late" / "pretrain" / "roam" / "meta.json").exists()
    hub.start()
    back = build(hub, tmp_path / "late", model, "--resume")
    assert back.returncode == 0, back.stderr
    assert folder_digest(tmp_path / "late") == folder_digest(undisturbed)
    assert json.loads((tmp_path / "late" / "sft" / "oasst1" / "meta.json").read_text())["built"]
