"""What read_manifest refuses, and that it says why."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import BuildError, ManifestError, StoreExistsError, StoreNotFoundError
from shardmill.records import Drop, Ragged
from shardmill.store import Manifest, kept_ledger, open_store, read_manifest, write_placeholder
from shardmill.store.manifest import write_manifest
from shardmill.testing.stores import build_small_store, plain_facts

Change = Callable[[dict[str, Any]], object]


def sealed(meta: dict[str, Any]) -> bytes:
    """meta.json with a right checksum, made by the rule of FORMAT.md."""
    zeroed = json.dumps(meta | {"manifest_sha256": "0" * 64}, indent=2, sort_keys=True).encode()
    return zeroed.replace(b"0" * 64, hashlib.sha256(zeroed).hexdigest().encode(), 1)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    build_small_store(
        tmp_path / "store",
        {
            "train": Ragged.from_sequences([[1, 2, 3], [4], [5, 6]]),
            "val": Ragged.from_sequences([[7]]),
        },
        shard_bytes=8,
        drops=[Drop(id="x:1", reason="bad")],
    )
    return tmp_path / "store"


def change(store: Path, edit: Change) -> None:
    meta = json.loads((store / "meta.json").read_bytes())
    edit(meta)
    (store / "meta.json").write_bytes(sealed(meta))


def shard(meta: dict[str, Any], number: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = meta["splits"]["train"]["shards"][number]
    return found


def rename(file: str) -> Change:
    return lambda meta: shard(meta).update(file=file)


def test_a_changed_name_with_a_right_checksum_is_read(store: Path) -> None:
    """The helper of this file works: without it every refusal below could be the checksum's."""
    change(store, lambda meta: meta.update(dataset_name="other"))
    assert read_manifest(store).dataset_name == "other"


