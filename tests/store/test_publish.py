"""Publishing: the whole store or nothing, and no file of a user is ever deleted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardmill.errors import BuildError, StoreExistsError, StoreNotFoundError
from shardmill.records import Ragged
from shardmill.storage.atomic import atomic_write
from shardmill.store import check_target, is_finished, open_store, publish_folder, write_placeholder
from shardmill.store import store as store_module
from shardmill.testing.stores import build_small_store, plain_facts, read_documents


def staged(place: Path, ids: list[int], name: str = "staged") -> Path:
    build_small_store(place / name, {"a": Ragged.from_sequences([ids])}, shard_bytes=2)
    return place / name


def tokens(folder: Path) -> list[int]:
    open_store(folder)
    found: list[int] = read_documents(folder, "a").values.tolist()
    return found


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_store_is_moved_to_a_missing_or_empty_folder(tmp_path: Path) -> None:
    publish_folder(staged(tmp_path, [1, 2]), tmp_path / "deep" / "store", overwrite=False)
    assert tokens(tmp_path / "deep" / "store") == [1, 2]
    (tmp_path / "empty").mkdir()
    publish_folder(staged(tmp_path, [3]), tmp_path / "empty", overwrite=False)
    assert tokens(tmp_path / "empty") == [3]
    assert names(tmp_path) == ["deep", "empty"]


def test_a_finished_store_is_replaced_only_on_request(tmp_path: Path) -> None:
    publish_folder(staged(tmp_path, [1, 2, 3]), tmp_path / "store", overwrite=False)
    new = staged(tmp_path, [4])
    with pytest.raises(StoreExistsError, match="pass overwrite=True"):
        publish_folder(new, tmp_path / "store", overwrite=False)
    assert tokens(tmp_path / "store") == [1, 2, 3]
    assert tokens(new) == [4]
    (tmp_path / "store" / "a" / "shard_00099.bin").write_bytes(b"stale")
    publish_folder(new, tmp_path / "store", overwrite=True)
    assert tokens(tmp_path / "store") == [4]
    assert names(tmp_path / "store" / "a") == ["shard_00000.bin"]
    assert names(tmp_path) == ["store"]


def test_plans_go_with_the_store_they_were_made_of(tmp_path: Path) -> None:
    publish_folder(staged(tmp_path, [1, 2, 3]), tmp_path / "store", overwrite=False)
    (tmp_path / "store" / "packs").mkdir()
    (tmp_path / "store" / "packs" / "a-8192-split.plan").write_bytes(b"a plan")
    publish_folder(staged(tmp_path, [4]), tmp_path / "store", overwrite=True)
    assert tokens(tmp_path / "store") == [4]
    assert names(tmp_path / "store") == ["a", "a_idx.npy", "meta.json"]
    (tmp_path / "store" / "packs").mkdir()
    (tmp_path / "store" / "packs" / "notes.txt").write_text("mine")
    with pytest.raises(StoreExistsError, match=r"packs/notes.txt: no build of ours"):
        publish_folder(staged(tmp_path, [5]), tmp_path / "store", overwrite=True)


def test_without_an_atomic_exchange_two_renames_do(tmp_path: Path, monkeypatch) -> None:
    # this kernel can exchange, so its absence has to be played
    monkeypatch.setattr(store_module, "exchange", lambda first, second: False)
    publish_folder(staged(tmp_path, [1]), tmp_path / "store", overwrite=False)
    publish_folder(staged(tmp_path, [2]), tmp_path / "store", overwrite=True)
    assert tokens(tmp_path / "store") == [2]
    assert names(tmp_path) == ["store"]


def test_a_placeholder_gives_way_without_being_asked(tmp_path: Path) -> None:
    write_placeholder(tmp_path / "store", plain_facts({}), ["a", "b"])
    assert is_finished(tmp_path / "store") is False
    publish_folder(staged(tmp_path, [5]), tmp_path / "store", overwrite=False)
    assert is_finished(tmp_path / "store") is True
    assert tokens(tmp_path / "store") == [5]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("file", ["thesis.txt", "a/thesis.bin", "b/c/model.bin", ".hidden"])
def test_a_file_of_a_user_is_never_deleted(tmp_path: Path, file: str, overwrite: bool) -> None:
    for kind in ("store", "bare"):
        target = tmp_path / kind
        if kind == "store":
            staged(tmp_path, [1], "store")
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        (target / file).write_text("years of work")
        with pytest.raises(StoreExistsError, match=str(target)):
            publish_folder(staged(tmp_path, [2], f"new-{kind}"), target, overwrite=overwrite)
        assert (target / file).read_text() == "years of work"


def test_shards_without_a_manifest_are_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "store" / "a").mkdir(parents=True)
    (tmp_path / "store" / "a" / "shard_00000.bin").write_bytes(b"ab")
    with pytest.raises(StoreExistsError, match="holds 'a' and no meta"):
        check_target(tmp_path / "store", overwrite=True)


def test_a_damaged_store_can_be_replaced_on_request(tmp_path: Path) -> None:
    target = staged(tmp_path, [1], "store")
    (target / "meta.json").write_bytes(b"{")
    assert is_finished(target) is False
    with pytest.raises(StoreExistsError, match="damaged or foreign"):
        check_target(target, overwrite=False)
    publish_folder(staged(tmp_path, [2]), target, overwrite=True)
    assert tokens(target) == [2]


def test_a_file_or_link_in_the_way_is_refused(tmp_path: Path) -> None:
    new = staged(tmp_path, [1])
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(staged(tmp_path, [2], "behind"))
    for name in ("file", "link"):
        with pytest.raises(StoreExistsError, match="in the way"):
            publish_folder(new, tmp_path / name, overwrite=True)
    assert tokens(tmp_path / "behind") == [2]


def test_an_unfinished_folder_is_never_published(tmp_path: Path) -> None:
    new = staged(tmp_path, [1])
    (new / "meta.json").unlink()
    with pytest.raises(StoreNotFoundError, match="unfinished"):
        publish_folder(new, tmp_path / "store", overwrite=True)
    assert not (tmp_path / "store").exists()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a second file system")
def test_another_disk_is_an_error_that_says_so(tmp_path: Path) -> None:
    if Path("/dev/shm").stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs a second file system")
    new = staged(tmp_path, [1])
    target = Path("/dev/shm") / f"shardmill-{os.getpid()}"
    with pytest.raises(BuildError, match="stage it beside the target"):
        publish_folder(new, target, overwrite=False)
    assert tokens(new) == [1]


def test_atomic_write_shows_nothing_before_the_end_and_leaves_nothing_on_failure(tmp_path) -> None:
    path = tmp_path / "f"
    with atomic_write(path) as file:
        file.write(b"one")
        assert not path.exists()
    assert path.read_bytes() == b"one"
    with pytest.raises(KeyboardInterrupt), atomic_write(path) as file:  # noqa: PT012
        file.write(b"two")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"one"
    assert names(tmp_path) == ["f"]


WRITE_OFTEN = """
import sys
from pathlib import Path
from shardmill.storage.atomic import atomic_write
for number in range(150):
    with atomic_write(Path(sys.argv[1])) as file:
        file.write(sys.argv[2].encode() * 5000)
"""


@pytest.mark.slow
def test_two_processes_that_write_one_file_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "f"
    running = [
        subprocess.Popen([sys.executable, "-c", WRITE_OFTEN, str(path), letter])
        for letter in ("a", "b")
    ]
    seen = set()
    while any(process.poll() is None for process in running):
        if path.exists():
            seen.add(path.read_bytes())
    assert [process.returncode for process in running] == [0, 0]
    assert seen <= {b"a" * 5000, b"b" * 5000}
    assert len(seen) >= 1
    assert names(tmp_path) == ["f"]
