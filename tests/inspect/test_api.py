"""Every view says what the store, the plan and the loader say."""

from __future__ import annotations

import shutil
import time
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from shardmill.building import BuildSpec, build_chats, build_plan
from shardmill.chat import bind_template, known_template
from shardmill.errors import OptionError, StoreNotFoundError
from shardmill.inspect import documents, rows
from shardmill.inspect.api import Desk
from shardmill.inspect.documents import even_runs
from shardmill.inspect.stores import Shelf, Tokenizers, find_stores
from shardmill.loading import Loader, PackSource, SampleStream, TokenSource
from shardmill.loading.config import open_stream, read_config
from shardmill.records import IGNORE_INDEX, ROLES, Conversation, Ragged
from shardmill.sources import MemoryChats
from shardmill.store import PlanOptions, open_store
from shardmill.store.readers import open_pack
from shardmill.testing.stores import (
    build_small_chat_store,
    build_small_store,
    make_examples,
    read_documents,
    read_examples,
)
from shardmill.tokenizers import open_tokenizer
from tests.inspect.conftest import CONFIG, OPENED, SPECIALS, TEXTS, ask, open_desk

STORE = "/stores/{store}"
PLAN = f"{STORE}/plans/{{plan}}"
CHATS, PAGES = 0, 1
LLAMA = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
MARKS = {
    "four-marker": SPECIALS,
    "chatml": {one: one for one in ("<|im_start|>", "<|im_end|>")},
    "llama-3": {one: one for one in LLAMA},
}


def test_the_list_and_the_overview_say_what_the_manifest_says(desk, place):
    listed = ask(desk, "/stores")
    assert [
        (one["name"], one["kind"], one["splits"], one["error"]) for one in listed["stores"]
    ] == [
        ("chats", "chat", ["train"], None),
        ("pages", "text", ["train", "val"], None),
    ]
    assert listed["mixture"] is True
    store = open_store(place / "chats")
    facts = ask(desk, STORE, store=CHATS)
    chat = store.manifest.splits["train"].chat
    assert facts["splits"] == [
        {
            "name": "train",
            "tokens": store.num_tokens("train"),
            "documents": 40,
            "shards": 1,
            "bytes": 2 * store.num_tokens("train"),
            "trained_tokens": chat.trained_tokens,
            "turns": 160,
        }
    ]
    assert facts["fingerprint"] == store.fingerprint
    assert facts["ledger"]["documents"]["kept"] == 40
    assert facts["tokenizer"]["name"] == "byte:4"
    assert facts["exclusions"] is None
    assert [plan["rows"] for plan in facts["plans"]] == [
        len(open_pack(place / "chats" / "packs" / f"{plan['name']}.plan"))
        for plan in facts["plans"]
    ]


@pytest.mark.parametrize("split", ["train", "val"])
def test_the_texts_of_every_document_join_to_its_decoded_text(desk, place, split):
    wanted = read_documents(place / "pages", split)
    page = ask(desk, f"{STORE}/documents", store=PAGES, split=split, limit=500)
    assert page["total"] == len(wanted) == len(page["documents"])
    for number, ids in enumerate(wanted):
        line = page["documents"][number]
        assert (line["start"], line["tokens"]) == (wanted.offsets[number], len(ids))
        assert line["preview"] == OPENED.decode(ids[:96])[:160]
        address = f"{STORE}/documents/{{document}}"
        found = ask(desk, address, store=PAGES, split=split, document=number)
        assert found["view"]["ids"] == ids.tolist()
        assert "".join(found["view"]["texts"]) == OPENED.decode(ids)
        assert (found["view"]["trained"], found["turns"]) == (None, None)


def test_hostile_text_is_what_it_was(desk):
    found = ask(desk, f"{STORE}/documents", store=PAGES, split="val")
    texts = [one["preview"].removesuffix("<|e|>") for one in found["documents"]]
    assert texts[:6] == TEXTS[:6]


