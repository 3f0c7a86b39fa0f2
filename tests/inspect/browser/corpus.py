"""A little made-up world to look at: two text stores, chats with plans, and a mixture.

In: an empty folder.  Out: the stores `harbour`, `recipes`, `chats`, a tokenizer and `train.toml`.
Promise: the same folder gives the same bytes; every sentence is made here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardmill.building import BuildSpec, Feed, build_chats, build_plan, build_store
from shardmill.chat import bind_template, known_template
from shardmill.protocols import Tokenizer
from shardmill.sources import open_chats, open_source
from shardmill.store import PlanOptions
from shardmill.tokenizers import TrainSpec, open_tokenizer, train_tokenizer

WHO = ["The harbour master", "A young pilot", "The keeper of the north light", "An old cooper"]
DOES = ["wrote down", "counted", "repaired", "remembered", "painted", "argued about", "measured"]
WHAT = ["the tide tables", "seven grey herons", "the brass barometer", "a crate of lemons"]
WHEN = ["before the first ferry", "while it rained", "at a quarter past nine", "in the small hours"]
WHY = ["because nobody else would", "so that the ledger balanced", "for the price of a coffee"]
DISHES = ["lentil soup", "plum cake", "flat bread", "pickled beets", "barley stew", "apple tart"]
ASKED = [
    "When is high water on Sunday?",
    "How do I keep a plum cake from sinking?",
    "Why is the north light white and not red?",
    "Can you write the log for a calm night?",
]
CODE = "def tide(hour):\n    return 2.4 * cos(hour / 6.21)\n"
LANGUAGES = [
    "Gr\u00fc\u00dfe aus dem Hafen. ",
    "\u0412\u0435\u0442\u0435\u0440 \u0441\u0442\u0438\u0445. ",
]
CONFIG = """
[data]
shuffle = "block"
seed = 7
pack_sequences = true
tokenizer_path = "{tokenizer}"

[[data.datasets]]
name = "harbour"
path = "{folder}/harbour"
weight = 6

[[data.datasets]]
name = "recipes"
path = "{folder}/recipes"
weight = 3

[[data.datasets]]
name = "harbour-val"
path = "{folder}/harbour"
split = "val"
weight = 1

[[data.phases]]
start_step = 300
dataset_weights = {{ harbour = 4, recipes = 5, harbour-val = 1 }}

[[data.phases]]
start_step = 700
dataset_weights = {{ harbour = 1, recipes = 8, harbour-val = 1 }}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What was made."""

    folder: Path
    tokenizer_path: Path
    tokenizer: Tokenizer

    def arguments(self) -> list[str]:
        """Of `shardmill view`: harbour is store 0, recipes 1, chats 2."""
        names = ["harbour", "recipes", "chats"]
        config = ["--config", str(self.folder / "train.toml")]
        return [*(str(self.folder / name) for name in names), *config]


def build_world(folder: Path) -> World:
    """Everything, in a few seconds."""
    draw = np.random.default_rng(11)
    logs = [_log(draw, number) for number in range(420)]
    recipes = [_recipe(draw, number) for number in range(240)]
    chats = [_chat(draw, number) for number in range(160)]
    _lines(folder / "logs.jsonl", [{"text": text} for text in logs])
    _lines(folder / "recipes.jsonl", [{"text": text} for text in recipes])
    _lines(folder / "chats.jsonl", chats)
    report = train_tokenizer(
        folder / "tokenizer",
        texts=[*logs, *recipes, CODE * 20],
        spec=TrainSpec(vocab_size=900, model_type="byte-bpe"),
    )
    tokenizer = open_tokenizer(str(report.model))
    spec = BuildSpec(append_eot=True, shard_bytes=4096, dataset_name="harbour logs")
    parts = (("val", 2000), ("train", 24_000))
    for name, source, fill in (
        ("harbour", "logs.jsonl", parts),
        ("recipes", "recipes.jsonl", (("train", None),)),
    ):
        feed = Feed(source=open_source(folder / source, on_bad="skip"), fill=fill)
        build_store([feed], folder / name, tokenizer=tokenizer, spec=spec, workers=1)
    _chat_store(folder, tokenizer)
    (folder / "train.toml").write_text(CONFIG.format(tokenizer=report.model, folder=folder))
    return World(folder=folder, tokenizer_path=report.model, tokenizer=tokenizer)


def _chat_store(folder: Path, tokenizer: Tokenizer) -> None:
    build_chats(
        open_chats(str(folder / "chats.jsonl")),
        folder / "chats",
        template=bind_template(known_template("four-marker"), tokenizer),
        tokenizer=tokenizer,
        spec=BuildSpec(seed=3),
    )
    build_plan(folder / "chats", options=PlanOptions(seq_len=512))
    for algorithm in ("first-fit", "concatenate"):
        options = PlanOptions(seq_len=384, algorithm=algorithm, max_per_row=3)
        build_plan(folder / "chats", options=options, name=algorithm)


def _lines(path: Path, records: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def _sentence(draw: np.random.Generator) -> str:
    parts = [str(draw.choice(words)) for words in (WHO, DOES, WHAT, WHEN, WHY)]
    return " ".join(parts[: int(draw.integers(3, 6))]) + ". "


def _log(draw: np.random.Generator, number: int) -> str:
    if number % 53 == 7:
        return ""
    size = int(np.exp(draw.normal(1.6, 0.9))) + 1
    lines = [f"Log {number}. "] + [_sentence(draw) for _ in range(min(size, 60))]
    if number % 9 == 4:
        lines.insert(1, str(draw.choice(LANGUAGES)))
    return "".join(lines).strip() + ("\n\n" + CODE if number % 12 == 5 else "\n")


def _recipe(draw: np.random.Generator, number: int) -> str:
    dish = str(draw.choice(DISHES))
    steps = "".join(f"{step + 1}. {_sentence(draw)}\n" for step in range(int(draw.integers(2, 8))))
    return f"# {dish.capitalize()}, the {number}th time\n\n{steps}"


def _chat(draw: np.random.Generator, number: int) -> dict[str, object]:
    said = [{"role": "system", "content": "You keep the harbour's books. Be brief."}]
    for turn in range(int(draw.integers(1, 4))):
        answer = "".join(_sentence(draw) for _ in range(int(draw.integers(1, 5)))).strip()
        said.append({"role": "user", "content": ASKED[(number + turn) % len(ASKED)]})
        said.append({"role": "assistant", "content": answer})
    if number % 40 == 39:
        said.append({"role": "user", "content": "<|eot|> is what I say."})
        said.append({"role": "assistant", "content": "Noted."})
    return {"messages": said}
