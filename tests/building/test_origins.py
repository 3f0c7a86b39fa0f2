"""The table of origins: a function of the input, sealed, of its very store.

That workers, units, kills and resumes do not show in it is seen where they do not show in a store:
it is one of the files compared there.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.building import BuildSpec, Feed, build_chats, build_store
from shardmill.chat import bind_template, known_template
from shardmill.errors import DamagedStoreError, ManifestError
from shardmill.sources import ConcatSource, JsonlSource, MemoryChats, MemorySource, TextSource
from shardmill.store import open_store, read_origins, verify
from shardmill.store.layout import ORIGINS
from shardmill.tokenizers import ByteTokenizer
from tests.building.corpora import SMALL
from tests.helpers import folder_digest

TOKENIZER = ByteTokenizer(byte_offset=1, specials={"eot": "<e>"})


def build(feeds, out: Path, **how):
    how = {"workers": 1, "spec": BuildSpec(append_eot=True), **how}
    return build_store(feeds, out, tokenizer=TOKENIZER, **how)


def pages(folder: Path, **files: list[str]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, texts in files.items():
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


def table_of(store: Path) -> list[list[int]]:
    """Without marks."""
    opened = open_store(store)
    found = read_origins(opened.folder, opened.manifest)
    assert found is not None
    return [[*row[:2], *row[3:]] for row in found.table.tolist()]


def test_a_row_counts_what_comes_before_its_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr("shardmill.building.plan.CHUNK_BYTES", 40)  # about two lines
    folder = pages(tmp_path / "pages", a=["one", "two", "three", "four", "five"], b=["six"])
    feed = Feed(source=JsonlSource(folder, limits=SMALL), fill=(("val", 8), ("train", None)))
    build([feed], tmp_path / "store")
    opened = open_store(tmp_path / "store")
    found = read_origins(opened.folder, opened.manifest)
    assert found is not None
    assert (found.fill, found.splits) == ((("val", "train"),), ("train", "val"))
    # feed, chunk, rows of the file, documents of train, documents of val
    assert table_of(tmp_path / "store") == [
        [0, 0, 0, 0, 0],
        [0, 1, 2, 0, 2],
        [0, 2, 4, 2, 2],
        [0, 3, 0, 3, 2],
    ]


@settings(deadline=None, max_examples=8)
@given(
    old=st.lists(st.lists(st.sampled_from(["a", "bb", "x" * 20]), max_size=4), max_size=3),
    new=st.lists(st.lists(st.sampled_from(["a", "bb", "x" * 20]), max_size=4), min_size=1),
    grain_bytes=st.sampled_from([1, 60, 200]),
)
def test_a_store_that_was_added_to_has_the_table_of_a_build_of_all(
    tmp_path_factory, old, new, grain_bytes
):
    """Small parts are one chunk only while they are small, so that new files may move old chunks:
    then old ones are counted again."""
    folder = tmp_path_factory.mktemp("origins")
    lines = (folder / "lines").resolve()
    lines.mkdir()
    (lines / "0.txt").write_text("a line\nanother\n")
    pages(folder / "pages", **{f"0{number}": texts for number, texts in enumerate([["y"], *old])})

    def feed() -> Feed:
        parts = [
            TextSource(lines, split="line", limits=SMALL),
            JsonlSource(folder / "pages", field="text", limits=SMALL),
        ]
        return Feed(source=ConcatSource(parts, name="all"), fill=(("val", 9), ("train", None)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardmill.building.plan.CHUNK_BYTES", grain_bytes)
        build([feed()], folder / "store")
        pages(folder / "pages", **{f"9{number}": texts for number, texts in enumerate(new)})
        build([feed()], folder / "store", append=True)
        build([feed()], folder / "whole")
    assert folder_digest(folder / "store") == folder_digest(folder / "whole")


def test_old_chunks_that_new_files_move_are_counted_again(tmp_path, monkeypatch):
    monkeypatch.setattr("shardmill.building.plan.CHUNK_BYTES", 100)
    first, second = tmp_path / "first", tmp_path / "second"

    def feed() -> Feed:
        parts = [JsonlSource(first, field="text"), JsonlSource(second, field="text", on_bad="skip")]
        return Feed(source=ConcatSource(parts, name="all"), fill=(("train", None),))

    pages(first, a=["one", "two"])
    pages(second, a=["three"])
    build([feed()], tmp_path / "store")
    assert len(table_of(tmp_path / "store")) == 1  # both are small
    pages(second, b=["x" * 90, "y" * 90])
    build([feed()], tmp_path / "store", append=True)
    build([feed()], tmp_path / "whole")
    assert folder_digest(tmp_path / "store") == folder_digest(tmp_path / "whole")


def test_sources_of_one_chunk_and_conversations_have_no_table(tmp_path):
    build([Feed(source=MemorySource(["a"]), fill=(("train", None),))], tmp_path / "memory")
    tokenizer = ByteTokenizer(
        byte_offset=4, specials={"sys": "<s>", "usr": "<u>", "asst": "<a>", "eot": "<e>"}
    )
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    build_chats(
        MemoryChats([chat]),
        tmp_path / "chats",
        template=bind_template(known_template("four-marker"), tokenizer),
        tokenizer=tokenizer,
        spec=BuildSpec(),
    )
    assert not list(tmp_path.rglob(ORIGINS))


@pytest.fixture
def two(tmp_path):
    """Two stores of other texts."""
    for name in ("a", "b"):
        source = JsonlSource(pages(tmp_path / f"pages-{name}", one=[name]), name=name)
        build([Feed(source=source, fill=(("train", None),))], tmp_path / name)
    return tmp_path


def test_a_table_of_another_store_is_refused_and_reported(two):
    shutil.copy(two / "b" / ORIGINS, two / "a" / ORIGINS)
    with pytest.raises(DamagedStoreError, match="of another store"):
        read_origins(two / "a", open_store(two / "a").manifest)
    (problem,) = verify(two / "a").problems
    assert problem.startswith(f"{ORIGINS}: of another store (fingerprint ")


def test_a_damaged_table_is_refused_at_every_byte(two):
    path = two / "a" / ORIGINS
    data, manifest = path.read_bytes(), open_store(two / "a").manifest
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises((DamagedStoreError, ManifestError)):
            read_origins(two / "a", manifest)
    for place in (0, 1, 63, 64, len(data) - 33, len(data) - 1):
        path.write_bytes(data[:place])
        with pytest.raises((DamagedStoreError, ManifestError)):
            read_origins(two / "a", manifest)
    assert len(verify(two / "a").problems) == 1


def test_a_store_with_a_table_can_be_replaced(two):
    source = JsonlSource(two / "pages-b", name="b")
    feed = Feed(source=source, fill=(("train", None),))
    build([feed], two / "a", overwrite=True)
    assert folder_digest(two / "a") == folder_digest(two / "b")
