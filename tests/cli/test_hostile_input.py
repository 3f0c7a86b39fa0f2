"""What a hostile caller tried on the command line, and what happens now."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pytest

from shardmill.compat.chomp import read_config
from shardmill.errors import DamagedStoreError, OptionError
from shardmill.remote import pull
from shardmill.store.readers import open_token_folder
from shardmill.store.readers.files import ShardFiles

BYTE = ("--tokenizer", "byte", "--no-append-eot")
CONFIG = """
[data]
backend = "files"
files = "a.txt"
[data.tokenizer]
kind = "byte"
[train]
seq_len = 4
batch_size = 1
"""


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_a_state_replaces_nothing_but_a_file(run_cli, tmp_path, monkeypatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("some text, long enough for a row")
    Path("c.toml").write_text(CONFIG)
    Path("real").write_text("kept")
    target = Path("state")
    {"pipe": os.mkfifo, "link": lambda path: path.symlink_to("real"), "folder": Path.mkdir}[kind](
        target
    )
    before = stat.S_IFMT(target.lstat().st_mode)
    code, _, err = run_cli("stream", "c.toml", "--steps", "1", "--save-state", "state")
    assert code == 2
    assert "--save-state state: found a link, device, pipe or folder" in err
    assert stat.S_IFMT(target.lstat().st_mode) == before
    assert Path("real").read_text() == "kept"


@pytest.mark.parametrize(
    "line", ["[train]\nGRAD_ACCUM = 4", "[model]\neos-token-id = 3", "[MODEL]\nvocab_size = 9"]
)
def test_another_case_or_a_hyphen_is_a_misspelt_key(tmp_path, line: str) -> None:
    (tmp_path / "c.toml").write_text(
        f"{CONFIG.replace('[train]', line if '[train]' in line else '[train]')}\n"
        + ("" if "[train]" in line else line)
    )
    with pytest.raises(OptionError, match=r"did you mean|wanted"):
        read_config(tmp_path / "c.toml")


def test_a_pipe_in_the_place_of_a_shard_is_damage_and_no_wait(tmp_path) -> None:
    """Both readers open shards by this call, when they are first needed."""
    np.save(tmp_path / "1.npy", np.arange(40, dtype=np.uint16))
    files = ShardFiles.of_files(open_token_folder(tmp_path, "*.npy").files)
    (tmp_path / "1.npy").unlink()
    os.mkfifo(tmp_path / "1.npy")
    with pytest.raises(DamagedStoreError, match=r"1\.npy"):
        files.open(0)


def test_repaired_texts_are_on_the_receipt(run_cli, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("latin.txt").write_bytes("Gr\u00f6\u00dfe".encode("latin-1"))
    code, out, _ = run_cli("build", "latin.txt", "--out", "store", *BYTE)
    assert code == 0
    assert "repaired: 1 invalid_utf8" in out


def test_pull_makes_no_folder_that_is_called_like_a_url(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match=r"folder: found a URL \(memory://\.\.\.\)"):
        pull("memory://a/b", "memory://a/c")
    assert list(tmp_path.iterdir()) == []


def test_the_printed_config_names_the_tokenizer_from_anywhere(
    run_cli, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tokens").mkdir()
    np.save("tokens/a.npy", np.zeros(5000, dtype=np.uint16))
    Path("own").mkdir()
    Path("own/tokenizer.json").write_text(
        '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'
    )
    _, out, _ = run_cli("check", "tokens", "--tokenizer", "own/tokenizer.json")
    assert f'tokenizer_path = "{tmp_path}/own/tokenizer.json"' in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("push", "store", "s3:/data/x"), "found no '://'"),
        (("push", "store", "hub:owner/name"), "found no '://'"),
        (("push", "store", "simplecache::memory://bucket/x"), "a chained URL is only read from"),
        (("build", "a.txt", "--out", "memory://b/s", "--scratch", "s3://x/y", *BYTE), "--scratch"),
        (("info", "http://127.0.0.1:9/store?sig=abc"), "has a query"),
        (
            (
                "build",
                "chats",
                "c.jsonl",
                "--out",
                "s",
                "--tokenizer",
                "byte:4",
                "--template",
                "t.jinja",
            ),
            "--tokenizer byte:4: has no Jinja template",
        ),
    ],
)
def test_a_path_that_makes_no_sense_is_refused(run_cli, tmp_path, monkeypatch, words, said) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("some text")
    Path("c.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    Path("t.jinja").write_text("{{ messages }}")
    assert run_cli("build", "a.txt", "--out", "store", *BYTE)[0] == 0
    before = sorted(path.name for path in tmp_path.iterdir())
    code, _, err = run_cli(*words)
    assert (code, said in err) == (2, True), err
    assert sorted(path.name for path in tmp_path.iterdir()) == before
