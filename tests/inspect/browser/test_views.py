"""What a view must not hide: unknown addresses, what is trained, phases, names, long prompts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardmill.building import BuildSpec, Feed, build_chats, build_plan, build_store
from shardmill.chat import bind_template, known_template
from shardmill.sources import MemorySource, open_chats
from shardmill.store import PlanOptions
from shardmill.tokenizers import open_tokenizer
from tests.inspect.browser.session import running_view, set_size, set_theme, skip_without_browser

pytestmark = pytest.mark.slow  # a browser and a server start

SPECIALS = {"sys": "<|sys|>", "usr": "<|usr|>", "asst": "<|asst|>", "eot": "<|eot|>"}
OPENED = open_tokenizer("byte:4", specials=SPECIALS)
PROMPT = "You are an agent with tools. Call them one at a time. <b>Never guess.</b>\n" * 12
FILL = (("train", None),)
CONFIG = """
[data]
seed = 7

[[data.datasets]]
name = "old"
path = "{folder}/one/text"
weight = 3

[[data.datasets]]
name = "new"
path = "{folder}/two/text"
weight = 1

[[data.phases]]
start_step = 12
dataset_weights = {{ old = 1, new = 3 }}

[[data.phases]]
start_step = 40000
dataset_weights = {{ old = 1, new = 1 }}
"""


@dataclass(frozen=True, slots=True)
class Agents:
    """Two stores of one name (0 one/chats, 1 two/chats), 2 talk without a user, and two more of
    one name in a mixture."""

    folder: Path
    url: str


def agent(number: int) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": PROMPT},
        {"role": "user", "content": f"Task {number}: <img src=x onerror=pwned=1> mend the pump."},
        {"role": "assistant", "content": "I look at the pump first."},
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": "Done."},
    ]


def build(folder: Path, talks: list[list[dict[str, str]]]) -> None:
    folder.parent.mkdir(exist_ok=True)
    rows = folder.parent / f"{folder.name}.jsonl"
    rows.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    template = bind_template(known_template("four-marker"), OPENED)
    build_chats(
        open_chats(str(rows)), folder, template=template, tokenizer=OPENED, spec=BuildSpec()
    )
    build_plan(folder, options=PlanOptions(seq_len=1024))


@pytest.fixture(scope="module")
def agents(tmp_path_factory) -> Iterator[Agents]:
    skip_without_browser()
    folder = tmp_path_factory.mktemp("agents")
    build(folder / "one" / "chats", [agent(number) for number in range(20)])
    build(folder / "two" / "chats", [agent(number + 100) for number in range(20)])
    build(folder / "talk", [[{"role": "system", "content": "alone"}, *agent(7)[2:3]]])
    for name in ("one", "two"):
        feed = Feed(source=MemorySource([f"{name} {n}" for n in range(900)]), fill=FILL)
        build_store([feed], folder / name / "text", tokenizer=OPENED, spec=BuildSpec())
    (folder / "train.toml").write_text(CONFIG.format(folder=folder))
    stores = [str(folder / name) for name in ("one/chats", "two/chats", "talk")]
    special = [part for name in SPECIALS for part in ("--special", f"{name}={SPECIALS[name]}")]
    arguments = [*stores, "--tokenizer", "byte:4", *special]
    arguments += ["--config", str(folder / "train.toml")]
    with running_view(arguments) as url:
        yield Agents(folder, url)


@pytest.mark.parametrize(
    ("route", "words"),
    [
        ("#/nowhere", "There is no page #/nowhere"),
        ("#/0/nowhere", "There is no page #/0/nowhere"),
        ("#/0/overview/more", "There is no page"),
        ("#/0/document", "There is no page"),
        ("#/0/document/x", "There is no page"),
        ("#/0/plan/a/b", "There is no page"),
        ("#/%E0%A4%A/overview", "There is no page"),
        ("#/99/overview", "There is no store 99"),
        ("#/99/documents?split=train", "There is no store 99"),
        ("#/0/document/99999?split=train", "there is no document 99,999: split 'train' has"),
        ("#/0/documents?split=train&start=99999", "There is no document 99,999"),
        ("#/2/plan/none", "There is no plan none"),
        ("#/2/plan/train-first-fit?row=9999", "there is no row 9,999"),
    ],
)
def test_an_unknown_address_says_so_and_leads_home(page, route, words):
    page.refused = ["/api/stores/"]
    page.open(route)
    assert words in page.text(".failure p:first-child")
    assert page.texts("#view ol.rows li") == []
    page.click(".failure a", "Go to the overview")
    page.until(r"return /^#.\d+.overview$/.test(location.hash)")
    page.settled()
    chosen = page.run("return document.getElementById('store').selectedOptions[0].text")
    assert page.text("#view h1") == chosen


def test_the_empty_address_is_the_overview(page):
    for route in ("", "#", "#/", "#/0"):
        page.load(route)
        assert page.text("#view h1") == "harbour"


BARS = """return [...document.querySelectorAll(arguments[0])].map(one => {
    const style = getComputedStyle(one);
    const tokens = [...one.querySelectorAll('.token')];
    return {colour: style.borderLeftColor, style: style.borderLeftStyle, bar: one.dataset.bar,
        trained: tokens.filter(token => token.classList.contains('trained')).length,
        tokens: tokens.length, sheet: getComputedStyle(one.closest('.tokens, .card, body')
        ).backgroundColor}; })"""
TRAINED = """return getComputedStyle(document.querySelector('.legend .token.trained'))
    .borderBottomColor"""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(
    "route",
    [
        "#/2/document/3?split=train",
        "#/2/plan/train-first-fit?row=2",
        "#/0/step?split=train&step=3&batch_size=2&seq_len=64&seed=7&shuffle=global&documents=1",
    ],
)
def test_a_bar_has_the_colour_of_trained_only_where_tokens_are_trained(page, driver, route, theme):
    set_theme(driver, theme)
    page.open(route)
    bars = page.run(BARS, "#view .run:not(.waste)")
    trained = page.run(TRAINED)
    assert len(bars) > 1
    for bar in bars:
        share = bar["trained"] / bar["tokens"]
        wanted = "all" if share == 1 else "some" if share else "none"
        assert bar["bar"] == wanted
        assert (bar["colour"] == trained) == (share > 0)
        assert (bar["style"] == "solid") == (wanted != "some")
        assert contrast(bar["colour"], bar["sheet"]) >= 3
    if "/document/" in route:
        assert {bar["bar"] for bar in bars} == {"none", "some"}
    swatches = page.run(BARS, ".legend .swatch-bar")
    assert [one["bar"] for one in swatches] == ["all", "some", "none"]
    assert re.search(r"all\s+some\s+none", page.text(".legend"))


def test_a_bubble_has_the_colour_of_trained_only_where_tokens_are_trained(page):
    page.open("#/2/document/3?split=train&look=chat")
    bars = page.run(BARS, "#view .bubble")
    heads = page.texts(".bubble-head")
    trained = page.run(TRAINED)
    assert {"trained" in head for head in heads} == {True, False}
    for bar, head in zip(bars, heads, strict=True):
        assert (bar["colour"] == trained) == ("trained" in head)


def contrast(one: str, other: str) -> float:
    def light(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        red, green, blue = (
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted([light(one), light(other)])
    return (high + 0.05) / (low + 0.05)


def test_a_list_of_agents_shows_what_each_was_asked(on, agents):
    page = on(agents.url)
    page.open("#/0/documents?split=train")
    texts = page.texts(".rows .row-text")
    assert len(set(texts)) == len(texts) == 20
    assert texts[3] == "user Task 3: <img src=x onerror=pwned=1> mend the pump.<|eot|>"
    assert page.run("return document.querySelector('main img') === null")
    page.open("#/0/documents?split=train&kind=id&q=4")
    assert page.text(".rows .row-text").startswith("user Task 4")
    page.open("#/2/documents?split=train")
    assert page.text(".rows .row-text") == "system alone<|eot|>"


def test_the_mixture_shows_every_phase_without_a_choice(on, agents):
    page = on(agents.url)
    page.open("#/mixture")
    assert [row[1] for row in page.table("Phases")] == ["0", "12", "40,000"]
    assert page.texts(".chart .phase-name") == ["phase 1", "phase 2", "phase 3"]
    lines = """return [...document.querySelectorAll('.chart .phase')].map(
        one => one.getBoundingClientRect().x)"""
    x = page.run(lines)
    right = page.run("return document.querySelector('.chart .base').getBoundingClientRect().right")
    wide = [after - before for before, after in zip(x, [*x[1:], right], strict=True)]
    assert min(wide) >= 40
    ends = [row[0] for row in page.table("Share of each source over samples")]
    assert {"12", "40,000"} <= set(ends)  # no share is of two phases
    assert page.run(OVERLAPS, ".chart.shares .phase-name, .chart.shares .tick") == []
    assert "wider" in page.text("#view .hint")


def test_stores_of_one_name_are_distinguished_everywhere(on, agents):
    page = on(agents.url)
    page.open("#/1/overview")
    assert page.text("#view h1") == "two/chats"
    assert page.run("return document.title").startswith("two/chats - ")
    assert page.texts("#store option") == ["one/chats", "two/chats", "talk", "one/text", "two/text"]
    page.open("#/0/documents?split=train")
    assert page.text(".title .muted") == "one/chats"
    page.open("#/0/document/3?split=train")
    assert "one/chats/train" in page.text(".title .muted")
    page.open("#/0/step")
    assert "two/chats" in page.texts("form select option")
    page.open("#/mixture")
    assert [row[:2] for row in page.table("Sources")] == [
        ["old", "one/text/train"],
        ["new", "two/text/train"],
    ]


FOLD = "#view button[aria-expanded]"
IS_OPEN = f"return document.querySelector('{FOLD}').ariaExpanded"


@pytest.mark.parametrize("look", ["tokens", "chat"])
def test_a_long_system_prompt_folds_and_opens_with_the_keyboard(on, agents, look):
    page = on(agents.url)
    page.open(f"#/0/document/3?split=train&look={look}")
    tokens = len(OPENED.encode(PROMPT)) + 2
    assert page.text(FOLD) == f"Show all {tokens:,} tokens"
    state = """const button = document.querySelector(arguments[0]);
        const text = document.getElementById(button.getAttribute('aria-controls'));
        return [button.ariaExpanded, text.clientHeight, text.scrollHeight]"""
    expanded, height, whole = page.run(state, FOLD)
    assert expanded == "false"
    assert height < whole / 2
    page.run("document.querySelector(arguments[0]).focus()", FOLD)
    page.press("\ue007")
    expanded, height, whole = page.run(state, FOLD)
    assert (expanded, height) == ("true", whole)
    assert page.text(FOLD) == "Show less"
    page.press(" ")
    assert page.run(state, FOLD)[0] == "false"
    page.open("#/2/document/0?split=train")
    assert page.texts(FOLD) == []


def test_a_token_inside_a_folded_prompt_is_shown_when_it_is_chosen(on, agents):
    page = on(agents.url)
    page.open("#/0/document/3?split=train&at=700")
    assert page.run(IS_OPEN) == "true"
    page.open("#/0/document/4?split=train")
    page.run("document.querySelector('.token[tabindex=\"0\"]').focus()")
    page.press("\ue010")  # End: after the prompt, which stays folded
    assert page.run(IS_OPEN) == "false"
    page.press("\ue011", *["\ue015"] * 8)  # Home, then down line by line
    page.until(f"{IS_OPEN} === 'true'")


OVERLAPS = """const boxes = [...document.querySelectorAll(arguments[0])].flatMap(one => {
    const box = one.getBoundingClientRect();
    return box.width ? [{text: one.textContent, left: box.left, right: box.right, top: box.top,
        bottom: box.bottom}] : []; });
