"""S3 that loses connections, throttles and cuts answers short: the bytes are right in the end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shardmill.errors import StoreError
from shardmill.records import Ragged
from shardmill.remote import pull, push
from shardmill.remote.claims import CLAIM
from shardmill.testing.stores import build_small_store
from tests.remote.conftest import Spot, files_of, remote_files
from tests.services import Fault, LoopbackS3

FAULTS = {
    "503": {"status": 503},
    "500": {"status": 500},
    "429": {"status": 429},
    "connection lost": {"drop_after": 0},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
def test_a_push_through_faults_arrives_whole(make_store, s3: LoopbackS3, s3_spot: Spot, kind: str):
    store = make_store()
    s3.faults += [
        Fault(path="shard_0000", method="PUT", times=3, **FAULTS[kind]),
        Fault(path="meta.json", method="PUT", times=2, **FAULTS[kind]),
    ]
    push(store, s3_spot.url, storage_options=s3_spot.options)
    assert [fault.times for fault in s3.faults] == [0, 0]
    assert remote_files(s3_spot) == files_of(store)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*FAULTS, "cut short"])
def test_a_pull_through_faults_is_whole(
    make_store, s3: LoopbackS3, s3_spot: Spot, tmp_path: Path, kind: str
) -> None:
    store = make_store()
    push(store, s3_spot.url, storage_options=s3_spot.options)
    fault = FAULTS.get(kind, {"drop_after": 400})
    s3.faults += [Fault(path="shard_0000", method="GET", times=3, **fault)]
    s3.faults += [Fault(path="meta.json", method="GET", times=1, **fault)]
    pull(s3_spot.url, tmp_path / "copy", storage_options=s3_spot.options)
    assert [fault.times for fault in s3.faults] == [0, 0]
    assert files_of(tmp_path / "copy") == files_of(store)


@pytest.mark.slow
def test_a_server_that_stays_down_is_an_error_and_the_next_push_continues(
    make_store, s3: LoopbackS3, s3_spot: Spot
) -> None:
    store = make_store()
    s3.faults.append(Fault(path="shard_00009", method="PUT", times=10_000, status=503))
    with pytest.raises(StoreError, match=r"unreachable after 6 tries.*do the same again"):
        push(store, s3_spot.url, workers=1, storage_options=s3_spot.options)
    assert "meta.json" not in remote_files(s3_spot)
    s3.faults.clear()
    s3.requests.clear()
    again = push(store, s3_spot.url, storage_options=s3_spot.options)
    assert again.kept_files == 10  # the index and the nine shards before
    assert s3.sent("PUT", "train/shard_00000") == 0
    assert remote_files(s3_spot) == files_of(store)


@pytest.mark.slow
def test_the_manifest_is_the_last_file_that_is_sent(make_store, s3: LoopbackS3, s3_spot: Spot):
    push(make_store(), s3_spot.url, storage_options=s3_spot.options)
    put = [request.path.rpartition("/")[2] for request in s3.requests if request.method == "PUT"]
    put = [name for name in put if not name.startswith(CLAIM)]
    assert len(put) == 15
    assert put[0].startswith(".shardmill-push.json")
    assert put[-1].startswith("meta.json")


@pytest.mark.slow
def test_a_replaced_store_loses_its_manifest_first(make_store, s3: LoopbackS3, s3_spot: Spot):
    push(make_store("first", seed=1), s3_spot.url, storage_options=s3_spot.options)
    s3.requests.clear()
    second = make_store("second", seed=2)
    push(second, s3_spot.url, replace=True, storage_options=s3_spot.options)
    changes = [r for r in s3.requests if r.method in ("PUT", "DELETE", "POST")]
    changes = [r for r in changes if ".shardmill-push" not in r.path]
    assert changes[0].method == "DELETE"
    assert "meta.json" in changes[0].path


@pytest.mark.slow
def test_an_answer_with_other_bytes_is_fetched_again(make_store, s3, s3_spot, tmp_path) -> None:
    """The first beginning is wrong: sha256 finds it, and the file is fetched from the start."""
    store = make_store()
    push(store, s3_spot.url, storage_options=s3_spot.options)
    s3.faults.append(Fault(path="shard_00009", method="GET", times=10_000, status=503))
    with pytest.raises(StoreError, match="unreachable"):
        pull(s3_spot.url, tmp_path / "copy", workers=1, storage_options=s3_spot.options)
    (staged,) = tmp_path.glob(".copy.*.pull.tmp")
    (staged / "train/shard_00009.bin").write_bytes(bytes(400))
    (staged / "train/shard_00001.bin").write_bytes(bytes(1000))
    s3.faults.clear()
    again = pull(s3_spot.url, tmp_path / "copy", storage_options=s3_spot.options)
    assert files_of(tmp_path / "copy") == files_of(store)
    assert again.moved_files == 5  # shards 1 and 9, both files of val, and the manifest


@pytest.mark.slow
def test_large_files_go_in_parts_and_their_parts_are_checked(s3, s3_spot, tmp_path) -> None:
    ids = np.random.default_rng(0).integers(0, 60_000, 20_000_000)
    build_small_store(tmp_path / "store", {"train": Ragged.from_lengths(ids, [len(ids)])})
    sent = push(tmp_path / "store", s3_spot.url, storage_options=s3_spot.options)
    assert s3.sent("PUT", "train_tokens.bin?partNumber=3") == 1
    s3.requests.clear()
    again = push(tmp_path / "store", s3_spot.url, storage_options=s3_spot.options)
    assert (sent.moved_files, again.moved_files) == (3, 0)
    assert s3.sent("GET", "train_tokens") == 0, "the ETag of the parts was not enough"
    place = s3_spot.open()
    place.write("train_tokens.bin", b"other bytes")
    mended = push(tmp_path / "store", s3_spot.url, storage_options=s3_spot.options)
    assert mended.moved_bytes == 40_000_000
