"""What a chat costs beside its bare tokenisation: conversations to (ids, mask), then to rows.

    python benchmarks/chat.py [--data FOLDER] [--megabytes 24] [--rounds 9] [--json] [--only store]

A template made of tokens renders batches of 1,024 conversations; bare is one `encode_batch` of the
very texts that the template encodes for them, ready in a list, by the engine as shardmill sets it
up, which leaves a core free (FASTOKENS_BPE_THREADS overrides). Both alternate in this process over
the same batches; a number is the median of the rounds' ratios, time of the rendering to time of the
bare engine. Conversations are parsed anew for every copy, so that no two share an object.

Conversations: dolly, sgd and glaive from --data (or SHARDMILL_REAL_DATA), repeated to --megabytes
of text for fast engines, and a part of that for the reference ones. Exits with 1 when a reference
engine takes over 1.3 times its bare time, or the fastest one over 2.0, on all three together, or
when another part fails: rows (benchmarks/chat_fit.py), or builds from JSON lines with Jinja
templates beside token templates, transformers and TRL (benchmarks/chat_store.py).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
from chat_fit import fit_rows_section
from common import Contender, alternate

from shardmill.chat import TokenTemplate, TrainPolicy, bind_template, known_template
from shardmill.protocols import Encoder, Texts, Tokenizer
from shardmill.records import Conversation, Ragged
from shardmill.tokenizers import TrainSpec, open_tokenizer, train_tokenizer
from shardmill.tokenizers.engines import fast_candidates

BATCH = 1024
MARKERS = {"im_start": "<|im_start|>", "im_end": "<|im_end|>"}
REFERENCE, FASTEST = 1.3, 2.0
PARTS = ("dolly", "sgd", "glaive", "all")
ONLY = ("all", "reference", "fast", "rows", "store")
SHARE = {"unigram": 0.2, "byte-bpe": 0.1}  # of the text, for reference engines


def dolly(row: dict[str, Any]) -> Conversation:
    asked = "\n\n".join(text for text in (row["instruction"], row["context"]) if text)
    answer = {"role": "assistant", "content": row["response"]}
    return Conversation(messages=[{"role": "user", "content": asked}, answer])


def sgd(row: dict[str, Any]) -> Conversation:
    return Conversation(messages=row["messages"])


def glaive(row: dict[str, Any]) -> Conversation:
    messages: list[dict[str, Any]] = []
    for said in row["conversations"]:
        if said["from"] == "function_call":
            call = json.loads(said["value"])
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        else:
            messages.append({"role": said["from"], "content": said["value"]})
    tools = row.get("tools")
    return Conversation(messages=messages, tools=json.loads(tools) if tools else None)


FILES = {
    "dolly": ("dolly/databricks-dolly-15k.jsonl", dolly),
    "sgd": ("chats/sgd_dev.messages.jsonl", sgd),
    "glaive": ("chats/glaive_toolcall.sharegpt.jsonl", glaive),
}


def batches(data: Path, part: str) -> Iterator[list[Conversation]]:
    """Batches of fresh conversations without end: a file in its order, or all three shuffled."""
    lines = [
        (read, line)
        for name, (file, read) in FILES.items()
        if part in (name, "all")
        for line in (data / file).read_text().splitlines()
    ]
    if part == "all":
        random.Random(0).shuffle(lines)
    endless = cycle(lines)
    while True:
        yield [read(json.loads(line)) for read, line in islice(endless, BATCH)]


class Recorder:
    """An encoder that keeps the texts it is given."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self.texts: list[str] = []

    def encode_batch(self, texts: Texts) -> Ragged:
        self.texts = [str(text) for text in texts]
        return self.encoder.encode_batch(texts)


@dataclass(frozen=True)
class Work:
    """Batches of conversations, and the texts of each that a template encodes."""

    chats: list[list[Conversation]]
    texts: list[list[str]]
    num_bytes: int


def collect(data: Path, part: str, tokenizer: Tokenizer, num_bytes: int) -> Work:
    """Enough batches for about that many bytes of text; every conversation has a place."""
    recorder = Recorder(tokenizer)
    template = bind_template(known_template("chatml"), tokenizer, recorder)
    work = Work([], [], 0)
    for batch in batches(data, part):
        rendered = template.render(batch, TrainPolicy())
        if rendered.drops:
            raise SystemExit(f"{part}: {rendered.drops[0]}: the benchmark wants every conversation")
        size = work.num_bytes + sum(len(text.encode()) for text in recorder.texts)
        work = Work([*work.chats, batch], [*work.texts, recorder.texts], size)
        if size >= num_bytes:
            return work
    raise AssertionError("batches have no end")


