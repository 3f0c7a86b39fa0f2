"""The table of origins goes with its store, to object storage and back."""

from __future__ import annotations

import shutil

import pytest

from shardmill.building import BuildSpec, Feed, build_store
from shardmill.remote import pull, push
from shardmill.sources import TextSource
from shardmill.store import verify
from shardmill.store.layout import ORIGINS
from shardmill.tokenizers import ByteTokenizer
from tests.remote.conftest import files_of


@pytest.fixture
def store(tmp_path):
    return built(tmp_path, "some text")


def built(folder, text: str):
    (folder / "a.txt").write_text(text)
    feed = Feed(source=TextSource(folder / "a.txt"), fill=(("train", None),))
    spec = BuildSpec()
    place = folder / f"store-{len(text)}"
    build_store([feed], place, tokenizer=ByteTokenizer(), spec=spec, workers=1)
    return place


@pytest.fixture
def url(tmp_path) -> str:
    return f"file://{tmp_path}/place"


def test_origins_are_pushed_and_pulled(store, url, tmp_path):
    assert push(store, url).moved_files == 4
    assert push(store, url).moved_files == 0
    pull(url, tmp_path / "copy")
    assert files_of(tmp_path / "copy") == files_of(store)
    assert verify(tmp_path / "copy").ok
    (tmp_path / "copy" / ORIGINS).unlink()  # a copy does without
    assert pull(url, tmp_path / "copy").moved_files == 0


def test_origins_of_another_store_are_left_out_with_a_warning(store, url, tmp_path, caplog):
    push(store, url)
    other = built(tmp_path, "some other text")
    shutil.copy(other / ORIGINS, tmp_path / "place" / ORIGINS)
    pull(url, tmp_path / "copy")
    assert "of another store" in caplog.text
    assert not (tmp_path / "copy" / ORIGINS).exists()
    assert verify(tmp_path / "copy").ok


def test_origins_of_a_replaced_store_are_removed(store, url, tmp_path):
    push(store, url)
    other = built(tmp_path, "some other text")
    (other / ORIGINS).unlink()
    push(other, url, replace=True)
    assert not (tmp_path / "place" / ORIGINS).exists()
    pull(url, tmp_path / "copy")
    assert files_of(tmp_path / "copy") == files_of(other)


def test_damaged_origins_are_not_pushed(store, url, tmp_path, caplog):
    path = store / ORIGINS
    path.write_bytes(path.read_bytes()[:-1])
    assert push(store, url).moved_files == 3
    assert "it is left out" in caplog.text
    assert not (tmp_path / "place" / ORIGINS).exists()


def test_origins_that_are_no_file_are_left_out_with_a_warning(store, url, tmp_path, caplog):
    (store / ORIGINS).rename(tmp_path / "table")
    (store / ORIGINS).symlink_to(tmp_path / "table")
    assert push(store, url).moved_files == 3
    assert f"{store / ORIGINS}: not a plain file (a link?)" in caplog.text
