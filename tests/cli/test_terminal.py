"""No name, document, manifest or template gives the terminal a command."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import re
import shutil
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from shardmill.cli import terminal as stdout
from shardmill.cli.app import every_command, open_app
from shardmill.cli.terminal import (
    SafeConsole,
    indented,
    messages,
    one_line,
    printable,
    visible,
)
from shardmill.store.manifest import encode_manifest, read_manifest
from tests.services import LoopbackHub

EVIL = "x\x1b[31mRED\x1b]0;title\x07\r\x9b2J\x7f\u202eevil\u2066\u200f\u061c\u200b\u2028\ufeffy"
FORBIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)
COLOUR = re.compile("\x1b\\[[0-9;]*m")
KEPT = {"\n", "\t"}
PREPENDED = {*range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD}
HIEROGLYPHS = range(0x13430, 0x13460)
"""Format characters that are drawn."""


@pytest.mark.slow
def test_every_character_that_acts_or_hides_is_escaped() -> None:
    for number in range(sys.maxunicode + 1):
        character = chr(number)
        category = unicodedata.category(character)
        is_drawn = number in PREPENDED or number in HIEROGLYPHS
        is_hidden = category in ("Cc", "Cf", "Cs", "Zl", "Zp") and not is_drawn
        is_hidden = is_hidden or number == 0x2065  # not assigned, in the middle of such
        changed = printable(f"a{character}b") != f"a{character}b"
        assert changed == (is_hidden and character not in KEPT), hex(number)


@given(st.text())
def test_what_is_escaped_is_escaped_once_and_is_still_the_same_json(text) -> None:
    assert printable(printable(text)) == printable(text)
    assert not FORBIDDEN.search(printable(text))
    assert "\n" not in one_line(text)
    for ascii_only in (True, False):
        line = json.dumps({"text": text}, ensure_ascii=ascii_only)
        if not re.search("[\U00010000-\U0010ffff]", line):
            assert json.loads(printable(line)) == {"text": text}


def test_joiners_stay_where_text_needs_them() -> None:
    family, persian = "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\u0645\u06cc\u200c\u062e"
    for text in (family, persian):
        assert printable(text) == visible(text) == text
    hidden = "pass\u200dword \u200d\u200c" + "\u0645\u200d\u200d\u0645"
    for text in (printable(hidden), visible(hidden)):
        assert not re.search("[\u200c\u200d]", text)


def test_further_lines_of_a_message_cannot_be_taken_for_messages() -> None:
    assert indented("a\nshardmill: ok\n  b\n") == "a\n  shardmill: ok\n  b\n"


def test_a_console_colours_but_lets_no_text_do_so(capsys) -> None:
    console = SafeConsole(force_terminal=True, color_system="standard", soft_wrap=True)
    console.print(Text(EVIL, style="green"))
    out = capsys.readouterr().out
    assert "\x1b[32m" in out
    assert not FORBIDDEN.search(COLOUR.sub("", out))
    assert "\\x1b[31mRED" in out


def test_no_command_makes_a_console_of_another_kind() -> None:
    for path in Path(stdout.__file__).parent.rglob("*.py"):
        assert not re.search(r"[^\w]Console\(|Progress\(\n? *\*|Bars\(", path.read_text()) or (
            path.name == "terminal.py"
        ), path


# whole commands


@pytest.fixture
def hostile(here) -> Path:
    """A store, chats, texts, a template and tokens whose names and contents are hostile."""
    rows = [json.dumps({"text": f"{EVIL} \ud800 {number}"}) for number in range(30)]
    Path(f"d{EVIL}").mkdir()
    Path(f"d{EVIL}", f"{EVIL}.jsonl").write_text("\n".join(rows))
    Path("bad.jsonl").write_text(json.dumps({EVIL: 1}) + f'\n{{"{EVIL}')
    shutil.copytree("store", f"s{EVIL}")
    shutil.copytree("chats", "marked")
    for folder in (f"s{EVIL}", "marked"):
        manifest = read_manifest(Path(folder))
        named = [{**manifest.sources[0], "name": EVIL}]
        said = dict.fromkeys(("dataset_name", "dataset_config", "split_rule"), f"{EVIL}\nfake")
        changed = msgspec.structs.replace(
            manifest, **said, dataset_revision=EVIL, sources=type(manifest.sources)(named)
        )
        Path(folder, "meta.json").write_bytes(encode_manifest(changed))
    talk = [{"role": "user", "content": EVIL}, {"role": "assistant", "content": EVIL}]
    Path("talk.jsonl").write_text("\n".join([json.dumps({"messages": talk})] * 5))
    Path("evil.jinja").write_text(f"{{{{ raise_exception('{EVIL}') }}}}")
    Path(f"{EVIL}.toml").write_text(f'[data]\n"{json.dumps(EVIL)[1:-1]}" = 1\n')
    Path(f"t{EVIL}").mkdir()
    np.arange(90, dtype="<u2").tofile(Path(f"t{EVIL}", f"{EVIL}.bin"))
    return here


SPM = ("--tokenizer", "spm.model")
CALLS: dict[str, tuple[str, ...]] = {
    "a command": (EVIL,),
    "an option": ("info", f"--{EVIL}"),
    "a number": ("pack", "chats", "--seq-len", EVIL),
    "a choice": ("build", "data", "--out", "n", *SPM, "--on-bad", EVIL),
    "no look": ("look", EVIL),
    "no store": ("info", EVIL),
    "no file": ("build", EVIL, "--out", "new", *SPM),
    "two lines": ("info", "x\nshardmill: all is well"),
    "build": ("build", f"d{EVIL}", "--out", f"o{EVIL}", *SPM),
    "build again": ("build", "data", "--out", f"s{EVIL}", *SPM),
    "build json": ("build", f"d{EVIL}", "--out", f"o{EVIL}", *SPM, "--json"),
    "dry run": ("build", f"d{EVIL}", "--out", f"o{EVIL}", *SPM, "--dry-run"),
    "a name": ("build", f"d{EVIL}", "--out", "new", *SPM, "--name", EVIL),
    "bad rows": ("build", "bad.jsonl", "--out", "new", *SPM),
    "a field": ("build", "data", "--out", "new", *SPM, "--field", EVIL),
    "chats": ("build", "chats", "talk.jsonl", "--out", "new", "--template", "chatml", *SPM),
    "a template": (
        "build",
        "chats",
        "talk.jsonl",
        "--out",
        "new",
        "--template",
        "evil.jinja",
        *SPM,
    ),
    "no template": ("build", "chats", "talk.jsonl", "--out", "n", "--template", EVIL, *SPM),
    "info": ("info", f"s{EVIL}"),
    "info json": ("info", f"s{EVIL}", "--json"),
    "info chats": ("info", "marked"),
    "show": ("show", f"s{EVIL}", "--example", "0", *SPM),
    "show json": ("show", f"s{EVIL}", "--example", "0", *SPM, "--json"),
    "show step": ("show", f"s{EVIL}", "--step", "0", "--batch-size", "2", "--seq-len", "32", *SPM),
    "no split": ("show", "store", "--example", "0", "--split", EVIL, *SPM),
    "blame": ("blame", f"s{EVIL}", "--token", "5", *SPM, "--input", "data/*.jsonl"),
    "blame no input": ("blame", f"s{EVIL}", "--token", "5", *SPM),
    "verify": ("verify", f"s{EVIL}"),
    "check": ("check", f"t{EVIL}", "--dtype", "uint16"),
    "check json": ("check", f"t{EVIL}", "--dtype", "uint16", "--json"),
    "diff": ("diff", "store", f"s{EVIL}"),
    "diff json": ("diff", "store", f"s{EVIL}", "--json"),
    "exclude": ("exclude", f"s{EVIL}", "--document", "1", "--reason", EVIL),
    "exclude list": ("exclude", f"s{EVIL}", "--list"),
    "push": ("push", f"s{EVIL}", f"memory://place/{EVIL}"),
    "pull": ("pull", f"memory://nosuch/{EVIL}", "new"),
    "convert": ("convert", f"t{EVIL}", f"c{EVIL}", "--from", "tokens", "--to", "store"),
    "pack": ("pack", "marked", "--seq-len", "63"),
    "pack list": ("pack", f"s{EVIL}", "--list"),
    "a config": ("stream", f"{EVIL}.toml"),
    "a setting": ("stream", "stream.toml", "--set", f"data.{EVIL}=1"),
    "stream": ("stream", "stream.toml", "--set", f'data.files="d{EVIL}/*"', "--show", "2"),
    "bench": ("bench", EVIL, *SPM),
    "tokenizer": ("tokenizer", "info", EVIL),
    "train": ("tokenizer", "train", f"d{EVIL}", "--out", f"m{EVIL}", "--vocab-size", "300"),
    "view": ("view", f"s{EVIL}", "--tokenizer", EVIL),
}


def test_every_command_is_called() -> None:
    called = {" ".join(words[:2]) for words in CALLS.values()}
    for name, _ in every_command(open_app()):
        assert any(one.startswith(name.removeprefix("shardmill ")) for one in called), name


@pytest.mark.parametrize("debug", [False, True], ids=["", "debug"])
@pytest.mark.parametrize("name", CALLS)
def test_no_command_passes_on_what_acts_on_a_terminal(name, debug, hostile, run_cli) -> None:
    code, out, err = run_cli(*(["--debug"] if debug else []), *CALLS[name])
    for text in (out, err):
        assert not FORBIDDEN.search(text), repr(text)
    assert code in (0, 1, 2)
    if not debug:
        assert not re.search("^(fake|shardmill: all is well)", out + err, re.MULTILINE)
    if "--json" in CALLS[name]:
        assert any(EVIL in text for text in texts_of(json.loads(out))) or name == "show json", err


def texts_of(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from texts_of(one)


def test_a_log_line_of_ours_is_escaped_and_those_of_others_are_not_shown(
    here, run_cli, monkeypatch
):
    def log(*_: object, **__: object) -> None:
        logging.getLogger("shardmill.x").warning("ours: %s", f"{EVIL}\nshardmill: two")
        logging.getLogger("botocore.credentials").info("Found credentials in environment")
        logging.getLogger("fsspec").warning("theirs")
        sys.stderr.write(f"{EVIL}\n")
        raise ValueError

    monkeypatch.setattr(sys.modules["shardmill.cli.commands.info"], "open_store", log)
    code, _, err = run_cli("info", "store")
    assert code == 70
    assert not FORBIDDEN.search(err)
    assert err.startswith(f"ours: {printable(EVIL)}\n  shardmill: two\n{printable(EVIL)}\n")
    assert "theirs" not in err
    assert "credentials" not in err


BARS = """
import sys
from shardmill.building import Progress
from shardmill.cli.terminal import build_progress, messages
from tests.cli.test_terminal import EVIL
with messages("shardmill"), build_progress() as bars:
    for tokens in range(3):
        bars.show(Progress(source=EVIL, feed=0, documents=1, tokens=tokens, share=0.5))
    print(EVIL, file=sys.stderr)
