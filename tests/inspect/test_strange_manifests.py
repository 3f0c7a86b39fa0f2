"""A manifest may say anything of its sources and options; no comparison ends in a foreign error."""

from __future__ import annotations

import hashlib
import io
import json
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.cli import main
from shardmill.errors import ManifestError, OptionError, ShardmillError
from shardmill.inspect.diff import diff_stores
from shardmill.loading import ChatRows
from shardmill.records import Ragged
from shardmill.store import verify
from shardmill.testing.stores import build_small_chat_store, build_small_store
from tests.packs import FIVE
from tests.store.test_manifest import sealed

NAMED = [
    [{"files": ["x"]}],
    [{"files": "x"}],
    [{"files": 5}],
    [{"files": {"a": 1}}],
    [{"files": [{}]}],
    [{"files": [{"file": 5}]}],
    [{"files": [{"file": ["a"]}]}],
    [{"files": [{"file": "a", "bytes": "many"}]}],
    [{"files": [{"file": "a", "sha256": "1"}]}],
    [{"kind": "concat"}],
    [{"kind": "concat", "parts": 7}],
    [{"kind": "concat", "parts": ["x", None, {"files": ["y"]}]}],
    [{"kind": "concat", "parts": [{"kind": "concat", "parts": [[]]}]}],
    [{}],
]
KEYS = st.sampled_from(["kind", "files", "file", "bytes", "parts", "sha256", "name", "x"])
LEAVES = st.none() | st.booleans() | st.integers(0, 9) | st.sampled_from(["concat", "a", "b", ""])
ANYTHING = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)
SOURCES = st.sampled_from(NAMED) | st.lists(st.dictionaries(KEYS, ANYTHING, max_size=4), max_size=3)


@pytest.fixture(scope="module")
def stores(tmp_path_factory) -> tuple[Path, Path]:
    top = tmp_path_factory.mktemp("strange")
    for name in "ab":
        build_small_store(top / name, {"train": Ragged.from_sequences([[1, 2], [3]])})
    return top / "a", top / "b"


def say(folder: Path, **facts) -> None:
    """Change what a manifest says, with the right checksum."""
    meta = json.loads((folder / "meta.json").read_bytes())
    (folder / "meta.json").write_bytes(sealed(meta | facts))


def run(*words: str) -> int:
    """The exit code of a command, in this process."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()):
        patch.setattr(sys, "argv", ["shardmill", *words])
        with redirect_stderr(io.StringIO()), pytest.raises(SystemExit) as end:
            main()
    return int(end.value.code or 0)


@pytest.mark.parametrize("sources", NAMED, ids=json.dumps)
def test_sources_of_any_shape_are_compared(stores, sources):
    left, right = stores
    say(left, sources=sources)
    say(right, sources=[{"files": [{"file": "a", "bytes": 3}]}])
    for pair in ((left, right), (right, left)):
        found = diff_stores(*pair)
        assert not found.identical
        assert found.facts["sources"]
    say(right, sources=sources)
    assert diff_stores(left, right).identical


def test_files_of_strange_manifests_are_compared_where_possible(stores):
    left, right = stores
    say(left, sources=[{"files": [{"file": "x"}, {"file": "a", "bytes": 3}, {"file": "b"}]}])
    say(right, sources=[{"files": [{"file": "a", "bytes": 4}, {"file": "b", "sha256": "1"}]}])
    assert diff_stores(left, right).facts["sources"] == (
        "x: was an input -> is none",
        "a: bytes 3 -> 4",
        "b: sha256 None -> 1",
    )
    say(left, sources=[{"files": [["x", 2**63], {"file": "a"}]}])
    say(right, sources=[{"files": [["x", -1], {"file": "a"}]}])
    assert diff_stores(left, right).facts["sources"] == (f"x: last written {2**63} -> -1",)
    say(left, sources=[{"files": [{"file": "a", "bytes": None}]}])
    say(right, sources=[{"files": [{"file": "a"}]}])
    same = ("the same files, recorded with other facts",)
    assert diff_stores(left, right).facts["sources"] == same


def test_a_manifest_nested_beyond_reason_is_refused_or_compared(stores):
    left, right = stores
    for depth in (100, 400, 900, 5000):
        meta = json.loads((right / "meta.json").read_bytes())
        text = sealed(meta | {"sources": [{"x": 12345678}]})
        deep = text.replace(b"12345678", b'{"a":' * depth + b"1" + b"}" * depth)
        zeroed = re.sub(rb'(?<="manifest_sha256": ")[0-9a-f]+', b"0" * 64, deep)
        seal = hashlib.sha256(zeroed).hexdigest().encode()
        (left / "meta.json").write_bytes(zeroed.replace(b"0" * 64, seal, 1))
        try:
            assert not diff_stores(left, right).identical
        except ManifestError:
            assert depth > 100
        assert run("diff", str(left), str(right)) in (1, 2)
        assert run("verify", str(left)) in (0, 1)
    say(right, sources=[])
    (left / "meta.json").write_bytes((right / "meta.json").read_bytes())


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(before=SOURCES, now=SOURCES, options=st.dictionaries(KEYS, ANYTHING, max_size=3))
def test_no_manifest_ends_a_comparison_in_a_foreign_error(stores, before, now, options):
    left, right = stores
    say(left, sources=before, options=options)
    say(right, sources=now, options={})
    found = diff_stores(left, right)
    assert found.identical == (before == now and not options)
    assert verify(left).ok


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(before=SOURCES, now=SOURCES, chat=ANYTHING)
def test_the_commands_give_their_own_exit_codes_for_any_manifest(stores, before, now, chat):
    left, right = stores
    say(left, sources=before, options={"chat": chat})
    say(right, sources=now, options={"chat": {}})
    assert run("diff", str(left), str(right)) in (0, 1)
    assert run("diff", str(left), str(right), "--json") in (0, 1)
    assert run("info", str(left)) == 0
    assert run("info", str(left), "--json") == 0
    assert run("verify", str(left)) == 0


@pytest.mark.parametrize(
    "chat", [None, 5, "x", [], {"template": "x"}, {"template": {"end_ids": 7}}]
)
def test_the_end_of_a_turn_is_not_taken_from_an_option_that_is_none(tmp_path, chat):
    build_small_chat_store(tmp_path / "s", {"train": FIVE})
    say(tmp_path / "s", options={"chat": chat})
    with pytest.raises(OptionError, match="pass pad_id"):
        ChatRows(tmp_path / "s", seq_len=8)
    try:
        assert ChatRows(tmp_path / "s", seq_len=8, pad_id=1).pad_id == 1
    except ShardmillError as error:
        pytest.fail(str(error))
