"""Which row a token came from, and what is excluded, as a view shows it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardmill.building import BuildSpec, Feed, build_chats, build_store
from shardmill.chat import bind_template, known_template
from shardmill.errors import OptionError, SourceError
from shardmill.inspect.api import Desk
from shardmill.inspect.stores import Shelf, Tokenizers
from shardmill.loading import Loader, SampleStream, TokenSource
from shardmill.sources import open_chats, open_source
from shardmill.store import exclude_documents
from tests.inspect.conftest import OPENED, SPECIALS, ask

STORE = "/stores/{store}"


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """`pages` from two files whose text is in the field "body", `chats` from one."""
    for name in "ab":
        rows = [{"body": f"{name} {n} \u00e9<b>" * 9, "id": f"{name}-{n}"} for n in range(30)]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    feed = Feed(
        source=open_source(str(tmp_path / "*.jsonl"), field="body"), fill=(("train", None),)
    )
    spec = BuildSpec(append_eot=True)
    build_store([feed], tmp_path / "pages", tokenizer=OPENED, spec=spec)
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "answer"}]
    (tmp_path / "talk.json").write_text(json.dumps([{"messages": talk}] * 3))
    build_chats(
        open_chats(tmp_path / "talk.json"),
        tmp_path / "chats",
        template=bind_template(known_template("four-marker"), OPENED),
        tokenizer=OPENED,
        spec=BuildSpec(),
    )
    return tmp_path


def open_desk(built: Path, name: str, *inputs: str, tokenizer: bool = True) -> Desk:
    names = ["byte:4"] if tokenizer else []
    return Desk(Shelf([built / name], Tokenizers(names, SPECIALS)), None, inputs)


def test_a_token_is_shown_in_the_row_it_came_from(built):
    desk = open_desk(built, "pages", str(built / "*.jsonl"))
    view = ask(desk, f"{STORE}/documents/{{document}}", store=0, document=31)
    at = view["first_token"] + view["view"]["texts"].index("<")
    found = ask(desk, f"{STORE}/blame", store=0, token=at)
    assert (found["file"], found["row"], found["own_id"]) == ("b.jsonl", "b.jsonl:2", "b-1")
    assert (found["text_before"], found["text"]) == ("b 1 \u00e9", "<")
    assert found["text_after"] == ("b>" + "b 1 \u00e9<b>" * 8)[:200]
    assert (found["from"], found["to"], found["note"]) == (5, 6, "")
    last = ask(desk, f"{STORE}/blame", store=0, token=at + view["num_tokens"] - 7)
    assert last["text"] == ""
    assert "appended by the build" in last["note"]


def test_a_token_of_a_chat_is_shown_in_its_turn(built):
    desk = open_desk(built, "chats", str(built / "talk.json"))
    view = ask(desk, f"{STORE}/documents/{{document}}", store=0, document=1)
    at = view["first_token"] + view["view"]["texts"].index("w")
    found = ask(desk, f"{STORE}/blame", store=0, token=at)
    shown = [found[key] for key in ("role", "turn", "text_before", "text", "text_after")]
    assert shown == ["assistant", 1, "ans", "w", "er"]


def test_missing_input_and_tokenizer_are_named(built):
    with pytest.raises(OptionError, match="does not record where that is; name it with --input"):
        ask(open_desk(built, "pages"), f"{STORE}/blame", store=0, token=1)
    blind = open_desk(built, "pages", str(built / "*.jsonl"), tokenizer=False)
    with pytest.raises(OptionError, match="proved with its tokenizer: no tokenizer was named"):
        ask(blind, f"{STORE}/blame", store=0, token=1)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """`in` with the input of four stores: rows, lines of text, chats in a folder of their own, and
    rows of the same name as the first, with other content."""
    place = tmp_path / "in"
    files = {
        "rows/train.jsonl": "".join(json.dumps({"body": f"row {n}"}) + "\n" for n in range(9)),
        "other/train.jsonl": "".join(json.dumps({"text": f"other {n}"}) + "\n" for n in range(9)),
        "poems.txt": "a line\nanother line\n",
        "talk/deep/x/chats.jsonl": chat_lines("x"),
        "talk/deep/x/more.jsonl": chat_lines("more"),
    }
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    (place / "notes.md").write_text("of no store")
    feeds = {
        "rows": [open_source(place / "rows", field="body")],
        "other": [open_source(place / "other" / "*.jsonl")],
        "both": [
            open_source(place / "rows" / "train.jsonl", field="body"),
            open_source(place / "poems.txt", split="line"),
        ],
    }
    for name, sources in feeds.items():
        fill = (("train", None),)
        made = [Feed(source=source, fill=fill) for source in sources]
        build_store(made, tmp_path / name, tokenizer=OPENED, spec=BuildSpec(append_eot=True))
    build_chats(
        open_chats(place / "talk"),
        tmp_path / "chats",
        template=bind_template(known_template("four-marker"), OPENED),
        tokenizer=OPENED,
        spec=BuildSpec(),
    )
    return tmp_path


def chat_lines(word: str) -> str:
    talk = [{"role": "user", "content": f"q {word}"}, {"role": "assistant", "content": word}]
    return json.dumps({"messages": talk}) + "\n"


STORES = ["rows", "other", "both", "chats"]


def desk_of(data: Path, *inputs: str, stores: list[str] = STORES) -> Desk:
    paths = [data / name for name in stores]
    return Desk(Shelf(paths, Tokenizers(["byte:4"], SPECIALS)), None, inputs)


def came_from(desk: Desk, number: int, token: int) -> tuple[str, str]:
    """File and text around a token, as `blame` proves it."""
    found = ask(desk, f"{STORE}/blame", store=number, split="train", token=token)
    return found["file"], found["text_before"] + found["text"] + found["text_after"]


@pytest.mark.parametrize("where", ["in", "in/", "in/**/*"])
def test_one_folder_holds_the_input_of_several_stores(data, where):
    desk = desk_of(data, str(data / where))
    assert came_from(desk, 0, 1) == ("train.jsonl", "row 0")
    assert came_from(desk, 1, 1) == ("train.jsonl", "other 0")
    assert came_from(desk, 2, 1) == ("train.jsonl", "row 0")
    last = ask(desk, STORE, store=2)["splits"][0]["tokens"] - 3
    assert came_from(desk, 2, last) == ("poems.txt", "another line")
    assert came_from(desk, 3, 2) == ("deep/x/chats.jsonl", "q x")


def test_inputs_go_to_the_stores_that_were_built_from_them(data):
    desk = desk_of(data, str(data / "in" / "talk"), str(data / "in" / "rows"))
    assert came_from(desk, 0, 1) == ("train.jsonl", "row 0")
    assert came_from(desk, 3, 2) == ("deep/x/chats.jsonl", "q x")
    with pytest.raises(OptionError, match="does not record where that is; name it with --input"):
        came_from(desk, 1, 1)  # none of its files was found
    with pytest.raises(OptionError, match=r"store 'both' wants .*'poems.txt'.* too"):
        came_from(desk, 2, 1)  # half of its files


def test_an_input_is_given_to_one_store_by_name(data):
    desk = desk_of(data, f"rows={data / 'in' / 'rows'}", f"{data / 'other'}={data / 'in'}")
    assert came_from(desk, 0, 1) == ("train.jsonl", "row 0")
    assert came_from(desk, 1, 1) == ("train.jsonl", "other 0")
    with pytest.raises(OptionError, match="name it with --input"):
        came_from(desk, 2, 1)


def test_a_folder_with_an_equals_sign_in_its_name_is_a_folder(data):
    (data / "in" / "rows").rename(data / "in" / "day=1")
    desk = desk_of(data, str(data / "in" / "day=1"))
    assert came_from(desk, 0, 1) == ("train.jsonl", "row 0")


@pytest.mark.parametrize("named", ["{data}/strange", "{data}/empty", "chats={data}/in/rows"])
def test_an_input_of_no_store_is_refused_with_what_each_store_wants(data, named):
    (data / "empty").mkdir()
    (data / "strange").mkdir()
    (data / "strange" / "x.jsonl").write_text("{}")
    with pytest.raises(OptionError) as refused:
        desk_of(data, str(data / "in"), named.format(data=data))
    message = str(refused.value)
    assert "store 'chats' wants 'deep/x/chats.jsonl'" in message
    assert ("store 'rows' wants 'train.jsonl'" in message) == ("=" not in named)


def test_a_name_that_two_stores_share_needs_their_folder(data):
    (data / "a").mkdir()
    (data / "rows").rename(data / "a" / "rows")
    (data / "b").mkdir()
    (data / "other").rename(data / "b" / "rows")
    stores = ["a/rows", "b/rows"]
    with pytest.raises(
        OptionError, match="2 stores are called 'rows'; wanted one of a/rows, b/rows"
    ):
        desk_of(data, f"rows={data / 'in'}", stores=stores)
    desk = desk_of(data, f"a/rows={data / 'in'}", stores=stores)
    assert came_from(desk, 0, 1) == ("train.jsonl", "row 0")


def test_a_file_that_changed_since_is_reported_as_changed(data):
    with (data / "in" / "rows" / "train.jsonl").open("a") as file:
        file.write("{}\n")
    desk = desk_of(data, str(data / "in" / "rows"), stores=["rows"])
    with pytest.raises(SourceError, match="changed since the store was built from it"):
        came_from(desk, 0, 1)


def test_a_store_that_cannot_be_opened_stops_no_input(data):
    (data / "other" / "meta.json").write_text("{}")
    desk = desk_of(data, str(data / "in"))
    assert came_from(desk, 0, 1) == ("train.jsonl", "row 0")


def test_the_documents_of_a_source_are_found(built):
    feeds = [
        Feed(source=open_source(str(built / f"{name}.jsonl"), field="body"), fill=fill)
        for name, fill in (("a", (("val", 500), ("train", None))), ("b", (("train", None),)))
    ]
    build_store(feeds, built / "both", tokenizer=OPENED, spec=BuildSpec(append_eot=True))
    desk = open_desk(built, "both")

    def found(source: str, split: str) -> list[str]:
        words = {"store": 0, "split": split, "kind": "source", "q": source}
        matches = ask(desk, f"{STORE}/search", **words)["matches"]
        return [match["snippet"][:1] for match in matches]

    in_val = len(found("a.jsonl", "val"))
    assert 0 < in_val < 30
    assert found("a.jsonl", "train") == ["a"] * (30 - in_val)
    assert found("b.jsonl", "train") == ["b"] * 30
    assert found("b.jsonl", "val") == []


def test_a_damaged_list_of_exclusions_hides_nothing_else(built):
    (built / "pages" / "exclude.json").write_text("garbage")
    facts = ask(open_desk(built, "pages"), STORE, store=0)
    assert facts["splits"][0]["documents"] == 60
    assert "exclude.json" in facts["exclusions"]["error"]


def test_an_exclusion_is_shown_and_steps_are_those_of_a_loader_that_knows_it(built):
    desk = open_desk(built, "pages")

    def rows() -> list[list[int]]:
        found = ask(desk, "/step", store=0, step=1, batch_size=8, seq_len=32)
        return [row["view"]["ids"] for row in found["rows"]]

    before = rows()
    exclude_documents(built / "pages", range(20, 40), reason="a test")
    assert ask(desk, STORE, store=0)["exclusions"]["documents"] == 20
    loader = Loader(SampleStream([TokenSource(built / "pages", seq_len=32)]), batch_size=8)
    next(iter(loader))
    assert [row[:-1] for row in rows()] == next(iter(loader)).input_ids.tolist()
    assert rows() != before
