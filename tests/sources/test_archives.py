"""Tar and zip archives of texts: read in place, hostile ones refused, nothing ever unpacked."""

from __future__ import annotations

import gzip
import io
import json
import logging
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import SourceError
from shardmill.sources import BatchLimits, TarSource, ZipSource, open_chats, open_source
from shardmill.sources.source import read_document
from shardmill.testing.sources import (
    account,
    assert_cut_is_the_source,
    assert_divides_exactly,
    assert_ledger_balances,
    assert_resumes_exactly,
    raw_bytes,
)
from tests.sources.forms import tar_bytes, zip_bytes

SMALL = BatchLimits(num_bytes=60, num_documents=3)
LIMITS = st.builds(
    BatchLimits, num_bytes=st.integers(1, 200), num_documents=st.integers(1, 9)
) | st.just(BatchLimits())
NAMES = st.sampled_from(["a.txt", "d/b.md", "d/a.py", "n" * 180 + ".c", "x.jpg", "a.b/c.d.txt"])
WRITERS: dict[str, Callable[..., bytes]] = {".tar": tar_bytes, ".zip": zip_bytes}
WRITERS[".tar.gz"] = lambda members: gzip.compress(tar_bytes(members, format=tarfile.GNU_FORMAT))
TALK = {"prompt": "a", "response": "b"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("archives")


def check(make_source: Callable[[], Any], num_bytes: int) -> Any:
    found = assert_ledger_balances(make_source())
    assert assert_resumes_exactly(make_source) == found
    assert_cut_is_the_source(make_source(), num_bytes)
    assert_divides_exactly(make_source, (1, 3))
    return found


@pytest.mark.filterwarnings("ignore:Duplicate name")
@settings(deadline=None, max_examples=30)
@given(
    members=st.lists(st.tuples(NAMES, raw_bytes()), max_size=8),
    suffix=st.sampled_from(sorted(WRITERS)),
    limits=LIMITS,
    num_bytes=st.integers(1, 400),
)
def test_every_member_that_is_text_is_a_document(
    folder: Path,
    members: list[tuple[str, Any]],
    suffix: str,
    limits: BatchLimits,
    num_bytes: int,
) -> None:
    path = folder / f"a{suffix}"
    path.write_bytes(WRITERS[suffix]([(name, case.raw) for name, case in members]))
    texts = [(name, case) for name, case in members if not name.endswith(".jpg")]
    if not texts and members:
        with pytest.raises(SourceError, match=r"no member ends in .*found \d+ .jpg; choose"):
            account(open_source(path).batches())
        return
    found = check(lambda: open_source(path, limits=limits), num_bytes)
    prose = (".txt", ".md")
    good = [c for n, c in texts if n.endswith(prose) or not (c.is_repaired or b"\0" in c.raw)]
    assert found.texts == [case.document for case in good if case.document]
    assert found.num_read == len(texts)
    dropped = [f"a{suffix}:{name}" for name, case in texts if case not in good]
    assert [(drop.id, drop.reason) for drop in found.drops] == [(id, "not_text") for id in dropped]


def samples() -> list[tuple[str, bytes]]:
    """As WebDataset: of each sample a picture, a text and facts."""
    found = []
    for n in range(6):
        facts = {"caption": f"caption {n}" if n != 3 else None, **TALK}
        found += [(f"t/{n:03}.jpg", b"\xff\0"), (f"t/{n:03}.txt", f"text {n}".encode())]
        found += [(f"t/{n:03}.json", json.dumps(facts).encode())]
    return found


@pytest.mark.parametrize("suffix", sorted(WRITERS))
def test_a_sample_is_a_row_with_the_members_of_one_stem(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(WRITERS[suffix](samples()))
    make = lambda **options: lambda: open_source(path, limits=SMALL, **options)  # noqa: E731
    texts = [f"text {n}" for n in range(6)]
    assert check(make(), 90).texts == texts
    assert check(make(field="txt"), 90).texts == texts
    found = check(make(field="caption"), 90)
    assert found.texts == [f"caption {n}" for n in (0, 1, 2, 4, 5)]
    assert [(drop.id, drop.reason) for drop in found.drops] == [(f"a{suffix}:t/003", "no_text")]
    chats = lambda: open_chats(path, limits=SMALL)  # noqa: E731
    said = assert_ledger_balances(chats())
    assert assert_resumes_exactly(chats) == said
    assert_cut_is_the_source(chats(), 90)
    assert [chat.id for chat in said.conversations] == [f"a{suffix}:t/{n:03}" for n in range(6)]
    _, where = read_document(make(field="caption")(), None, 4) or ("", None)
    assert where is not None
    assert where.id == f"a{suffix}:t/005"


def test_what_is_left_out_of_an_archive_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    members = [*samples(), (".git/config.txt", b"x"), ("__MACOSX/a.txt", b"x")]
    (tmp_path / "a.tar").write_bytes(tar_bytes(members))
    with caplog.at_level(logging.INFO):
        account(open_source(tmp_path / "a.tar").batches())
        assert account(open_source(tmp_path / "a.tar", ext=".json,.txt").batches()).num_read == 12
    assert "left out 14 members of other endings (6 .jpg, 6 .json, 2 hidden)" in caplog.text
    assert "left out 8 members of other endings (6 .jpg, 2 hidden)" in caplog.text


def test_names_and_links_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for kind, name in ((tarfile.SYMTYPE, "l.txt"), (tarfile.LNKTYPE, "h.txt")):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, str(tmp_path / "secret.txt")
            archive.addfile(info)
        info = tarfile.TarInfo("pipe.txt")
        info.type = tarfile.FIFOTYPE
        archive.addfile(info)
        for name in ("../up.txt", "/etc/abs.txt", "./here.txt"):
            info = tarfile.TarInfo(name)
            info.size = 2
            archive.addfile(info, io.BytesIO(b"ok"))
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.tar").write_bytes(stream.getvalue())
    with zipfile.ZipFile(tmp_path / "in/a.zip", "w") as made:
        link = zipfile.ZipInfo("l.txt")
        link.external_attr = 0o120777 << 16
        made.writestr(link, str(tmp_path / "secret.txt"))
        for name in ("../up.txt", "/etc/abs.txt", "./here.txt"):
            made.writestr(name, b"ok")
    before = sorted(tmp_path.rglob("*"))
    for path in (tmp_path / "in/a.tar", tmp_path / "in/a.zip"):
        assert check(lambda path=path: open_source(path, limits=SMALL), 9).texts == ["ok"] * 3
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("suffix", [".tar.gz", ".zip"])
def test_a_bomb_is_refused_before_it_is_held(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(WRITERS[suffix]([("a.txt", b"fine"), ("b.txt", bytes(30_000_000))]))
    assert path.stat().st_size < 60_000
    source = open_source(path, limits=BatchLimits(num_bytes=10_000, most_bytes=100_000))
    tracemalloc.start()
    try:
        with pytest.raises(SourceError, match=r"member 'b.txt' of 30,000,000 bytes"):
            account(source.batches())
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_a_header_that_says_it_is_huge_is_refused(tmp_path: Path) -> None:
    info = tarfile.TarInfo("a.txt")
    info.type, info.size = tarfile.XHDTYPE, 2**40
    (tmp_path / "a.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(4096))
    with pytest.raises(SourceError, match="a header of 1,099,511,627,776 bytes"):
        account(TarSource(tmp_path / "a.tar").batches())


@pytest.mark.parametrize("suffix", sorted(WRITERS))
def test_an_archive_cut_at_any_byte_is_damaged_not_short(tmp_path: Path, suffix: str) -> None:
    members = [(f"{n}.txt", f"text {n * 7919}".encode() * 9) for n in range(6)]
    whole = WRITERS[suffix](members)
    # Of a tar the last blocks are zeros, which nobody misses; the first of them is the end's mark.
    last = len(whole.rstrip(b"\0")) + 400 if suffix == ".tar" else len(whole)
    path = tmp_path / f"a{suffix}"
    for stop in range(0, last, 37):
        path.write_bytes(whole[:stop])
        with pytest.raises(SourceError, match=r"a\.(tar|zip).*damaged or truncated"):
            account(open_source(path).batches())


def test_a_member_that_is_damaged_is_named(tmp_path: Path) -> None:
    data = bytearray(zip_bytes([("a.txt", b"a" * 99), ("b.txt", bytes(range(97, 122)) * 9)]))
    at = data.index(b"b.txt") + 9
    data[at] ^= 255
    (tmp_path / "a.zip").write_bytes(data)
    with pytest.raises(SourceError, match=r"a\.zip, member 'b\.txt': the archive is damaged"):
        account(ZipSource(tmp_path / "a.zip").batches())
    (tmp_path / "a.tar").write_bytes(tar_bytes([("a.txt", b"x")]) + b"more")
    with pytest.raises(SourceError, match="something follows its end"):
        account(TarSource(tmp_path / "a.tar").batches())


def test_a_zip_is_cut_between_samples(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(zip_bytes(samples()))
    source = ZipSource(tmp_path / "a.zip", field="caption", on_bad="skip", limits=SMALL)
    pieces: Sequence[Any] = assert_cut_is_the_source(source, 100)
    assert len(pieces) > 2
    cursor = list(pieces[0].batches())[-1].cursor
    with pytest.raises(SourceError, match="resume with the piece the cursor came from"):
        list(pieces[2].batches({**cursor, "position": {"members": 1}}))
