"""A diff says exactly what was done to a store."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.building import BuildSpec, Feed, build_store
from shardmill.cli import main
from shardmill.errors import StoreNotFoundError
from shardmill.inspect import document_diff
from shardmill.inspect.diff import DocumentPlace, OrderBreak, diff_stores
from shardmill.records import Ragged
from shardmill.sources import JsonlSource
from shardmill.store import read_manifest
from shardmill.store.manifest import write_manifest
from shardmill.testing.stores import build_small_chat_store, build_small_store, make_examples
from shardmill.tokenizers import ByteTokenizer
from tests.helpers import run_command

documents = st.lists(st.lists(st.integers(0, 3), max_size=4).map(tuple), max_size=12)
Splits = dict[str, list[tuple[int, ...]]]


def store_of(folder: Path, splits: Splits, **changes) -> Path:
    ragged = {name: Ragged.from_sequences(part) for name, part in splits.items()}
    build_small_store(folder, ragged, **changes)
    return folder


def walk(a: list, b: list) -> tuple[list[int], list[int], tuple[int, int] | None]:
    """The law in plain words: numbers only in a, only in b, and where the order parts."""
    more = {doc: a.count(doc) - b.count(doc) for doc in (*a, *b)}
    only: tuple[list[int], list[int]] = ([], [])
    i = j = 0
    order = None

    def passes(side: int, part: list, at: int) -> bool:
        sign = 1 - 2 * side
        if sign * more[part[at]] <= 0:
            return False
        more[part[at]] -= sign
        only[side].append(at)
        return True

    left, right = list(range(len(a))), list(range(len(b)))
    both = set(a) & set(b)
    for side, part, numbers in ((0, a, left), (1, b, right)):
        for at in [n for n in numbers if part[n] not in both]:
            assert passes(side, part, at)
            numbers.remove(at)
    while i < len(left) and j < len(right) and order is None:
        if a[left[i]] == b[right[j]]:
            i, j = i + 1, j + 1
        elif passes(0, a, left[i]):
            i += 1
        elif passes(1, b, right[j]):
            j += 1
        else:
            order = left[i], right[j]
    for side, part, rest in ((0, a, left[i:]), (1, b, right[j:])):
        for at in rest:
            passes(side, part, at)
    assert not any(more.values())
    return sorted(only[0]), sorted(only[1]), order


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(
    a=st.fixed_dictionaries({"train": documents, "val": documents}),
    edits=st.fixed_dictionaries({"train": documents, "val": documents}),
    keep=st.lists(st.booleans(), min_size=24, max_size=24),
    seed=st.integers(0, 9),
    sizes=st.tuples(st.sampled_from([None, 2, 6]), st.sampled_from([None, 4, 12])),
    dtypes=st.tuples(*[st.sampled_from(["uint16", "uint32"])] * 2),
    small=st.booleans(),
)
def test_a_diff_counts_what_was_left_out_added_moved_and_swapped(
    tmp_path_factory, a, edits, keep, seed, sizes, dtypes, small
):
    """Drawn edits: some documents are removed, some appended, and some seeds shuffle all."""
    folder, draw = tmp_path_factory.mktemp("diff"), np.random.default_rng(seed)
    b: Splits = {}
    for at, (name, part) in enumerate(a.items()):
        b[name] = [doc for doc, kept in zip(part, keep[12 * at :], strict=False) if kept]
        b[name] += edits[name]
        if seed % 2:
            b[name] = [b[name][place] for place in draw.permutation(len(b[name]))]
    multiple = {"uint16": 1, "uint32": 2}
    for name, splits, size, dtype in zip("ab", (a, b), sizes, dtypes, strict=True):
        cut = None if size is None else size * multiple[dtype]
        store_of(folder / name, splits, shard_bytes=cut, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr(document_diff, "HEAP_RECORDS", 3)
            patch.setattr(document_diff, "BLOCK_TOKENS", 2)
            patch.setattr(document_diff, "BLOCK_DOCUMENTS", 3)
        found = diff_stores(folder / "a", folder / "b")
    manifests = [read_manifest(folder / name) for name in "ab"]
    assert found.identical == (manifests[0] == manifests[1])
    for split in found.documents:
        left, right = a[split.split], b[split.split]
        only_a, only_b, parts = walk(left, right)
        assert split.both == len(left) - len(only_a) == len(right) - len(only_b)
        assert (split.only_a, split.only_b) == (len(only_a), len(only_b))
        assert (split.first_only_a, split.first_only_b) == (tuple(only_a[:5]), tuple(only_b[:5]))
        order = split.order and (split.order.a.document, split.order.b.document)
        assert order == parts
        if split.order:
            assert split.order.a.token == sum(map(len, left[: split.order.a.document]))
    everywhere = Counter(doc for part in a.values() for doc in part)
    everywhere &= Counter(doc for part in b.values() for doc in part)
    assert found.moved == everywhere.total() - sum(split.both for split in found.documents)


def test_one_changed_token_is_one_document_less_and_one_more(tmp_path):
    before = [(1, 2, 3), (4,), (), (5, 6)]
    store_of(tmp_path / "a", {"train": before})
    store_of(tmp_path / "b", {"train": [(1, 2, 3), (7,), (), (5, 6)]})
    (split,) = diff_stores(tmp_path / "a", tmp_path / "b").documents
    assert (split.both, split.first_only_a, split.first_only_b) == (3, (1,), (1,))
    assert (split.only_a, split.only_b, split.order) == (1, 1, None)


def test_one_of_several_equal_documents_left_out_is_no_other_order(tmp_path):
    before = [(1,), (2,), (3,), (2,), (4,), (2,), (5,)]
    store_of(tmp_path / "a", {"train": before})
    for gone in (1, 3, 5):
        now = [document for number, document in enumerate(before) if number != gone]
        store_of(tmp_path / f"b{gone}", {"train": now})
        (split,) = diff_stores(tmp_path / "a", tmp_path / f"b{gone}").documents
        assert (split.both, split.first_only_a, split.order) == (6, (gone,), None)
        (split,) = diff_stores(tmp_path / f"b{gone}", tmp_path / "a").documents
        assert (split.both, split.first_only_b, split.order) == (6, (gone,), None)


def test_two_swapped_documents_are_a_break_of_the_order_and_nothing_else(tmp_path):
    store_of(tmp_path / "a", {"train": [(1,), (2, 2), (3,), (4,)]}, shard_bytes=2)
    store_of(tmp_path / "b", {"train": [(1,), (3,), (2, 2), (4,)]}, shard_bytes=2)
    found = diff_stores(tmp_path / "a", tmp_path / "b")
    place = DocumentPlace(split="train", document=1, token=1)
    assert found.documents[0].order == OrderBreak(a=place, b=place)
    assert (found.documents[0].both, found.documents[0].only_a) == (4, 0)
    assert found.facts == {"splits": ("train: other bytes in 3 files",)}


def test_a_token_at_another_place_or_a_zero_more_is_another_document(tmp_path):
    store_of(tmp_path / "a", {"train": [(1, 2), (0,), (), (0, 0, 5)]})
    store_of(tmp_path / "b", {"train": [(2, 1), (0, 0), (0,), (0, 5)]})
    (split,) = diff_stores(tmp_path / "a", tmp_path / "b").documents
    assert (split.both, split.only_a, split.only_b) == (1, 3, 3)


def chats(masks: list[list[bool]]):
    return make_examples([([9], [(2, [(7, t) for t in mask])]) for mask in masks])


@pytest.mark.parametrize("shift", [0, 5])
def test_a_changed_mask_is_distinguished_from_changed_tokens(tmp_path, shift):
    plain = [[True] * (3 + at) for at in range(shift)]
    before = [*plain, [True, True], [True, False, True], [True] * 9]
    now = [*plain, [True, False], [True, False, True], [False] * 8 + [True]]
    build_small_chat_store(tmp_path / "a", {"train": chats(before)}, shard_bytes=6)
    build_small_chat_store(tmp_path / "b", {"train": chats(now)}, shard_bytes=6)
    found = diff_stores(tmp_path / "a", tmp_path / "b")
    (split,) = found.documents
    assert (split.both, split.only_a, split.only_b, split.order) == (3 + shift, 0, 0, None)
    assert (split.other_mask, split.first_other_mask) == (2, (shift, shift + 2))
    total = sum(1 + len(mask) for mask in before)
    shares = tuple(sum(map(sum, masks)) / total for masks in (before, now))
    assert found.trained_share == shares


def test_facts_are_named_by_section(tmp_path):
    store_of(tmp_path / "a", {"train": [(1,)]}, vocab_size=9, seed=1)
    store_of(
        tmp_path / "b",
        {"train": [(1,)], "val": []},
        vocab_size=10,
        seed=2,
        options={"chat": {"template": {"name": "x"}}},
    )
    assert diff_stores(tmp_path / "a", tmp_path / "b").facts == {
        "tokenizer": ("vocab_size: 9 -> 10",),
        "template": ("None -> {'template': {'name': 'x'}}",),
        "options": ("seed: 1 -> 2",),
        "splits": ("val: None -> {'documents': 0, 'tokens': 0, 'shards': 1}",),
    }


def test_files_that_were_added_changed_or_come_in_another_order_are_named(tmp_path):
    files = tmp_path / "files"
    files.mkdir()
    for name, text in (("b", "x"), ("c", "y")):
        (files / f"{name}.jsonl").write_text(json.dumps({"text": text}) + "\n")

    def build(out: str, **how) -> None:
        feeds = [Feed(source=JsonlSource(files), fill=(("train", None),))]
        build_store(feeds, tmp_path / out, tokenizer=ByteTokenizer(), spec=BuildSpec(), **how)

    build("old")
    build("grown")
    (files / "a.jsonl").write_text('{"text": "z"}\n')
    build("grown", append=True)
    build("sorted")
    added = diff_stores(tmp_path / "old", tmp_path / "grown")
    assert added.facts["sources"] == ("a.jsonl: was none -> is an input",)
    assert added.documents[0].only_b == 1
    assert added.documents[0].order is None
    turned = diff_stores(tmp_path / "grown", tmp_path / "sorted")
    assert turned.facts["sources"] == ("the files are in another order, from b.jsonl on",)
    assert turned.documents[0].order is not None
    (files / "c.jsonl").write_text('{"text": "yy"}\n')
    build("sorted", overwrite=True)
    changed = diff_stores(tmp_path / "grown", tmp_path / "sorted")
    assert changed.facts["sources"] == ("the files are in another order, from b.jsonl on",)
    both = diff_stores(tmp_path / "old", tmp_path / "sorted").facts["sources"]
    assert both[0] == "c.jsonl: bytes 14 -> 15"
    assert both[-1] == "a.jsonl: was none -> is an input"
    for number in range(30):
        (files / f"d{number}.jsonl").write_text('{"text": "z"}\n')
    (files / "b.jsonl").unlink()
    build("many")
    many = diff_stores(tmp_path / "old", tmp_path / "many").facts["sources"]
    assert many[0] == "31 files added, 1 removed, 1 changed"
    assert (len(many), many[-1]) == (22, "and 14 more")


def test_equal_shards_are_not_read(tmp_path, monkeypatch):
    """Documents in shards of equal hashes are in both, whatever reading would give."""
    store_of(tmp_path / "a", {"train": [(1, 2), (3, 4), (5,)]}, shard_bytes=4)
    store_of(tmp_path / "b", {"train": [(1, 2), (3, 4), (6,)]}, shard_bytes=4)
    read = []
    real = document_diff._hash_documents

    def noted(space, bits, starts, ends):
        read.append((starts.tolist(), ends.tolist()))
        return real(space, bits, starts, ends)

    monkeypatch.setattr(document_diff, "_hash_documents", noted)
    (split,) = diff_stores(tmp_path / "a", tmp_path / "b").documents
    assert (split.both, split.only_a, split.only_b) == (2, 1, 1)
    assert read == [([4], [5]), ([4], [5])]


def run(*args: str):
    return run_command("diff", *args)


def test_the_command_exits_0_for_identical_stores_and_1_for_others(tmp_path):
    a, b = (store_of(tmp_path / name, {"train": [(1,), (2,)]}) for name in "ab")
    same = run(str(a), str(b))
    assert (same.exit_code, same.stdout) == (
        0,
        f"{a}, {b}: identical, 2 documents (by their manifests; `shardmill verify` reads the "
        "contents)\n",
    )
    c = store_of(tmp_path / "c", {"train": [(2,), (1,)]})
    other = run(str(a), str(c), "--tokenizer", "byte")
    assert other.exit_code == 1
    assert other.stdout.splitlines() == [
        f"{a} -> {c}: different",
        "  splits:",
        "    train: other bytes in 1 files",
        "  documents of train: 2 in both",
        "    those in both come in another order, first at",
        f"      {a}: document 0, token 0: '\\x01'",
        f"      {c}: document 0, token 0: '\\x02'",
    ]
    told = run(str(a), str(c), "--json")
    assert json.loads(told.stdout) == json.loads(json.dumps(asdict(diff_stores(a, c))))


def test_what_is_no_store_is_exit_code_2(tmp_path, monkeypatch, capsys):
    a = store_of(tmp_path / "a", {"train": [(1,)]})
    with pytest.raises(StoreNotFoundError):
        diff_stores(a, tmp_path / "none")
    monkeypatch.setattr("sys.argv", ["shardmill", "diff", str(a), str(tmp_path / "none")])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "no such folder" in capsys.readouterr().err


def test_stores_that_differ_in_a_fact_alone_are_not_identical(tmp_path):
    a, b = (store_of(tmp_path / name, {"train": [(1,)]}) for name in "ab")
    manifest = read_manifest(b)
    write_manifest(b, msgspec.structs.replace(manifest, produced_by={"engine": "other"}))
    found = diff_stores(a, b)
    assert (found.identical, found.documents[0].both) == (False, 1)
    assert found.facts == {"options": ("produced_by.engine: None -> 'other'",)}
