"""The blocks of a page, run in a folder that holds what its commands speak of.

In: a page.  Out: nothing, or an AssertionError with the page, the line and what was printed.
Promise: commands are the real ones, `shardmill` and `python` of this environment; nothing leaves
this machine: s3:// is a server on loopback.
Not here: which lines are not run (test_docs.py).

The folder, for every page:

    data/*.jsonl  pages/*.jsonl      documents            books/*.txt  corpus/*.md  notes/  texts
    spm.model  meta.json             a tokenizer with the specials of four-marker and chatml
    chats/*.jsonl                    conversations        examples/  the repository's

and for a page that `EXTRAS` names what it says there.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import yaml

from shardmill.tokenizers import DEFAULT_SPECIALS, TrainSpec, train_tokenizer
from tests.docs_blocks import (
    NUMBERS_DIFFER,
    UNTIL_STOPPED,
    Block,
    blocks_of,
    console_parts,
    same_output,
)

ROOT = Path(__file__).parent.parent
SYLLABLES = re.findall(
    r"\w+", "ba ce di fo gu ha le mi no pu ra se ti vo wu ka lo me ni tu sha ter ing ound"
)
DOCKERFILE = {"FROM", "RUN", "COPY", "ENV", "WORKDIR", "ENTRYPOINT", "CMD", "USER", "ARG"}


def write_world(parent: Path) -> Path:
    """The folder that pages run in, made once and copied."""
    world = parent / "page"
    for name in ("data", "pages", "books", "corpus", "notes", "chats"):
        (world / name).mkdir(parents=True)
    draw = random.Random(0)
    words = ["".join(draw.choices(SYLLABLES, k=draw.randint(1, 4))) for _ in range(6_000)]
    texts = [" ".join(draw.choices(words, k=120)) + f". Page {n}." for n in range(240)]
    for folder, start in (("data", 0), ("pages", 100)):
        for part in range(2):
            rows = [json.dumps({"text": text}) for text in texts[start + part * 40 :][:40]]
            (world / f"{folder}/{part}.jsonl").write_text("\n".join(rows) + "\n")
    for n in range(8):
        (world / f"books/{n}.txt").write_text("\n".join(texts[n * 30 : n * 30 + 30]))
        (world / f"corpus/{n}.md").write_text(texts[n])
        (world / f"notes/{n}.md").write_text(texts[-n])
    chats = [
        [{"role": "user", "content": f"{n} + {n}?"}, {"role": "assistant", "content": f"{2 * n}"}]
        for n in range(2, 42)
    ]
    lines = [json.dumps({"messages": messages}) + "\n" for messages in chats]
    (world / "chats/a.jsonl").write_text("".join(lines[:20]))
    (world / "chats/b.jsonl").write_text("".join(lines[20:]))
    specials = {**DEFAULT_SPECIALS, "im_start": "<|im_start|>", "im_end": "<|im_end|>"}
    spec = TrainSpec(vocab_size=400, model_type="bpe", specials=specials)
    train_tokenizer(parent / "tokenizer", texts=texts, spec=spec)
    for name in ("spm.model", "meta.json"):
        shutil.copy(parent / f"tokenizer/{name}", world / name)
    (world / "examples").symlink_to(ROOT / "examples")
    return world


def write_tokens(folder: Path) -> None:
    """A folder of bare tokens with metadata."""
    (folder / "tokens").mkdir()
    ids = np.arange(3_670_016, dtype=np.uint16) % 50_000
    ids[1_048_576 + 700] = 50_256
    for number, part in enumerate(np.split(ids, [1_048_576, 2_097_152])):
        part.tofile(folder / f"tokens/shard_{number:05d}.bin")
    facts = "dtype: uint16\ntokenizer: gpt2\nvocab_size: 50257\n"
    (folder / "tokens/metadata.yaml").write_text(facts)


ENDS = "{{ '<|im_end|>\\n' }}"
THINKS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' and (loop.last or m['reasoning_content']) %}"
    "{{ '<think>\\n' + (m['reasoning_content'] or '') + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ m['content'] }}" + ENDS + "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Writes an empty block of reasoning in the last turn only, as the template of Qwen 3."""