def test_a_conversation_has_its_mask_and_its_turns(desk, place):
    wanted = read_examples(place / "chats", "train")
    address = f"{STORE}/documents/{{document}}"
    for number, (begin, end) in enumerate(pairwise(wanted.ids.offsets.tolist())):
        found = ask(desk, address, store=CHATS, document=number)
        view, mask = found["view"], wanted.mask[begin:end]
        inside = (wanted.turn_starts >= begin) & (wanted.turn_starts < end)
        starts = (wanted.turn_starts[inside] - begin).tolist()
        assert view["trained"] == mask.astype(int).tolist()
        assert [
            (turn["turn"], turn["role"], turn["start"], turn["stop"], turn["trained"])
            for turn in found["turns"]
        ] == [
            (place, ROLES[role], start, stop, mask[start:stop].sum())
            for place, (role, (start, stop)) in enumerate(
                zip(wanted.turn_roles[inside], pairwise([*starts, end - begin]), strict=True)
            )
        ]
        assert view["turn"] == [
            sum(start <= at for start in starts) - 1 for at in range(end - begin)
        ]
        line = ask(desk, f"{STORE}/documents", store=CHATS, start=number, limit=1)["documents"][0]
        assert line["trained"] == mask.sum()


def talk(*turns: tuple[str, str]) -> Conversation:
    return Conversation(messages=[{"role": role, "content": text} for role, text in turns])


@pytest.mark.parametrize("name", ["four-marker", "chatml", "llama-3"])
def test_a_conversation_is_listed_with_its_first_user_turn(tmp_path, name):
    own = open_tokenizer("byte:4", specials=MARKS[name])
    prompt = ("system", "You are an agent. " * 40)
    talks = [
        talk(prompt, ("user", f"task {n}"), ("assistant", "yes"), ("user", "more"))
        for n in range(9)
    ]
    talks.append(talk(prompt, ("assistant", "nobody asked")))
    talks.append(talk(("user", "user\nis what I say"), ("assistant", "no")))
    build_chats(
        MemoryChats(talks),
        tmp_path / "s",
        template=bind_template(known_template(name), own),
        tokenizer=own,
        spec=BuildSpec(),
    )
    desk = Desk(Shelf([tmp_path / "s"], Tokenizers(["byte:4"], MARKS[name])))
    found = ask(desk, f"{STORE}/documents", store=0)["documents"]
    listed = [(one["role"], one["preview"]) for one in found]
    assert [role for role, _ in listed] == [*["user"] * 9, "system", "user"]
    for number, (_, text) in enumerate(listed[:9]):
        assert text.startswith(f"task {number}")
    assert listed[9][1].startswith("You are an agent.")
    assert listed[10][1].startswith("user\nis what I say")
    (match,) = all_matches(desk, store=0, kind="id", q="3")
    assert (match["role"], match["snippet"]) == listed[3]


def test_text_is_listed_from_its_beginning(desk):
    found = ask(desk, f"{STORE}/documents", store=PAGES, split="train")["documents"]
    assert {one["role"] for one in found} == {None}


def test_stores_of_one_name_are_named_with_as_much_folder_as_tells_them_apart(tmp_path):
    paths = [tmp_path / part for part in ("x/1/out/s", "x/2/out/s", "y/2/out/s", "t", "z/t", "own")]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        build_small_store(path, {"train": Ragged.from_sequences([[1]])})
    desk = Desk(Shelf(paths, Tokenizers([], None)))
    names = [one["name"] for one in ask(desk, "/stores")["stores"]]
    assert names[:3] == ["x/1/out/s", "x/2/out/s", "y/2/out/s"]
    assert names[3:] == [f"{tmp_path.name}/t", "z/t", "own"]
    assert [ask(desk, STORE, store=number)["name"] for number in range(6)] == names


@pytest.mark.parametrize("starts", [(), (12,), (3, 12, 40_000), (1, 2, 3)])
def test_the_mixture_shows_every_phase_when_nothing_is_chosen(place, tmp_path, starts):
    text = CONFIG.format(pages=place / "pages").partition("[[data.phases]]")[0]
    for number, start in enumerate(starts):
        shares = f"{{ pages = {number % 2}, other = 1 }}"
        text += f"\n[[data.phases]]\nstart_step = {start}\ndataset_weights = {shares}\n"
    (tmp_path / "train.toml").write_text(text)
    desk = open_desk(place)
    desk.config = read_config(tmp_path / "train.toml")
    found = ask(desk, "/mixture", seq_len=8)
    borders = [phase["start"] for phase in found["phases"]]
    assert borders == [0, *starts]
    ends = [point["sample"] for point in found["points"]]
    assert ends == sorted(set(ends))
    assert found["samples"] == ends[-1] > borders[-1]
    assert set(starts) <= set(ends)  # a share is of one phase
    assert len(ends) <= 400
    for point in found["points"]:
        phase = max(at for at, start in enumerate(borders) if start < point["sample"])
        for share, wanted in zip(point["shares"], found["phases"][phase]["shares"], strict=True):
            if wanted in (0, 1):
                assert share == wanted
    assert [one["store"] for one in found["sources"]] == ["pages", "pages"]


