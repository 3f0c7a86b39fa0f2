"""No exception, traceback or repr of the library shows a secret; no file it writes holds one."""

from __future__ import annotations

import dataclasses
import inspect
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardmill
from shardmill import building, loading, remote, sources, urls
from shardmill import formats as interop
from shardmill import store as shards
from shardmill import tokenizers as tokenizer
from shardmill.building import BuildSpec, Feed, build_store
from shardmill.compat.chomp import read_config as read_stream_config
from shardmill.inspect import blame
from shardmill.inspect import diff as compare
from shardmill.loading import streaming
from shardmill.remote import open_remote, pull, push
from shardmill.remote.folder import open_folder
from shardmill.sources import open_source
from shardmill.storage import retry
from shardmill.store import readers as mapped
from shardmill.tokenizers import ByteTokenizer
from tests.secret_forms import FORMS, seen
from tests.services import LoopbackHub, LoopbackS3

PACKAGES = (shardmill, blame, building, compare, interop, loading, mapped, remote, shards, sources)
PACKAGES += (streaming, tokenizer)
PATHS = ("path", "folder", "where", "url", "spec", "source", "file", "store", "name_or_path", "a")
OTHERS: dict[str, Any] = {
    "seq_len": 8,
    "max_bytes": 10**6,
    "cache": "cache",
    "split": "train",
    "batch_size": 1,
    "dtype": "uint16",
    "num_bins": 1,
    "pack_size": 8,
    "total_seq_starts": 1,
    "specials": {},
}


def takes_a_place(called: Any) -> bool:
    """Whether it opens what its first parameter names. Records hold what they are given."""
    if dataclasses.is_dataclass(called) or hasattr(called, "__struct_fields__"):
        return False
    try:
        parameters = [*inspect.signature(called).parameters.values()]
    except (TypeError, ValueError):
        return False
    return bool(parameters) and any(
        word in str(parameters[0].annotation) for word in ("str", "Path", "Where")
    )


PLACES: dict[str, Callable[..., Any]] = {
    f"{package.__name__}.{name}": getattr(package, name)
    for package in PACKAGES
    for name in getattr(package, "__all__", ())
    if callable(getattr(package, name)) and takes_a_place(getattr(package, name))
}


def call(called: Callable[..., Any], url: str) -> Any:
    """With the URL wherever a place may be, and something for every other parameter."""
    given: dict[str, Any] = {}
    first = True
    positional = []
    for name, parameter in inspect.signature(called).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        is_place = first or any(word in str(parameter.annotation) for word in ("str", "Path"))
        needed = parameter.default is parameter.empty
        if needed:
            value = OTHERS.get(name, url if is_place else 1)
            if parameter.kind is parameter.KEYWORD_ONLY:
                given[name] = value
            else:
                positional.append(value)
        first = False
    return called(*positional, **given)


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path) -> None:
    """Nothing is asked twice, no hub at all, and no secret is known from another test."""
    monkeypatch.setattr(urls, "_known", {})
    monkeypatch.setattr(retry, "MAX_RETRIES", 0)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # caches of clients
    monkeypatch.chdir(tmp_path)


def test_the_functions_that_take_a_url_are_found() -> None:
    assert {"shardmill.open_store", "shardmill.remote.pull", "shardmill.open_source"} <= {*PLACES}
    assert len(PLACES) > 25


@pytest.mark.parametrize("name", sorted(PLACES))
def test_nothing_that_is_raised_or_returned_shows_a_secret(name, caplog) -> None:
    caplog.set_level("DEBUG", logger="shardmill")
    wrong = []
    for url, secrets in FORMS.items():
        try:
            found = call(PLACES[name], url)
            shown = "" if isinstance(found, str | Path) else repr(found)  # a path, as it was given
        except Exception as error:  # noqa: BLE001 - whatever it is, it is printed
            shown = "".join(traceback.format_exception(error)) + repr(error)
        shown += "".join(one.getMessage() for one in caplog.records if "shardmill" in one.name)
        if found := seen(shown, secrets):
            wrong.append(f"{url}: {found} in {shown[-1500:]}")
        caplog.clear()
    assert not wrong, f"{len(wrong)} of {len(FORMS)}\n" + "\n".join(wrong[:3])


