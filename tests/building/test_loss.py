"""A store that keeps nothing, or loses more than it may, is not published; its work is kept."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

import shardmill
from shardmill.building import BuildSpec, Feed, build_chats, build_store, has_unfinished_build
from shardmill.chat import bind_template, known_template
from shardmill.errors import BuildError, LossError, OptionError, SourceError
from shardmill.sources import JsonlSource, MemorySource, open_chats
from shardmill.store import PlanOptions, open_store, verify
from shardmill.tokenizers import ByteTokenizer, open_tokenizer
from tests.helpers import folder_digest

SPECIALS = {"sys": "<s>", "usr": "<u>", "asst": "<a>", "eot": "<e>"}
TALK = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
ALONE = TALK[:1]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(path: Path, good: int, bad: int) -> Path:
    return write(path, [{"text": f"page {n}"} for n in range(good)] + [{"text": None}] * bad)


def chats(path: Path, good: int, bad: int) -> Path:
    return write(path, [{"messages": TALK}] * good + [{"messages": ALONE}] * bad)


def build(path: Path, out: str | Path, **options: Any) -> shardmill.BuildReport:
    given: dict[str, Any] = {"workers": 1, "append_eot": False, **options}
    return shardmill.build(path, out, tokenizer="byte", **given)


def build_talks(path: Path, out: str | Path, **options: Any) -> shardmill.BuildReport:
    given: dict[str, Any] = {"special": SPECIALS, "template": "four-marker", "workers": 1}
    return shardmill.build(path, out, tokenizer="byte:4", **given, **options)


def test_documents_of_which_nothing_is_kept_are_an_error(tmp_path):
    with pytest.raises(LossError) as caught:
        build(texts(tmp_path / "d.jsonl", 0, 500), tmp_path / "s")
    error = caught.value
    assert isinstance(error, BuildError)
    assert isinstance(error, SourceError)
    assert (error.reasons, error.num_read, error.num_kept) == ({"no_text": 500}, 500, 0)
    assert error.examples == {"no_text": ("d.jsonl:1", '{"text": null}')}
    assert "nothing is kept of 500 rows; nothing was published" in str(error)
    assert '500 no_text (the field is null or not there), as d.jsonl:1: {"text": null}' in str(
        error
    )
    assert [path.name for path in tmp_path.iterdir()] == ["d.jsonl"]
    assert (
        build(tmp_path / "d.jsonl", tmp_path / "s", allow_empty=True).manifest.ledger.tokens.kept
        == 0
    )


def test_conversations_of_which_nothing_is_kept_are_an_error(tmp_path):
    with pytest.raises(LossError) as caught:
        build_talks(chats(tmp_path / "c.jsonl", 0, 500), tmp_path / "s")
    assert caught.value.reasons == {"no_assistant": 500}
    assert caught.value.examples["no_assistant"][0] == "c.jsonl:1"
    assert '"role": "user"' in caught.value.examples["no_assistant"][1]
    assert [path.name for path in tmp_path.iterdir()] == ["c.jsonl"]
    build_talks(tmp_path / "c.jsonl", tmp_path / "s", allow_empty=True)
    assert verify(tmp_path / "s").ok


@pytest.mark.parametrize(
    ("rows", "reasons"),
    [([], {}), ([{"text": ""}] * 7, {"empty": 7})],
)
def test_input_without_a_row_or_a_text_is_an_error(tmp_path, rows, reasons):
    with pytest.raises(LossError) as caught:
        build(write(tmp_path / "d.jsonl", rows), tmp_path / "s")
    assert caught.value.reasons == reasons


def test_an_empty_store_in_the_place_of_another_leaves_that_one(tmp_path):
    build(texts(tmp_path / "d.jsonl", 9, 0), tmp_path / "s")
    before = folder_digest(tmp_path / "s")
    texts(tmp_path / "d.jsonl", 0, 9)
    with pytest.raises(LossError):
        build(tmp_path / "d.jsonl", tmp_path / "s", overwrite=True)
    assert folder_digest(tmp_path / "s") == before
    assert not has_unfinished_build(tmp_path / "s")


def test_a_loss_above_the_limit_publishes_nothing_and_one_below_is_counted(tmp_path):
    path = texts(tmp_path / "d.jsonl", 94, 6)
    with pytest.raises(LossError, match=r"6 of 100 rows are lost: 6\.0%.*limit of 5\.0%") as caught:
        build(path, tmp_path / "s")
    assert (caught.value.num_kept, caught.value.num_read) == (94, 100)
    assert caught.value.options["max_loss"] == 0.06
    assert not (tmp_path / "s").exists()
    assert has_unfinished_build(tmp_path / "s")
    done = build(texts(tmp_path / "e.jsonl", 95, 5), tmp_path / "e")
    assert done.manifest.ledger.documents.dropped == {"no_text": 5}


class Counting(ByteTokenizer):
    """Counts the texts that it encodes."""

    num_texts = 0

    def encode_batch(self, texts):
        type(self).num_texts += len(texts)
        return super().encode_batch(texts)


@pytest.mark.parametrize("kind", ["documents", "conversations"])
def test_to_accept_a_loss_encodes_nothing_again_and_gives_the_same_bytes(tmp_path, kind):
    tokenizer = Counting(byte_offset=4, specials=SPECIALS)
    if kind == "documents":
        feed = Feed(
            source=JsonlSource(texts(tmp_path / "d.jsonl", 80, 20)), fill=(("train", None),)
        )

        def run(out: str, **options: Any) -> None:
            build_store([feed], tmp_path / out, tokenizer=tokenizer, spec=BuildSpec(), **options)

    else:
        source = open_chats(chats(tmp_path / "c.jsonl", 80, 20))
        template = bind_template(known_template("four-marker"), tokenizer)
        proof = shardmill.prove_mask(template, tokenizer)

        def run(out: str, **options: Any) -> None:
            build_chats(
                source,
                tmp_path / out,
                template=template,
                tokenizer=tokenizer,
                spec=BuildSpec(),
                certificate=proof,
                **options,
            )

    Counting.num_texts = 0
    with pytest.raises(LossError):
        run("s", engine="reference", workers=1)
    assert Counting.num_texts >= 80
    Counting.num_texts = 0
    run("s", engine="reference", workers=1, resume=True, max_loss=1.0)
    assert Counting.num_texts == 0
    run("whole", engine="reference", workers=1, max_loss=0.2)
    assert folder_digest(tmp_path / "s") == folder_digest(tmp_path / "whole")


def test_what_was_asked_to_be_left_out_is_no_loss(tmp_path):
    rows = [{"text": "x" * 50}] * 10 + [{"text": ""}] * 90
    manifest = build(write(tmp_path / "d.jsonl", rows), tmp_path / "s", max_tokens=120).manifest
    rows_of = manifest.ledger.documents
    assert (rows_of.empty, rows_of.over_budget) == (90, 10 - rows_of.kept)
    assert rows_of.over_budget > 5

    def message(number: int, lang: str) -> dict[str, Any]:
        asked = number % 2 == 0
        return {
            "message_id": str(number),
            "parent_id": None if asked else str(number - 1),
            "message_tree_id": str(number // 2),
            "role": "prompter" if asked else "assistant",
            "text": f"m{number}",
            "lang": lang,
        }

    path = write(
        tmp_path / "t.jsonl",
        [message(n, "de" if n >= 4 and (n % 2 == 0 or n < 10) else "en") for n in range(20)],
    )
    tokenizer = open_tokenizer("byte:4", specials=SPECIALS)
    done = build_chats(
        open_chats(path, lang="en"),
        tmp_path / "t",
        template=bind_template(known_template("four-marker"), tokenizer),
        tokenizer=tokenizer,
        spec=BuildSpec(),
        max_loss=0.0,
    )
    assert done.manifest.ledger.documents.kept == 2
    assert set(done.manifest.ledger.documents.dropped) == {"other_language", "below_left_out"}


def test_rows_of_every_reason_are_shown_wherever_they_are(tmp_path):
    """In ranges of files, of other files, under ids of their own, and as broken lines."""
    folder = tmp_path / "data"
    folder.mkdir()
    talks = [{"messages": TALK}] * 300
    bad = {"messages": ALONE, "id": "mine"}
    write(folder / "a.jsonl", [*talks, {"messages": [{"role": "alien", "content": "x"}]}])
    with write(folder / "b.jsonl", [*talks, bad] + [bad] * 99).open("a") as file:
        file.write('{"messages": [}\n')
    with pytest.raises(LossError) as caught:
        build_talks(folder, tmp_path / "s", on_bad="skip", unit_bytes=1000)
    assert caught.value.reasons == {"no_assistant": 100, "unknown_role": 1, "bad_json": 1}
    (alien, snippet), (mine, _), (broken, problem) = (
        caught.value.examples[why] for why in ("unknown_role", "no_assistant", "bad_json")
    )
    assert (alien, mine, broken) == ("a.jsonl:301", "mine", "b.jsonl:401")
    assert '"alien"' in snippet
    assert "broken JSON" in problem


def test_a_store_at_a_url_is_published_only_when_the_loss_is_accepted(tmp_path):
    path, url = texts(tmp_path / "d.jsonl", 9, 1), f"memory://loss/{tmp_path.name}"
    with pytest.raises(LossError):
        build(path, url)
    with pytest.raises(BuildError, match="an earlier build did not finish"):
        build(path, url)
    done = build(path, url, resume=True, max_loss=0.1)
    assert done.manifest.ledger.documents.kept == 9
    texts(path, 0, 9)
    with pytest.raises(LossError, match="nothing is kept"):
        build(path, f"{url}-none")
    assert build(path, f"{url}-none", allow_empty=True).manifest.ledger.tokens.kept == 0


def test_the_limit_is_a_share(tmp_path):
    path = texts(tmp_path / "d.jsonl", 9, 0)
    for wrong in (-0.1, 5, True, "0.1"):
        with pytest.raises(OptionError, match="wanted a share from 0 to 1"):
            build(path, tmp_path / "s", max_loss=wrong)
    with pytest.raises(LossError):
        build(texts(path, 999, 1), tmp_path / "s", max_loss=0)


def test_the_error_can_be_pickled_with_its_reasons(tmp_path):
    with pytest.raises(LossError) as caught:
        build(texts(tmp_path / "d.jsonl", 0, 3), tmp_path / "s")
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert (again.reasons, again.examples) == (caught.value.reasons, caught.value.examples)


def test_a_plan_without_a_row_is_an_error_with_the_examples_that_no_row_holds(tmp_path):
    long = [TALK[0], {"role": "assistant", "content": "x" * 50}]
    build_talks(write(tmp_path / "c.jsonl", [{"messages": long}] * 3), tmp_path / "s")
    with pytest.raises(LossError) as caught:
        shardmill.pack(tmp_path / "s", 16, long="drop")
    assert caught.value.reasons == {"too_long": 3}
    assert caught.value.examples == {"too_long": ("example 0", "55 tokens")}
    assert "3 too_long, as example 0: 55 tokens" in str(caught.value)
    assert list(open_store(tmp_path / "s").folder.glob("packs/*")) == []
    plan = shardmill.pack(tmp_path / "s", 16, long="drop", allow_empty=True)
    assert plan.facts.metrics.num_rows == 0
    assert plan.facts.options == PlanOptions(seq_len=16, long="drop")


def test_a_stream_without_a_document_says_why(tmp_path):
    batches = shardmill.stream(
        texts(tmp_path / "d.jsonl", 0, 5),
        tokenizer="byte",
        seq_len=8,
        batch_size=1,
        append_eot=False,
    )
    with batches, pytest.raises(LossError, match="gave no document") as caught:
        next(iter(batches))
    assert caught.value.reasons == {"no_text": 5}
    assert caught.value.examples == {"no_text": ("d.jsonl:1", '{"text": null}')}


def test_a_source_in_memory_has_reasons_without_rows(tmp_path):
    feed = Feed(source=MemorySource(["", ""]), fill=(("train", None),))
    with pytest.raises(LossError) as caught:
        build_store([feed], tmp_path / "s", tokenizer=ByteTokenizer(), spec=BuildSpec())
    assert (caught.value.reasons, caught.value.examples) == ({"empty": 2}, {})
