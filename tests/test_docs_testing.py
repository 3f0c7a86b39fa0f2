"""`shardmill.testing` for outsiders: all modules listed, all names told, and each law can fail."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings

import shardmill.testing
from shardmill.chat import MaskProofError, Rendered, bind_template, known_template
from shardmill.packing import PACKERS
from shardmill.records import Conversation, Drop
from shardmill.testing.packing import assert_packer_laws, assert_rows_cover, example_lengths
from shardmill.testing.tokenizers import assert_renders_exactly, assert_template_laws, conversations
from shardmill.tokenizers import DEFAULT_SPECIALS, open_tokenizer

FILES = sorted(path.stem for path in Path(shardmill.testing.__file__).parent.glob("[a-z]*.py"))
MODULES = [importlib.import_module(f"shardmill.testing.{name}") for name in FILES]
TOKENIZER = open_tokenizer("byte:8", specials=DEFAULT_SPECIALS)
TEMPLATE = bind_template(known_template("four-marker"), TOKENIZER)


def test_every_module_is_listed() -> None:
    listed = re.findall(r"^(\w+)\.py ", shardmill.testing.__doc__ or "", re.MULTILINE)
    assert sorted(listed) == FILES


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_name_is_told(module: ModuleType) -> None:
    own = {
        name: value
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")
    }
    assert own
    for name, value in own.items():
        if inspect.isfunction(value) or inspect.isclass(value):
            assert (value.__doc__ or "").strip(), f"{module.__name__}.{name} has no docstring"


@pytest.mark.parametrize("name", sorted(PACKERS))
@given(lengths=example_lengths(12))
def test_our_packers_keep_the_law_for_packers_of_others(name: str, lengths: list[int]) -> None:
    options = {"seed": 1} if name == "first-fit-shuffle" else {}

    def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
        plan = PACKERS[name](lengths, capacity, **options)
        rows = [plan.rows.bin_indices(row) for row in range(len(plan))]
        return [plan.pieces.example[row].tolist() for row in rows]

    assert_packer_laws(pack, lengths, 12)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([[0, 1], [1, 2]], "in two places"),
        ([[0, 1]], "in no row: \\[2\\]"),
        ([[0, 1], [2, 4]], "do not exist: \\[4\\]"),
        ([[0, 1], [], [2]], "row 1 is empty"),
        ([[0, 1, 2]], "row 0 holds 12 tokens of 10"),
    ],
)
def test_rows_that_cover_nothing_or_too_much_are_found(rows: list[list[int]], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        assert_rows_cover(rows, [3, 4, 5, 0], 10)


def test_a_packer_that_changes_its_mind_is_found() -> None:
    answers = [[[0], [1]], [[0, 1]]]
    with pytest.raises(AssertionError, match="packed again"):
        assert_packer_laws(lambda _lengths, _capacity: answers.pop(), [1, 2], 5)


@settings(deadline=None, max_examples=40)
@given(conversations(list(DEFAULT_SPECIALS.values())))
def test_our_template_renders_hard_conversations_exactly(chats: list[Conversation]) -> None:
    assert_renders_exactly(TEMPLATE, chats)


class Changed:
    """Our template, its answer changed."""

    name, marker_ids, describe = TEMPLATE.name, TEMPLATE.marker_ids, TEMPLATE.describe

    def __init__(self, how: str) -> None:
        self.how = how

    def render(self, chats, policy) -> Rendered:
        found = TEMPLATE.render(chats, policy)
        if self.how == "trains everything":
            return replace(found, examples=replace(found.examples, mask=found.examples.mask | True))
        if self.how == "trains nothing":
            empty = found.examples.mask & False
            return replace(found, examples=replace(found.examples, mask=empty))
        if self.how == "drops without a reason":
            drops = tuple(Drop(id=drop.id, reason="") for drop in found.drops)
            return replace(found, drops=drops)
        if self.how == "forgets drops":
            return replace(found, drops=())
        return TEMPLATE.render(list(chats)[:1], policy)  # "keeps the first only"


def chat(number: int, answer: str) -> Conversation:
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": answer}]
    return Conversation(messages=said, id=f"chat {number}")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("trains nothing", "'chat 0' trains nothing"),
        ("drops without a reason", "a drop without a reason"),
        ("forgets drops", "not kept"),
        ("keeps the first only", "not kept"),
    ],
)
def test_a_template_that_loses_something_is_found(how: str, words: str) -> None:
    nobody = Conversation(messages=[{"role": "user", "content": "hi"}], id="chat 1")
    chats = [chat(0, "yo"), nobody, chat(2, "yes")]
    assert_renders_exactly(TEMPLATE, chats)
    with pytest.raises(AssertionError, match=words):
        assert_renders_exactly(Changed(how), chats)


def test_a_template_that_trains_everything_is_refused() -> None:
    assert assert_template_laws(TEMPLATE, TOKENIZER, [chat(0, "yo")]).end == "<|eot|>"
    with pytest.raises(MaskProofError):
        assert_template_laws(Changed("trains everything"), TOKENIZER)
