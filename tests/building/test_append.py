"""Adding files to a store gives the bytes of a build of all files, old ones first."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.building import BuildSpec, Feed, build_store, workplace
from shardmill.building.splits import HashSplit
from shardmill.errors import BuildError, DamagedStoreError, OptionError, SourceError
from shardmill.records import Ragged
from shardmill.sources import (
    BatchLimits,
    ConcatSource,
    JsonlSource,
    MemorySource,
    ParquetSource,
    TextSource,
)
from shardmill.storage.atomic import HashedFile
from shardmill.store import open_store, read_origins, verify, writer
from shardmill.store.layout import ORIGINS
from shardmill.store.plans import write_origins
from shardmill.store.writer import share_file
from shardmill.tokenizers import ByteTokenizer
from shardmill.tokenizers.base import as_list
from tests.helpers import folder_digest

SMALL = BatchLimits(num_bytes=60, num_documents=4)


class Mute(ByteTokenizer):
    """A text that begins with "~" has no token."""

    def encode_batch(self, texts) -> Ragged:
        return super().encode_batch(["" if text[0] == "~" else text for text in as_list(texts)])


rows = st.lists(
    st.sampled_from(["", "~", "~~", "a", "bb", "ccc dd", "x" * 30, "caf\u00e9", None, b"{broken"]),
    max_size=6,
)
file_lists = st.lists(st.lists(rows, min_size=1, max_size=5), min_size=2, max_size=4)
THREE = HashSplit(seed=3, fractions=(("val", 0.3), ("test", 0.2)))


def write(kind: str, path: Path, content: list[str | bytes | None]) -> None:
    """One file of these rows."""
    if kind == "parquet":
        texts = [None if isinstance(one, bytes) else one for one in content]
        table = pa.table({"text": pa.array(texts, pa.string())})
        pq.write_table(table, path, row_group_size=2)
    elif kind == "jsonl":
        lines = [
            one if isinstance(one, bytes) else json.dumps({"text": one}).encode() for one in content
        ]
        path.write_bytes(b"".join(line + b"\n" for line in lines))
    else:
        path.write_text("".join(f"{one}\n" for one in content))


def source_of(kind: str, where: object):
    if kind == "parquet":
        return ParquetSource(where, field="text", name="all", limits=SMALL)
    if kind == "jsonl":
        return JsonlSource(where, field="text", on_bad="skip", name="all", limits=SMALL)
    split = "line" if kind == "lines" else None
    return TextSource(where, split=split, name="all", limits=SMALL)


SUFFIX = {"jsonl": ".jsonl", "parquet": ".parquet", "lines": ".txt", "texts": ".txt"}


def build(source, out: Path, *, fill=(("train", None),), eot=False, shard_bytes=32, **how):
    """`fill` None: a hash chooses."""
    feed = Feed(source=source, fill=fill or tuple((split, None) for split in THREE.splits))
    return build_store(
        [feed if fill else replace(feed, by_hash=THREE)],
        out,
        spec=BuildSpec(dataset_name="d", shard_bytes=shard_bytes, append_eot=eot),
        max_loss=1.0,
        allow_empty=True,
        **{"tokenizer": Mute(byte_offset=1, specials={"eot": "<e>"}), "workers": 1, **how},
    )


class Growing:
    """A folder to which files are added; names sort at random, the order is that of addition."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder / "files", kind
        self.folder.mkdir(parents=True)
        self.paths: list[Path] = []

    def add(self, files, draw: np.random.Generator) -> None:
        names = sorted(draw.choice(10**6, len(files), replace=False).tolist())
        for name, content in zip(names, files, strict=True):
            path = self.folder / f"{name:06d}-{len(self.paths)}{SUFFIX[self.kind]}"
            write(self.kind, path, content)
            self.paths.append(path)

    def in_order(self):
        return source_of(self.kind, self.paths)

    def as_found(self):
        return source_of(self.kind, self.folder)


def is_full(store: Path, fill) -> bool:
    limits = [limit for _, limit in fill or [("", None)]]
    return None not in limits and open_store(store).manifest.ledger.tokens.kept == sum(limits)


