"""The page over real stores, in a real browser: what it shows is what is in them."""

from __future__ import annotations

import re
from itertools import islice

import numpy as np
import pytest

from shardmill.loading import Loader, PackSource, SampleStream, TokenSource
from shardmill.loading.config import open_stream, read_config
from shardmill.records import IGNORE_INDEX
from shardmill.store import open_store, read_plan
from shardmill.store.readers import ChatSpace, PackSpace
from shardmill.testing.stores import read_documents

pytestmark = pytest.mark.slow  # a browser and a server start


def number(text: str) -> int:
    return int(re.sub(r"[^0-9]", "", text.split("(")[0]))


def test_the_overview_tells_the_numbers_of_the_store(page, world):
    page.open("#/0/overview")
    manifest = open_store(world.folder / "harbour").manifest
    splits = {
        row[0]: [number(cell) for cell in row[1:3]] for row in page.table("Splits of the store")
    }
    wanted = {name: [one.tokens, one.documents] for name, one in manifest.splits.items()}
    assert splits == wanted
    went = {(row[0], row[1]): number(row[2]) for row in page.table("Where every input went")}
    documents = manifest.ledger.documents
    assert went == {
        ("read", "train"): manifest.splits["train"].documents,
        ("read", "val"): manifest.splits["val"].documents,
        ("read", "empty"): documents.empty,
        ("read", "over budget"): documents.over_budget,
    }
    assert sum(went.values()) == documents.read
    tokens = page.table("Where every token went")
    assert sum(number(row[2]) for row in tokens if row[0] == "tokens") == (
        manifest.ledger.tokens.encoded + manifest.ledger.tokens.separators
    )
    shards = manifest.splits["train"].shards
    assert [row[0] for row in page.table("Shards of train")] == [one.file for one in shards[:10]]
    page.click("#shards .pager button", "Last")
    assert [row[0] for row in page.table("Shards of train")] == [one.file for one in shards[10:]]


def test_a_search_leads_to_the_word(page, world):
    page.open("#/0/overview")
    page.press("/")
    page.until("return document.activeElement.id === 'search'")
    page.write("#search", "heron")
    words = page.texts(".rows mark")
    assert words
    assert set(words) == {"heron"}
    page.click(".rows li:first-child a")
    page.until("return location.hash.includes('/document/')")
    page.settled()
    chosen = page.text(".token[aria-selected='true']")
    assert chosen.replace("\u00b7", "") in "herons"
    assert page.facts()["kind"] == "text"


def test_a_search_goes_on_when_asked_to(page, world):
    page.open("#/0/documents?split=train&q=the")
    documents = open_store(world.folder / "harbour").num_documents("train")
    first = page.texts(".rows .row-number")
    assert len(first) == 50
    while page.texts("#search-state button"):
        page.click("#search-state button", "Continue")
    found = page.texts(".rows .row-number")
    assert found[:50] == first
    assert len(set(found)) == len(found)
    assert f"{len(found)} matches; looked at {documents} of {documents}" in page.text("#live")


def test_the_search_says_what_it_looked_at_when_it_finds_nothing(page, world):
    page.open("#/0/documents?split=val&q=zebra")
    documents = open_store(world.folder / "harbour").num_documents("val")
    assert page.texts(".rows li") == []
    assert f"0 matches; looked at {documents} of {documents}" in page.text("#search-state")


def test_every_token_of_a_document_is_a_box_and_the_text_is_the_decoded_text(page, world):
    ids = read_documents(world.folder / "harbour", "train")
    for document in (0, 10, 12):  # the second ends with code, the third has other letters
        own = ids[document].tolist()
        page.open(f"#/0/document/{document}?split=train")
        assert page.tokens() == [(one, False) for one in own]
        page.click("[role=group] button", "Text")
        assert page.text(".paper") == world.tokenizer.decode(np.array(own))


def test_what_is_trained_is_marked_token_by_token(page, world):
    example = ChatSpace(open_store(world.folder / "chats"), "train").examples([3])
    wanted = list(zip(example.ids.values.tolist(), example.mask.tolist(), strict=True))
    assert 0 < sum(trained for _, trained in wanted) < len(wanted)
    page.open("#/2/document/3?split=train")
    assert page.tokens() == wanted
    page.click("[role=group] button", "Chat")
    assert [text.split(" ")[0] for text in page.texts(".bubble-head")] == [
        *("system", "user", "assistant", "user", "assistant", "user", "assistant"),
    ]
    trained = world.tokenizer.decode(example.ids.values[example.mask])
    assert "".join(page.texts(".trained-text")) == trained