return boxes.flatMap((one, at) => boxes.slice(at + 1).filter(other =>
    one.left < other.right - 0.5 && other.left < one.right - 0.5
    && one.top < other.bottom - 0.5 && other.top < one.bottom - 0.5)
    .map(other => `${one.text} | ${other.text}`))"""
OUTSIDE = """return [...document.querySelectorAll(arguments[0])].filter(one => {
    const box = one.getBoundingClientRect();
    return box.left < 0 || box.right > innerWidth; }).map(one => one.textContent)"""
HARD = """const done = arguments[arguments.length - 1];
import('./flow.js').then(({flow}) => {
    const node = (name, value, kind) => ({name, value, kind});
    const all = node('tokens', 524288000000, 'input');
    const ends = [node('train', 500000000000, 'kept'), node('validation', 4288000000, 'kept'),
        node('over budget', 19999999000, 'lost'),
        node('dropped: the language of this row is not one of those wanted', 1000, 'lost'),
        node('W'.repeat(80), 1, 'lost')];
    const last = [node('trained', 300000000000, 'kept'),
        node('context only', 204288000000, 'plain')];
    const links = [...ends.map(to => ({from: all, to, value: to.value})),
        ...last.map(to => ({from: ends[0], to, value: to.value}))];
    document.getElementById('view').replaceChildren(
        flow({title: 'hard', unit: 'tokens', columns: [[all], ends, last], links}));
    done(null);
})"""
LABELS = ".chart.flow .node-name"


@pytest.mark.parametrize("width", [360, 390, 400, 1280])
def test_labels_of_flows_do_not_overlap(page, driver, width):
    set_size(driver, width, 800)
    for route in ("#/0/overview", "#/2/overview"):
        page.load(route)
        assert len(page.texts(LABELS)) > 4
        assert page.run(OVERLAPS, LABELS) == []
        assert page.run(OUTSIDE, LABELS) == []
    driver.execute_async_script(HARD)
    assert len(page.texts(LABELS)) == 8
    assert page.run(OVERLAPS, LABELS) == []
    assert page.run(OUTSIDE, LABELS) == []
    assert "500,000,000,000" in "".join(page.texts(LABELS))