@pytest.mark.slow
@settings(deadline=None, max_examples=20)
@given(
    kind=st.sampled_from(["jsonl", "parquet", "lines", "texts"]),
    batches=file_lists,
    grain_bytes=st.sampled_from([1, 40, 150, 10**6]),
    shard_tokens=st.sampled_from([1, 3, 7, 10**6]),
    fill=st.sampled_from(
        [
            (("train", None),),
            (("val", 5), ("train", None)),
            (("val", 4), ("train", 30)),
            (("val", 0), ("a", 3), ("b", 20), ("train", None)),
            (("train", 60),),
            None,
        ]
    ),
    eot=st.booleans(),
    seed=st.integers(0, 99),
)
def test_adding_files_gives_the_bytes_of_a_build_of_all(
    tmp_path_factory, kind, batches, grain_bytes, shard_tokens, fill, eot, seed
):
    folder, draw = tmp_path_factory.mktemp("append"), np.random.default_rng(seed)
    growing = Growing(folder, kind)
    how = {"fill": fill, "shard_bytes": 2 * shard_tokens, "eot": eot}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardmill.building.plan.CHUNK_BYTES", grain_bytes)
        for number, files in enumerate(batches):
            growing.add(files, draw)
            build(growing.in_order(), folder / f"whole{number}", **how)
            if number and is_full(folder / "store", fill):
                with pytest.raises(BuildError, match="full: its old files filled all splits"):
                    build(growing.as_found(), folder / "store", append=True, **how)
                return
            build(growing.as_found(), folder / "store", append=True, **how)
            assert folder_digest(folder / "store") == folder_digest(folder / f"whole{number}")
    assert verify(folder / "store").problems == []
    assert sorted(path.name for path in folder.glob(".*")) == []


def grown(tmp_path: Path, *contents, kind: str = "jsonl") -> Growing:
    """A folder with one file for each content, in the order of their names."""
    growing = Growing(tmp_path, kind)
    for number, content in enumerate(contents):
        path = growing.folder / f"{number}{SUFFIX[kind]}"
        write(kind, path, content)
        growing.paths.append(path)
    return growing


def add_file(growing: Growing, content, name: str = "9") -> None:
    path = growing.folder / f"{name}{SUFFIX[growing.kind]}"
    write(growing.kind, path, content)
    growing.paths.append(path)


def test_dropped_rows_stand_where_a_build_of_all_puts_them(tmp_path):
    """One batch holds the end of the old files and the first new row: what its source drops comes
    before what has no token."""
    growing = grown(tmp_path, ["~"], [b"{broken"])
    build(growing.as_found(), tmp_path / "s")
    add_file(growing, [None, "~"])
    build(growing.as_found(), tmp_path / "s", append=True)
    build(growing.in_order(), tmp_path / "whole")
    assert folder_digest(tmp_path / "s") == folder_digest(tmp_path / "whole")
    ids = [json.loads(row)["id"] for row in (tmp_path / "s/dropped.jsonl").read_text().splitlines()]
    assert ids == ["1.jsonl:1", "9.jsonl:1", "all: document 0", "all: document 1"]


