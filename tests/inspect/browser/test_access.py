"""The page for those who do not see it, or see it badly, or have no mouse."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest

from tests.inspect.browser.session import set_size, set_theme

pytestmark = pytest.mark.slow  # a browser and a server start

VIEWS = [
    "#/0/overview",
    "#/2/overview",
    "#/0/documents?split=train",
    "#/0/documents?split=train&q=barometer",
    "#/0/document/17?split=train&at=3",
    "#/0/document/17?split=train&look=text",
    "#/2/document/3?split=train&at=60",
    "#/2/document/3?split=train&look=chat",
    "#/2/plan/train-first-fit?sort=waste",
    "#/2/plan/train-first-fit?row=2",
    "#/0/plan",
    "#/mixture?samples=1000&points=50",
    "#/step",
    "#/0/step?split=train&step=3&batch_size=2&seq_len=64&seed=7&shuffle=global",
]
"""All of them, with something in them."""

NAMELESS = """
const visible = one => one.getClientRects().length > 0;
const named = one => [one.ariaLabel, one.textContent, one.title,
    one.getAttribute('aria-labelledby'), ...[...(one.labels ?? [])].map(label => label.textContent)]
    .some(text => text && text.trim());
return [...document.querySelectorAll('button, a[href], input, select, summary, progress,'
    + ' [tabindex="0"], dialog, nav, aside, svg[role=img], [role=listbox], [role=group],'
    + ' [role=region]')]
    .filter(visible).filter(one => !named(one)).map(one => one.outerHTML.slice(0, 120))"""

HEADINGS = """return [...document.querySelectorAll('main h1, main h2, main h3')]
    .filter(one => one.getClientRects().length > 0).map(one => Number(one.tagName[1]))"""

# Colours are painted on one pixel, so any notation is read; backgrounds lie on one another.
BARE = """return [...document.querySelectorAll('main svg')].filter(one => one.role !== 'img'
    || !(one.ariaLabel || (one.querySelector('title') && one.querySelector('desc'))))
    .map(one => one.outerHTML.slice(0, 120))"""

UNTOLD = """return [...document.querySelectorAll('figure.chart')]
    .filter(one => !one.querySelector('table'))
    .concat([...document.querySelectorAll('th')].filter(one => !one.scope))
    .map(one => one.outerHTML.slice(0, 120))"""

TWICE = """const ids = [...document.querySelectorAll('[id]')].map(one => one.id);
return ids.filter((one, at) => ids.indexOf(one) !== at)"""

CONTRAST = """
const pixel = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
const layers = one => { const found = []; for (let at = one; at; at = at.parentElement)
    found.unshift(getComputedStyle(at).backgroundColor); return found; };
const painted = colours => { pixel.clearRect(0, 0, 1, 1);
    for (const colour of colours) { pixel.fillStyle = colour; pixel.fillRect(0, 0, 1, 1); }
    return [...pixel.getImageData(0, 0, 1, 1).data.slice(0, 3)]; };
const light = rgb => { const [r, g, b] = rgb.map(one => one / 255).map(
    one => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const seen = new Map();
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
    const one = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || one.getClientRects().length === 0) continue;
    if (one.closest('.hidden, .skip, dialog:not([open]), button:disabled, title, desc, option'))
        continue;
    const style = getComputedStyle(one), under = layers(one);
    const ink = one instanceof SVGElement ? style.fill : style.color;
    const key = ink + under.join();
    if (seen.has(key)) continue;
    const [a, b] = [light(painted([...under, ink])), light(painted(under))].sort((x, y) => y - x);
    seen.set(key, [(a + 0.05) / (b + 0.05), one.outerHTML.slice(0, 100)]);
}
return [...seen.values()]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """What was found in one view."""

    nameless: list[str]
    levels: list[int]
    bare: list[str]
    untold: list[str]
    twice: list[str]
    ratios: dict[str, list[tuple[float, str]]]  # by theme
    widths: dict[int, int]  # of the page, by the width of the screen


@pytest.fixture(scope="module")
def looked(driver, url) -> dict[str, Looked]:
    """Every view, looked at once."""
    from tests.inspect.browser.page import Page

    page = Page(driver, url)
    set_size(driver, 1280, 800)
    page.open("#/0/overview")
    found = {}
    for view in VIEWS:
        page.open(view)
        found[view] = look(page, driver)
    return found


def look(page, driver) -> Looked:
    ratios, widths = {}, {}
    for theme in ("dark", "light"):
        set_theme(driver, theme)
        ratios[theme] = page.run(CONTRAST)
    for width in (360, 1280):
        set_size(driver, width, 740)
        widths[width] = page.run("return document.documentElement.scrollWidth")
    page.run("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    parts = [page.run(script) for script in (NAMELESS, HEADINGS, BARE, UNTOLD, TWICE)]
    nameless, levels, bare, untold, twice = parts
    return Looked(
        nameless=nameless,
        levels=levels,
        bare=bare,
        untold=untold,
        twice=twice,
        ratios=ratios,
        widths=widths,
    )


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_contrasts_with_its_background(looked, theme):
    ratios = [pair for one in looked.values() for pair in one.ratios[theme]]
    assert {where: ratio for ratio, where in ratios if ratio < 4.5} == {}
    assert len(ratios) > 100
    assert max(ratio for ratio, _ in ratios) > 12


def test_themes_differ(looked):
    for view, one in looked.items():
        assert one.ratios["light"] != one.ratios["dark"], view


def test_every_control_has_a_name(looked):
    assert {view: one.nameless for view, one in looked.items() if one.nameless} == {}


def test_headings_go_down_step_by_step_from_one(looked):
    for view, one in looked.items():
        steps = [after - before for before, after in pairwise(one.levels)]
        assert one.levels[0] == 1, view
        assert one.levels.count(1) == 1, view
        assert max(steps, default=0) <= 1, view


def test_pictures_have_descriptions_and_tables(looked):
    told = {view: (one.bare, one.untold) for view, one in looked.items()}
    assert told == {view: ([], []) for view in VIEWS}


def test_ids_are_there_once(looked):
    assert {view: one.twice for view, one in looked.items() if one.twice} == {}


@pytest.mark.parametrize("width", [360, 1280])
def test_no_view_is_wider_than_the_screen(looked, width):
    wide = {view: one.widths[width] for view, one in looked.items() if one.widths[width] > width}
    assert wide == {}


def test_there_are_landmarks_and_results_are_announced(page):
    page.open("#/0/documents?split=train&q=heron")
    for mark in ("header", "nav", "main"):
        assert page.run("return document.querySelectorAll(arguments[0]).length", mark) == 1
    assert "matches; looked at" in page.text("#live")


def test_where_the_focus_is_can_be_seen(page):
    page.open("#/0/documents?split=train")
    unseen = []
    for _ in range(16):
        page.press("\ue004")
        style = page.run(
            """const style = getComputedStyle(document.activeElement);
            return [document.activeElement.outerHTML.slice(0, 80), style.outlineStyle,
                style.outlineWidth]"""
        )
        if style[1] == "none" or style[2] == "0px":
            unseen.append(style)
    assert unseen == []