def write_model(folder: Path) -> None:
    """A small tokenizer with a chat template, where the id of one on the hub would be."""
    from tests.chat.jinja_kit import make_tokenizer

    make_tokenizer(THINKS).save_pretrained(str(folder / "Qwen/Qwen3-0.6B"))
    talks = [
        json.loads(line)
        for path in sorted(folder.glob("chats/*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    (folder / "chats.json").write_text(json.dumps(talks))


EXTRAS: Mapping[str, Callable[[Path], None]] = {
    "config.md": write_tokens,
    "chats.md": write_model,
    "chat-data.md": write_model,
}
"""Page -> what its folder holds beside the rest."""


def write_commands(folder: Path) -> Path:
    """`shardmill` and `python` as a shell finds them, of this interpreter and this clone."""
    folder.mkdir()
    for name, words in {"python": "", "shardmill": " -m shardmill", "pytest": " -m pytest"}.items():
        file = folder / name
        file.write_text(f'#!/bin/sh\nexec "{sys.executable}"{words} "$@"\n')
        file.chmod(0o755)
    return folder


class PageRun:
    """A page being worked through, block by block."""

    def __init__(
        self, *, folder: Path, environment: Mapping[str, str], not_run: frozenset[str]
    ) -> None:
        self.folder = folder  # where the next command begins
        self.passed_over: list[str] = []  # lines of `not_run` that were met
        self.missing: list[str] = []  # commands that a page starts and this version does not have
        self._environment = environment
        self._not_run = not_run
        self._names: dict[str, object] = {"__name__": "__docs__"}
        self._printed = ""

    def run(self, page: Path) -> None:
        EXTRAS.get(page.name, lambda _: None)(self.folder)
        for block in blocks_of(page):
            self._run_block(block)

    def _run_block(self, block: Block) -> None:
        if block.file:
            (self.folder / block.file).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / block.file).write_text(block.body)
        match block.language:
            case "python" if block.file:
                compile(block.body, str(block), "exec")  # a command runs it, see test_docs.py
            case "python":
                self._printed = self._python(block)
            case "sh":
                self._printed = self._shell(block)
            case "console":
                differ = block.title == NUMBERS_DIFFER
                for command, shown in console_parts(block.body):
                    printed = self._bash(block, self._without_not_run(f"{command}\n"))
                    if shown:
                        assert_shown(block, shown, printed, numbers_differ=differ)
            case "output":
                differ = block.title == NUMBERS_DIFFER
                assert_shown(block, block.body, self._printed, numbers_differ=differ)
            case _:
                parse(block)

    def _python(self, block: Block) -> str:
        out = io.StringIO()
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(out):
            exec(compile(block.body, str(block), "exec"), self._names)
        return out.getvalue()

    def _shell(self, block: Block) -> str:
        if block.title == UNTIL_STOPPED:
            return self._until_stopped(block)
        return self._bash(block, self._without_not_run(block.body))

    def _without_not_run(self, body: str) -> str:
        lines = body.splitlines()
        self.passed_over += [line for line in lines if line in self._not_run]
        return "\n".join(":" if line in self._not_run else line for line in lines) + "\n"

    def _bash(self, block: Block, script: str) -> str:
        place = self.folder / ".place"
        with subprocess.Popen(
            ["bash", "-c", f"set -e\ntrap 'pwd > {place}' EXIT\n{script}"],
            cwd=self.folder,
            env={**self._environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                printed, told = process.communicate(timeout=600)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # what it left in the background, too
        code = process.returncode
        assert code == 0, f"{block}: exit {code}\n{told}{printed}"
        self.folder = Path(place.read_text().strip())
        place.unlink()
        return printed

    def _until_stopped(self, block: Block) -> str:
        """Start it, wait until the address that it prints answers, stop it as Ctrl-C does."""
        name = block.body.split()[1]
        asked = ["shardmill", name, "--help"]
        known = subprocess.run(
            asked, env={**self._environment}, capture_output=True, check=False, cwd=self.folder
        )
        if known.returncode != 0:
            self.missing.append(name)
            return ""
        with subprocess.Popen(
            ["bash", "-c", f"exec {block.body}"],
            cwd=self.folder,
            env={**self._environment, "BROWSER": "true"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            assert process.stdout is not None
            printed = ""
            for line in process.stdout:
                printed += line
                if line.startswith("http://"):
                    with urllib.request.urlopen(line.strip(), timeout=600) as answer:
                        answer.read()
                    process.send_signal(signal.SIGINT)
            process.wait(600)
        assert "\nhttp://" in f"\n{printed}", f"{block}: ended without an address\n{printed}"
        assert "Traceback" not in printed, f"{block}:\n{printed}"
        return printed


def assert_shown(block: Block, shown: str, printed: str, *, numbers_differ: bool) -> None:
    same = same_output(shown, printed, numbers_differ=numbers_differ)
    assert same, f"{block} shows\n{shown}\n--- but this was printed:\n{printed}"


def parse(block: Block) -> None:
    """A block that is data, or a script for elsewhere: it must be one."""
    match block.language:
        case "toml":
            tomllib.loads(block.body)
        case "json":
            json.loads(block.body)
        case "yaml":
            assert yaml.safe_load(block.body) is not None, block
        case "dockerfile":
            assert {line.split()[0] for line in block.body.splitlines()} <= DOCKERFILE, block
        case "bash":
            done = subprocess.run(
                ["bash", "-n"], input=block.body, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{block}: {done.stderr}"


def environment_for(commands: Path, more: Mapping[str, str]) -> dict[str, str]:
    """What commands see: this clone's packages, no terminal, no home of anybody."""
    return {
        **os.environ,
        **more,
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(commands.parent / "cache"),
        "COLUMNS": "100",
        "TERM": "dumb",
        "NO_COLOR": "1",
    }
