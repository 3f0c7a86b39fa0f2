"""A URL where a local folder is wanted: read, or refused by that name, never a folder `s3:`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from niels_gpt.cache.build_cache import build_sft_cache
from shardmill.arguments import is_url, refuse_url
from shardmill.building import BuildSpec, Feed, build_store
from shardmill.errors import ManifestError, OptionError, ShardmillError, StoreNotFoundError
from shardmill.inspect.diff import diff_stores
from shardmill.loading import TokenSource
from shardmill.remote import push, verify_remote
from shardmill.sources import MemorySource
from shardmill.store import exclude_documents, open_store, read_manifest, verify
from shardmill.tokenizers import ByteTokenizer
from tests.remote.conftest import Spot, files_of
from tests.remote.test_commands import refused
from tests.services import LoopbackS3

SECRET = "s3://KEY:SECRET@bucket/store"
URLS = ["s3://bucket/store", "gs://bucket/store", "memory://x/store", SECRET]


def test_urls_are_recognised() -> None:
    texts = ("s3://b/x", "S3://b", " s3://b", "gs:/b/x", "memory://", "file:///x")
    texts += ("hf://datasets/a", "simplecache::s3://b/x", "new+scheme.9://x")
    texts += ("abfs://c@a.dfs.core.windows.net/x",)
    # pathlib makes s3:/b/x of the first of these
    paths = (Path("s3://b/x"), Path("s3://"), Path("https://h/x"), Path("memory://x"))
    for value in (*texts, *paths):
        assert is_url(value), value


def test_paths_and_other_values_are_not_urls() -> None:
    texts = ("", "a/b", "/a/b", "C:/x", "c://x", "./s3://b/x", "a:b", "data:/x", "x y://z")
    texts += ("s3", "s3/b", "s3:x")
    paths = (Path("/s3:/x"), Path("notes: today/x"), Path("odd:/x"))
    for value in (*texts, *paths, 5, None, b"s3://b/x", ["s3://b"]):
        assert not is_url(value), value
        refuse_url(value, "output_dir", instead="nothing")


def test_a_refusal_shows_only_the_scheme() -> None:
    with pytest.raises(OptionError, match=r"folder: .*s3://.*pull") as caught:
        refuse_url(SECRET, "folder", instead="pull it first")
    assert "SECRET" not in str(caught.value)
    assert "bucket" not in str(caught.value)


def _sft(url: str) -> None:
    build_sft_cache([], url, tokenizer=ByteTokenizer(), val_frac=0.1, seed=0)


CALLS: dict[str, Callable[[Any], object]] = {
    "build_sft_cache": _sft,
    "open_store": open_store,
    "verify": verify,
    "read_manifest": read_manifest,
    "TokenSource": lambda url: TokenSource(url, seq_len=4),
    "diff_stores": lambda url: diff_stores(url, url),
    "a path": lambda url: open_store(Path(url)),
}


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_works_on_folders_refuses_a_url(
    call: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match=r"URL.*(shardmill\.build|pull)") as caught:
        CALLS[call](url)
    assert "SECRET" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (Path(SECRET), r"a URL, wanted a local folder, or a URL such as s3://bucket/path"),
        (SECRET, "has credentials in its address"),
        ("https://host/store", "a web server is only read from"),
        ("simplecache::s3://bucket/store", "a chained URL is only read from"),
    ],
    ids=["a path", "secret", "web", "chained"],
)
def test_a_build_to_what_is_no_place_for_a_store_is_refused(
    out: str | Path, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    feed = Feed(source=MemorySource(["text"], name="x"), fill=(("train", None),))
    with pytest.raises(ShardmillError, match=words) as caught:
        build_store([feed], out, tokenizer=ByteTokenizer(), spec=BuildSpec())
    assert "SECRET" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_verify_reads_a_store_at_a_url(make_store, spot: Spot) -> None:
    store = make_store()
    exclude_documents(store, [3], reason="takedown")
    push(store, spot.url, storage_options=spot.options)
    report = verify_remote(spot.url, storage_options=spot.options)
    assert report.problems == []
    local = verify(store)
    assert (report.files, report.tokens, report.documents) == (
        local.files,
        local.tokens,
        local.documents,
    )


@pytest.mark.parametrize("damage", ["other bytes", "short", "gone", "manifest", "foreign"])
def test_verify_names_damage_at_a_url(make_store, spot: Spot, damage: str) -> None:
    push(make_store(), spot.url, storage_options=spot.options)
    place = spot.open()
    name = "meta.json" if damage == "manifest" else "train/shard_00001.bin"
    if damage == "gone":
        place.remove(name)
    elif damage == "foreign":
        name = "train/shard_00099.bin"
        place.write(name, bytes(10))
    else:
        data = place.read(name, place.info(name)["size"])
        place.write(name, data[:-1] + (b"" if damage == "short" else bytes([data[-1] ^ 2])))
    report = verify_remote(spot.url, storage_options=spot.options)
    assert not report.ok
    (problem,) = report.problems
    assert name in problem


def test_verify_of_an_empty_url_is_not_found(spot: Spot) -> None:
    with pytest.raises(StoreNotFoundError, match="check the URL"):
        verify_remote(spot.url, storage_options=spot.options)
    assert issubclass(ManifestError, ValueError)


@pytest.mark.slow
def test_info_and_verify_read_a_url_on_the_command_line(
    shardmill, make_store, s3: LoopbackS3, s3_spot: Spot
) -> None:
    store, env = make_store(), s3.environment()
    push(store, s3_spot.url, storage_options=s3_spot.options)
    local = json.loads(shardmill("info", str(store), "--json").stdout)
    there = json.loads(shardmill("info", s3_spot.url, "--json", env=env).stdout)
    assert there.pop("store") == s3_spot.url
    assert local.pop("store") == str(store)
    assert there == local
    table = shardmill("info", s3_spot.url, env=env)
    assert table.returncode == 0, table.stderr
    assert s3_spot.url in table.stdout
    done = shardmill("verify", s3_spot.url, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout == shardmill("verify", str(store)).stdout.replace(str(store), s3_spot.url)
    s3_spot.open().write("train/shard_00001.bin", bytes(1000))
    damaged = shardmill("verify", s3_spot.url, env=env)
    assert damaged.returncode == 1
    assert "shard_00001.bin" in damaged.stderr


COMMANDS = [
    ["diff", "URL", "URL"],
    ["view", "URL"],
    ["show", "URL", "--example", "0"],
    ["pack", "URL", "--seq-len", "64"],
    ["exclude", "URL", "--list"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_command_that_works_on_folders_names_pull(
    shardmill, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = shardmill(*(SECRET if word == "URL" else word for word in command))
    refused(done, "URL", "shardmill pull")
    assert "SECRET" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_the_name_of_a_url_is_written_with_a_dot(
    make_store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store()
    monkeypatch.chdir(tmp_path)
    shutil.copytree(store, tmp_path / "s3:/bucket")
    assert files_of(open_store("./s3:/bucket").folder) == files_of(store)