def test_pages_of_a_document_are_its_parts(desk):
    address = f"{STORE}/documents/{{document}}"
    whole = ask(desk, address, store=CHATS, document=5)
    for start in range(0, whole["num_tokens"], 7):
        part = ask(desk, address, store=CHATS, document=5, start=start, limit=7)
        for name in ("ids", "texts", "trained", "turn", "marker"):
            assert part["view"][name] == whole["view"][name][start : start + 7]
        assert part["turns"] == whole["turns"]
    after = ask(desk, address, store=CHATS, document=5, start=10_000)["view"]
    assert (after["ids"], after["start"]) == ([], whole["num_tokens"])


def test_of_a_document_with_many_turns_the_seen_ones_are_listed(desk, monkeypatch):
    monkeypatch.setattr(documents, "MOST_TURNS", 2)
    address = f"{STORE}/documents/{{document}}"
    whole = ask(desk, address, store=CHATS, document=5)
    last = ask(desk, address, store=CHATS, document=5, start=whole["num_tokens"] - 1)
    assert [(turn["turn"], turn["stop"]) for turn in last["turns"]] == [(3, whole["num_tokens"])]
    assert [turn["turn"] for turn in whole["turns"]] == [0, 1]


def test_rows_of_a_plan_are_those_of_its_space(desk, place, plan_names):
    for name in plan_names:
        space = open_pack(place / "chats" / "packs" / f"{name}.plan", pad_id=3)
        pieces = space.pieces(np.arange(len(space)))
        page = ask(desk, f"{PLAN}/rows", store=CHATS, plan=name, limit=500)
        assert page["total"] == len(space) == len(page["rows"])
        assert [row["used"] for row in page["rows"]] == pieces.used.tolist()
        for number, row in enumerate(page["rows"]):
            part = slice(*pieces.offsets[number : number + 2])
            columns = pieces.examples[part], pieces.columns[part], pieces.lengths[part]
            assert [tuple(piece.values()) for piece in row["pieces"]] == list(
                zip(*(column.tolist() for column in columns), strict=True)
            )
            found = ask(desk, f"{PLAN}/rows/{{row}}", store=CHATS, plan=name, row=number)
            wanted, view = space.rows([number]), found["view"]
            assert view["ids"] == wanted.ids[0].tolist()
            assert view["trained"] == wanted.trained[0].astype(int).tolist()
            owner = np.full(space.row_len, -1)
            for piece, (_, at, length) in enumerate(zip(*columns, strict=True)):
                owner[at : at + length] = piece
                shown = "".join(view["texts"][at : at + length])
                assert shown == OPENED.decode(wanted.ids[0, at : at + length])
            assert view["piece"] == owner.tolist()


def test_pieces_of_a_row_are_decoded_apart(tmp_path):
    emoji = OPENED.encode("\U0001f600")
    talks = [([], [(2, [(number, True) for number in half])]) for half in (emoji[:2], emoji[2:])]
    known = {"tokenizer_fingerprint": OPENED.fingerprint, "special_token_ids": {"eot": 3}}
    build_small_chat_store(tmp_path / "s", {"train": make_examples(talks)}, **known)
    options = PlanOptions(seq_len=4, algorithm="concatenate")
    name = build_plan(tmp_path / "s", options=options).path.stem
    desk = Desk(Shelf([tmp_path / "s"], Tokenizers(["byte:4"], SPECIALS)))
    view = ask(desk, f"{PLAN}/rows/{{row}}", store=0, plan=name, row=0)["view"]
    assert view["ids"] == [*emoji, 3]
    assert view["texts"] == ["\ufffd", "", "\ufffd", "\ufffd", "<|e|>"]
    assert view["piece"] == [0, 0, 1, 1, -1]
    (row,) = ask(desk, "/step", store=0, plan=name, batch_size=1, step=0)["rows"]
    assert (row["view"]["texts"], row["edges"]) == (view["texts"], [0, 2, 4])