"""


@pytest.mark.slow
def test_bars_on_a_terminal_show_names_and_obey_none() -> None:
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", BARS],
        stderr=theirs,
        stdout=theirs,
        check=False,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "300"},
        cwd=Path(__file__).parent.parent.parent,
    )
    os.close(theirs)
    seen = os.read(ours, 10**6).decode()
    os.close(ours)
    assert done.returncode == 0, seen
    assert "\\x1b[31mRED" in seen
    assert "\x1b[31m" not in seen
    assert "\x1b]0" not in seen
    assert not FORBIDDEN.search(re.sub("\x1b\\[[0-9;?]*[A-Za-z]|\r", "", seen))


# only our own messages


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("pull", "s3://bucket/pushed", "pulled"),
        ("build", "s3://bucket/pushed/meta.json", "--out", "new", *SPM),
    ],
)
def test_a_client_of_object_storage_prints_nothing(words, here, storage) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shardmill", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**storage.environment(), "PYTHONPATH": str(Path(__file__).parent.parent.parent)},
    )
    assert "credentials" not in done.stderr
    assert not re.search("(?i)boto|fsspec|aiohttp|Traceback|Warning", done.stderr), done.stderr


@pytest.mark.slow
def test_a_client_of_the_hub_prints_nothing(here) -> None:
    pytest.importorskip("datasets")
    with LoopbackHub() as hub:
        hub.publish("own/rows", here / "data")
        words = ("build", "hub:own/rows", "--out", "new", *SPM)
        done = subprocess.run(
            [sys.executable, "-m", "shardmill", *words],
            capture_output=True,
            text=True,
            check=False,
            env={
                **os.environ,
                "HF_ENDPOINT": hub.url,
                "HF_HUB_OFFLINE": "0",
                "HF_HOME": str(here / "hf"),
                "NO_PROXY": "127.0.0.1",
                "PYTHONPATH": str(Path(__file__).parent.parent.parent),
            },
        )
    assert done.returncode == 0, done.stderr
    assert "HTTP" not in done.stderr
    assert hub.url not in done.stderr


def test_a_library_that_closes_the_stream_it_found_closes_nothing() -> None:
    file = io.StringIO()
    with redirect_stderr(file):
        with messages("shardmill"):
            found = sys.stderr
        found.close()
        print("still open", file=sys.stderr)
    assert file.getvalue() == "still open\n"
