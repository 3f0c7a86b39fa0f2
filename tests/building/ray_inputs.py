"""Documents, conversations and a hub dataset, and a process that builds stores of them.

The process takes jobs on stdin and answers on stdout, in JSON lines. It is one of its own because
the hub's client reads HF_ENDPOINT when it is imported, and so that it can be killed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shardmill.building import BuildSpec, Feed, build_chats, build_store, plan
from shardmill.chat import bind_template, known_template
from shardmill.sources import BatchLimits, open_chats, open_source
from tests.building.corpora import feeds_of, write_corpus
from tests.building.parts import Watched
from tests.services import LoopbackHub

LIMITS = BatchLimits(num_bytes=2_000, num_documents=23)
SPEC = BuildSpec(shard_bytes=20_000)
SPECIALS = {"sys": "<|s|>", "usr": "<|u|>", "asst": "<|a|>", "eot": "<|e|>"}


def write_inputs(folder: Path, hub: LoopbackHub) -> None:
    """Files of every kind, and the datasets own/docs and own/chats on the hub."""
    draw = np.random.default_rng(7)
    write_corpus(folder / "corpus", num_files=3)
    texts = [None if row % 31 == 5 else f"{row} " + "caf\u00e9 " * (row % 60) for row in range(400)]
    _write_parquet(folder / "docs", "text", texts)
    hub.publish("own/docs", folder / "docs")
    chats = [_chat(draw, row) for row in range(400)]
    lines = [json.dumps({"messages": chat}) if row % 29 else "{" for row, chat in enumerate(chats)]
    (folder / "chats.jsonl").write_text("\n".join(lines[:200]) + "\n")
    _write_parquet(folder / "chats", "messages", chats[200:])
    hub.publish("own/chats", folder / "chats")


def _chat(draw: np.random.Generator, row: int) -> list[dict[str, str]]:
    """Some have no answer."""
    turns = int(draw.integers(1, 7))
    return [
        {"role": ("user", "assistant")[turn % 2], "content": f"{row}-{turn} word " * (3 * turn + 2)}
        for turn in range(turns)
    ]


def _write_parquet(folder: Path, column: str, values: list[Any]) -> None:
    (folder / "data").mkdir(parents=True)
    size = -(-len(values) // 4)
    for number in range(4):
        table = pa.table({column: values[number * size : (number + 1) * size]})
        path = folder / f"data/train-{number:05d}-of-00004.parquet"
        pq.write_table(table, path, row_group_size=12)


def _files(folder: Path) -> list[Feed]:
    return feeds_of(folder / "corpus")


def _hub(folder: Path) -> list[Feed]:
    """A hub dataset by its name, then its files by their address."""
    where = ("hub:own/docs", "hf://datasets/own/docs/**/*.parquet")
    sources = [open_source(one, limits=LIMITS) for one in where]
    return [Feed(source=source, fill=(("val", 3_000), ("train", None))) for source in sources]


FEEDS: dict[str, tuple[Callable[[Path], list[Feed]], ...]] = {
    "files": (_files,),
    "hub": (_hub,),
    "files and hub": (_files, _hub),
}


def _build(kind: str, folder: Path, out: str, **options: Any) -> None:
    options = {"max_loss": 1.0, **options}
    if kind in FEEDS:
        feeds = [feed for feeds in FEEDS[kind] for feed in feeds(folder)]
        build_store(feeds, out, tokenizer=Watched(), spec=SPEC, **options)
        return
    assert kind == "chats", kind
    tokenizer = Watched(byte_offset=4, specials=SPECIALS)
    inputs = [str(folder / "chats.jsonl"), "hub:own/chats"]
    build_chats(
        open_chats(inputs, on_bad="skip", limits=LIMITS),
        out,
        template=bind_template(known_template("four-marker"), tokenizer),
        tokenizer=tokenizer,
        spec=SPEC,
        val_fraction=0.3,
        **options,
    )


class Builder:
    """The process. `environ` says where its hub is; what it logs goes to `errors`."""

    def __init__(self, inputs: Path, environ: Mapping[str, str], errors: Path) -> None:
        self._errors = errors
        self._printed: list[str] = []
        with errors.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "tests.building.ray_inputs", str(inputs)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=dict(environ),
            )

    def start(self, kind: str, out: Path | str, **options: Any) -> None:
        """Build a store of "chats" or of one of the `FEEDS`."""
        assert self.process.stdin is not None
        job = {"kind": kind, "out": str(out), "options": options}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

    def finish(self) -> int | None:
        """Wait for the end of what was started: None, or the exit code of the process."""
        assert self.process.stdout is not None
        for line in self.process.stdout:  # Ray too may print there
            if line == "done\n":
                return None
            self._printed.append(line)
        return self.process.wait()

    def build(self, kind: str, out: Path | str, **options: Any) -> None:
        self.start(kind, out, **options)
        assert self.finish() is None, self.messages()

    def messages(self) -> str:
        return "".join((*self._printed, self._errors.read_text()))

    def close(self) -> None:
        """End it; it may be gone."""
        self.process.kill()
        self.process.communicate()


def main() -> None:
    plan.CHUNK_BYTES = 3_000
    folder = Path(sys.argv[1])
    for line in sys.stdin:
        job = json.loads(line)
        _build(job["kind"], folder, job["out"], **job["options"])
        print("done", flush=True)


if __name__ == "__main__":
    main()