def test_a_plan_tells_how_full_its_rows_are_and_the_emptiest_first(desk, place, plan_names):
    name = plan_names[0]
    space = open_pack(place / "chats" / "packs" / f"{name}.plan")
    used = space.pieces(np.arange(len(space))).used
    facts = ask(desk, PLAN, store=CHATS, plan=name)
    assert facts["looked_at"] == facts["rows"] == len(space)
    for one in facts["histogram"]:
        assert one["count"] == ((used >= one["from"]) & (used < one["to"])).sum()
    assert sum(one["count"] for one in facts["histogram"]) == len(space)
    page = ask(desk, f"{PLAN}/rows", store=CHATS, plan=name, sort="waste", limit=500)
    order = np.lexsort((np.arange(len(used)), used))
    assert [row["row"] for row in page["rows"]] == order.tolist()


def test_of_a_plan_with_many_rows_some_are_counted(place, plan_names, monkeypatch):
    monkeypatch.setattr(rows, "_BLOCK", 2)
    monkeypatch.setattr(rows, "LOOK_AT_ALL", 4)
    monkeypatch.setattr(rows, "MOST_WASTE", 3)
    space = open_pack(place / "chats" / "packs" / f"{plan_names[0]}.plan")
    fill = rows.measure_fill(space)
    assert len(space) > 4
    assert (fill.looked_at, fill.counts.sum(), len(fill.emptiest)) == (4, 4, 3)


def assert_step_is_the_loaders(found, batch):
    assert [row["sample"] for row in found["rows"]] == list(batch.samples)
    assert [row["epoch"] for row in found["rows"]] == batch.epoch.tolist()
    assert [row["window"] for row in found["rows"]] == batch.item.tolist()
    for place, row in enumerate(found["rows"]):
        view = row["view"]
        assert view["ids"][:-1] == batch.input_ids[place].tolist()
        labels = batch.labels[place]
        assert view["trained"] == [0, *(labels != IGNORE_INDEX).astype(int).tolist()]
        counted = np.flatnonzero(labels != IGNORE_INDEX)
        assert [view["ids"][at + 1] for at in counted] == labels[counted].tolist()
        for piece, (begin, end) in enumerate(pairwise([*row["edges"], len(view["ids"])])):
            assert set(view["piece"][begin:end]) == {piece}
            assert "".join(view["texts"][begin:end]) == OPENED.decode(view["ids"][begin:end])


def batch_at(stream, step, **options):
    with Loader(stream, ahead=0, **options) as loader:
        return next(islice(iter(loader), step, None))


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("shuffle", ["global", "block", "none"])
@pytest.mark.parametrize(("step", "rank", "world"), [(0, 0, 1), (31, 3, 8)])
def test_a_step_of_a_store_is_what_a_loader_gives(
    desk, place, documents, shuffle, step, rank, world
):
    shape = {"rank": rank, "world": world, "batch_size": 3}
    found = ask(
        desk,
        "/step",
        store=PAGES,
        split="train",
        seq_len=16,
        step=step,
        seed=5,
        shuffle=shuffle,
        documents=int(documents),
        **shape,
    )
    source = TokenSource(place / "pages", seq_len=16, split="train")
    stream = SampleStream([source], seed=5, shuffle=shuffle)
    assert_step_is_the_loaders(found, batch_at(stream, step, documents=documents, **shape))


def test_a_step_of_a_plan_is_what_a_loader_gives(desk, place, plan_names):
    for name in plan_names:
        stream = SampleStream([PackSource(place / "chats", name)], seed=0)
        for step in (0, 7):
            found = ask(desk, "/step", store=CHATS, plan=name, batch_size=4, step=step)
            assert_step_is_the_loaders(found, batch_at(stream, step, batch_size=4))


def test_a_step_of_the_mixture_is_what_a_loader_gives(desk, place):
    for step in (0, 2, 3, 9):
        found = ask(desk, "/step", seq_len=8, batch_size=2, world=2, rank=1, step=step)
        stream = open_stream(desk.config, seq_len=8, global_batch_size=4)
        shape = {"batch_size": 2, "world": 2, "rank": 1}
        assert_step_is_the_loaders(found, batch_at(stream, step, documents=True, **shape))
        assert {row["path"] for row in found["rows"]} == {str(place / "pages")}


