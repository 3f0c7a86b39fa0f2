"""The guarantees of sources as assertions, and input that is hard to read.

A source that passes resumes exactly from every cursor and accounts for every row it read; its
pieces, when it can be divided or cut, together give what it gives. The hypothesis strategies make
each row together with the document or drop it must become, so that a test needs no second parser.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from shardmill.protocols import (
    ConversationSource,
    CuttableChats,
    CuttableSource,
    DividedSource,
    Source,
    continues,
)
from shardmill.records import Conversation, ConversationBatch, Drop, TextBatch

_NO_COUNTS = {"empty": 0, "invalid_utf8": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Everything a source of documents or of conversations gave, however it was batched."""

    texts: list[str] = field(default_factory=list)
    conversations: list[Conversation] = field(default_factory=list)
    num_read: int = 0
    counts: Mapping[str, int] = field(default_factory=lambda: dict(_NO_COUNTS))
    drops: list[Drop] = field(default_factory=list)
    num_rows: int = 0  # of pieces whose drops have a `row`


def account(batches: Iterable[TextBatch | ConversationBatch]) -> Account:
    """Read to the end and add up."""
    texts: list[str] = []
    conversations: list[Conversation] = []
    drops: list[Drop] = []
    num_read = num_rows = 0
    counts = dict(_NO_COUNTS)
    for batch in batches:
        drops += batch.drops
        num_read += batch.num_read
        num_rows += batch.num_rows
        if isinstance(batch, ConversationBatch):
            conversations += batch.conversations
        else:
            texts += batch.texts.to_pylist()
        for name, count in batch.counts.items():
            counts[name] = counts.get(name, 0) + count
    return Account(
        texts=texts,
        conversations=conversations,
        num_read=num_read,
        counts=counts,
        drops=drops,
        num_rows=num_rows,
    )


def joined(pieces: Iterable[Source | ConversationSource]) -> Account:
    """What pieces give in order, with full ids; see `CuttableSource`."""
    parts: list[TextBatch | ConversationBatch] = []
    before = 0
    for piece in pieces:
        if not continues(piece):
            before = 0
        num_rows = 0
        for batch in piece.batches():
            num_rows += batch.num_rows
            drops = tuple(drop.numbered(before) for drop in batch.drops)
            batch = replace(batch, drops=drops, num_rows=0)
            if isinstance(batch, ConversationBatch):
                chats = tuple(_numbered(chat, before) for chat in batch.conversations)
                batch = replace(batch, conversations=chats)
            parts.append(batch)
        before += num_rows
    return account(parts)


def _numbered(chat: Conversation, rows_before: int) -> Conversation:
    drop = Drop(id=chat.id, reason="", row=chat.row)
    return replace(chat, id=drop.numbered(rows_before).id, row=None)


def assert_ledger_balances(source: Source | ConversationSource) -> Account:
    """Every row read is a document, an empty one or a drop, and documents are clean. Of a source of
    conversations: each read is one or a drop, all have ids, contents are clean text; a row of many
    threads counts once for each.
    """
    batches: list[TextBatch | ConversationBatch] = [*source.batches()]
    for number, batch in enumerate(batches):
        where = f"{source.name}, batch {number}"
        given = batch.conversations if isinstance(batch, ConversationBatch) else batch.texts
        num_counted = batch.counts.get("empty", 0) + batch.counts.get("filtered", 0)
        found = len(given) + num_counted + len(batch.drops)
        assert batch.num_read == found, f"{where}: {batch.num_read} read, {found} accounted for"
        assert batch.num_read + batch.num_rows > 0, f"{where}: nothing was read for it"
        repaired = batch.counts.get("invalid_utf8", 0)
        assert 0 <= repaired <= len(given), f"{where}: {batch.counts}"
        assert batch.counts.get("front_matter", 0) <= len(given), f"{where}: {batch.counts}"
        for drop in batch.drops:
            assert drop.id, f"{where}: a drop without an id: {drop}"
            assert drop.reason, f"{where}: a drop without a reason: {drop}"
        if isinstance(batch, ConversationBatch):
            for chat in batch.conversations:
                _assert_clean(chat, where)
            continue
        assert batch.texts.type == pa.large_string(), f"{where}: {batch.texts.type}"
        batch.texts.validate(full=True)
        assert batch.texts.null_count == 0, f"{where}: nulls"
        assert "" not in batch.texts.to_pylist(), f"{where}: an empty document"
        assert batch.strings in (None, batch.texts.to_pylist()), f"{where}: other strings"
    return account(batches)


def _assert_clean(chat: Conversation, where: str) -> None:
    assert chat.id, f"{where}: a conversation without an id: {chat}"
    for message in chat.messages:
        content = message.get("content")
        if isinstance(content, str):
            content.encode()  # raises on half a surrogate pair


