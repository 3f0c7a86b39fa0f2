"""The laws of moving a finished folder, at every kind of place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shardmill.errors import DamagedStoreError, StoreError, StoreExistsError, StoreNotFoundError
from shardmill.formats.packed.memmap import MemmapShardWriter
from shardmill.remote import pull, push
from shardmill.remote.contents import MARKER
from shardmill.store import verify
from tests.remote.conftest import Spot, files_of, remote_files


def test_a_pushed_and_pulled_store_is_the_same_to_the_byte(make_store, spot: Spot, tmp_path):
    store = make_store()
    sent = push(store, spot.url, storage_options=spot.options)
    assert (sent.files, sent.moved_files, sent.kept_files) == (14, 14, 0)
    assert remote_files(spot) == files_of(store)
    fetched = pull(spot.url, tmp_path / "copy", storage_options=spot.options)
    assert (fetched.moved_files, fetched.bytes) == (14, sent.bytes)
    assert files_of(tmp_path / "copy") == files_of(store)
    assert verify(tmp_path / "copy").ok
    assert sorted(p.name for p in tmp_path.glob(".*")) == []


def test_files_that_are_there_are_not_moved_again(make_store, spot: Spot, tmp_path: Path) -> None:
    store = make_store()
    push(store, spot.url, storage_options=spot.options)
    again = push(store, spot.url, storage_options=spot.options)
    assert (again.moved_files, again.moved_bytes, again.kept_files) == (0, 0, 14)
    pull(spot.url, tmp_path / "copy", storage_options=spot.options)
    again = pull(spot.url, tmp_path / "copy", storage_options=spot.options)
    assert (again.moved_files, again.kept_files) == (0, 14)


def test_a_damaged_copy_of_the_same_size_is_sent_again_and_nothing_else(make_store, spot: Spot):
    store = make_store()
    push(store, spot.url, storage_options=spot.options)
    place = spot.open()
    place.fs.pipe_file(place.path("train/shard_00003.bin"), bytes(1000))
    again = push(store, spot.url, storage_options=spot.options)
    assert (again.moved_files, again.moved_bytes) == (1, 1000)
    assert remote_files(spot) == files_of(store)


def test_another_store_is_refused_and_replaces_on_request(make_store, spot: Spot) -> None:
    first = make_store("first", seed=1)
    second = make_store("second", seed=2, shard_bytes=2500)
    push(first, spot.url, storage_options=spot.options)
    with pytest.raises(StoreExistsError, match="another finished folder"):
        push(second, spot.url, storage_options=spot.options)
    assert remote_files(spot) == files_of(first)
    push(second, spot.url, replace=True, storage_options=spot.options)
    assert remote_files(spot) == files_of(second)


def test_unknown_files_are_not_overwritten(make_store, spot: Spot) -> None:
    place = spot.open()
    place.write("train_idx.npy", b"mine")
    with pytest.raises(StoreExistsError, match=r"train_idx\.npy"):
        push(make_store(), spot.url, storage_options=spot.options)
    assert remote_files(spot) == {"train_idx.npy": b"mine"}


def test_the_unfinished_push_of_another_folder_is_not_mixed_with_this_one(make_store, spot: Spot):
    spot.open().write(MARKER, b'{"pushing":"another"}\n')
    with pytest.raises(StoreExistsError, match="unfinished push of another"):
        push(make_store(), spot.url, storage_options=spot.options)
    push(make_store("other"), spot.url, replace=True, storage_options=spot.options)
    assert MARKER not in remote_files(spot)


def test_a_damaged_local_file_is_never_sent(make_store, spot: Spot) -> None:
    store = make_store()
    (store / "train/shard_00002.bin").write_bytes(bytes(1000))
    with pytest.raises(DamagedStoreError, match=r"train/shard_00002\.bin: its sha256"):
        push(store, spot.url, storage_options=spot.options)
    assert "meta.json" not in remote_files(spot)
    assert remote_files(spot).get("train/shard_00002.bin") is None


@pytest.mark.parametrize("damage", ["zeros", "short", "gone"])
def test_a_damaged_remote_file_is_named_and_nothing_appears(
    make_store, spot: Spot, tmp_path: Path, damage: str
) -> None:
    push(make_store(), spot.url, storage_options=spot.options)
    place = spot.open()
    path = place.path("train/shard_00001.bin")
    if damage == "gone":
        place.fs.rm_file(path)
    else:
        place.fs.pipe_file(path, bytes(1000 if damage == "zeros" else 10))
    with pytest.raises(DamagedStoreError, match=r"train/shard_00001\.bin"):
        pull(spot.url, tmp_path / "copy", storage_options=spot.options)
    assert not (tmp_path / "copy").exists()


def test_pull_refuses_a_folder_that_is_not_empty(make_store, spot: Spot, tmp_path):
    push(make_store(), spot.url, storage_options=spot.options)
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy/note.txt").write_text("mine")
    with pytest.raises(StoreExistsError, match=r"note\.txt"):
        pull(spot.url, tmp_path / "copy", storage_options=spot.options)
    assert files_of(tmp_path / "copy") == {"note.txt": b"mine"}


def test_nothing_at_the_url_is_not_found(spot: Spot, tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError, match="check the URL"):
        pull(spot.url, tmp_path / "copy", storage_options=spot.options)


def test_an_unfinished_folder_is_not_pushed(make_store, spot: Spot, tmp_path: Path) -> None:
    store = make_store()
    (store / "meta.json").unlink()
    with pytest.raises(StoreNotFoundError, match="not a finished folder"):
        push(store, spot.url, storage_options=spot.options)
    assert remote_files(spot) == {}


def test_a_packed_shard_is_pushed_and_pulled(spot: Spot, tmp_path: Path) -> None:
    with MemmapShardWriter(tmp_path / "shard", 2, 8, 3) as writer:
        writer.write_bin(0, np.array([1, 2, 3]), np.array([1, 1, 0]), np.array([0]))
        writer.write_bin(1, np.array([4, 5, 6, 7]), np.array([1, 0, 1, 0]), np.array([0, 2]))
        writer.finalize()
    sent = push(tmp_path / "shard", spot.url, storage_options=spot.options)
    assert (sent.kind, sent.files) == ("packed folder", 6)
    pull(spot.url, tmp_path / "copy", storage_options=spot.options)
    assert files_of(tmp_path / "copy") == files_of(tmp_path / "shard")


def test_progress_ends_at_all_bytes(make_store, spot: Spot, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    options = {"storage_options": spot.options, "workers": 1}
    sent = push(make_store(), spot.url, progress=lambda *now: seen.append(now), **options)
    assert seen[-1] == (sent.bytes, sent.bytes)
    seen.clear()
    pull(spot.url, tmp_path / "copy", progress=lambda *now: seen.append(now), **options)
    assert seen[-1] == (sent.bytes, sent.bytes)


def test_an_unknown_protocol_is_an_option_error(make_store) -> None:
    with pytest.raises(ValueError, match="Protocol not known"):
        push(make_store(), "nowhere://bucket/x")


def test_two_pulls_of_one_folder_do_not_mix(make_store, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/elsewhere"
    push(make_store(), url)

    def pull_again(done: int, total: int) -> None:
        if 0 < done < total:
            with pytest.raises(RuntimeError, match="another process pulls this folder"):
                pull(url, tmp_path / "copy")

    pull(url, tmp_path / "copy", workers=1, progress=pull_again)
    assert verify(tmp_path / "copy").ok


def test_a_store_error_is_what_callers_catch() -> None:
    assert issubclass(DamagedStoreError, StoreError)