def test_a_large_batch_comes_in_parts(desk):
    values = {"store": PAGES, "split": "train", "seq_len": 16, "step": 1, "batch_size": 40}
    whole = ask(desk, "/step", limit=40, **values)["rows"]
    part = ask(desk, "/step", start=30, limit=4, **values, **{"from": 3, "tokens": 5})
    assert part["start"] == 30
    for row, other in zip(part["rows"], whole[30:34], strict=True):
        assert row["sample"] == other["sample"]
        assert row["view"]["ids"] == other["view"]["ids"][3:8]
        assert row["view"]["texts"] == other["view"]["texts"][3:8]
        assert (row["view"]["start"], row["view"]["stop"]) == (3, 8)


def test_a_batch_with_much_text_comes_in_parts_too(desk, monkeypatch):
    values = {"store": PAGES, "split": "train", "seq_len": 16, "step": 1, "batch_size": 9}
    whole = ask(desk, "/step", **values)["rows"]
    monkeypatch.setattr(rows, "MOST_CHARACTERS", 20)
    found: list[dict] = []
    while len(found) < 9:
        part = ask(desk, "/step", start=len(found), **values)["rows"]
        assert 1 <= len(part) <= 3
        found += part
    assert found == whole


def test_a_folder_among_the_plans_hides_no_other(place, tmp_path):
    folder = Path(shutil.copytree(place / "chats", tmp_path / "chats"))
    desk = Desk(Shelf([folder], Tokenizers([], None)))
    before = ask(desk, STORE, store=0)["plans"]
    (folder / "packs" / "train-zz.plan").mkdir()
    (folder / "packs" / "train-zy.plan").write_text("no plan")
    after = ask(desk, STORE, store=0)["plans"]
    assert after[: len(before)] == before
    assert [(plan["name"], plan["error"] is None) for plan in after[len(before) :]] == [
        ("train-zy", False),
        ("train-zz", False),
    ]


def test_the_mixture_counts_what_is_taken(desk):
    found = ask(desk, "/mixture", samples=50, points=10, seq_len=8, batch_size=2)
    stream = open_stream(desk.config, seq_len=8, global_batch_size=2)
    taken = stream.take(np.arange(50)).source
    assert [one["name"] for one in found["sources"]] == ["pages", "other"]
    assert [phase["start"] for phase in found["phases"]] == [0, 6]
    assert found["phases"][0]["shares"] == [0.75, 0.25]
    for number, point in enumerate(found["points"]):
        stop = 5 * (number + 1)
        assert point["sample"] == stop
        assert point["counts"] == np.bincount(taken[:stop], minlength=2).tolist()
        window = np.bincount(taken[stop - 5 : stop], minlength=2) / 5
        assert point["shares"] == window.tolist()


def test_a_histogram_counts_every_document(desk, place):
    lengths = read_documents(place / "pages", "train").lengths
    found = ask(desk, f"{STORE}/histogram", store=PAGES, split="train")
    for one in found["bins"]:
        assert one["count"] == ((lengths >= one["from"]) & (lengths < one["to"])).sum()
    assert sum(one["count"] for one in found["bins"]) == found["looked_at"] == len(lengths)
    assert (found["shortest"], found["longest"]) == (lengths.min(), lengths.max())
    assert (found["mean"], found["median"]) == (lengths.mean(), np.median(lengths))


def test_many_documents_are_sampled_evenly(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "LOOK_AT_ALL", 40)
    monkeypatch.setattr(documents, "_BLOCK", 10)
    ragged = Ragged.from_lengths(np.zeros(6950, np.int64), [n % 140 for n in range(100)] + [2000])
    build_small_store(tmp_path / "s", {"train": ragged})
    found = ask(Desk(Shelf([tmp_path / "s"], Tokenizers([], None))), f"{STORE}/histogram", store=0)
    assert (found["looked_at"], found["documents"]) == (40, 101)
    assert (found["shortest"], found["longest"]) == (0, 2000)  # both ends are looked at
    assert even_runs(25, 30, 10) == [(0, 10), (10, 20), (20, 25)]


def test_an_empty_split_has_views_too(tmp_path):
    build_small_store(tmp_path / "s", {"train": Ragged.from_sequences([])})
    desk = Desk(Shelf([tmp_path / "s"], Tokenizers([], None)))
    assert ask(desk, f"{STORE}/documents", store=0) == {"total": 0, "documents": []}
    found = ask(desk, f"{STORE}/histogram", store=0)
    assert (found["bins"], found["mean"], found["documents"]) == ([], None, 0)
    with pytest.raises(OptionError, match="there is no document 0: split 'train' is empty"):
        ask(desk, f"{STORE}/documents/{{document}}", store=0, document=0)


