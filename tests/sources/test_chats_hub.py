"""Conversations of a hub dataset: the real client against a hub on loopback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.services import Fault, LoopbackHub

datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.slow

# The client reads HF_ENDPOINT when it is imported, so a separate process reads the hub.
CHILD = """
import json, sys
from shardmill import look
from shardmill.sources import BatchLimits, open_chats
from shardmill.testing.sources import (
    assert_conversation_ledger_balances, assert_conversations_resume_exactly,
    assert_cut_is_the_source)
def make():
    return open_chats(
        sys.argv[1].split(","), limits=BatchLimits(num_documents=17), retry_delay=0.01,
        on_bad="skip")
found = assert_conversation_ledger_balances(make())
assert assert_conversations_resume_exactly(make) == found
chats = [[chat.id, chat.group, list(chat.messages)] for chat in found.conversations]
pieces = {size: assert_cut_is_the_source(make(), size) for size in (1, 500, 10**9)}
names = [piece.name.partition("/")[2] for piece in pieces[1]]
drops = [[drop.id, drop.reason] for drop in found.drops]
looked = look(sys.argv[1].split(","), rows=4).to_json()
print(json.dumps({"chats": chats, "describe": make().describe(), "size": make().size_hint(),
    "look": looked, "drops": drops, "pieces": names, "piece": pieces[1][0].describe()["inputs"]}))
"""


def read(hub: LoopbackHub, inputs: str, home: Path) -> dict[str, Any]:
    home.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD, inputs],
        env=hub.environment(home),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=home,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_hub_dataset_beside_a_file_gives_its_chats_and_resumes(tmp_path: Path) -> None:
    chats = [[{"role": "user", "content": f"hi {n}"}] for n in range(40)]
    (tmp_path / "set/data").mkdir(parents=True)
    for shard in range(2):
        part = chats[shard * 20 : shard * 20 + 20]
        name = f"data/train-{shard:05d}-of-00002.parquet"
        pq.write_table(pa.table({"messages": part}), tmp_path / "set" / name, row_group_size=5)
    local = tmp_path / "more.jsonl"
    local.write_text(json.dumps({"messages": chats[0], "id": "mine"}))
    with LoopbackHub() as hub:
        commit = hub.publish("own/chats", tmp_path / "set")
        hub.faults.append(Fault(path="train-00001", status=503, times=2))
        found = read(hub, f"hub:own/chats,{local}", tmp_path / "home")
    wanted = [[f"own/chats:row {n}", None, chat] for n, chat in enumerate(chats)]
    assert found["chats"] == [*wanted, ["mine", None, chats[0]]]
    assert found["describe"]["shape"] == "messages"
    assert found["describe"]["inputs"][0]["revision"] == commit
    assert found["describe"]["inputs"][1]["file"] == "more.jsonl"
    looked = found["look"]
    assert looked["formats"] == {"a dataset of the hub": 1, "jsonl": 1}
    assert (looked["shape"], looked["num_rows"], looked["is_all"]) == ("messages", 3, False)
    assert looked["left_out"] == {"no_assistant": 3}
    assert found["size"] is None
    files = [f"own/chats/data/train-{shard:05d}-of-00002.parquet" for shard in range(2)]
    assert found["pieces"][:9] == [
        *(f"{file}:row group {number}" for file in files for number in range(4)),
        "more.jsonl:bytes 0-1",
    ]
    assert found["piece"] == [
        {
            "dataset": "own/chats",
            "revision": commit,
            "file": files[0].removeprefix("own/chats/"),
            "part": "row group 0",
        }
    ]


def test_rows_of_a_piece_are_named_as_in_the_stream(tmp_path: Path) -> None:
    (tmp_path / "set/data").mkdir(parents=True)
    for shard in range(2):
        rows = [[{"role": "user", "content": "hi"}], None, []]
        name = f"data/train-{shard:05d}-of-00002.parquet"
        pq.write_table(pa.table({"messages": rows}), tmp_path / "set" / name, row_group_size=1)
    with LoopbackHub() as hub:
        hub.publish("own/chats", tmp_path / "set")
        found = read(hub, "hub:own/chats", tmp_path / "home")
    assert found["drops"] == [[f"own/chats:row {row}", "other_shape"] for row in (1, 4)]
    assert [id for id, *_ in found["chats"]] == [f"own/chats:row {row}" for row in (0, 2, 3, 5)]
    assert len(found["pieces"]) == 6


def test_rows_that_the_client_decodes_are_one_piece(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "hi"}]
    messages = datasets.List({key: datasets.Value("string") for key in ("role", "content")})
    features = datasets.Features({"messages": messages, "tools": datasets.Json()})
    rows = [{"messages": said, "tools": [{"name": f"tool {number}"}]} for number in range(9)]
    (tmp_path / "set/data").mkdir(parents=True)
    made = datasets.Dataset.from_list(rows, features=features)
    made.to_parquet(tmp_path / "set/data/train.parquet", batch_size=2)
    with LoopbackHub() as hub:
        hub.publish("own/chats", tmp_path / "set")
        found = read(hub, "hub:own/chats", tmp_path / "home")
    assert len(found["chats"]) == 9
    assert found["pieces"] == ["own/chats"]
