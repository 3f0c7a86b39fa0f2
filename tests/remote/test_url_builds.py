"""Builds to a URL: the objects of a local build, whatever is there, fails or is asked meanwhile.
Killed builds have their own module."""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
import re
import tarfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from shardmill.building import BuildReport, BuildSpec, build_store
from shardmill.errors import (
    BuildError,
    BuildLockedError,
    DamagedStoreError,
    OptionError,
    StoreError,
    StoreExistsError,
    StoreNotFoundError,
    UnfinishedBuildError,
)
from shardmill.remote import open_remote, pull, push, remote_manifest, verify_remote
from shardmill.remote.contents import BUILD, FileFact, is_same
from shardmill.remote.folder import RemoteFolder
from shardmill.remote.workplace import UrlOutput, scratch_folder
from shardmill.storage.atomic import HashedFile, LockedFile
from shardmill.tokenizers import ByteTokenizer
from tests.building.corpora import feeds_of, write_corpus
from tests.remote.conftest import Spot, files_of, remote_files
from tests.services import Fault, LoopbackS3

SPEC = BuildSpec(shard_bytes=16_000)
OTHER = BuildSpec(shard_bytes=50_000)
FILES = 29  # of the store
near = pytest.mark.parametrize(
    "spot", ["memory", pytest.param("file", marks=pytest.mark.slow)], indirect=True
)
"""For what does not depend on the place; other tests show that S3, which is slow, does the same."""


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardmill.building.plan.CHUNK_BYTES", 12_000)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus", num_files=1)


Build = Callable[..., BuildReport]


@pytest.fixture
def build(corpus: Path, tmp_path: Path, request, monkeypatch) -> Iterator[Build]:
    """Build the corpus to a spot, `scratch` beside it; `spec` makes it another store."""

    def run(spot: Spot, *, spec: BuildSpec = SPEC, **how: Any) -> BuildReport:
        if spot.url.startswith("s3:"):
            for name, value in request.getfixturevalue("s3").environment().items():
                monkeypatch.setenv(name, value)
        how = {"workers": 1, "scratch": tmp_path / "scratch", **how}
        return build_store(feeds_of(corpus), spot.url, tokenizer=ByteTokenizer(), spec=spec, **how)

    yield run
    scratch = tmp_path / "scratch"
    assert not scratch.exists() or list(scratch.iterdir()) == []


@pytest.fixture
def wanted(corpus: Path, tmp_path: Path) -> dict[str, bytes]:
    """The files of a local build."""
    how = {"tokenizer": ByteTokenizer(), "spec": SPEC, "workers": 1}
    build_store(feeds_of(corpus), tmp_path / "local", **how)  # type: ignore[arg-type]
    found = files_of(tmp_path / "local")
    assert len(found) == FILES
    return found


def middle_shard(files: dict[str, bytes]) -> str:
    names = sorted(name for name in files if name.startswith("train/shard_"))
    return names[len(names) // 2]


def stop_after(spot: Spot, num_receipts: int) -> Callable[[object], None]:
    """Progress that raises when so many receipts are there."""

    def look(_progress: object) -> None:
        if sum(name.endswith(".receipt") for name in spot.open().listing()) >= num_receipts:
            raise KeyboardInterrupt

    return look


def stopped(build: Build, spot: Spot, num_receipts: int = 5, **how: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        build(spot, on_progress=stop_after(spot, num_receipts), **how)


def test_the_objects_are_the_files_of_a_local_build(spot: Spot, build: Build, wanted) -> None:
    done = build(spot)
    assert remote_files(spot) == wanted
    assert (done.url, done.sent_files) == (spot.url, FILES)
    assert done.sent_bytes == sum(map(len, wanted.values()))
    again = build(spot, resume=True)
    assert (again.manifest, again.cost, again.sent_files) == (done.manifest, None, 0)
    assert verify_remote(spot.url, storage_options=spot.options).problems == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "s3"])
def test_two_workers_send_the_same_objects(kind: str, request, build: Build, wanted, tmp_path):
    spot = Spot(f"file://{tmp_path}/there", {})
    if kind == "s3":
        spot = request.getfixturevalue("s3_spot")
    assert build(spot, workers=2).cost.num_workers == 2
    assert remote_files(spot) == wanted


