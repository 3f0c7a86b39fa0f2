"""Exclusions travel with their store, and no transfer lifts one unasked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from shardmill.errors import ManifestError, StoreExistsError
from shardmill.loading import SampleStream, TokenSource
from shardmill.remote import open_remote, pull, push
from shardmill.store import exclude_documents, exclude_spans, read_exclusions
from shardmill.store.exclusions import remove_exclusion
from tests.remote.conftest import Spot, files_of, remote_files


def test_exclusions_are_pushed_and_pulled_with_their_store(make_store, spot: Spot, tmp_path: Path):
    store = make_store()
    exclude_documents(store, [3], reason="takedown")
    sent = push(store, spot.url, storage_options=spot.options)
    assert (sent.files, sent.moved_files) == (15, 15)
    assert remote_files(spot) == files_of(store)
    fetched = pull(spot.url, tmp_path / "copy", storage_options=spot.options)
    assert (fetched.files, fetched.moved_files) == (15, 15)
    assert files_of(tmp_path / "copy") == files_of(store)


def test_later_only_new_exclusions_are_sent(make_store, spot: Spot, tmp_path: Path):
    store = make_store()
    push(store, spot.url, storage_options=spot.options)
    pull(spot.url, tmp_path / "copy", storage_options=spot.options)
    exclude_documents(store, [3], reason="takedown")
    again = push(store, spot.url, storage_options=spot.options)
    assert (again.moved_files, again.kept_files) == (1, 14)
    assert remote_files(spot) == files_of(store)
    fetched = pull(spot.url, tmp_path / "copy", storage_options=spot.options)
    assert (fetched.moved_files, fetched.kept_files) == (1, 14)
    assert files_of(tmp_path / "copy") == files_of(store)
    assert pull(spot.url, tmp_path / "copy", storage_options=spot.options).moved_files == 0


def test_a_push_does_not_lift_exclusions_unless_asked(make_store, spot: Spot, tmp_path: Path):
    store = make_store()
    stale = tmp_path / "stale"
    shutil.copytree(store, stale)
    exclude_documents(store, [3], reason="takedown")
    push(store, spot.url, storage_options=spot.options)
    with pytest.raises(StoreExistsError, match="excludes tokens that the local folder does not"):
        push(stale, spot.url, storage_options=spot.options)
    exclude_documents(stale, [5], reason="another")
    with pytest.raises(StoreExistsError, match="nothing was sent"):
        push(stale, spot.url, storage_options=spot.options)
    assert remote_files(spot) == files_of(store)
    exclude_documents(stale, [3, 4], reason="more")
    push(stale, spot.url, storage_options=spot.options)
    assert remote_files(spot) == files_of(stale)
    for number in (1, 2):
        remove_exclusion(stale, number)
    push(stale, spot.url, replace=True, storage_options=spot.options)
    assert remote_files(spot) == files_of(stale)
    assert "exclude.json" not in remote_files(spot)


def test_replacing_a_store_removes_its_exclusions(make_store, spot: Spot, caplog):
    first, second = make_store("first", seed=1), make_store("second", seed=2)
    exclude_documents(first, [3], reason="takedown")
    push(first, spot.url, storage_options=spot.options)
    push(second, spot.url, replace=True, storage_options=spot.options)
    assert remote_files(spot) == files_of(second)
    assert "exclude.json: removed, and with it what was excluded there" in caplog.text


def test_a_pull_does_not_lift_exclusions(make_store, spot: Spot, tmp_path: Path):
    store, copy = make_store(), tmp_path / "copy"
    push(store, spot.url, storage_options=spot.options)
    pull(spot.url, copy, storage_options=spot.options)
    exclude_documents(copy, [7], reason="only here")
    pull(spot.url, copy, storage_options=spot.options)
    assert [entry.documents for entry in read_exclusions(copy).entries] == [(7,)]
    exclude_documents(store, [3], reason="only there")
    push(store, spot.url, storage_options=spot.options)
    with pytest.raises(StoreExistsError, match="excludes tokens that the copy at the URL does not"):
        pull(spot.url, copy, storage_options=spot.options)
    exclude_documents(store, [7], reason="both")
    push(store, spot.url, storage_options=spot.options)
    pull(spot.url, copy, storage_options=spot.options)
    assert files_of(copy) == files_of(store)


def test_what_was_lifted_since_an_interrupted_pull_is_not_pulled(make_store, spot, tmp_path: Path):
    store = make_store()
    sent = push(store, spot.url, storage_options=spot.options)
    exclude_documents(store, [3], reason="takedown")
    staged = tmp_path / f".copy.{sent.manifest_sha256[:16]}.pull.tmp"
    staged.mkdir()
    (store / "exclude.json").rename(staged / "exclude.json")
    pull(spot.url, tmp_path / "copy", storage_options=spot.options)
    assert files_of(tmp_path / "copy") == files_of(store)


def test_damaged_remote_exclusions_are_refused(make_store, spot: Spot, tmp_path: Path):
    store = make_store()
    exclude_documents(store, [3], reason="takedown")
    push(store, spot.url, storage_options=spot.options)
    place = spot.open()
    data = remote_files(spot)["exclude.json"].replace(b"takedown", b"takeaway")
    place.fs.pipe_file(place.path("exclude.json"), data)
    options = {"cache": tmp_path / "cache", "max_bytes": 6000, "storage_options": spot.options}
    with pytest.raises(ManifestError, match=r"exclude\.json: its sha256"):
        open_remote(spot.url, **options)
    with pytest.raises(ManifestError, match=r"exclude\.json: its sha256"):
        pull(spot.url, tmp_path / "copy", storage_options=spot.options)
    assert not (tmp_path / "copy").exists()


def test_a_remote_store_gives_what_the_local_one_gives(
    make_store: Callable[..., Path], spot: Spot, tmp_path: Path
) -> None:
    store = make_store("wiki")
    plain = SampleStream([TokenSource(store, seq_len=30)], seed=3).take(range(300)).item.tolist()
    exclude_spans(store, [(100, 400), (3000, 3001)], reason="test")
    push(store, spot.url, storage_options=spot.options)
    options = {"cache": tmp_path / "cache", "max_bytes": 6000, "storage_options": spot.options}
    local = SampleStream([TokenSource(store, seq_len=30)], seed=3)
    with open_remote(spot.url, **options) as far:
        stream = SampleStream([TokenSource(far, seq_len=30, name="wiki")], seed=3)
        found = stream.take(range(300)).item.tolist()
        assert found == local.take(range(300)).item.tolist() != plain
        assert stream.exclusions == local.exclusions
        assert far.exclusions == read_exclusions(store)
        assert json.dumps(stream.exclusions)
