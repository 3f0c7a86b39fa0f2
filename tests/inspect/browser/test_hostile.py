"""Texts that would like to be code, structure or invisible are shown, and do nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from shardmill.building import BuildSpec, Feed, build_chats, build_store
from shardmill.chat import bind_template, known_template
from shardmill.sources import open_chats, open_source
from shardmill.tokenizers import open_tokenizer
from tests.inspect.browser.session import running_view, skip_without_browser

pytestmark = pytest.mark.slow  # a browser and a server start

SPECIALS = {"sys": "<|sys|>", "usr": "<|usr|>", "asst": "<|asst|>", "eot": "<|eot|>"}
HOSTILE = [
    "<script>window.pwned = 1</script>",
    "<img src=x onerror='window.pwned = 1'>",
    "<svg onload=window.pwned=1><animate onbegin=window.pwned=1></svg>",
    "</script></style></textarea></title><script>pwned = 1</script>",
    "javascript:window.pwned=1",
    "${window.pwned = 1} {{constructor.constructor('pwned=1')()}}",
    "<a href='https://example.com/' style='position:fixed;inset:0'>all of it</a>",
    "<base href='https://example.com/'><meta http-equiv=refresh content=0>",
    "\u202ereversed\u202c \u2066isolated\u2069 a\u200bb\ufeffc\u00a0d\u0000e\u001b[31m\u007f",
    "\u05e9\u05dc\u05d5\u05dd and \u0627\u0644\u0633\u0644\u0627\u0645 \U0001f468\u200d\U0001f469",
    "Z\u0351\u0352\u0353\u0354" * 50,
]
HUGE = 10 * 2**20
OPENED = open_tokenizer("byte:4", specials=SPECIALS)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> Iterator[str]:
    """A server over stores whose names, files and texts are all hostile."""
    skip_without_browser()
    folder = tmp_path_factory.mktemp("hostile")
    inputs = folder / "<img src=x onerror=pwned=1>.jsonl"
    rows = [*HOSTILE, "<b>" + "x" * (HUGE - 3)]
    inputs.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    feed = Feed(source=open_source(inputs), fill=(("train", None),))
    store = folder / "<svg onload=pwned=1>"
    spec = BuildSpec(dataset_name="<script>pwned=1</script>", options={"<i>": "<script>pwned=1"})
    build_store([feed], store, tokenizer=OPENED, spec=spec, workers=1)
    chats = folder / "chats.jsonl"
    said = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}]}
        for text in HOSTILE
    ]
    chats.write_text("".join(json.dumps(one) + "\n" for one in said))
    build_chats(
        open_chats(str(chats)),
        folder / "chats",
        template=bind_template(known_template("four-marker"), OPENED),
        tokenizer=OPENED,
        spec=BuildSpec(),
    )
    special = [part for name in SPECIALS for part in ("--special", f"{name}={SPECIALS[name]}")]
    with running_view(
        [str(store), str(folder / "chats"), "--tokenizer", "byte:4", *special]
    ) as found:
        yield found


def shown(text: str) -> str:
    """As the page writes it: what cannot be seen is named."""
    names = {0x0: "NUL", 0x1B: "ESC", 0x7F: "DEL", 0xA0: "NBSP", 0x200B: "ZWSP", 0x200D: "ZWJ"}
    names[0xFEFF] = "BOM"
    bidi = {0x202E, 0x202C, 0x2066, 0x2069}
    return "".join(
        names.get(ord(one), f"U+{ord(one):04X}" if ord(one) in bidi else one) for one in text
    )


INTACT = """return window.pwned === undefined
    && document.querySelector('main script, main img, main iframe, main base, main meta,'
        + ' main style, main svg animate, main [style*=fixed], main a[href*=example]') === null
    && document.querySelectorAll('header.top nav a').length === 5
    && document.baseURI.startsWith('http://127.0.0.1:')"""


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_a_hostile_text_is_only_text(on, hostile, number):
    page = on(hostile)
    page.open(f"#/0/document/{number}?split=train")
    assert [one for one, _ in page.tokens()] == list(OPENED.encode(HOSTILE[number]))
    assert page.run(INTACT)
    page.open(f"#/0/document/{number}?split=train&look=text")
    assert page.text(".paper") == shown(HOSTILE[number])
    assert page.run(INTACT)
    page.open(f"#/1/document/{number}?split=train&look=chat")
    assert page.texts(".bubble-text")[1] == shown(f"<|asst|>{HOSTILE[number]}<|eot|>")
    assert page.run(INTACT)


def test_lists_searches_and_names_are_only_text(on, hostile):
    page = on(hostile)
    for route in (
        "#/0/overview",
        "#/1/overview",
        "#/0/documents?split=train",
        "#/0/documents?split=train&q=%3Cscript%3E",
        "#/1/documents?split=train&kind=text&q=onerror",
        "#/0/step?split=train&step=0&batch_size=2&seq_len=512&shuffle=none&world=1&rank=0&seed=0",
    ):
        page.open(route)
        assert page.run(INTACT), route
    page.open("#/0/documents?split=train&q=%3Cscript%3E")
    assert set(page.texts(".rows mark")) == {"<script>"}
    page.open("#/0/overview")
    assert page.text("h1") == "<svg onload=pwned=1>"


def test_an_address_is_only_text(on, hostile):
    page = on(hostile)
    page.refused = ["/api/"]
    for route in (
        "#/0/documents?split=%3Cscript%3Epwned=1%3C/script%3E",
        "#/0/plan/%3Cimg%20src=x%20onerror=pwned=1%3E",
        "#/%E0%A4%A/%3Cscript%3E",
        "#/0/document/%3Cscript%3E?split=train",
        "#/99/overview",
    ):
        page.open(route)
        assert page.run(INTACT), route


def test_a_document_of_ten_megabytes_is_shown_by_the_page(on, hostile):
    page = on(hostile)
    number = len(HOSTILE)
    page.open(f"#/0/document/{number}?split=train")
    assert f"{HUGE:,} tokens" in page.text(".title .path")
    assert [one for one, _ in page.tokens()] == list(OPENED.encode("<b>" + "x" * 1997))
    page.click(".pager button", "Last")
    assert len(page.tokens()) == HUGE % 2000
    page.open(f"#/0/document/{number}?split=train&at=5000000")
    assert page.facts()["offset"] == "5,000,000"
    assert page.run(INTACT)
