"""Conversations of a hub dataset: the real client against a hub on loopback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.services import Fault, LoopbackHub

pytest.importorskip("datasets")
pytestmark = pytest.mark.slow

# The client reads HF_ENDPOINT when it is imported, so a separate process reads the hub.
CHILD = """
import json, sys
from shardmill.sources import BatchLimits, open_chats
from shardmill.testing.sources import (
    assert_conversation_ledger_balances, assert_conversations_resume_exactly)
def make():
    return open_chats(
        sys.argv[1].split(","), limits=BatchLimits(num_documents=17), retry_delay=0.01)
found = assert_conversation_ledger_balances(make())
assert assert_conversations_resume_exactly(make) == found
chats = [[chat.id, chat.group, list(chat.messages)] for chat in found.conversations]
print(json.dumps({"chats": chats, "describe": make().describe(), "size": make().size_hint()}))
"""


def test_a_hub_dataset_beside_a_file_gives_its_chats_and_resumes(tmp_path: Path) -> None:
    chats = [[{"role": "user", "content": f"hi {n}"}] for n in range(40)]
    (tmp_path / "set/data").mkdir(parents=True)
    for shard in range(2):
        part = chats[shard * 20 : shard * 20 + 20]
        name = f"data/train-{shard:05d}-of-00002.parquet"
        pq.write_table(pa.table({"messages": part}), tmp_path / "set" / name, row_group_size=5)
    local = tmp_path / "more.jsonl"
    local.write_text(json.dumps({"messages": chats[0], "id": "mine"}))
    (tmp_path / "home").mkdir()
    with LoopbackHub() as hub:
        commit = hub.publish("own/chats", tmp_path / "set")
        hub.faults.append(Fault(path="train-00001", status=503, times=2))
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", CHILD, f"hub:own/chats,{local}"],
            env=hub.environment(tmp_path / "home"),
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
            cwd=tmp_path / "home",
        )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    wanted = [[f"own/chats:row {n}", None, chat] for n, chat in enumerate(chats)]
    assert found["chats"] == [*wanted, ["mine", None, chats[0]]]
    assert found["describe"]["shape"] == "messages"
    assert found["describe"]["inputs"][0]["revision"] == commit
    assert found["describe"]["inputs"][1]["file"] == "more.jsonl"
    assert found["size"] is None