def all_matches(desk, **values):
    """Going on with the cursor until there is none."""
    matches, after = [], None
    for _ in range(1000):
        more = {} if after is None else {"after": after}
        found = ask(desk, f"{STORE}/search", **values, **more)
        matches += found["matches"]
        after = found["next"]
        if after is None:
            return matches
    raise AssertionError("a search without end")


@pytest.mark.parametrize("seconds", [0.0, 10.0])
@pytest.mark.parametrize(
    "text", ["hello hello", "\u00e9", "Page", "<|e|>", "nowhere", "\U0001f600"]
)
def test_a_search_finds_every_document_once_however_often_it_is_broken_off(
    desk, place, monkeypatch, text, seconds
):
    monkeypatch.setattr(documents, "MOST_MATCHES", 7)
    if seconds == 0.0:  # every call ends after one look
        ticks = iter(range(10**9))
        monkeypatch.setattr(documents, "SECONDS", 2)
        # only the clock of `search`: a server of another test must not sleep by these ticks
        monkeypatch.setattr(documents, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    matches = all_matches(desk, store=PAGES, split="train", q=text)
    decoded = [OPENED.decode(ids) for ids in read_documents(place / "pages", "train")]
    assert [match["document"] for match in matches] == [
        number for number, found in enumerate(decoded) if text in found
    ]
    for match in matches:
        units = match["snippet"].encode("utf-16-le")[2 * match["from"] : 2 * match["to"]]
        assert units.decode("utf-16-le") == text
        before = OPENED.encode(decoded[match["document"]].partition(text)[0])
        assert match["at"] == len(before)


def test_a_match_across_the_parts_of_a_long_document_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "_TOKENS", 64)
    words = [f"w{n}\u00e9 " for n in range(200)]
    ids = OPENED.encode("".join(words))
    known = {"tokenizer_fingerprint": OPENED.fingerprint}
    build_small_store(tmp_path / "s", {"train": Ragged.from_sequences([ids])}, **known)
    desk = Desk(Shelf([tmp_path / "s"], Tokenizers(["byte:4"], None)))
    for number in range(0, 200, 3):
        text = "".join(words[number : number + 2])
        (match,) = all_matches(desk, store=0, q=text)
        assert match["at"] == len(OPENED.encode("".join(words[:number])))


def test_documents_with_ids_that_are_no_text_are_counted(tmp_path):
    ids = OPENED.encode("needle")
    ragged = Ragged.from_sequences([ids, [9999, *ids], ids])
    known = {"tokenizer_fingerprint": OPENED.fingerprint}
    build_small_store(tmp_path / "s", {"train": ragged}, **known)
    desk = Desk(Shelf([tmp_path / "s"], Tokenizers(["byte:4"], None)))
    found = ask(desk, f"{STORE}/search", store=0, q="needle")
    assert [match["document"] for match in found["matches"]] == [0, 2]
    assert (found["scanned"], found["unreadable"], found["next"]) == (3, 1, None)
    page = ask(desk, f"{STORE}/documents", store=0)["documents"]
    assert [line["preview"] for line in page] == [
        "needle",
        " ".join(map(str, [9999, *ids])),
        "needle",
    ]


def test_a_search_goes_through_tokens_of_megabytes(tmp_path):
    own = open_tokenizer("byte:4", specials={"huge": "x" * 3_000_000, "eot": "<|e|>"})
    huge, eot = own.special_token_ids().values()
    ids = [*[huge, *own.encode("between")] * 4, *own.encode("at the end"), eot]
    known = {"tokenizer_fingerprint": own.fingerprint}
    build_small_store(tmp_path / "s", {"train": Ragged.from_sequences([ids])}, **known)
    specials = {"huge": "x" * 3_000_000, "eot": "<|e|>"}
    desk = Desk(Shelf([tmp_path / "s"], Tokenizers(["byte:4"], specials)))
    (match,) = all_matches(desk, store=0, q="at the end")
    assert match["at"] == 4 * 8
    view = ask(desk, f"{STORE}/documents/{{document}}", store=0, document=0)["view"]
    assert (view["stop"], view["cut"]) == (8, [0])


