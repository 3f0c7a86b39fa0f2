"""Texts on which tokenizer engines are known to disagree, the same on every machine.

Every code point between two letters (the first two planes also between a space and a digit), runs
of each whitespace, single lines of about a megabyte, controls, combining marks, jamo, emoji
sequences, and every special string inside text. About 15 MB, generated in a fraction of a second.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from shardmill.records import IntArray

BATTERY_VERSION = 2
LINE_CHARACTERS = 2**20
_POINTS_PER_TEXT = 1024

WHITESPACE = (
    "\t\n\v\f\r \x1c\x1d\x1e\x1f\x85\xa0"
    "\u1680\u2000\u2003\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
)
_EMOJI = [
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466",
    "\U0001f3f3\ufe0f\u200d\U0001f308",
    "\U0001f1e9\U0001f1ea\U0001f1eb\U0001f1f7\U0001f1e9",
    "\U0001f44b\U0001f3fd",
    "1\ufe0f\u20e3",
    "\u2764\ufe0f\u200d\U0001f525",
]
_WORDS = [
    "",
    "a",
    " ",
    "\n",
    "Hello, world!",
    " leading and trailing ",
    "don't DON'T it's IT'S we'll WE'LL I'm you've they'd 'tis",
    "1 12 123 1234 12345 1,234,567.89 0x1F 1e-9 3.14",
    "def f(x):\n    return x ** 2\n\n\nclass A:\n\tpass\n",
    "https://example.org/a?b=c&d=%20#e user@example.org",
    "\r\nwindows\r\nlines\r\n\r\n",
    "tab\t\tand  two   three    four",
    "\ufeffbom at the start, and \ufeff inside",
    "e\u0301 \u00e9 E\u0301\u0323 \u1e14\u0300 a\u0300\u0301\u0302\u0303\u0304\u0305",
    "\u1100\u1161\u11a8 \uac01 \u1112\u1161\u11ab\u1100\u1173\u11af \ud55c\uae00",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u0928\u092e\u0938\u094d\u0924\u0947",
    "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0\u3067\u3059\u3002 \u4e2d\u6587\uff0c\u6807\u70b9\u3002",
    "\u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22 \u1780\u17d2\u1798\u17c2\u179a",
    "\u1019\u103c\u1014\u103a\u1019\u102c \u0e01\u0e33",
    "\ufb01\ufb02 \uff21\uff22\uff11\uff12 \u2460\u2461 \u00bd \u00b2 \u2122",
    "\u03a3\u03c2\u03c3 \u0130i\u0131I \u00df\u1e9e \u01c5 \u02b0",
    "\u200b\u200c\u200d\u2060\u00ad invisible \u202eright to left\u202c",
    "\u2581 lower block \u2581\u2581 \u2581a",
    "\u0120 \u010a \u00c2 byte-level look-alikes \u0121",
    "<0x0A> <0x41> <unk> <s> </s> [CLS] [SEP] [MASK] [PAD] <pad> <|endoftext|>",
    "\ue000\uf8ff\U000f0000\U0010fffd private use \ufffe\uffff\U0001ffff\ufffd",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" + "b" * 300,
    "\u0378\u0530 unassigned \U0001fae8\U0001fac8 new emoji \U00031350\U0002ebf0",
]


def short_texts() -> list[str]:
    """A few hundred short difficult strings."""
    controls = [
        f"a{chr(point)}b{chr(point)}{chr(point)} c" for point in [*range(32), *range(127, 160)]
    ]
    marks = ["o" + chr(point) + "x " + chr(point) for point in range(0x300, 0x370, 5)]
    runs = [
        pattern.format(space * count)
        for space in WHITESPACE
        for count in (1, 2, 3, 5, 17)
        for pattern in ("{}", "a{}b", "{}a", "a{}")
    ]
    return [*_WORDS, *_EMOJI, *(f"x{e}y {e}" for e in _EMOJI), *controls, *marks, *runs]


def battery_texts(specials: Sequence[str] = (), added: Sequence[str] = ()) -> Iterator[str]:
    """The whole battery, in a fixed order.

    `specials` are the model's special strings, `added` its tokens that are matched in text.
    """
    yield from short_texts()
    yield from _special_texts(specials)
    yield from _added_texts(added)
    for space in WHITESPACE:
        yield "a" + space * 20_000 + "b"
        yield (space * 3 + "x") * 200
    yield from _long_lines()
    every = _all_points()
    yield from _in_context("a", every, "b")
    yield from _in_context(" ", every[every < 0x20000], "1")


def battery_sha256(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _special_texts(specials: Sequence[str]) -> Iterator[str]:
    for text in specials:
        yield from (
            text,
            f"a{text}b",
            f" {text} ",
            text * 3,
            f"{text}\n{text}",
            text[:-1],
            text[1:],
        )
        yield f"{text[: len(text) // 2]}{text}{text[len(text) // 2 :]}"
    yield " ".join(specials)
    yield "".join(specials)


def _added_texts(added: Sequence[str]) -> Iterator[str]:
    """Each token alone, doubled and between others; neighbours in both orders."""
    for left, right in zip(added, [*added[1:], *added[:1]], strict=True):
        for text in (left, left * 2, left + right, right + left):
            for before, after in (("", ""), ("a", "b"), (" ", " "), ("\n", "\n"), ("\u0301", "1")):
                yield f"{before}{text}{after}"
        yield from (f"{left} {right}", f"{left}\n{right}", left[:-1] + right, left[1:])


def _long_lines() -> Iterator[str]:
    letters = _random(LINE_CHARACTERS, "letters") % 26 + ord("a")
    digits = _random(LINE_CHARACTERS, "digits") % 10 + ord("0")
    han = _random(LINE_CHARACTERS // 4, "han") % 20_000 + 0x4E00
    every = _all_points()
    mixed = every[_random(LINE_CHARACTERS // 4, "any") % len(every)]
    yield "x" * LINE_CHARACTERS
    yield " " * LINE_CHARACTERS
    for points in (letters, digits, han, mixed):
        yield _text_of(points)


def _in_context(before: str, points: npt.NDArray[np.uint32], after: str) -> Iterator[str]:
    for start in range(0, len(points), _POINTS_PER_TEXT):
        part = points[start : start + _POINTS_PER_TEXT]
        rows = np.empty((len(part), 3), np.uint32)
        rows[:, 0], rows[:, 1], rows[:, 2] = ord(before), part, ord(after)
        yield _text_of(rows.reshape(-1))


def _all_points() -> npt.NDArray[np.uint32]:
    every = np.arange(0x110000, dtype=np.uint32)
    return every[(every < 0xD800) | (every > 0xDFFF)]


def _text_of(points: IntArray) -> str:
    return points.astype("<u4").tobytes().decode("utf-32-le")


def _random(count: int, name: str) -> npt.NDArray[np.uint64]:
    """The same numbers on every machine and numpy release: a counter through splitmix64."""
    start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    with np.errstate(over="ignore"):
        state = np.uint64(start) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(
            0x9E3779B97F4A7C15
        )
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
