"""A dataset of a hub is found again without being named: the real client, a hub on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.services import LoopbackHub

pytest.importorskip("datasets")
pytestmark = pytest.mark.slow

CODE = """
import json
from shardmill.inspect.blame import blame_tokens
from shardmill.building import BuildSpec, Feed, build_store, plan
from shardmill.sources import HubSource, open_hub
from shardmill.tokenizers import ByteTokenizer

plan.CHUNK_BYTES = 1
said = []
sources = [open_hub("own/docs"), HubSource("own/docs")]
for number, source in enumerate(sources):
    feed = Feed(source=source, fill=(("train", None),))
    build_store(
        [feed], f"s{number}", tokenizer=ByteTokenizer(), spec=BuildSpec(), workers=1, max_loss=1.0
    )
    found = blame_tokens(f"s{number}", "train", range(7), tokenizer=ByteTokenizer())[::6]
    said.append([[one.text, one.file, one.row_id, one.found_by] for one in found])
print(json.dumps(said))
"""


def test_rows_of_a_hub_are_named_by_file_and_number(tmp_path: Path) -> None:
    texts = [["zero", None], ["", "one", "two"]]
    (tmp_path / "docs/data").mkdir(parents=True)
    for number, rows in enumerate(texts):
        path = tmp_path / f"docs/data/train-{number:05d}-of-00002.parquet"
        pq.write_table(pa.table({"text": pa.array(rows, pa.string())}), path, row_group_size=2)
    with LoopbackHub() as hub:
        hub.publish("own/docs", tmp_path / "docs")
        done = subprocess.run(
            [sys.executable, "-c", CODE],
            env={**os.environ, **hub.environment(tmp_path / "home")},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
    assert done.returncode == 0, done.stderr
    by_file, streamed = json.loads(done.stdout)
    names = [f"data/train-{number:05d}-of-00002.parquet" for number in range(2)]
    assert by_file == [
        ["zero", names[0], f"own/docs/{names[0]}:row 0", "origins"],
        ["one", names[1], f"own/docs/{names[1]}:row 1", "origins"],
    ]
    assert streamed == [
        ["zero", names[0], "own/docs:row 0", "origins"],
        ["one", names[1], "own/docs:row 3", "origins"],
    ]
