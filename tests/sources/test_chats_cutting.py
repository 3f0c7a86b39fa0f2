"""Conversations that are cut are the same in pieces, with the true rows of their drops."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.chat.policy import TrainPolicy
from shardmill.chat.template_spec import known_template
from shardmill.chat.token_template import bind_template
from shardmill.errors import OptionError, SourceError
from shardmill.protocols import CuttableChats, continues
from shardmill.records import Conversation, Drop
from shardmill.sources import SHAPES, BatchLimits, ChatSource, MemoryChats, open_chats
from shardmill.testing.sources import Account, account, assert_cut_is_the_source, joined
from shardmill.tokenizers import ByteTokenizer

LIMITS = st.builds(
    BatchLimits, num_bytes=st.integers(1, 200), num_documents=st.integers(1, 9)
) | st.just(BatchLimits())
NUM_BYTES = st.integers(1, 100) | st.integers(1, 2000)


def message(text: str, *replies: Any, **more: Any) -> dict[str, Any]:
    return {"text": text, "role": "prompter", "replies": list(replies), **more}


ROWS: dict[str, list[dict[str, Any]]] = {
    "oasst-tree": [
        {"prompt": message("a", message("b"), message("c"), message_id="m")},
        {"prompt": message("a", message("b", message("d")), message("c", lang="de"))},
        {"prompt": message("x"), "message_tree_id": "t"},
    ],
    "messages": [
        {"messages": [{"role": "user", "content": "hi"}]},
        {"messages": [{"role": "user", "content": "half \ud83d pair"}]},
        {"messages": []},
    ],
    "sharegpt": [{"conversations": [{"from": "human", "value": "x" * 60}]}],
    "history": [{"history": [["a", "b"]], "prompt": "c", "response": "d"}],
    "alpaca": [{"instruction": "a", "input": "", "output": "b\r\n"}],
    "prompt-response": [{"question": "a", "answer": "b"}, {"question": "c", "answer": None}],
    "preference": [
        {"prompt": "a", "chosen": "b\r\n", "rejected": "half \ud83d pair"},
        {"prompt": "a", "chosen": "b", "rejected": None},
        {"prompt": "a", "completions": ["b", "c"], "scores": [1, 1]},
    ],
    "kto": [{"prompt": "a", "response": "b", "label": False}, {"messages": [], "label": True}],
}
BAD = [b'{"messages": [', b"[]", b"\xff", b'{"other": 1}', b'{"text": "x", "messages": 5}']
BLANKS = [b"", b"", b"\n", b" \r\n", b"\n\n\n\n\n\n\n\n"]


def lines(rows: list[bytes], draw: st.DrawFn) -> bytes:
    """With blank lines, a BOM, CR LF, perhaps no end."""
    end = draw(st.sampled_from([b"\n", b"\r\n"]))
    body = b"".join(draw(st.sampled_from(BLANKS)) + row + end for row in rows)
    body += draw(st.sampled_from(BLANKS))
    body = body.removesuffix(end) if draw(st.booleans()) else body
    return b"\xef\xbb\xbf" + body if draw(st.booleans()) else body


def parquet(rows: list[bytes], draw: st.DrawFn) -> bytes:
    """Without what only JSON can hold."""
    good = [json.loads(row) for row in rows if row not in BAD and b"\\ud83d" not in row]
    stream = pa.BufferOutputStream()
    table = pa.Table.from_pylist(good) if good else pa.table({"other": pa.array([1])})
    pq.write_table(table, stream, row_group_size=draw(st.integers(1, 3)))
    return bytes(stream.getvalue())


def listed(rows: list[bytes], _draw: st.DrawFn) -> bytes:
    return b"[" + b", ".join(row for row in rows if row not in (BAD[0], BAD[2])) + b"]"


FORMATS: dict[str, Callable[[list[bytes], st.DrawFn], bytes]] = {
    ".jsonl": lines,
    ".jsonl.gz": lambda rows, draw: gzip.compress(lines(rows, draw)),
    ".jsonl.zst": lambda rows, draw: zstandard.compress(lines(rows, draw)),
    ".json": listed,
    ".parquet": parquet,
}


@st.composite
def folders(draw: st.DrawFn) -> tuple[str, dict[str, bytes]]:
    """A shape, and files of it in several formats, most of them JSON lines."""
    shape = draw(st.sampled_from(sorted(ROWS)))
    own = st.sampled_from([{}, {}, {"id": "mine"}, {"group": "g"}])
    good = st.tuples(st.sampled_from(ROWS[shape]), own).map(
        lambda pair: json.dumps({**pair[0], **pair[1]}).encode()
    )
    suffixes = draw(
        st.lists(st.sampled_from([".jsonl", ".jsonl", *FORMATS]), min_size=1, max_size=4)
    )
    files = {}
    for number, suffix in enumerate(suffixes):
        rows = draw(st.lists(good | good | st.sampled_from(BAD), max_size=8))
        files[f"{number}{suffix}"] = FORMATS[suffix](rows, draw)
    return shape, files


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(folder=folders(), limits=LIMITS, num_bytes=NUM_BYTES, is_named=st.booleans())
def test_chats_of_every_shape_and_format_cut_anywhere_are_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    folder: tuple[str, dict[str, bytes]],
    limits: BatchLimits,
    num_bytes: int,
    is_named: bool,
) -> None:
    root = tmp_path_factory.mktemp("chats")
    shape, files = folder
    for name, data in files.items():
        (root / name).write_bytes(data)
    source = open_chats(root, shape=shape if is_named else None, on_bad="skip", limits=limits)
    try:
        source.describe()
    except SourceError:  # the first row is one of the bad ones
        with pytest.raises(SourceError, match=r"no known shape|would be ignored"):
            source.cut(num_bytes)
    else:
        assert_cut_is_the_source(source, num_bytes)


def test_every_shape_is_among_these() -> None:
    assert {*ROWS, "oasst-messages"} == set(SHAPES)


def tree_row(name: str, parent: str | None, tree: str | None, **more: Any) -> dict[str, Any]:
    found = {"message_id": name, "parent_id": parent, "message_tree_id": tree, **more}
    return {"text": name.upper(), "role": "prompter", "lang": "en", **found}


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(data=st.data(), num_bytes=NUM_BYTES)
def test_trees_of_rows_are_never_cut_apart(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, num_bytes: int
) -> None:
    root = tmp_path_factory.mktemp("trees")
    rows: list[dict[str, Any]] = []
    borders = [0]
    for tree in range(data.draw(st.integers(1, 5))):
        names = [f"{tree}.{number}" for number in range(data.draw(st.integers(1, 4)))]
        parents = [None] + [
            data.draw(st.sampled_from([*names[:at], "gone"])) for at in range(1, len(names))
        ]
        rows += [
            tree_row(name, parent, f"t{tree}") for name, parent in zip(names, parents, strict=True)
        ]
        borders.append(len(rows))
    is_together = data.draw(st.booleans())
    allowed = st.sampled_from(borders) if is_together else st.integers(0, len(rows))
    cuts = sorted(data.draw(st.lists(allowed, max_size=3)))
    for number, (start, stop) in enumerate(zip([0, *cuts], [*cuts, len(rows)], strict=True)):
        junk = [{"junk": 1}] * data.draw(st.integers(0, 2))
        found = [json.dumps(row) for row in (*junk, *rows[start:stop], *junk)]
        (root / f"{number}.jsonl").write_text("\n".join(found))
    limits = BatchLimits(num_documents=data.draw(st.integers(1, 4)))
    source = open_chats(root, shape="oasst-messages", on_bad="skip", limits=limits)

    pieces = assert_cut_is_the_source(source, num_bytes)
    files = [file.name for piece in pieces for file in piece.files]
    assert files == [file.name for file in source.files]
    if is_together:
        # A file is never cut, and a run of files is no larger than was asked for.
        assert all(len(one.files) == 1 or one.size_hint() <= num_bytes for one in pieces)


def test_rows_of_a_tree_in_two_files_make_the_source_one_piece(tmp_path: Path) -> None:
    rows = [tree_row("a", None, "t"), tree_row("b", "a", "t"), tree_row("c", None, "u")]
    for number, row in enumerate(rows):
        (tmp_path / f"{number}.jsonl").write_text(json.dumps(row))
    source = open_chats(tmp_path)
    (piece,) = source.cut(1)
    assert piece is source

    (tmp_path / "1.jsonl").write_text(json.dumps(tree_row("b", None, "v")))
    assert len(assert_cut_is_the_source(open_chats(tmp_path), 1)) == 3


def test_a_range_counts_its_own_lines_and_the_pieces_before_it_name_them(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"messages": []}\n\n[]\n{"messages": [], "id": "me"}\n\n\n{}\n{"messages": []}\n'
    )
    pieces = assert_cut_is_the_source(open_chats(path, on_bad="skip"), 30)

    found = [account(piece.batches()) for piece in pieces]
    assert [(one.conversations, one.drops, one.num_rows) for one in found] == [
        (
            [
                Conversation(messages=[], id="rows.jsonl", row=0),
                Conversation(messages=[], id="me"),
            ],
            [Drop(id="rows.jsonl", reason="bad_json", row=2)],
            4,
        ),
        ([], [], 0),
        (
            [Conversation(messages=[], id="rows.jsonl", row=3)],
            [Drop(id="rows.jsonl", reason="other_shape", row=2)],
            4,
        ),
    ]
    assert [continues(piece) for piece in pieces] == [False, True, True]
    assert pieces[1].name == "rows.jsonl/rows.jsonl:bytes 24-48"
    assert pieces[1].describe()["inputs"][0]["part"] == "bytes 24-48"
    assert [chat.id for chat in joined(pieces).conversations] == [
        "rows.jsonl:1",
        "me",
        "rows.jsonl:8",
    ]


def test_what_a_template_drops_has_the_row_of_its_conversation(tmp_path: Path) -> None:
    row = json.dumps({"messages": [{"role": "user", "content": "no answer"}]})
    (tmp_path / "rows.jsonl").write_text(f"{row}\n" * 4)
    specials = {"start": "<|im_start|>", "end": "<|im_end|>"}
    tokenizer = ByteTokenizer(byte_offset=2, specials=specials)
    template = bind_template(known_template("chatml"), tokenizer)
    ids: list[str] = []
    before = 0
    for piece in open_chats(tmp_path).cut(100):
        found = account(piece.batches())
        drops = template.render(found.conversations, TrainPolicy()).drops
        ids += [drop.numbered(before).id for drop in drops]
        before += found.num_rows
    assert ids == [f"rows.jsonl:{number}" for number in range(1, 5)]


def test_a_line_of_nothing_at_the_end_of_a_range_still_counts(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n" * 50 + "{}\n")
    source = open_chats(path, shape="messages", on_bad="skip", limits=BatchLimits(num_bytes=5))
    pieces = assert_cut_is_the_source(source, 7)

    assert joined(pieces).drops == [Drop(id="rows.jsonl:51", reason="other_shape")]
    (only,) = pieces[0].batches()
    assert (only.num_read, only.num_rows, only.drops) == (0, 6, ())


@pytest.mark.parametrize("bad", ["broken", '{"other": 1}'])
@pytest.mark.parametrize("before", [0, 1, 17])
def test_an_error_in_a_range_names_the_line_of_the_file(
    tmp_path: Path, before: int, bad: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"messages": []}\n\n' * before + f"{bad}\n" + '{"messages": []}\n')
    for num_bytes in (1, 20, 50, 1000):
        pieces = open_chats(path, shape="messages").cut(num_bytes)
        with pytest.raises(SourceError, match=f"{path}:{2 * before + 1}: "):
            joined(pieces)


def test_all_pieces_use_the_shape_of_the_first_row_and_are_as_strict(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "a", "answer": "b"}, {"prompt": "a", "answer": "b", "messages": []}] * 3
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for shape in (None, "prompt-response"):
        pieces = assert_cut_is_the_source(open_chats(path, on_bad="skip", shape=shape), 1)
        assert len(joined(pieces).conversations) == (6 if shape else 3)
        assert {piece.describe()["shape"] for piece in pieces} == {"prompt-response"}
        assert {piece.describe()["shape_is_named"] for piece in pieces} == {shape is not None}


def test_pieces_are_runs_ranges_row_groups_and_whole_files(tmp_path: Path) -> None:
    line = json.dumps({"messages": [{"role": "user", "content": "x" * 72}]}) + "\n"
    for number in range(3):
        (tmp_path / f"a{number}.jsonl").write_text(line)
    (tmp_path / "b.jsonl").write_text(line * 7)
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(line.encode() * 90, 0))
    (tmp_path / "d.json").write_text(f"[{', '.join([line] * 9)}]")
    table = pa.Table.from_pylist([json.loads(line)] * 6)
    pq.write_table(table, tmp_path / "e.parquet", row_group_size=2, use_dictionary=False)
    source = open_chats(tmp_path)
    pieces = assert_cut_is_the_source(source, 360)

    assert isinstance(source, CuttableChats)
    assert len(line) == 120
    assert [piece.name.partition("/")[2] for piece in pieces] == [
        "a0.jsonl to a2.jsonl",
        *(f"b.jsonl:bytes {start}-{stop}" for start, stop in [(0, 280), (280, 560), (560, 840)]),
        "c.jsonl.gz",
        "d.json",
        *(f"e.parquet:row group {number}" for number in range(3)),
    ]
    assert [len(account(piece.batches()).conversations) for piece in pieces] == [
        *(3, 3, 2, 2, 90, 9, 2, 2, 2)
    ]
    with pytest.raises(OptionError, match="wanted at least 1"):
        source.cut(0)
    assert not isinstance(MemoryChats([]), CuttableChats)


@pytest.mark.slow
def test_thousands_of_files_are_cut_into_small_pieces(tmp_path: Path) -> None:
    for number in range(3000):
        (tmp_path / f"{number:04}.jsonl").write_text('{"messages": []}\n')
    pieces = open_chats(tmp_path).cut(17 * 100)

    assert [len(piece.files) for piece in pieces] == [100] * 30
    assert max(len(pickle.dumps(piece)) for piece in pieces) < 20_000


def _read(piece: ChatSource) -> Account:
    return account(piece.batches())


@pytest.mark.slow
def test_a_fresh_process_reads_a_piece(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n{}\n\n' * 20)
    pieces = open_chats(tmp_path, on_bad="skip").cut(100)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.map(_read, pieces)

    assert found == [account(piece.batches()) for piece in pieces]