REFUSED: dict[str, tuple[Change, str]] = {
    "another format": (lambda m: m.update(format="zarr"), "not a shardmill store"),
    "a newer version": (lambda m: m.update(version=4), "upgrade shardmill"),
    "version true": (lambda m: m.update(version=True), "reads versions 1 to 3"),
    "an unknown key": (lambda m: m.update(colour=1), r"unknown keys \['colour'\]"),
    "an unknown inner key": (lambda m: shard(m).update(colour=1), "colour"),
    "a missing key": (lambda m: m.pop("ledger"), "ledger"),
    "a missing inner key": (lambda m: shard(m).pop("sha256"), "sha256"),
    "a negative count": (lambda m: shard(m).update(tokens=-4), ">= 0"),
    "an absurd count": (lambda m: shard(m).update(tokens=2**62 + 1), "<= 4611686018427387904"),
    "a huge count": (lambda m: shard(m).update(tokens=10**30), "meta.json"),
    "a fraction": (lambda m: shard(m).update(tokens=4.5), "int"),
    "a string for a number": (lambda m: shard(m).update(tokens="4"), "int"),
    "an odd dtype": (lambda m: m.update(token_dtype="int8"), "int8"),
    "big endian": (lambda m: m.update(token_dtype="uint16-be"), "uint16-be"),
    "a sha256 that is no hex": (lambda m: shard(m).update(sha256="g" * 64), "regex"),
    "a sha256 with a line end": (lambda m: shard(m).update(sha256="a" * 64 + "\n"), "regex"),
    "a short sha256": (lambda m: shard(m).update(sha256="a" * 63), "regex"),
    "an absolute path": (rename("/etc/passwd"), "not a plain path"),
    "a path upwards": (rename("../other.bin"), "not a plain path"),
    "a path upwards inside": (rename("train/../../x.bin"), "not a plain path"),
    "two dots": (rename(".."), "not a plain path"),
    "a backslash": (rename("train\\shard.bin"), "not a plain path"),
    "a NUL": (rename("train/a\0.bin"), "not a plain path"),
    "an empty name": (rename(""), "not a plain path"),
    "a drive": (rename("C:x.bin"), "not a plain path"),
    "a hidden file": (rename("train/.x.bin"), "not a plain path"),
    "a name with a line end": (rename("train/x.bin\n"), "not a plain path"),
    "a non-ASCII digit": (rename("train/shard_0000\u0661.bin"), "not a plain path"),
    "the manifest as shard": (rename("meta.json"), "listed twice"),
    "one shard twice": (rename("train/shard_00001.bin"), "listed twice"),
    "one shard twice but for case": (
        lambda m: shard(m, 1).update(file="train/SHARD_00000.bin"),
        "listed twice",
    ),
    "an impossible split": (
        lambda m: m["splits"].update({"../x": m["splits"]["val"]}),
        r"'\.\./x'",
    ),
    "tokens that do not add up": (lambda m: shard(m, 1).update(tokens=1), "hold 5 tokens"),
    "documents that do not add up": (lambda m: shard(m).update(documents=1), "2 documents start"),
    "an index of another size": (
        lambda m: m["splits"]["train"]["index"].update(entries=4),
        "4 index entries",
    ),
    "a shard that is not full": (lambda m: m.update(shard_bytes=10), "cut at 5"),
    "shard_bytes of no token": (lambda m: m.update(shard_bytes=0), "no positive multiple"),
    "shard_bytes of half a token": (lambda m: m.update(shard_bytes=7), "no positive multiple"),
    "one file, two shards": (lambda m: m.update(shard_bytes=None), "means one file"),
    "last before first": (
        lambda m: shard(m).update(last_document=0, first_document=1),
        "impossible",
    ),
    "a document that is not there": (lambda m: shard(m, 1).update(last_document=3), "impossible"),
    "no first document": (lambda m: shard(m).update(first_document=None), "empty shard only"),
    "shards out of order": (lambda m: shard(m, 1).update(first_document=0), "begins before"),
    "a flat total that lies": (lambda m: m.update(train_tokens=7), "train_tokens is 7"),
    "a flat total too many": (lambda m: m.update(test_tokens=0), "test_tokens"),
    "a flat total missing": (lambda m: m.pop("val_documents"), "val_documents is None"),
    "documents lost": (lambda m: m["ledger"]["documents"].update(read=9), "does not balance"),
    "documents from nowhere": (
        lambda m: m["ledger"]["documents"].update(kept=5, empty=0, read=6),
        "documents kept is 5",
    ),
    "tokens lost": (lambda m: m["ledger"]["tokens"].update(encoded=9), "does not balance"),
    "drops that are not listed": (lambda m: m.update(dropped=None), "documents dropped is 1"),
    "built is false": (lambda m: m.update(built=False), '"built" is false'),
    "an unknown unit": (lambda m: m.update(unit="page"), "page"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_manifest_that_cannot_be_true_is_refused(store: Path, name: str) -> None:
    edit, wanted = REFUSED[name]
    change(store, edit)
    with pytest.raises(ManifestError, match=wanted) as refusal:
        read_manifest(store)
    assert str(store / "meta.json") in str(refusal.value)


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b"", "not a JSON object"),
        (b"{", "not a JSON object"),
        (b"[1, 2]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b"\xff\xfe", "not a JSON object"),
        (b'{"format": NaN}', "not a JSON object"),
        (b'{"format": "shardmill-store", "version": NaN}', "not a JSON object"),
        (b'{"a":' * 100_000, "not a JSON object"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not a JSON object|not a shardmill"),
        (b'{"format": "shardmill-store", "version": 1}', "0 manifest_sha256 keys"),
        (b'{"format": "' + b"\xed\xa0\x80" + b'"}', "not a"),
    ],
)
def test_bytes_that_are_no_manifest_are_refused(tmp_path: Path, data: bytes, wanted: str) -> None:
    (tmp_path / "meta.json").write_bytes(data)
    with pytest.raises(ManifestError, match=wanted):
        read_manifest(tmp_path)


@pytest.mark.slow
def test_any_changed_byte_of_a_manifest_is_refused(store: Path) -> None:
    path = store / "meta.json"
    data = path.read_bytes()
    for position in range(0, len(data), 7):
        flipped = bytearray(data)
        flipped[position] ^= 1
        path.write_bytes(bytes(flipped))
        with pytest.raises(ManifestError):
            read_manifest(store)
    path.write_bytes(data)
    assert read_manifest(store).dataset_name == "small"


def test_a_huge_manifest_is_refused_without_reading_it(store: Path) -> None:
    os.truncate(store / "meta.json", 2**40)
    with pytest.raises(ManifestError, match="1,099,511,627,776 bytes"):
        read_manifest(store)


def test_a_manifest_that_is_a_link_or_folder_or_pipe_is_refused(store: Path) -> None:
    path = store / "meta.json"
    path.rename(store.parent / "elsewhere.json")
    path.symlink_to(store.parent / "elsewhere.json")
    with pytest.raises(ManifestError, match="not a plain file"):
        read_manifest(store)
    path.unlink()
    path.mkdir()
    with pytest.raises(ManifestError, match="not a plain file"):
        read_manifest(store)
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(ManifestError, match="not a plain file"):
        read_manifest(store)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.text(st.characters(codec="utf-8"))
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=60)
@given(
    options=st.dictionaries(st.text(st.characters(codec="utf-8")), json_values, max_size=4),
    name=st.none() | st.text(st.characters(codec="utf-8")),
    seed=st.integers(-(2**63), 2**64 - 1),
)
def test_facts_are_read_back_as_they_were_written(options, name, seed, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("facts")
    facts = plain_facts({}, options=options, dataset_name=name, seed=seed, sources=[options])
    fields = {key: getattr(facts, key) for key in facts.__struct_fields__}
    manifest = Manifest(
        format="shardmill-store",
        version=1,
        built=True,
        token_dtype="uint16-le",
        shard_bytes=2,
        splits={},
        dropped=None,
        **fields,
    )
    write_manifest(folder, manifest)
    assert read_manifest(folder) == manifest


@pytest.mark.parametrize(
    "options",
    [
        {"a": float("nan")},
        {"a": [float("inf")]},
        {"a": {"b": "\ud800"}},
        {"a": {1: 2}},
        {"a": {1, 2}},
        {"a": b"bytes"},
        {"a": Path("x")},
        {"manifest_sha256": "0" * 64},
    ],
)
def test_facts_that_json_would_change_are_never_written(tmp_path: Path, options) -> None:
    with pytest.raises(BuildError, match=re.escape(str(tmp_path))):
        build_small_store(tmp_path / "s", {"a": Ragged.from_sequences([[1]])}, options=options)
    assert not (tmp_path / "s" / "meta.json").exists()


def test_a_placeholder_reserves_a_place_and_does_not_open(tmp_path: Path) -> None:
    facts = plain_facts({}, dataset_name="later", ledger=kept_ledger(0, 0))
    write_placeholder(tmp_path / "p", facts, ["train", "val"], shard_bytes=128)
    meta = json.loads((tmp_path / "p" / "meta.json").read_bytes())
    flat = {key: meta[key] for key in meta if key.startswith(("train", "val_"))}
    assert flat == {"train_tokens": 0, "train_documents": 0, "val_tokens": 0, "val_documents": 0}
    assert (meta["built"], meta["splits"], meta["shard_bytes"]) == (False, {}, 128)
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == ["meta.json", "train", "val"]
    with pytest.raises(StoreNotFoundError, match="not built"):
        open_store(tmp_path / "p")
    write_placeholder(tmp_path / "p", facts, ["train"])
    assert read_manifest(tmp_path / "p").built is False


def test_a_placeholder_never_replaces_a_store(store: Path) -> None:
    with pytest.raises(StoreExistsError, match="finished store"):
        write_placeholder(store, plain_facts({}), ["train"])
    assert open_store(store).num_tokens("train") == 6


def test_a_placeholder_with_a_lying_total_is_refused(tmp_path: Path) -> None:
    write_placeholder(tmp_path, plain_facts({}), ["train"])
    change(tmp_path, lambda meta: meta.update(train_tokens=5))
    with pytest.raises(ManifestError, match="train_tokens is 5"):
        read_manifest(tmp_path)


def test_manifests_are_frozen(store: Path) -> None:
    manifest = read_manifest(store)
    with pytest.raises(AttributeError):
        manifest.seed = 1  # type: ignore[misc]
    assert msgspec.structs.replace(manifest, seed=1).seed == 1
