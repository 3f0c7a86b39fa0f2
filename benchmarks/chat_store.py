"""What Jinja templates cost, from JSON lines to stored ids and mask.

    python benchmarks/chat_store.py [--data FOLDER] [--rounds 3] [--times 4] [--json]

CPU seconds of fresh processes and their children: reading, rendering, encoding and writing count;
imports, opening the tokenizer, the proof of the mask and that of a fast engine do not, since they
take as long for a thousand conversations as for a billion. A number is the median over rounds of
the ratio of two processes that ran right after one another.

- compiled: a build with a Jinja template to one with the token template of the same format
- exact: a build in which nothing is compiled (no form is kept) to reading the same lines and one
  plain `apply_chat_template` each
- trl: TRL's own preparation (`SFTTrainer` with assistant_only_loss) to a build with the same
  template; ids and masks of both must be equal. Left out where trl is not installed
- workers: CPU seconds and seconds of two workers, to those of one

Conversations: sgd (18 turns each) and glaive (with tools and calls) from --data, repeated. Exits
with 1 when a wanted number is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
from chat import FILES, MARKERS

from shardmill.building import BuildSpec, build_chats
from shardmill.building import worker as worker_module
from shardmill.building.api import open_template
from shardmill.chat import ChatTemplate
from shardmill.chat.proof.prove import prove_mask
from shardmill.protocols import Tokenizer
from shardmill.records import Conversation
from shardmill.sources import open_chats
from shardmill.store import open_store
from shardmill.store.readers import ChatSpace
from shardmill.tokenizers import EngineChoice, TrainSpec, choose_encoder, train_tokenizer

COMPILED, EXACT, TRL = 1.3, 2.0, 5.0
REPEATED = {"sgd": 4, "glaive": 16, "many-sgd": 16, "many-glaive": 64}
REPEATED |= {"large-sgd": 64, "large-glaive": 384}
"""How often the file of each part is written, times --times: some seconds of work. Compiled forms
are learnt once, so they get as many conversations as a set for fine-tuning has: some ten thousand
for the reference engine, a hundred thousand for fast ones."""
TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Task:
    """What one process does. It is told as words on its command line."""

    work: str  # build, exact, plain, trl
    part: str  # a name of REPEATED
    template: str = "chatml.jinja"  # a file in TEMPLATES, or a name of a token template
    engine: str = "reference"
    workers: int = 1


@dataclass
class Clock:
    """CPU seconds of this process and its children, and seconds."""

    cpu: float = 0.0
    seconds: float = 0.0
    left_out: float = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        began, cpu = time.perf_counter(), _cpu()
        yield
        self.cpu += _cpu() - cpu - self.left_out
        self.seconds += time.perf_counter() - began

    def without(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*values: Any, **options: Any) -> Any:
            began = _cpu()
            found = run(*values, **options)
            self.left_out += _cpu() - began
            return found

        return timed


def _cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


# What one process does.


def open_for(folder: Path, task: Task) -> tuple[Tokenizer, ChatTemplate]:
    is_file = task.template.endswith(".jinja")
    template = TEMPLATES / task.template if is_file else task.template
    tokenizer, opened, _ = open_template(template, folder / "tokenizer")
    if task.work == "exact":
        from shardmill.chat.jinja.template import JinjaTemplate, KeptForms

        class NoForms(KeptForms):
            def has_room(self, shape: object) -> bool:  # noqa: ARG002
                return False

        opened = replace(cast(JinjaTemplate, opened), forms=NoForms())
    return tokenizer, opened


def build(folder: Path, task: Task, clock: Clock, out: Path) -> int:
    """Conversations to a store at `out`."""
    tokenizer, template = open_for(folder, task)
    certificate = prove_mask(template, tokenizer)
    if task.work == "exact":
        cast(Any, template).proofs.clear()
    worker_module.choose_encoder = clock.without(choose_encoder)
    with clock.running():
        report = build_chats(
            open_chats(folder / f"{task.part}.jsonl"),
            out,
            template=template,
            tokenizer=tokenizer,
            spec=BuildSpec(dataset_name=task.part),
            certificate=certificate,
            any_encoder=True,
            engine=cast(EngineChoice, task.engine),
            workers=task.workers,
            unit_bytes=2**20 if task.workers > 1 else None,
        )
    assert report.cost is not None
    if report.cost.num_workers != task.workers:
        raise SystemExit(f"{task}: wanted {task.workers} workers, had {report.cost.num_workers}")
    return report.manifest.splits["train"].documents


def plain(folder: Path, task: Task, clock: Clock, _out: Path) -> int:
    """Each line as transformers renders it, to nowhere."""
    from shardmill.tokenizers.huggingface import load_transformers

    tokenizer = load_transformers(str(folder / "tokenizer"))
    template = (TEMPLATES / task.template).read_text()
    count = 0
    with clock.running(), (folder / f"{task.part}.jsonl").open() as lines:
        for line in lines:
            row = json.loads(line)
            tokenizer.apply_chat_template(
                row["messages"],
                tools=row.get("tools"),
                chat_template=template,
                tokenize=True,
                return_dict=False,
            )
            count += 1
    return count


def trl(folder: Path, task: Task, clock: Clock, out: Path) -> int:
    from peers.chat_trl import prepare

    template = (TEMPLATES / task.template).read_text()
    file = folder / f"{task.part}.jsonl"
    ids, trained = prepare(file, folder / "tokenizer", template, clock.running())
    offsets = np.concatenate(([0], np.cumsum([len(one) for one in ids])))
    np.savez(out, ids=np.concatenate(ids), offsets=offsets, mask=np.concatenate(trained))
    return len(ids)


WORK: dict[str, Callable[[Path, Task, Clock, Path], int]] = {
    "build": build,
    "exact": build,
    "plain": plain,
    "trl": trl,
}


# All of them, one after another.


def _standard(chat: Conversation) -> dict[str, Any]:
    """A conversation as transformers wants it."""
    names = {"human": "user", "gpt": "assistant", "observation": "tool"}
    messages = [{**one, "role": names.get(one["role"], one["role"])} for one in chat.messages]
    for one in messages:
        if "tool_calls" in one:
            one["tool_calls"] = [
                {"type": "function", "function": call} for call in one["tool_calls"]
            ]
    return {"messages": messages, **({"tools": chat.tools} if chat.tools else {})}


def write_inputs(data: Path, folder: Path, times: float) -> dict[str, int]:
    """A tokenizer and the JSON lines of each part; the number of conversations of each."""
    counts: dict[str, int] = {}
    texts: list[str] = []
    for part, repeated in REPEATED.items():
        file, read = FILES[part.rpartition("-")[2]]
        chats = [
            _standard(read(json.loads(line))) for line in (data / file).read_text().splitlines()
        ]
        # The names of roles are words of the vocabulary, as in those that models are trained with.
        texts += [f"{one['role']}\n{one['content']}" for row in chats for one in row["messages"]]
        lines = [json.dumps(row) + "\n" for row in chats] * max(1, round(repeated * times))
        (folder / f"{part}.jsonl").write_text("".join(lines))
        counts[part] = len(lines)
    spec = TrainSpec(vocab_size=6000, model_type="byte-bpe", specials=MARKERS)
    train_tokenizer(folder / "tokenizer", texts=texts, spec=spec)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": MARKERS["im_end"],
        "additional_special_tokens": list(MARKERS.values()),
    }
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))
    return counts


def run(folder: Path, task: Task, out: str) -> dict[str, Any]:
    """The CPU seconds of a task in a process of its own."""
    words = [task.work, task.part, task.template, task.engine, str(task.workers)]
    done = subprocess.run(
        [sys.executable, __file__, "--task", *words, str(folder), out],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: ended with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def ratios(folder: Path, above: Task, below: Task, rounds: int) -> dict[str, Any]:
    """CPU seconds of one task to those of another."""
    found, clocks, counts = [], [], set()
    for number in range(rounds):
        pair = {}
        for task in (above, below) if number % 2 else (below, above):
            with tempfile.TemporaryDirectory(dir=folder) as out:
                pair[task] = run(folder, task, str(Path(out, "out")))
            counts.add(pair[task]["count"])
        found.append((pair[above]["cpu"], pair[below]["cpu"]))
        clocks.append(pair[above]["seconds"] / pair[below]["seconds"])
    each = [one / other for one, other in found]
    return {
        "ratio": round(statistics.median(each), 3),
        "lowest": round(min(each), 3),
        "highest": round(max(each), 3),
        "above_s": round(statistics.median(one for one, _ in found), 3),
        "below_s": round(statistics.median(other for _, other in found), 3),
        "by_clock": round(statistics.median(clocks), 3),
        "conversations": sorted(counts),
    }


def compare_with_trl(folder: Path) -> tuple[int, int]:
    """How many conversations have equal ids and masks, and how many there are."""
    blocks = "chatml_blocks.jinja"
    run(folder, Task("trl", "sgd", blocks), str(folder / "trl.npz"))
    run(folder, Task("build", "sgd", blocks, "fast"), str(folder / "compared"))
    space = ChatSpace(open_store(folder / "compared"), "train")
    ours = space.examples(range(len(space)))
    with np.load(folder / "trl.npz") as theirs:
        ids, offsets, mask = theirs["ids"], theirs["offsets"], theirs["mask"]
    same = 0
    for at in range(min(len(ours.ids), len(offsets) - 1)):
        mine = slice(*ours.ids.offsets[at : at + 2])
        other = slice(*offsets[at : at + 2])
        same += np.array_equal(ours.ids.values[mine], ids[other]) and np.array_equal(
            ours.mask[mine], mask[other]
        )
    return same, len(offsets) - 1


def store_section(data: Path, *, rounds: int, times: float = 1) -> dict[str, Any]:
    """All rows: what, wanted, found; each is told on stderr when it is there."""
    rows: list[dict[str, Any]] = []

    def add(name: str, found: dict[str, Any], **rule: Any) -> None:
        passed = found["ratio"] <= rule.get("most", found["ratio"])
        passed = passed and found["ratio"] >= rule.get("least", found["ratio"])
        passed = passed and rule.get("same", True)
        rows.append({"name": name, **found, **rule, "passed": passed})
        print(_line(rows[-1]), file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="shardmill-chat-store-") as place:
        folder = Path(place)
        counts = write_inputs(data, folder, times)
        told = (f"{part}: {count:,} conversations" for part, count in counts.items())
        print(", ".join(told), file=sys.stderr, flush=True)
        for kind in ("sgd", "glaive"):
            for engine, part in (("reference", f"many-{kind}"), ("fast", f"large-{kind}")):
                jinja, tokens = (
                    Task("build", part, template, engine) for template in ("chatml.jinja", "chatml")
                )
                add(
                    f"compiled / token template, {kind}, {engine}",
                    ratios(folder, jinja, tokens, rounds),
                    most=COMPILED,
                )
        for part in ("sgd", "glaive"):
            add(
                f"exact / apply_chat_template, {part}",
                ratios(folder, Task("exact", part), Task("plain", part), rounds),
                most=EXACT,
            )
        if find_spec("trl") is None:
            print("absent: trl is not installed: make bench-peers", file=sys.stderr)
        else:
            blocks = "chatml_blocks.jinja"
            same, count = compare_with_trl(folder)
            add(
                f"trl / fast, sgd ({same:,} of {count:,} have equal ids and masks)",
                ratios(
                    folder, Task("trl", "sgd", blocks), Task("build", "sgd", blocks, "fast"), rounds
                ),
                least=TRL,
                same=same == count,
            )
        one, two = (Task("build", "sgd", workers=workers) for workers in (1, 2))
        add("two workers / one, sgd, reference", ratios(folder, two, one, rounds))
    return {"rows": rows, "passed": all(row["passed"] for row in rows)}


def _line(row: dict[str, Any]) -> str:
    wanted = f"at most {row['most']}" if "most" in row else ""
    wanted = f"at least {row['least']}" if "least" in row else wanted
    word = ("reached" if row["passed"] else "MISSED") if wanted else ""
    spread = f"{row['lowest']:.2f} .. {row['highest']:.2f}"
    seconds = f"{row['above_s']:.2f} s / {row['below_s']:.2f} s"
    clock = f"by the clock {row['by_clock']:.2f}"
    return (
        f"{word:8} {row['name']:66} {row['ratio']:6.2f}  {wanted:13} {spread:16} {seconds}, {clock}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("SHARDMILL_REAL_DATA"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--times", type=float, default=1, help="as much input")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--task", nargs=7, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.task:
        work, part, template, engine, workers, folder, out = args.task
        task, clock = Task(work, part, template, engine, int(workers)), Clock()
        count = WORK[work](Path(folder), task, clock, Path(out))
        print(json.dumps({"cpu": clock.cpu, "seconds": clock.seconds, "count": count}))
        return 0
    if args.data is None:
        parser.error("wanted --data or SHARDMILL_REAL_DATA: a folder with chats/")
    result = store_section(Path(args.data), rounds=args.rounds, times=args.times)
    if args.json:
        print(json.dumps(result, indent=2))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