def assert_resumes_exactly(make_source: Callable[[], Source | ConversationSource]) -> Account:
    """From the cursor of any batch, sent through JSON, a fresh source gives exactly the rest.

    The rest is the same batches: a build that stops at a budget in the middle of a batch must count
    the same whether it was resumed or not. Reads the source once for each of its batches, so give
    it small input and small limits.
    """
    batches: list[TextBatch | ConversationBatch] = [*make_source().batches()]
    for number, batch in enumerate(batches):
        cursor = json.loads(json.dumps(batch.cursor))
        assert cursor == batch.cursor, f"batch {number}: {batch.cursor!r} does not survive JSON"
        wanted = [account([later]) for later in batches[number + 1 :]]
        found = [account([later]) for later in make_source().batches(cursor)]
        assert found == wanted, f"after batch {number} ({cursor}): {found} instead of {wanted}"
    whole = account(batches)
    assert account(make_source().batches()) == whole, "a second reading differs from the first"
    return whole


def assert_divides_exactly(
    make_source: Callable[[], DividedSource], at_least: Iterable[int] = (1, 2, 3, 100)
) -> list[int]:
    """However a source is divided, its pieces, pickled and read in order, give its documents, drops
    and counts, and each resumes exactly. Dividing again gives the same pieces, and asking for more
    never gives fewer. Returns the number of pieces for each of `at_least`.
    """
    whole = account(make_source().batches())
    numbers = []
    for wanted in at_least:
        pieces = [pickle.loads(pickle.dumps(piece)) for piece in make_source().divide(wanted)]
        names = [piece.name for piece in pieces]
        again = make_source().divide(wanted)
        assert [piece.name for piece in again] == names, f"divide({wanted}) differs: {names}"
        found = account(batch for piece in pieces for batch in piece.batches())
        assert found == whole, f"divide({wanted}) gives {found} instead of {whole}"
        for piece, twin in zip(pieces, again, strict=True):
            rest = assert_resumes_exactly(partial(copy, piece))
            assert account(twin.batches()) == rest, f"divide({wanted}): {piece.name} differs"
            assert piece.describe() == twin.describe(), f"divide({wanted}): {piece.name}"
        numbers.append(len(pieces))
    assert numbers == sorted(numbers), f"more pieces asked for, fewer given: {numbers}"
    return numbers


def assert_cut_is_the_source(source: CuttableSource | CuttableChats, num_bytes: int) -> list[Any]:
    """Pieces of about `num_bytes`, pickled and read in order, give the documents or conversations,
    counts and drops of the source, with their full ids. Each resumes exactly and accounts for its
    rows. Cutting again gives the same. Returns the pieces.
    """
    whole = account(source.batches())
    pieces: list[Any] = [*source.cut(num_bytes)]
    sent = [pickle.loads(pickle.dumps(piece)) for piece in pieces]
    found = joined(sent)
    assert found == whole, f"cut({num_bytes}) gives {found} instead of {whole}"
    repeated: list[Any] = [*source.cut(num_bytes)]
    for piece, twin, again in zip(pieces, sent, repeated, strict=True):
        rest = assert_resumes_exactly(partial(copy, twin))
        assert assert_ledger_balances(piece) == rest, f"cut({num_bytes}): {piece.name} differs"
        assert (again.name, again.describe()) == (twin.name, twin.describe()), piece.name
        assert continues(twin) == continues(piece), piece.name
    return pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCase:
    """One input row and what becomes of it: a document, an empty one (""), or a drop."""

    raw: bytes  # a line of JSON without its end, or the bytes of a column or file; see the strategy
    document: str | None  # None: dropped
    reason: str = ""  # of the drop
    is_repaired: bool = False


def expected(cases: Iterable[RowCase], ids: Callable[[int], str]) -> Account:
    """What a source must give for these rows; `ids` maps a row's number to the id of its drop."""
    cases = list(cases)
    kept = [case for case in cases if case.document]
    return Account(
        texts=[case.document for case in kept if case.document],
        num_read=len(cases),
        counts={
            "empty": sum(case.document == "" for case in cases),
            "invalid_utf8": sum(case.is_repaired for case in kept),
        },
        drops=[
            Drop(id=ids(number), reason=case.reason)
            for number, case in enumerate(cases)
            if case.document is None
        ],
    )


_PIECES = ["\r\n", "\n", "\r", "\ufeff", "\x00", " ", "\t", "{", "}", '"', "\\", "\u2028", "\x85"]
_PIECES += ["a", "word ", "\u00e9", "\u4e2d\u6587", "\U0001f600", "\ufffd", "e\u0301", "\u200f"]


def nasty_texts() -> st.SearchStrategy[str]:
    """Valid text that is hard to read: line ends, BOMs, NULs, quotes, wide characters."""
    pieces = st.sampled_from(_PIECES) | st.text(st.characters(codec="utf-8"), max_size=4)
    return st.lists(pieces, max_size=8).map("".join)