def measure(template: TokenTemplate, encoder: Encoder, work: Work, rounds: int) -> dict[str, Any]:
    calls, policy = len(work.chats), TrainPolicy()
    contenders = [
        Contender(name="bare", prepare=lambda _: work.texts, run=encoder.encode_batch),
        Contender(
            name="render",
            prepare=lambda _: work.chats,
            run=lambda chats: template.render(chats, policy),
        ),
    ]
    alternate(contenders, rounds=1, calls=calls)
    times = alternate(contenders, rounds=rounds, calls=calls)
    ratios = [taken / bare for bare, taken in zip(times["bare"], times["render"], strict=True)]
    seconds = statistics.median(times["bare"]) * calls
    return {
        "ratio": round(statistics.median(ratios), 3),
        "lowest": round(min(ratios), 3),
        "highest": round(max(ratios), 3),
        "bare_mb_per_second": round(work.num_bytes / seconds / 1e6, 1),
    }


def engines(folder: Path, kind: str, data: Path, only: str) -> Iterator[tuple[str, str, Any, Any]]:
    """(kind of engine, its name, tokenizer, encoder)"""
    texts = [m["content"] for c in next(batches(data, "dolly")) for m in c.messages]
    train_tokenizer(
        folder / kind,
        texts=texts,
        spec=TrainSpec(vocab_size=8000, model_type=kind, specials=MARKERS),  # type: ignore[arg-type]
    )
    tokenizer = open_tokenizer(folder / kind)
    if only in ("all", "reference"):
        yield "reference", f"{kind}, reference", tokenizer, tokenizer
    if only in ("all", "fast"):
        for engine in fast_candidates(tokenizer).engines:
            yield "fast", f"{kind}, {engine.name}", tokenizer, engine


def render_section(
    data: Path, *, megabytes: float, rounds: int, only: str = "all"
) -> dict[str, Any]:
    """Conversations to (ids, mask) against bare tokenisation."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="shardmill-chat-") as folder:
        for model, share in SHARE.items():
            found: dict[tuple[str, float], Work] = {}
            for kind, name, tokenizer, encoder in engines(Path(folder), model, data, only):
                template = bind_template(known_template("chatml"), tokenizer, encoder)
                size = megabytes * 1e6 * (share if kind == "reference" else 1)
                for part in PARTS:
                    if (part, size) not in found:
                        found[part, size] = collect(data, part, tokenizer, int(size))
                    result = measure(template, encoder, found[part, size], rounds)
                    rows.append({"engine": name, "kind": kind, "part": part, **result})
    whole = [row for row in rows if row["part"] == "all"]
    reference = [row["ratio"] for row in whole if row["kind"] == "reference"]
    fast = [row for row in whole if row["kind"] == "fast"]
    fastest = max(fast, key=lambda row: row["bare_mb_per_second"], default=None)
    passed = all(ratio <= REFERENCE for ratio in reference)
    passed &= fastest is None or fastest["ratio"] <= FASTEST
    return {
        "rows": rows,
        "wanted": {"reference": REFERENCE, "fastest": FASTEST},
        "reference": max(reference, default=None),
        "fastest": fastest and {"engine": fastest["engine"], "ratio": fastest["ratio"]},
        "passed": passed,
    }


def show(result: dict[str, Any]) -> None:
    print(f"{'engine':28} {'chats':8} {'bare MB/s':>10} {'render / bare':>14} {'rounds':>16}")
    for row in result["rows"]:
        spread = f"{row['lowest']:.2f} .. {row['highest']:.2f}"
        bare, ratio = row["bare_mb_per_second"], row["ratio"]
        print(f"{row['engine']:28} {row['part']:8} {bare:10.1f} {ratio:14.2f} {spread:>16}")
    print(
        f"all three: reference {result['reference']} (wanted {REFERENCE}), "
        f"fastest {result['fastest']} (wanted {FASTEST})"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("SHARDMILL_REAL_DATA"))
    parser.add_argument("--megabytes", type=float, default=24)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=ONLY, default="all")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.data is None and args.only != "rows":
        parser.error("wanted --data or SHARDMILL_REAL_DATA: a folder with dolly/ and chats/")
    if args.rounds < 1 or args.megabytes <= 0:
        parser.error("--rounds from 1 on, --megabytes above 0")
    versions = {"numpy": np.__version__, "python": platform.python_version()}
    result: dict[str, Any] = {**versions, "rounds": args.rounds}
    if args.only not in ("rows", "store"):
        result["render"] = render_section(
            Path(args.data), megabytes=args.megabytes, rounds=args.rounds, only=args.only
        )
    if args.only in ("all", "rows"):
        result["rows"] = fit_rows_section(rounds=args.rounds, calls=3)
    if args.only in ("all", "store"):
        from chat_store import store_section

        result["store"] = store_section(Path(args.data), rounds=min(args.rounds, 3))
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        if "render" in result:
            show(result["render"])
        if "rows" in result:
            print(f"rows (benchmarks/chat_fit.py): {json.dumps(result['rows'])}")
    parts = [result[key] for key in ("render", "rows", "store") if key in result]
    return 0 if all(part["passed"] for part in parts) else 1


if __name__ == "__main__":
    sys.exit(main())