def test_batches_end_where_they_would_in_a_build_of_all(tmp_path):
    """Three old rows and the first new one are a batch, and it fills the split: the ledger of a
    build of all never sees the row after it."""
    growing, how = grown(tmp_path, ["a", "a", "a"]), {"fill": (("train", 4),)}
    build(growing.as_found(), tmp_path / "s", **how)
    add_file(growing, ["b"], name="8")
    add_file(growing, ["c"], name="9")
    build(growing.as_found(), tmp_path / "s", append=True, **how)
    build(growing.in_order(), tmp_path / "whole", **how)
    assert folder_digest(tmp_path / "s") == folder_digest(tmp_path / "whole")
    assert open_store(tmp_path / "s").manifest.ledger.documents.read == 4


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit for each two rows of forty letters."""
    monkeypatch.setattr("shardmill.building.plan.CHUNK_BYTES", 110)


LONG = [letter * 40 for letter in "abcdefg"]


def test_units_that_stay_are_the_very_files_and_readers_keep_the_old_store(tmp_path, small):
    growing = grown(tmp_path, LONG)
    build(growing.as_found(), tmp_path / "s")
    before = {path.name: path.stat().st_ino for path in (tmp_path / "s/train").iterdir()}
    last = sorted(before)[-1]
    mapped = np.memmap(tmp_path / "s/train" / last, "<u2", mode="r")
    held = mapped.tolist()
    add_file(growing, ["b" * 5], name="0-before")
    build(growing.as_found(), tmp_path / "s", append=True)
    now = {path.name: path.stat().st_ino for path in (tmp_path / "s/train").iterdir()}
    unit = last[: len("shard_00000")]
    same = {name for name in before if now.get(name) == before[name]}
    assert same == {name for name in before if not name.startswith(unit)}, "all but the last unit"
    assert len(same) > 3
    assert mapped.tolist() == held
    source = open_store(tmp_path / "s").manifest.sources[0]
    assert [file["file"] for file in source["files"]] == ["0.jsonl", "0-before.jsonl"]


def test_only_what_a_new_file_changes_is_encoded(tmp_path, small):
    class Watched(Mute):
        seen: ClassVar[list[str]] = []

        def encode_batch(self, texts) -> Ragged:
            self.seen.extend(as_list(texts))
            return super().encode_batch(texts)

    tokenizer = Watched(byte_offset=1, specials={"eot": "<e>"})
    growing = grown(tmp_path, LONG)
    build(growing.as_found(), tmp_path / "s", tokenizer=tokenizer)
    add_file(growing, ["new " * 10])
    Watched.seen.clear()
    build(growing.as_found(), tmp_path / "s", tokenizer=tokenizer, append=True)
    assert set(Watched.seen) <= {LONG[-1], "new " * 10}


def refuse_links(patch: pytest.MonkeyPatch) -> None:
    def refuse(*_):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    patch.setattr(writer.os, "link", refuse)


def test_a_disk_that_cannot_link_gets_copies(tmp_path, monkeypatch, caplog, small):
    growing = grown(tmp_path, LONG)
    build(growing.as_found(), tmp_path / "s")
    add_file(growing, ["b"])
    build(growing.in_order(), tmp_path / "whole")
    refuse_links(monkeypatch)
    caplog.set_level(logging.INFO)
    build(growing.as_found(), tmp_path / "s", append=True)
    assert folder_digest(tmp_path / "s") == folder_digest(tmp_path / "whole")
    assert "its shards are copied" in caplog.text


def test_a_copy_has_its_name_only_when_it_is_whole_and_checked(tmp_path, monkeypatch):
    """A resume trusts a copy of the right size."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(b"tokens")
    refuse_links(monkeypatch)
    finish = HashedFile.finish

    def watched(self: HashedFile) -> str:
        assert not new.exists()
        return finish(self)

    monkeypatch.setattr(HashedFile, "finish", watched)
    with pytest.raises(DamagedStoreError, match="its sha256 is"):
        share_file(old, new, "0" * 64)
    assert list(tmp_path.iterdir()) == [old]
    assert not share_file(old, new, hashlib.sha256(b"tokens").hexdigest())
    assert new.read_bytes() == b"tokens"
    assert sorted(tmp_path.iterdir()) == [new, old]


def test_a_copy_that_was_killed_is_made_again(tmp_path, monkeypatch, small):
    growing = grown(tmp_path, LONG)
    build(growing.as_found(), tmp_path / "s")
    add_file(growing, ["b"])
    build(growing.in_order(), tmp_path / "whole")
    refuse_links(monkeypatch)
    real = workplace.publish_folder

    def stop(staged: Path, *_args, **_kwargs) -> None:
        for path in sorted((staged / "train").iterdir())[:3]:
            path.write_bytes(path.read_bytes()[:7])
        raise KeyboardInterrupt

    monkeypatch.setattr(workplace, "publish_folder", stop)
    with pytest.raises(KeyboardInterrupt):
        build(growing.as_found(), tmp_path / "s", append=True)
    monkeypatch.setattr(workplace, "publish_folder", real)
    build(growing.as_found(), tmp_path / "s", append=True, resume=True)
    assert folder_digest(tmp_path / "s") == folder_digest(tmp_path / "whole")


