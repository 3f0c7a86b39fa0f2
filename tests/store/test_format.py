"""FORMAT.md is true: its reader reads, its tables name every key, its hashes can be recomputed."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardmill.store
from shardmill.building import build_plan
from shardmill.records import Drop, Ragged
from shardmill.store import PlanOptions, open_store
from shardmill.store.plans import NAMES, REASONS, LeftOut, PlanFacts, PlanMetrics
from shardmill.testing.stores import (
    build_small_chat_store,
    build_small_store,
    chat_examples,
    documents,
    shard_sizes,
)
from tests.packs import FIVE, plan_options, rows_of_plan

TEXT = Path(shardmill.store.__file__).with_name("FORMAT.md").read_text()


def reader() -> dict[str, Any]:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "FORMAT.md", "exec"), names)
    return names


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(data=st.data(), dtype=st.sampled_from(["uint16", "uint32"]))
def test_the_reader_in_the_text_reads_every_store(data, dtype, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("format") / "store"
    splits = {"train": data.draw(documents(dtype=dtype)), "val": data.draw(documents(dtype=dtype))}
    build_small_store(folder, splits, dtype=dtype, shard_bytes=data.draw(shard_sizes(dtype)))
    names = reader()
    found = names["read_store"](folder)
    assert sorted(found) == ["train", "val"]
    for name, ragged in splits.items():
        parts = names["documents"](*found[name][:2])
        assert [part.tolist() for part in parts] == [part.tolist() for part in ragged]


def test_the_reader_in_the_text_refuses_damage(tmp_path: Path) -> None:
    build_small_store(tmp_path, {"a": Ragged.from_sequences([[1, 2, 3]])}, shard_bytes=4)
    shard = tmp_path / "a" / "shard_00000.bin"
    shard.write_bytes(b"\1\0\3\0")
    with pytest.raises(ValueError, match=r"shard_00000\.bin is damaged"):
        reader()["read_store"](tmp_path)
    meta = tmp_path / "meta.json"
    meta.write_bytes(meta.read_bytes().replace(b'"small"', b'"smaII"'))
    with pytest.raises(ValueError, match=r"meta\.json is damaged"):
        reader()["read_store"](tmp_path)


def test_the_text_names_every_key_of_a_manifest(tmp_path: Path) -> None:
    drops = [Drop(id="x", reason="bad")]
    build_small_store(tmp_path, {"a": Ragged.from_sequences([[1]])}, drops=drops)
    meta = json.loads((tmp_path / "meta.json").read_bytes())
    keys = {
        key.replace("a_", "<split>_") if key in {"a_tokens", "a_documents"} else key for key in meta
    }
    table = set(re.findall(r"^\| (.+?) \|", TEXT, flags=re.MULTILINE))
    named = {name for cell in table for name in re.findall(r"`([^`]+)`", cell)}
    assert keys - named == set()
    split = meta["splits"]["a"]
    inner = {
        *split,
        *split["index"],
        *split["shards"][0],
        *meta["ledger"],
        *meta["ledger"]["tokens"],
    }
    assert {key for key in inner if f'"{key}"' not in TEXT and f"`{key}`" not in TEXT} == set()


def test_the_manifest_has_a_sorted_indented_form(tmp_path: Path) -> None:
    build_small_store(
        tmp_path, {"a": Ragged.from_sequences([[1], [2, 3]])}, dataset_name="\u00e4\n"
    )
    data = (tmp_path / "meta.json").read_bytes()
    again = json.dumps(json.loads(data), indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    assert data.decode() == again


def test_the_fingerprint_is_the_one_the_text_describes(tmp_path: Path) -> None:
    build_small_store(tmp_path, {"a": Ragged.from_sequences([[1], [2, 3]])}, shard_bytes=2)
    meta = json.loads((tmp_path / "meta.json").read_bytes())
    keys = ("format", "version", "token_dtype", "tokenizer_sha256", "splits")
    compact = json.dumps({key: meta[key] for key in keys}, sort_keys=True, separators=(",", ":"))
    wanted = hashlib.sha256(compact.encode()).hexdigest()
    assert open_store(tmp_path).fingerprint == wanted


def test_the_index_header_is_the_one_in_the_table(tmp_path: Path) -> None:
    build_small_store(tmp_path, {"a": Ragged.from_sequences([[1], [2, 3]])})
    data = (tmp_path / "a_idx.npy").read_bytes()
    assert data[:10] == bytes.fromhex("934E554D5059 0100 7600")
    shape = b"{'descr': '<i8', 'fortran_order': False, 'shape': (2,), }"
    assert data[10:128] == shape + b" " * (117 - len(shape)) + b"\n"
    assert data[128:] == np.array([0, 1], "<i8").tobytes()


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(examples=chat_examples(max_examples=12), options=plan_options())
def test_the_reader_in_the_text_reads_every_plan(examples, options, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("plan") / "store"
    build_small_chat_store(folder, {"train": examples})
    plan = build_plan(folder, options=options, allow_empty=True)
    header, rows = reader()["read_plan"](plan.path)
    assert header["plan"] == msgspec.to_builtins(plan.facts)
    lengths = examples.ids.lengths.tolist()
    whole = [
        [(number, start, lengths[number] if stop is None else stop) for number, start, stop in row]
        for row in rows
    ]
    assert whole == [[tuple(piece) for piece in row] for row in rows_of_plan(plan, lengths)]


def test_the_plan_in_the_text_is_the_one_that_is_written(tmp_path: Path) -> None:
    build_small_chat_store(tmp_path / "s", {"train": FIVE})
    plan = build_plan(tmp_path / "s", options=PlanOptions(seq_len=6, long="split"))
    data = plan.path.read_bytes()
    (told,) = re.findall(r"```json\n(.*?)```", TEXT, flags=re.DOTALL)
    line = json.dumps(json.loads(told), separators=(",", ":")).encode()
    assert data[:960] == line.ljust(959) + b"\n"
    (dump,) = re.findall(r"```text\n(   960 .*?)```", TEXT, flags=re.DOTALL)
    body = b""
    for row in dump.splitlines()[:-1]:
        at, numbers = re.match(r" +(\d+)  ((?:[0-9a-f]{2} )+)", row).groups()  # type: ignore[union-attr]
        assert int(at) == 960 + len(body)
        body += bytes.fromhex(numbers).ljust(64, b"\0")
    assert data[960:-32] == body
    assert (len(data), data[-32:]) == (1376, hashlib.sha256(data[:1344]).digest())


def test_the_reader_in_the_text_refuses_a_damaged_plan(tmp_path: Path) -> None:
    build_small_chat_store(tmp_path / "s", {"train": FIVE})
    path = build_plan(tmp_path / "s", options=PlanOptions(seq_len=20)).path
    path.write_bytes(path.read_bytes().replace(b'"train"', b'"tram1"'))
    with pytest.raises(ValueError, match="is damaged"):
        reader()["read_plan"](path)


def test_the_text_names_every_array_and_key_of_a_plan() -> None:
    kinds = (PlanFacts, PlanOptions, PlanMetrics, LeftOut)
    keys = {*NAMES, *REASONS, *(field for kind in kinds for field in kind.__struct_fields__)}
    assert {key for key in keys if f'"{key}"' not in TEXT} == set()