def test_pointing_at_a_token_tells_about_it(page, world):
    page.open("#/0/document/17?split=train")
    ids = read_documents(world.folder / "harbour", "train")
    page.hover(".tokens .token", 5)
    facts = page.told("offset", "5")
    assert facts["id"] == str(ids[17][5])
    assert number(facts["position"]) == ids.offsets[17] + 5


def test_tokens_are_one_tab_stop_and_arrows_move(page):
    page.open("#/2/document/3?split=train")
    stops = "return document.querySelectorAll('.token[tabindex=\"0\"]').length"
    assert page.run(stops) == 1
    page.run("document.querySelector('.token[tabindex=\"0\"]').focus()")
    page.press("\ue014", "\ue014", "\ue014", "\ue012")  # right, right, right, left
    assert page.run("return Number(document.activeElement.dataset.at)") == 2
    assert page.facts()["offset"] == "2"
    assert page.run("return location.hash").endswith("at=2")
    page.press("\ue015")  # down: into the next line
    below = page.run("return Number(document.activeElement.dataset.at)")
    top = """return document.querySelectorAll('.tokens .token')[arguments[0]]
        .getBoundingClientRect().top"""
    assert page.run(top, below) > page.run(top, 2)
    page.press("\ue010")  # end
    assert page.run(stops) == 1
    assert page.run("return Number(document.activeElement.dataset.at)") == len(page.tokens()) - 1


def test_j_and_k_walk_and_g_goes(page):
    page.open("#/0/documents?split=train")
    page.press("j", "j", "k", "j")
    assert page.run("return document.activeElement.textContent").startswith("1")
    page.press("\ue007")
    page.until("return location.hash === '#/0/document/1?split=train'")
    page.until("return document.querySelector('h1')?.textContent === 'Document 1'")
    page.settled()
    page.press("j")
    page.until("return document.querySelector('h1')?.textContent === 'Document 2'")
    page.press("?")
    assert page.run("return document.getElementById('keys').open")
    page.press("\ue00c")
    page.until("return !document.getElementById('keys').open")
    for letter, title in (("m", "Mixture"), ("s", "Step"), ("p", "Plans"), ("o", "harbour")):
        page.press("g", letter)
        page.until("return document.querySelector('h1')?.textContent === arguments[0]", title)


def test_a_plan_is_switched_and_sorted_by_waste(page, world):
    page.open("#/2/plan")
    page.click("[aria-label=Plan] button", "train-concatenate")
    page.click("[aria-label='Sort by'] button", "emptiest first")
    labels = page.run(
        "return [...document.querySelectorAll('.packed-bar')].map(one => one.ariaLabel)"
    )
    shown = [tuple(map(int, re.findall(r"row (\d+): (\d+)", one)[0])) for one in labels]
    store = open_store(world.folder / "chats")
    plan = read_plan(world.folder / "chats" / "packs" / "train-concatenate.plan")
    space = PackSpace(store, plan, pad_id=world.tokenizer.special_token_ids()["eot"])
    used = space.pieces(np.arange(len(space))).used
    order = np.lexsort((np.arange(len(used)), used))[:40]
    rows = space.rows(order[:1])
    assert shown == [(row, used[row]) for row in order.tolist()]
    page.click(".rows li:first-child a")
    page.until("return document.querySelector('.tokens') !== null")
    page.settled()
    wanted = zip(rows.ids[0].tolist(), rows.trained[0].tolist(), strict=True)
    assert page.tokens() == list(wanted)


