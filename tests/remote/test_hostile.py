"""Manifests from elsewhere are not trusted: no name leaves the folder, no damage passes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import ManifestError, StoreError
from shardmill.formats.packed.files import sealed
from shardmill.remote import pull, push
from shardmill.remote.contents import read_contents
from tests.remote.conftest import files_of

BAD_NAMES = [
    *("../escaped", "/etc/escaped", "a/../../escaped", "..", ".", "", ".hidden", "a/b/c"),
    *("manifest.json", "MANIFEST.JSON", "a\\b", "a\x00b", "~/x", "-x", "a/", "//a", "C:a"),
]


def serve(number: str, name: str, manifest: dict[str, Any], data: bytes = b"x") -> str:
    fs = fsspec.filesystem("memory")
    root = f"/hostile/{hashlib.sha256(number.encode()).hexdigest()[:12]}"
    fs.pipe_file(f"{root}/deep/manifest.json", json.dumps(manifest).encode())
    fs.pipe_file(f"{root}/{name}" if name else f"{root}/x", data)
    return f"memory:/{root}/deep"


@pytest.mark.parametrize("name", BAD_NAMES)
def test_an_unsafe_name_is_refused_before_anything_is_written(name, tmp_path) -> None:
    entry = {"bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()}
    url = serve(name, "escaped", sealed({"format": "x", "files": {name: entry}}))
    with pytest.raises(ManifestError):
        pull(url, tmp_path / "in/copy")
    assert files_of(tmp_path) == {}


def test_a_packed_manifest_without_checksums_or_with_a_broken_seal_is_refused(tmp_path) -> None:
    with pytest.raises(ManifestError, match="lists no checksums"):
        pull(serve("none", "x", {"format": "x"}), tmp_path / "copy")
    broken = {**sealed({"files": {}}), "num_bins": 3}
    with pytest.raises(ManifestError, match="own checksum does not match"):
        pull(serve("broken", "x", broken), tmp_path / "copy")


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_a_corrupted_manifest_is_refused_or_means_the_same(data, store_bytes) -> None:
    place = data.draw(st.integers(0, len(store_bytes) - 1))
    changed = bytearray(store_bytes)
    changed[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(StoreError):
        read_contents("meta.json", bytes(changed), where="there")


@pytest.fixture(scope="module")
def store_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    from shardmill.records import Ragged
    from shardmill.testing.stores import build_small_store

    folder = tmp_path_factory.mktemp("store") / "store"
    build_small_store(folder, {"train": Ragged.from_sequences([[1, 2, 3]])})
    return (folder / "meta.json").read_bytes()


def test_a_link_at_the_staging_folder_is_not_followed(make_store, tmp_path: Path) -> None:
    url = "memory://hostile/linked"
    sent = push(make_store(), url)
    (tmp_path / "victim").mkdir()
    (tmp_path / f".copy.{sent.manifest_sha256[:16]}.pull.tmp").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError):
        pull(url, tmp_path / "copy")
    assert files_of(tmp_path / "victim") == {}


def test_two_manifests_in_one_folder_are_refused(make_store, tmp_path: Path) -> None:
    store = make_store()
    (store / "manifest.json").write_text("{}")
    with pytest.raises(ManifestError, match="keep one kind"):
        push(store, "memory://hostile/two")