def hold_the_sealing(monkeypatch: pytest.MonkeyPatch, method: str, of: str, until: str) -> None:
    """`method` of an output waits with the file `of` until the file `until` of the next unit is
    there."""
    keep, goes_on = UrlOutput.keep, threading.Event()

    def kept(self: UrlOutput, file: HashedFile, name: str) -> str:
        done = keep(self, file, name)
        if name == until:
            goes_on.set()
        return done

    monkeypatch.setattr(UrlOutput, "keep", kept)
    real = getattr(UrlOutput, method)

    def held(self: UrlOutput, *words: Any) -> Any:
        assert of not in words or goes_on.wait(60)
        return real(self, *words)

    monkeypatch.setattr(UrlOutput, method, held)


@near
def test_only_the_shards_at_work_are_on_the_local_disk(
    spot: Spot, build: Build, wanted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for each split of a unit, and of the one before, which is sealed meanwhile."""
    put, create, lock = RemoteFolder.put, UrlOutput.create, threading.Lock()
    names: dict[Path, str] = {}
    seen: list[list[str]] = []

    def look() -> None:
        found = [path for path in (tmp_path / "scratch").iterdir() if path.is_file()]
        seen.append([names[path] for path in found])

    def created(self: UrlOutput, name: str) -> HashedFile:
        with lock:
            file = create(self, name)
            names[file.path] = name
            look()
        return file

    def watched(self: RemoteFolder, source: Path, *rest: Any) -> bool:
        assert source.stat().st_size <= SPEC.shard_bytes or source not in names
        with lock:
            look()
        return put(self, source, *rest)

    monkeypatch.setattr(RemoteFolder, "put", watched)
    monkeypatch.setattr(UrlOutput, "create", created)
    sealed, following = "train/shard_f002_00000_001.bin", "train/shard_f002_00001.bin"
    hold_the_sealing(monkeypatch, "keep", of=sealed, until=following)
    build(spot)
    assert set(names.values()) == {name for name in wanted if name.endswith(".bin")}
    assert [sealed, following] in map(sorted, seen)
    for found in seen:
        assert len({re.sub(r"^.*/shard_((f\d+_)?\d{5}).*", r"\1", name) for name in found}) <= 2
        assert max(Counter(name.split("/")[0] for name in found).values(), default=0) <= 2


@near
def test_a_receipt_lists_the_shards_of_its_own_unit(
    spot: Spot, build: Build, wanted, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    """Also when shards of the next unit are sent before it is written."""
    receipt, following = "002-00000000.receipt", "train/shard_f002_00001.bin"
    hold_the_sealing(monkeypatch, "write_receipt", of=receipt, until=following)
    build(spot)
    assert remote_files(spot) == wanted
    assert "made again" not in caplog.text


def test_before_the_manifest_a_reader_finds_no_store(
    spot: Spot, build: Build, wanted, tmp_path: Path
) -> None:
    seen, cache = [], {"cache": tmp_path / "cache", "max_bytes": 10**6}

    def look(_progress: object) -> None:
        if len(seen) % 5 == 0:
            for read, more in ((remote_manifest, {}), (open_remote, cache)):
                with pytest.raises(StoreNotFoundError, match="a build to here is unfinished"):
                    read(spot.url, storage_options=spot.options, **more)  # type: ignore[operator]
        seen.append(len(spot.open().listing()))

    build(spot, on_progress=look)
    assert max(seen) > 40  # with the receipts
    assert remote_files(spot) == wanted


def test_a_stopped_build_is_continued_from_what_is_at_the_url(
    spot: Spot, build: Build, wanted, tmp_path: Path
) -> None:
    stopped(build, spot, 8)
    kept = {name for name in remote_files(spot) if name.endswith(".bin")}
    with pytest.raises(UnfinishedBuildError, match=r"resume=True.*overwrite=True"):
        build(spot)
    with pytest.raises(UnfinishedBuildError, match=r"other options or input.*\n.*shard_bytes"):
        build(spot, resume=True, spec=OTHER)
    before = {name: spot.open().info(name) for name in kept}
    done = build(spot, resume=True, scratch=tmp_path / "other")
    assert done.resumed
    assert remote_files(spot) == wanted
    after = {name: spot.open().info(name) for name in kept}
    assert sum(before[name] == after[name] for name in kept) >= len(kept) - 1, "it was sent again"
    assert list((tmp_path / "other").iterdir()) == []


@near
def test_a_build_that_fails_at_once_leaves_nothing(spot: Spot, build: Build) -> None:
    stopped(build, spot, 0)
    assert remote_files(spot) == {}


@near
def test_an_unfinished_build_is_discarded_with_overwrite(spot: Spot, build: Build, wanted) -> None:
    stopped(build, spot, spec=OTHER, num_receipts=8)
    build(spot, overwrite=True)
    assert remote_files(spot) == wanted


@near
def test_a_finished_store_is_refused_unless_overwritten(spot: Spot, build: Build, wanted) -> None:
    build(spot, spec=OTHER)
    before = remote_files(spot)
    with pytest.raises(StoreExistsError, match=r"nothing was built.*overwrite=True"):
        build(spot)
    with pytest.raises(StoreExistsError, match="other input or options"):
        build(spot, resume=True)
    assert remote_files(spot) == before
    seen = set()

    def look(_progress: object) -> None:
        seen.add("meta.json" in spot.open().listing())

    build(spot, overwrite=True, on_progress=look)
    assert seen == {False}, "a mixture could have been read"
    assert remote_files(spot) == wanted


@near
def test_a_stopped_replacement_is_continued(spot: Spot, build: Build, wanted) -> None:
    build(spot, spec=OTHER)
    stopped(build, spot, overwrite=True)
    assert "meta.json" not in remote_files(spot)
    assert build(spot, resume=True, overwrite=True).resumed
    assert remote_files(spot) == wanted
    assert build(spot, resume=True, overwrite=True).cost is None, "it was built again"


@near
def test_objects_of_others_are_refused_and_stay(spot: Spot, build: Build, wanted) -> None:
    place = spot.open()
    place.write("train/notes.txt", b"mine")
    for resume in (False, True):
        with pytest.raises(StoreExistsError, match=r"train/notes\.txt"):
            build(spot, resume=resume)
    notes = {"train/notes.txt": b"mine"}
    if place.is_local:  # as in a folder
        with pytest.raises(StoreExistsError, match=r"train/notes\.txt: no build of ours"):
            build(spot, overwrite=True)
        assert remote_files(spot) == notes
        place.remove("train/notes.txt")
        notes = {}
    build(spot, overwrite=True)
    assert remote_files(spot) == {**wanted, **notes}
    place.write("train/vectors.npy", b"mine")
    with pytest.raises(StoreExistsError, match=r"train/vectors\.npy: no build of ours"):
        build(spot, overwrite=True, spec=OTHER)
    place.remove("train/vectors.npy")
    assert remote_files(spot) == {**wanted, **notes}


@near
def test_exclusions_are_not_removed_with_their_store(spot: Spot, build: Build, wanted) -> None:
    build(spot)
    spot.open().write("exclude.json", b"{}")
    with pytest.raises(StoreExistsError, match=r"exclude\.json: lists what was excluded"):
        build(spot, overwrite=True, spec=OTHER)
    assert remote_files(spot) == {**wanted, "exclude.json": b"{}"}


@near
def test_a_push_and_an_unfinished_build_are_not_mixed(
    spot: Spot, build: Build, wanted, make_store
) -> None:
    store = make_store()
    stopped(build, spot)
    before = remote_files(spot)
    with pytest.raises(StoreExistsError, match="an unfinished build is there"):
        push(store, spot.url, storage_options=spot.options)
    assert remote_files(spot) == before
    push(store, spot.url, storage_options=spot.options, replace=True)
    assert remote_files(spot) == files_of(store)
    build(spot, overwrite=True)
    assert remote_files(spot) == wanted


@pytest.mark.slow
def test_the_unfinished_push_of_another_store_is_refused(
    s3: LoopbackS3, s3_spot: Spot, build: Build, wanted, make_store
) -> None:
    s3.faults.append(Fault(path="shard_", method="PUT", times=1000, status=403))
    with pytest.raises(StoreError):
        push(make_store("other"), s3_spot.url, storage_options=s3_spot.options)
    s3.faults.clear()
    for resume in (False, True):
        with pytest.raises(StoreExistsError, match="an unfinished push is there"):
            build(s3_spot, resume=resume)
    build(s3_spot, overwrite=True)
    assert remote_files(s3_spot) == wanted


def test_a_second_build_and_a_push_are_refused_meanwhile(
    spot: Spot, build: Build, wanted, make_store, tmp_path: Path
) -> None:
    store, tried = make_store(), []

    def try_too(_progress: object) -> None:
        if tried:
            return
        for how in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(BuildLockedError, match="another push or build is at work there"):
                build(spot, scratch=tmp_path / "other", **how)
            tried.append(how)
        with pytest.raises(StoreError, match="another push or build is at work there"):
            push(store, spot.url, storage_options=spot.options, replace=True)

    build(spot, on_progress=try_too)
    assert len(tried) == 3
    assert remote_files(spot) == wanted


def test_what_another_wrote_in_place_of_a_shard_is_replaced(
    spot: Spot, build: Build, wanted
) -> None:
    """As a worker can that was given up with its run."""
    name = middle_shard(wanted)

    def late(_progress: object) -> None:
        if name not in spot.open().listing():
            spot.open().write(name, b"other tokens")

    build(spot, on_progress=late)
    assert remote_files(spot) == wanted


@pytest.mark.parametrize("harm", ["changed", "gone"])
def test_a_shard_that_changes_after_it_was_sent_is_noticed_and_made_again(
    spot: Spot, build: Build, wanted, harm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing, name = RemoteFolder.listing, middle_shard(wanted)

    def look(self: RemoteFolder) -> Any:
        if any(path.endswith("_idx.npy") for path in self.fs.find(self.root)):  # it is finishing
            self.remove(name)
            if harm == "changed":
                self.pipe(name, bytes(len(wanted[name])))
        return listing(self)

    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "listing", look)
        with pytest.raises(DamagedStoreError, match=f"{name}: was sent, and is gone or changed"):
            build(spot)
    assert "meta.json" not in remote_files(spot)
    build(spot, resume=True)
    assert remote_files(spot) == wanted


@near
def test_a_worker_of_a_run_that_was_given_up_changes_nothing(
    spot: Spot, build: Build, wanted, tmp_path: Path
) -> None:
    stopped(build, spot)
    before = remote_files(spot)
    late = UrlOutput(spot.url, "run-0123456789abcdef", tmp_path / "late")
    name = next(name for name in before if name.endswith(".bin"))
    file = late.create(name)
    file.write(b"old tokens")
    with pytest.raises(BuildError, match="another build took over"):
        late.keep(file, name)
    file.abort()
    with pytest.raises(BuildError, match="another build took over"):
        late.write_receipt("000-00000000.receipt", b"old", [])
    assert remote_files(spot) == before
    build(spot, resume=True)
    ended = UrlOutput(spot.url, run_of(before), tmp_path / "late")
    with pytest.raises(BuildError, match="or this one has ended"):
        ended.write_receipt("000-00000000.receipt", b"late", [])
    assert remote_files(spot) == wanted


def run_of(files: dict[str, bytes]) -> str:
    """The name of the run that wrote them."""
    return str(json.loads(files[f"{BUILD}run.json"])["name"])


def test_a_pickle_holds_no_credentials_and_memory_stays_in_its_process(
    s3_spot: Spot, build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret-1")
    output = UrlOutput(s3_spot.url, "run-0123456789abcdef", tmp_path)
    data = pickle.dumps(output)
    assert b"very-secret-1" not in data
    assert pickle.loads(data).remote.url == s3_spot.url
    with pytest.raises(OptionError, match="in the memory of this process"):
        build(Spot("memory://remote/x", {}), workers=2)


def test_what_killed_processes_left_in_the_scratch_folder_goes(tmp_path: Path) -> None:
    left, used = (tmp_path / f".shardmill-build-{number:016x}" for number in (1, 2))
    foreign = tmp_path / "shardmill-build-notes"
    foreign.mkdir()
    for path in (left, used):
        path.touch()
    (tmp_path / f".shardmill-build-{3:016x}").mkdir()
    with closing(LockedFile(used)) as lock:
        lock.lock()
        scratch_folder(tmp_path)
        assert sorted(tmp_path.iterdir()) == [used, foreign]
    scratch_folder(tmp_path)
    assert list(tmp_path.iterdir()) == [foreign]


def test_a_checksum_of_google_is_enough(tmp_path: Path) -> None:
    path, data = tmp_path / "x", b"tokens"
    path.write_bytes(data)
    fact = FileFact(name="x", size=6, sha256="unknown")
    md5 = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
    nowhere = Spot("memory://remote/nothing", {}).open()
    assert is_same(nowhere, fact, path, {"size": 6, "md5Hash": md5})
    other = base64.b64encode(bytes(16)).decode()
    assert not is_same(nowhere, fact, path, {"size": 6, "md5Hash": other})


# a service that fails


@pytest.mark.slow
def test_a_destination_that_refuses_is_an_error_at_once(
    s3: LoopbackS3, s3_spot: Spot, build: Build
) -> None:
    with pytest.raises(StoreError, match="bucket"):
        build(Spot("s3://no-such-bucket/x", {}))
    s3.faults.append(Fault(path=".shardmill-push-", method="PUT", times=1000, status=403))
    with pytest.raises(StoreError, match=r"shardmill-push-.*no retry would help"):
        build(s3_spot)
    s3.faults.clear()
    assert remote_files(s3_spot) == {}


def test_a_destination_that_cannot_be_written_is_refused(build: Build, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "old.tar", "w") as archive:
        archive.add(__file__, "test.py")
    with pytest.raises(StoreError, match="this kind of storage may not support that"):
        build(Spot(f"tar://store::file://{tmp_path}/old.tar", {}))


@pytest.mark.slow
@pytest.mark.parametrize("flaw", [{"status": 503}, {"drop_after": 0}])
def test_a_service_that_fails_now_and_then_gets_the_whole_store(
    s3: LoopbackS3, s3_spot: Spot, build: Build, wanted, flaw: dict[str, int]
) -> None:
    s3.faults += [
        Fault(path=".shardmill-push-", method="PUT", times=2, **flaw),
        Fault(path="shard_0000", method="PUT", times=2, **flaw),
        Fault(path="shard_0000", method="HEAD", times=2, **flaw),
        Fault(path="000-00000003.receipt", method="PUT", times=2, **flaw),
        Fault(path="train_idx.npy", method="PUT", times=1, **flaw),
        Fault(path="meta.json", method="PUT", times=1, **flaw),
        Fault(path="plan.json", method="DELETE", times=1, **flaw),
    ]
    build(s3_spot)
    assert [fault.times for fault in s3.faults] == [0] * 7
    assert remote_files(s3_spot) == wanted


@pytest.mark.slow
def test_half_a_receipt_is_fetched_again(s3: LoopbackS3, s3_spot: Spot, build: Build, wanted):
    half = Fault(path=".receipt", method="GET", times=4, skip=5, drop_after=100)
    s3.faults.append(half)
    build(s3_spot)
    assert half.times == 0
    assert remote_files(s3_spot) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("status", [503, 403])
def test_after_a_service_refused_a_shard_the_build_is_resumed(
    s3: LoopbackS3, s3_spot: Spot, build: Build, wanted, status: int, tmp_path: Path
) -> None:
    name = middle_shard(wanted)
    s3.faults.append(Fault(path=name, method="PUT", times=1000, status=status))
    words = "unreachable" if status == 503 else "no retry would help"
    with pytest.raises(StoreError, match=f"{name}.*{words}"):
        build(s3_spot)
    s3.faults.clear()
    assert "meta.json" not in remote_files(s3_spot)
    s3.requests.clear()
    build(s3_spot, resume=True)
    assert s3.sent("PUT", "shard_00000") == 0, "it was sent again"
    assert remote_files(s3_spot) == wanted
    pull(s3_spot.url, tmp_path / "copy", storage_options=s3_spot.options)
    assert files_of(tmp_path / "copy") == wanted