@pytest.mark.parametrize("documents", [False, True])
def test_a_step_is_the_batch_of_the_loader(page, world, documents):
    page.open("#/0/step")
    values = {"step": 31, "rank": 1, "world": 2, "batch_size": 3, "seq_len": 64, "seed": 5}
    for name, value in values.items():
        page.run(f"document.querySelector('[name={name}]').value = arguments[0]", str(value))
    page.run("document.querySelector('[name=documents]').value = arguments[0]", str(int(documents)))
    page.run("document.querySelector('[name=split]').value = 'train'")
    page.click("form .main")
    page.until("return document.querySelectorAll('.step-row').length === 3")
    page.click(".step-row:nth-child(3) > summary")
    stream = SampleStream(
        [TokenSource(world.folder / "harbour", seq_len=64, split="train")], seed=5
    )
    with Loader(stream, ahead=0, rank=1, world=2, batch_size=3, documents=documents) as loader:
        batch = next(islice(iter(loader), 31, None))
    for row in range(3):
        page.until(f"return document.querySelector('.step-row:nth-child({row + 1}) .token')")
        shown = page.tokens(f".step-row:nth-child({row + 1})")
        assert [one for one, _ in shown[:-1]] == batch.input_ids[row].tolist()
        labels = [one if trained else IGNORE_INDEX for one, trained in shown[1:]]
        assert labels == batch.labels[row].tolist()


def test_a_step_of_a_plan_is_the_batch_of_the_loader(page, world):
    page.open("#/2/step?plan=train-first-fit&step=4&batch_size=2&world=1&seq_len=384&seed=9")
    source = PackSource(world.folder / "chats", plan="train-first-fit")
    with Loader(SampleStream([source], seed=9), ahead=0, batch_size=2) as loader:
        batch = next(islice(iter(loader), 4, None))
    for row in range(2):
        shown = page.tokens(f".step-row:nth-child({row + 1})")
        assert [one for one, _ in shown[:-1]] == batch.input_ids[row].tolist()
        assert [one for one, _ in shown if one] != []
        assert [trained for _, trained in shown[1:]] == (batch.labels[row] != IGNORE_INDEX).tolist()


def test_the_mixture_is_that_of_the_stream(page, world):
    page.open("#/mixture?samples=1000&points=10")
    stream = open_stream(
        read_config(world.folder / "train.toml"), seq_len=1024, global_batch_size=1, seed=None
    )
    rows = page.table("Share of each source over samples")
    counted = [
        [number(row[0]), *(int(re.findall(r"\((\d+)\)", c)[0]) for c in row[1:])] for row in rows
    ]
    assert counted == [[end, *stream.counts(end).tolist()] for end in range(100, 1001, 100)]
    assert [number(row[1]) for row in page.table("Phases")] == [0, 300, 700]
    assert len(page.texts(".chart .phase-name")) == 3


def test_verify_finds_the_shard_that_changed_and_praises_the_others(page):
    for store, wanted in ((1, {"ok"}), (3, {"ok", "damaged"})):
        page.open(f"#/{store}/overview")
        page.click("#verify")
        page.until("return document.querySelector('.verify .status') !== null")
        page.until("return document.querySelectorAll('td .status.unchecked').length === 0")
        signs = [row[0] for row in page.table("Shards of train") if "damaged" in row[5]]
        assert signs == (["train/shard_00000_001.bin"] if "damaged" in wanted else [])
    assert "train/shard_00000_001.bin" in page.text(".problems")


def test_an_error_is_shown_in_the_words_of_the_server(page, world):
    page.refused = ["/documents/99999", "/plans/none"]
    page.open("#/0/document/99999?split=train")
    documents = open_store(world.folder / "harbour").num_documents("train")
    words = page.text(".failure p")
    numbered = f"has {documents}, numbered 0 to {documents - 1}"
    assert words == f"there is no document 99,999: split 'train' {numbered}"
    page.click(".failure button", "Try again")
    assert page.text(".failure p") == words


def test_the_theme_is_that_of_the_system_until_another_is_chosen(page, driver):
    from tests.inspect.browser.session import set_theme

    paper = "return getComputedStyle(document.documentElement).backgroundColor"
    page.open("#/0/overview")
    light = page.run(paper)
    set_theme(driver, "dark")
    dark = page.until(
        f"{paper} !== arguments[0] && getComputedStyle(document.documentElement).backgroundColor",
        light,
    )
    page.click("#theme")
    assert page.run(paper) == light
    page.load("#/0/overview")
    assert page.run(paper) == light
    set_theme(driver, "light")
    page.click("#theme")
    assert page.run(paper) == dark
    page.click("#theme")
    assert page.run(paper) == light