def test_documents_are_found_by_number_and_by_source(desk, monkeypatch):
    (match,) = all_matches(desk, store=PAGES, split="val", kind="id", q="2")
    assert (match["document"], match["at"]) == (2, None)
    assert match["snippet"].removesuffix("<|e|>") == TEXTS[2]
    monkeypatch.setattr(documents, "MOST_MATCHES", 7)
    matches = all_matches(desk, store=CHATS, kind="source", q="memory")
    assert [match["document"] for match in matches] == list(range(40))


def test_shards_say_whether_they_are_sound(place, tmp_path):
    folder = Path(shutil.copytree(place / "pages", tmp_path / "pages"))
    desk = Desk(Shelf([folder], Tokenizers([], None)))
    address, values = f"{STORE}/shards", {"store": 0, "split": "train", "limit": 500}

    def statuses():
        return [shard["status"] for shard in ask(desk, address, **values)["shards"]]

    files = [shard["file"] for shard in ask(desk, address, **values)["shards"]]
    assert set(statuses()) == {"unchecked"}
    data = bytearray((folder / files[1]).read_bytes())
    data[0] ^= 1
    (folder / files[1]).write_bytes(data)
    (folder / files[2]).unlink()
    check = desk.checks[0]
    check.start()
    while check.facts()["state"] == "running":
        time.sleep(0.01)
    assert check.facts()["state"] == "done"
    assert statuses()[:4] == ["ok", "damaged", "missing", "ok"]
    (line,) = ask(Desk(Shelf([folder], Tokenizers([], None))), "/stores")["stores"]
    assert "missing" in line["error"]


def test_a_store_that_was_built_again_is_opened_again(tmp_path):
    desk = Desk(Shelf([tmp_path / "s"], Tokenizers([], None)))
    for ids in ([1, 2, 3], [4]):
        shutil.rmtree(tmp_path / "s", ignore_errors=True)
        build_small_store(tmp_path / "s", {"train": Ragged.from_sequences([ids])})
        found = ask(desk, f"{STORE}/documents/{{document}}", store=0, document=0)
        assert found["view"]["ids"] == ids
    shutil.rmtree(tmp_path / "s")
    with pytest.raises(StoreNotFoundError, match="moved or removed"):
        ask(desk, STORE, store=0)


def test_stores_are_found_in_a_folder_and_a_broken_one_hides_no_other(tmp_path):
    for name in ("b", "a"):
        build_small_store(tmp_path / name, {"train": Ragged.from_sequences([[1]])})
    (tmp_path / ".c.building").mkdir()
    (tmp_path / ".c.building" / "meta.json").write_text("{}")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "meta.json").write_text("{}")
    found = find_stores([tmp_path, tmp_path / "b"])
    assert [path.name for path in found] == ["a", "b", "d"]
    listed = ask(Desk(Shelf(found, Tokenizers([], None))), "/stores")["stores"]
    assert [(one["kind"], one["error"] is None) for one in listed] == [
        *(("text", True), ("text", True)),
        (None, False),
    ]
    with pytest.raises(StoreNotFoundError, match="no store, and no folder with stores"):
        find_stores([tmp_path / "a" / "train"])


def test_another_tokenizer_is_not_used_and_the_page_says_why(place):
    shelf = Shelf([place / "pages"], Tokenizers(["byte"], None))
    facts = ask(Desk(shelf), STORE, store=0)["tokenizer"]
    assert (facts["name"], facts["open"]) == (None, False)
    assert "not the tokenizer of this store" in facts["why"]
    desk = open_desk(place, tokenizer=False)
    found = ask(desk, f"{STORE}/documents/{{document}}", store=PAGES, split="val", document=0)
    assert found["view"]["texts"] == [str(number) for number in found["view"]["ids"]]
    assert "--tokenizer" in found["view"]["note"]
    with pytest.raises(OptionError, match="text cannot be searched"):
        ask(desk, f"{STORE}/search", store=PAGES, split="val", q="x")


def test_few_large_stores_are_open_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("shardmill.inspect.stores.MOST_SHARDS", 2)
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        build_small_store(path, {"train": Ragged.from_sequences([[1]])})
    shelf = Shelf(paths, Tokenizers([], None))
    first = shelf.store(0)
    assert shelf.store(0) is first
    shelf.store(1)
    assert shelf.store(0) is first
    shelf.store(2)
    assert shelf.store(0) is first
    shelf.store(1)
    assert shelf.store(2) is not first
    assert shelf.store(0) is not first
