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


def test_it_is_carried_both_ways(store, url, tmp_path):
    assert push(store, url).moved_files == 4
    assert push(store, url).moved_files == 0
    pull(url, tmp_path / "copy")
    assert files_of(tmp_path / "copy") == files_of(store)
    assert verify(tmp_path / "copy").ok
    (tmp_path / "copy" / ORIGINS).unlink()  # a copy does without
    assert pull(url, tmp_path / "copy").moved_files == 0


def test_one_of_another_store_is_left_out_and_told(store, url, tmp_path, caplog):
    push(store, url)
    other = built(tmp_path, "some other text")
    shutil.copy(other / ORIGINS, tmp_path / "place" / ORIGINS)
    pull(url, tmp_path / "copy")
    assert "of another store" in caplog.text
    assert not (tmp_path / "copy" / ORIGINS).exists()
    assert verify(tmp_path / "copy").ok


def test_it_goes_with_the_store_that_is_replaced(store, url, tmp_path):
    push(store, url)
    other = built(tmp_path, "some other text")
    (other / ORIGINS).unlink()
    push(other, url, replace=True)
    assert not (tmp_path / "place" / ORIGINS).exists()
    pull(url, tmp_path / "copy")
    assert files_of(tmp_path / "copy") == files_of(other)


def test_a_damaged_one_stays_here(store, url, tmp_path, caplog):
    path = store / ORIGINS
    path.write_bytes(path.read_bytes()[:-1])
    assert push(store, url).moved_files == 3
    assert "it is left out" in caplog.text
    assert not (tmp_path / "place" / ORIGINS).exists()


def test_one_that_is_no_file_is_left_out_and_told(store, url, tmp_path, caplog):
    (store / ORIGINS).rename(tmp_path / "table")
    (store / ORIGINS).symlink_to(tmp_path / "table")
    assert push(store, url).moved_files == 3
    assert f"{store / ORIGINS}: a link, a pipe or a folder" in caplog.text