def test_without_new_files_the_store_is_left_as_it_is(tmp_path, caplog):
    growing = grown(tmp_path, ["a"])
    build(growing.as_found(), tmp_path / "s")
    before = (tmp_path / "s").stat().st_ino
    with caplog.at_level(logging.INFO):
        done = build(growing.as_found(), tmp_path / "s", append=True)
    assert (tmp_path / "s").stat().st_ino == before
    assert done.manifest == open_store(tmp_path / "s").manifest
    assert "no new files" in caplog.text


def test_several_inputs_grow_each_and_keep_the_order_of_the_store(tmp_path):
    first, second = (
        grown(tmp_path / name, ["a", "~"], ["b"], kind=kind)
        for name, kind in (("x", "jsonl"), ("y", "parquet"))
    )

    def both() -> ConcatSource:
        return ConcatSource([first.as_found(), second.as_found()], name="both")

    build(both(), tmp_path / "s")
    add_file(first, ["c"])
    build(both(), tmp_path / "s", append=True)
    add_file(second, ["d"])
    build(both(), tmp_path / "s", append=True)
    parts = [
        source_of("jsonl", first.paths[:2]),
        source_of("parquet", second.paths[:2]),
        source_of("jsonl", first.folder).of_files((first.as_found().files[2],)),
        source_of("parquet", second.folder).of_files((second.as_found().files[2],)),
    ]
    build(ConcatSource(parts, name="both"), tmp_path / "whole")
    assert folder_digest(tmp_path / "s") == folder_digest(tmp_path / "whole")


def spoil_content(growing: Growing) -> None:
    growing.paths[0].write_text('{"text": "b"}\n')


def spoil_size(growing: Growing) -> None:
    write(growing.kind, growing.paths[0], ["a", "b"])


def spoil_place(growing: Growing) -> None:
    growing.paths[0].rename(growing.folder / "other.jsonl")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (spoil_content, r"0.jsonl: changed since.*0\.jsonl: sha256 [0-9a-f]+ -> [0-9a-f]"),
        (spoil_size, r"0.jsonl: changed since.*bytes 14 -> 28"),
        (spoil_place, "0.jsonl: the store was built from this file"),
    ],
)
def test_an_old_file_that_changed_or_went_is_named(tmp_path, spoil, says):
    growing = grown(tmp_path, ["a"])
    build(growing.as_found(), tmp_path / "s")
    wanted = folder_digest(tmp_path / "s")
    add_file(growing, ["c"])
    spoil(growing)
    with pytest.raises(SourceError, match=says) as refused:
        build(growing.as_found(), tmp_path / "s", append=True)
    assert "overwrite=True" in str(refused.value)
    assert folder_digest(tmp_path / "s") == wanted


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"shard_bytes": 64}, "shard_bytes: 32 -> 64"),
        ({"eot": True}, "append_eot: False -> True"),
        ({"tokenizer": ByteTokenizer(byte_offset=2)}, "tokenizer: '"),
        ({"fill": (("train", 99),)}, "how many tokens go to which split"),
        ({"fill": (("val", 1), ("train", None))}, "splits: "),
    ],
)
def test_other_options_are_refused_by_name(tmp_path, changes, says):
    growing = grown(tmp_path, ["a"])
    build(growing.as_found(), tmp_path / "s")
    add_file(growing, ["c"])
    with pytest.raises(BuildError, match="was built with other options") as refused:
        build(growing.as_found(), tmp_path / "s", append=True, **changes)
    assert says in str(refused.value)


def test_files_that_would_be_read_otherwise_are_refused(tmp_path):
    growing = grown(tmp_path, ["a"])
    build(growing.as_found(), tmp_path / "s")
    add_file(growing, ["c"])
    strict = JsonlSource(growing.folder, field="text", name="all", limits=SMALL)
    with pytest.raises(SourceError, match=r"'on_bad': 'skip'.*'on_bad': 'error'"):
        build(strict, tmp_path / "s", append=True)