def cleaned(text: str) -> str:
    """The rule of `clean` for valid text, in one line."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def raw_bytes() -> st.SearchStrategy[RowCase]:
    """Bytes of a file or a binary column: text, or text with bytes that are not UTF-8."""
    good = nasty_texts().map(lambda text: RowCase(raw=text.encode(), document=cleaned(text)))
    bad = st.tuples(nasty_texts(), st.sampled_from(_NOT_UTF8), nasty_texts()).map(_damaged)
    return good | bad


_NOT_UTF8 = [
    (b"\xff", 1),
    (b"\xc3", 1),  # a two-byte character cut short
    (b"\xe4\xb8", 1),  # a three-byte character cut short: one mark for both bytes
    (b"\xed\xa0\x80", 3),  # a surrogate written as UTF-8
    (b"\xc0\xaf", 2),  # an overlong slash
]


def _damaged(parts: tuple[str, tuple[bytes, int], str]) -> RowCase:
    before, (bad, num_marks), after = parts
    document = cleaned(before + "\ufffd" * num_marks + after)
    raw = before.encode() + bad + after.encode()
    return RowCase(raw=raw, document=document, is_repaired=True)


def json_lines(*, with_bad: bool) -> st.SearchStrategy[RowCase]:
    """Lines of JSON whose field "text" matters; `with_bad` adds broken ones, for on_bad="skip"."""
    kinds = [
        st.tuples(nasty_texts(), st.booleans()).map(_good_line),
        raw_bytes().map(_raw_line),
        st.sampled_from(_SURROGATES).map(_surrogate_line),
        st.sampled_from(
            [b'{"text": null}', b"{}", b'{"other": "x"}', b'{"text":null,"a":NaN}']
        ).map(lambda line: RowCase(raw=line, document=None, reason="no_text")),
    ]
    if with_bad:
        kinds.append(st.sampled_from(_BAD_LINES).map(_bad_line))
    return st.one_of(kinds)


_SURROGATES = [("\\ud800", "\ufffd"), ("x\\udc00y", "x\ufffdy"), ("\\ude00\\ud83d", "\ufffd\ufffd")]
_BAD_LINES = [
    (b'{"text": "a"', "bad_json"),
    (b'{"text": "a"} {"text": "b"}', "bad_json"),
    (b'"text"', "bad_json"),
    (b'["text"]', "bad_json"),
    (b'{"text": "tab\there"}', "bad_json"),
    (b'{"text":', "bad_json"),
    (b'"a"}', "bad_json"),
    (b"\xff\xfe", "bad_json"),
    (b'{"text": 5}', "not_a_string"),
    (b'{"text": ["a"]}', "not_a_string"),
    (b'{"text": {"text": "a"}}', "not_a_string"),
    (b'{"text": true}', "not_a_string"),
]


def _good_line(parts: tuple[str, bool]) -> RowCase:
    text, ascii_only = parts
    line = json.dumps({"id": 1, "text": text, "more": {"text": "no"}}, ensure_ascii=ascii_only)
    return RowCase(raw=line.encode(), document=cleaned(text))


def _raw_line(case: RowCase) -> RowCase:
    """The bytes of a case inside a JSON string: what JSON demands is escaped, damage is kept."""
    table = [(b"\\", b"\\\\"), (b'"', b'\\"')]
    table += [(bytes([code]), b"\\u%04x" % code) for code in range(32)]
    data = case.raw
    for found, escaped in table:
        data = data.replace(found, escaped)
    line = b'{"text": "' + data + b'"}'
    return RowCase(raw=line, document=case.document, is_repaired=case.is_repaired)


def _surrogate_line(pair: tuple[str, str]) -> RowCase:
    return RowCase(
        raw=f'{{"text": "{pair[0]}"}}'.encode(), document=cleaned(pair[1]), is_repaired=True
    )


def _bad_line(pair: tuple[bytes, str]) -> RowCase:
    return RowCase(raw=pair[0], document=None, reason=pair[1])


def parquet_bytes(column: pa.Array, *, name: str = "text", row_group_size: int = 7) -> bytes:
    """A small Parquet file with several row groups and another column that is not text."""
    numbers = pa.array(range(len(column)), pa.int64())
    stream = io.BytesIO()
    pq.write_table(
        pa.table({"number": numbers, name: column}), stream, row_group_size=row_group_size
    )
    return stream.getvalue()


def assert_conversation_ledger_balances(source: ConversationSource) -> Account:
    """As `assert_ledger_balances`, for a source of conversations."""
    return assert_ledger_balances(source)


def assert_conversations_resume_exactly(make_source: Callable[[], ConversationSource]) -> Account:
    """As `assert_resumes_exactly`, for a source of conversations."""
    return assert_resumes_exactly(make_source)
