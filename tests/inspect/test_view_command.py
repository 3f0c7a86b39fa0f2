"""`shardmill view` as a person calls it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request

import pytest

from shardmill.building import BuildSpec, Feed, build_store
from shardmill.sources import open_source
from tests.cli.test_build_chats import call  # noqa: F401
from tests.inspect.browser.session import running_view
from tests.inspect.conftest import OPENED, SPECIALS

FLAGS = ["--tokenizer", "byte:4"]
FLAGS += [word for name, text in SPECIALS.items() for word in ("--special", f"{name}={text}")]


@pytest.mark.slow
def test_it_prints_its_address_answers_and_ends_with_ctrl_c(place):
    command = [sys.executable, "-m", "shardmill", "view", str(place), *FLAGS, "--no-open"]
    command += ["--config", str(place / "train.toml")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            url = server.stdout.readline()
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\n", url)
            with urllib.request.urlopen(f"{url.strip()}api/stores", timeout=600) as answer:
                found = json.load(answer)
            assert [one["name"] for one in found["stores"]] == ["chats", "pages"]
            assert found["mixture"] is True
            server.send_signal(signal.SIGINT)
            out, err = server.communicate(timeout=600)
        finally:
            server.kill()
    assert (server.returncode, out, err) == (0, "", "shardmill: stopped\n")


@pytest.mark.slow
def test_several_stores_start_with_one_folder_of_input(place, tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{name} row"}}\n')
        feed = Feed(source=open_source(tmp_path / f"{name}.jsonl"), fill=(("train", None),))
        build_store([feed], tmp_path / "s" / name, tokenizer=OPENED, spec=BuildSpec())
    (tmp_path / "poem.txt").write_text("of no store")
    command = [str(tmp_path / "s" / "one"), str(tmp_path / "s" / "two"), *FLAGS]
    with running_view([*command, "--input", str(tmp_path)]) as url:
        for number, name in enumerate(("one", "two")):
            address = f"{url}api/stores/{number}/blame?token=1"
            with urllib.request.urlopen(address, timeout=60) as answer:
                assert json.load(answer)["file"] == f"{name}.jsonl"


@pytest.mark.slow
def test_an_address_that_others_reach_is_warned_of(place):
    command = [sys.executable, "-m", "shardmill", "view", str(place), "--host", "0.0.0.0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout.readline().startswith("http://127.0.0.1:")
            server.send_signal(signal.SIGINT)
            _, err = server.communicate(timeout=600)
        finally:
            server.kill()
    assert "everyone who reaches this address can read the data" in err
    assert server.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to look at"),
        (["."], "no store, and no folder with stores in it"),
        (["{place}", "--tokenizer", "nothing.model"], "no such file or folder"),
        (["{place}", "--special", "x"], "wanted NAME=STRING"),
        (["{place}", "--host", "256.0.0.1"], "cannot be bound"),
    ],
)
def test_a_mistake_is_one_line(call, place, arguments, message):  # noqa: F811
    code, out, err = call("view", *(one.format(place=place) for one in arguments))
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.slow
def test_without_the_extra_the_command_says_how_to_get_it(place):
    code = (
        "import sys\nsys.modules['starlette'] = None\n"
        f"sys.argv = ['shardmill', 'view', {str(place)!r}]\n"
        "from shardmill.cli import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == ("shardmill: starlette is not installed: pip install 'shardmill[view]'\n")