def test_what_cannot_grow_is_refused(tmp_path):
    growing = grown(tmp_path, ["a"])
    build(MemorySource(["a"], name="m"), tmp_path / "memory")
    with pytest.raises(OptionError, match="not a list of files"):
        build(growing.as_found(), tmp_path / "memory", append=True)
    build(growing.as_found(), tmp_path / "s")
    with pytest.raises(OptionError, match="not a list of files"):
        build(MemorySource(["a"], name="m"), tmp_path / "s", append=True)
    feed = Feed(source=growing.as_found(), fill=(("train", None),))
    with pytest.raises(OptionError, match="one source only"):
        build_store([feed, feed], tmp_path / "s", tokenizer=Mute(), spec=BuildSpec(), append=True)
    add_file(growing, ["c"])
    with pytest.raises(OptionError, match="engine='fast'"):
        build(growing.as_found(), tmp_path / "s", append=True, engine="fast")


def test_damage_to_the_old_store_is_noticed_or_stays_visible(tmp_path, monkeypatch, small):
    """Linked shards are not read: their old hashes are what the new store lists."""
    growing = grown(tmp_path, LONG)
    build(growing.as_found(), tmp_path / "s")
    add_file(growing, ["c"])
    first = sorted((tmp_path / "s/train").iterdir())[0]
    data = first.read_bytes()
    first.write_bytes(data[:-2])
    with pytest.raises(DamagedStoreError, match=r"shard_00000\.bin: truncated"):
        build(growing.as_found(), tmp_path / "s", append=True)
    first.write_bytes(b"\0" * len(data))
    with monkeypatch.context() as patch:
        refuse_links(patch)
        with pytest.raises(DamagedStoreError, match=r"shard_00000\.bin: its sha256"):
            build(growing.as_found(), tmp_path / "s", append=True)
    build(growing.as_found(), tmp_path / "s", append=True, overwrite=True)
    (problem,) = verify(tmp_path / "s").problems
    assert "train/shard_00000.bin" in problem


@pytest.mark.parametrize("how", ["removed", "of an older version"])
def test_a_store_without_a_record_of_its_units_is_refused(tmp_path, how):
    growing = grown(tmp_path, ["a"])
    build(growing.as_found(), tmp_path / "s")
    old = open_store(tmp_path / "s")
    if how == "removed":
        (tmp_path / "s" / ORIGINS).unlink()
    else:
        found = read_origins(old.folder, old.manifest)
        assert found is not None
        write_origins(old.folder, replace(found, units=None), old.manifest)
    wanted = folder_digest(tmp_path / "s")
    add_file(growing, ["c"])
    with pytest.raises(OptionError, match=r"no record of its units.*overwrite=True"):
        build(growing.as_found(), tmp_path / "s", append=True)
    assert folder_digest(tmp_path / "s") == wanted


def test_a_record_of_units_that_is_not_ours_is_refused(tmp_path):
    growing = grown(tmp_path, ["a"])
    build(growing.as_found(), tmp_path / "s")
    old = open_store(tmp_path / "s")
    found = read_origins(old.folder, old.manifest)
    assert found is not None
    write_origins(old.folder, replace(found, units=b'{"mark": 3}\n'), old.manifest)
    add_file(growing, ["c"])
    with pytest.raises(BuildError, match=r"record of units is not ours.*overwrite=True"):
        build(growing.as_found(), tmp_path / "s", append=True)


def test_a_file_of_the_user_in_the_store_is_never_lost(tmp_path):
    growing = grown(tmp_path, ["a"])
    build(growing.as_found(), tmp_path / "s")
    (tmp_path / "s/notes.md").write_text("mine")
    add_file(growing, ["c"])
    with pytest.raises(FileExistsError, match=r"notes\.md"):
        build(growing.as_found(), tmp_path / "s", append=True)
    assert (tmp_path / "s/notes.md").read_text() == "mine"