def test_a_store_built_from_a_signed_url_does_not_contain_it(tmp_path, caplog) -> None:
    pytest.importorskip("aiohttp")
    caplog.set_level("DEBUG", logger="shardmill")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/a.jsonl").write_text('{"text": "hello"}\n' * 20)
    secrets = ("Zx9qS3cretW0rd", "AKIAZQ3EXAMPLE7KEY42")
    with LoopbackHub() as hub:
        hub.publish("own/rows", tmp_path / "rows")
        plain = f"{hub.url}/datasets/own/rows/resolve/main/a.jsonl"
        signed = f"{plain}?X-Amz-Credential={secrets[1]}&X-Amz-Signature={secrets[0]}"
        signed = signed.replace("//", f"//user:{secrets[0]}@", 1)
        shown = []
        for name, url in (("plain", plain), ("signed", signed)):
            source = open_source(url, field="text")
            report = build_store(
                [Feed(source=source, fill=(("train", None),))],
                tmp_path / name,
                spec=BuildSpec(),
                tokenizer=ByteTokenizer(),
            )
            shown.append(repr([source, source.files, source.describe(), source.stamp(), report]))
    assert not seen("".join(shown) + caplog.text, secrets)
    assert_not_stored(tmp_path, secrets)
    one, two = ((tmp_path / name / "meta.json").read_bytes() for name in ("plain", "signed"))
    assert one == two


@pytest.mark.slow
def test_storage_options_are_in_no_repr_error_or_file(tmp_path, caplog) -> None:
    caplog.set_level("DEBUG", logger="shardmill")
    source = shardmill.MemorySource(["hello"] * 20, name="web")
    build_store(
        [Feed(source=source, fill=(("train", None),))],
        tmp_path / "store",
        spec=BuildSpec(),
        tokenizer=ByteTokenizer(),
    )
    url = "s3://bucket/pushed"
    with LoopbackS3() as s3:
        s3.make_bucket("bucket")
        secrets = ("AKIAZQ3EXAMPLE7KEY42", "Zx9qS3cretW0rd", "Zx9qS3cretT0ken")
        options = {**s3.options(), **dict(zip(("key", "secret", "token"), secrets, strict=True))}
        sent = push(tmp_path / "store", url, storage_options=options)
        got = pull(url, tmp_path / "copy", storage_options=options)
        how = {"cache": tmp_path / "cache", "max_bytes": 10**8, "storage_options": options}
        with open_remote(url, **how) as store:
            tokens = store.open_tokens("train")
            shown = repr([store, tokens, sent, got, sent.to_json(), open_folder(url, options)])
            with pytest.raises(ValueError) as wrong:
                store.open_tokens("nosuch")
    with pytest.raises(ValueError) as gone:  # the server is
        pull(url, tmp_path / "late", storage_options=options)
    for error in (wrong.value, gone.value):
        shown += "".join(traceback.format_exception(error))
    assert not seen(shown + caplog.text, secrets)
    assert_not_stored(tmp_path, secrets)


def test_the_settings_of_a_stream_show_no_secret() -> None:
    for url, secrets in FORMS.items():
        tokenizer = {"kind": "byte", "add_eos": False}
        train = {"seq_len": 8, "batch_size": 1}
        data = {"backend": "files", "files": [url], "tokenizer": tokenizer}
        config = read_stream_config({"data": data, "train": train})
        assert config.data.files == (url,)
        assert not seen(f"{config} {config!r} {config.data!r}", secrets)
        with pytest.raises(ValueError) as error:
            read_stream_config({"data": {"backend": url}, "train": train})
        assert not seen(f"{error.value} {error.value!r}", secrets)


def assert_not_stored(folder: Path, secrets: tuple[str, ...]) -> None:
    for top, _, names in os.walk(folder):
        for name in names:
            text = Path(top, name).read_bytes().decode("utf-8", "replace")
            assert not seen(f"{top}/{name} {text}", secrets), Path(top, name)
