"""Filters: the same answer as plain Python row by row, and nothing but what is allowed."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import OptionError, SourceError
from shardmill.records import TextBatch
from shardmill.sources import BatchLimits, open_source
from shardmill.sources.filters import parse_filter

Row = dict[str, Any]
Case = tuple[str, Callable[[Row], Any]]
"""An expression, and what it is of a row in plain Python; None is unknown, as in SQL."""


def path(*keys: str) -> Callable[[Row], Any]:
    def find(row: Row) -> Any:
        value: Any = row
        for key in keys:
            value = None if value is None else value.get(key)
        return value

    return find


def known(work: Callable[..., Any], *parts: Callable[[Row], Any]) -> Callable[[Row], Any]:
    """Unknown where a part is."""

    def find(row: Row) -> Any:
        values = [part(row) for part in parts]
        return None if None in values else work(*values)

    return find


def divided(left: float, right: float) -> float | None:
    return float(left) / float(right) if float(right) else None


def all_of(parts: list[Callable[[Row], Any]]) -> Callable[[Row], Any]:
    def find(row: Row) -> Any:
        values = [part(row) for part in parts]
        return False if False in values else None if None in values else True

    return find


def opposite(part: Callable[[Row], Any]) -> Callable[[Row], Any]:
    return known(operator.not_, part)


INTEGERS = st.integers(-3, 3) | st.sampled_from([2**53 + 1, -(2**63), 2**63 - 1])
FLOATS = st.sampled_from([-1.5, -0.0, 0.0, 0.5, 1.0, 3.0, 1e300, float("inf"), float("nan")])
WORDS = st.sampled_from(["", "a", "ab", "b", "\u00e9a", "\U0001f600", "z\x00"])
COLUMNS: dict[str, st.SearchStrategy[Any]] = {
    "i": INTEGERS,
    "f": FLOATS,
    "s": WORDS,
    "odd name": WORDS,
    "b": st.booleans(),
    "m": st.fixed_dictionaries({"x": st.none() | st.integers(-3, 3), "y": st.none() | WORDS}),
    "l": st.lists(st.integers(0, 3), max_size=3),
}
ROWS = st.lists(
    st.fixed_dictionaries({name: st.none() | found for name, found in COLUMNS.items()}),
    min_size=1,
    max_size=12,
)
ORDERS = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def literal(value: Any) -> Case:
    return repr(value), lambda _: value


@st.composite
def strings(draw: st.DrawFn) -> Case:
    return draw(
        st.sampled_from(
            [
                ("s", path("s")),
                ("m.y", path("m", "y")),
                ("col('odd name')", path("odd name")),
                literal("a"),
                literal("\u00e9a"),
            ]
        )
    )


@st.composite
def numbers(draw: st.DrawFn, depth: int = 2) -> Case:
    kind = draw(st.sampled_from(["column", "literal", "len", "list", "sum", "minus"]))
    if depth and kind == "sum":
        (left, one), (right, other) = draw(numbers(depth - 1)), draw(numbers(depth - 1))
        sign, work = draw(
            st.sampled_from(
                [
                    ("+", lambda a, b: float(a) + float(b)),
                    ("-", lambda a, b: float(a) - float(b)),
                    ("*", lambda a, b: float(a) * float(b)),
                    ("/", divided),
                ]
            )
        )
        return f"({left} {sign} {right})", known(work, one, other)
    if depth and kind == "minus":
        text, part = draw(numbers(depth - 1))
        return f"-({text})", known(lambda a: -float(a), part)
    if kind == "len":
        text, part = draw(strings())
        return f"len({text})", known(len, part)
    if kind == "list":
        return "len(l)", known(len, path("l"))
    if kind == "literal":
        return literal(draw(st.integers(0, 3) | st.sampled_from([0.5, 2**53 + 1, 1e300])))
    return draw(st.sampled_from([("i", path("i")), ("f", path("f")), ("m.x", path("m", "x"))]))


def compared(sign: str, one: Callable[[Row], Any], other: Callable[[Row], Any]) -> Any:
    def work(left: Any, right: Any) -> bool:
        if isinstance(left, float) != isinstance(right, float):
            left, right = float(left), float(right)
        return bool(ORDERS[sign](left, right))

    return known(work, one, other)


@st.composite
def comparisons(draw: st.DrawFn) -> Case:
    kind = draw(st.sampled_from([numbers, strings]))
    signs = draw(st.lists(st.sampled_from(sorted(ORDERS)), min_size=1, max_size=2))
    sides = [draw(kind()) for _ in range(len(signs) + 1)]
    text = sides[0][0] + "".join(
        f" {sign} {side}" for sign, (side, _) in zip(signs, sides[1:], strict=True)
    )
    if kind is strings:
        plain = [known(lambda a: a.encode(), part) for _, part in sides]
    else:
        plain = [part for _, part in sides]
    pairs = list(zip(signs, plain, plain[1:], strict=False))
    return text, all_of([compared(sign, one, other) for sign, one, other in pairs])


@st.composite
def others(draw: st.DrawFn) -> Case:
    (text, part), (number, value) = draw(strings()), draw(numbers())
    word = draw(st.sampled_from(["a", "b", "", "\u00e9"]))
    return draw(
        st.sampled_from(
            [
                ("b", path("b")),
                ("b == True", path("b")),
                (f"{text} is None", lambda row: part(row) is None),
                (f"{number} is not None", lambda row: value(row) is not None),
                ("m is None", lambda row: row["m"] is None),
                (f"{text} in ['a', 'ab']", known(lambda a: a in ["a", "ab"], part)),
                (f"{text} not in ['b']", known(lambda a: a not in ["b"], part)),
                (
                    "i in [1, -2, 9007199254740993]",
                    known(lambda a: a in [1, -2, 2**53 + 1], path("i")),
                ),
                ("f in [1, 0]", known(lambda a: a in [1.0, 0.0], path("f"))),
                (f"{text}.startswith({word!r})", known(lambda a: a.startswith(word), part)),
                (f"{text}.endswith({word!r})", known(lambda a: a.endswith(word), part)),
                (f"{text}.contains({word!r})", known(lambda a: word in a, part)),
                literal(True),
            ]
        )
    )


def joined(children: st.SearchStrategy[Case]) -> st.SearchStrategy[Case]:
    def ands(parts: list[Case]) -> Case:
        return " and ".join(f"({text})" for text, _ in parts), all_of([one for _, one in parts])

    def ors(parts: list[Case]) -> Case:
        texts = " or ".join(f"({text})" for text, _ in parts)
        return texts, opposite(all_of([opposite(one) for _, one in parts]))

    several = st.lists(children, min_size=2, max_size=3)
    negated = children.map(lambda case: (f"not ({case[0]})", opposite(case[1])))
    return several.map(ands) | several.map(ors) | negated


EXPRESSIONS = st.recursive(comparisons() | others(), joined, max_leaves=5)
LIMITS = st.builds(
    BatchLimits, num_bytes=st.integers(1, 200), num_documents=st.integers(1, 9)
) | st.just(BatchLimits())
SCHEMA = pa.schema(
    [
        ("number", pa.string()),
        ("i", pa.int64()),
        ("f", pa.float64()),
        ("s", pa.string()),
        ("odd name", pa.dictionary(pa.int32(), pa.string())),
        ("b", pa.bool_()),
        ("m", pa.struct([("x", pa.int16()), ("y", pa.large_string())])),
        ("l", pa.list_(pa.int8())),
    ]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("filters")


def write(folder: Path, rows: list[Row]) -> list[Path]:
    """The rows as JSON lines, in which a null is missing now and then, and as Parquet."""
    lines = [
        json.dumps({k: v for k, v in row.items() if v is not None or number % 2})
        for number, row in enumerate(rows)
    ]
    paths = [folder / "rows.jsonl", folder / "rows.parquet"]
    paths[0].write_text("".join(f"{line}\n" for line in lines))
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), paths[1], row_group_size=5)
    return paths


@settings(deadline=None, max_examples=60)
@given(case=EXPRESSIONS, rows=ROWS, limits=LIMITS, with_rows=st.booleans())
def test_a_filter_keeps_the_rows_that_plain_python_keeps(
    folder: Path, case: Case, rows: list[Row], limits: BatchLimits, with_rows: bool
) -> None:
    text, plain = case
    # so that JSON lines know every column
    first = {
        "i": 1,
        "f": 1.0,
        "s": "a",
        "odd name": "a",
        "b": True,
        "m": {"x": 1, "y": "a"},
        "l": [],
    }
    rows = [{"number": str(n), **row} for n, row in enumerate([first, *rows])]
    wanted = [row["number"] for row in rows if plain(row) is True]

    for where in write(folder, rows):
        how: Row = (
            {"map": "tests.sources.row_functions:number"} if with_rows else {"field": "number"}
        )
        source = open_source(where, filter=text, limits=limits, **how)
        batches: list[TextBatch] = list(source.batches())
        assert [one for batch in batches for one in batch.texts.to_pylist()] == wanted, where.name
        counted = sum(batch.counts.get("filtered", 0) for batch in batches)
        assert (counted, sum(batch.num_read for batch in batches)) == (
            len(rows) - len(wanted),
            len(rows),
        )


HOSTILE = [
    "",
    "__import__('os').system('true')",
    "().__class__.__bases__[0].__subclasses__()",
    "x.__class__.__mro__()",
    "x.format('a')",
    "open('f')",
    "len(x, y)",
    "len(*x)",
    "x.startswith(y)",
    "x.startswith('a', 1)",
    "[y for y in x]",
    "{x}",
    "(lambda: 1)()",
    "f'{x}'",
    "x if y else z",
    "(x := 5)",
    "x[0]",
    "10**10**10 == x",
    "x << 999999999 == 1",
    "x % 2 == 0",
    "x // 2 == 0",
    "x @ y == 0",
    "~x",
    "x == b'a'",
    "x == 1j",
    "x == ...",
    "x == None",
    "x is True",
    "x in y",
    "x in 'abc'",
    "x in []",
    "x in [1, 'a']",
    "x in [None]",
    "1 < x in [1]",
    "'a' < 5",
    "5",
    "5 or x",
    "x + 'a' == 'b'",
    "col(x) == 1",
    "col('a', 'b') == 1",
    "col('\\ud800') == 1",
    "x == '\\udc80'",
    "x == \x00",
    "x ==",
    "import os",
    "x == " + "9" * 5000,
    "(" * 10_000 + "x" + ")" * 10_000,
    "(" * 4_000 + "x" + ")" * 4_000,
    "not " * 2_000 + "x",
    "-" * 5_000 + "1 < x",
    "+".join(["x"] * 4_000) + " < 1",
    "x" + ".y" * 4_000 + " == 1",
    "x == 1 or " * 100_000 + "x",
]


@pytest.mark.parametrize("text", HOSTILE, ids=[text[:30] for text in HOSTILE])
def test_everything_else_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(OptionError, match="allowed are columns") as caught:
        parse_filter(text)
    assert len(str(caught.value)) < 700


def test_a_refusal_says_where() -> None:
    with pytest.raises(OptionError) as caught:
        parse_filter(" (\u00e9 == 'a' and\n foo(x))")
    assert ": at character 17, 'foo(x)': not allowed here; allowed are" in str(caught.value)


def texts(where: Path, **options: Any) -> list[str]:
    return [
        one for batch in open_source(where, **options).batches() for one in batch.texts.to_pylist()
    ]


def test_kinds_may_differ_in_a_column_that_a_filter_does_not_compare(tmp_path: Path) -> None:
    values = [1, 0.5, 2**63, 2**70, "high", None, True, [1], {"a": 1}]
    rows = [{"text": str(n), "score": value} for n, value in enumerate(values)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    assert texts(path, filter="score is None") == ["5"]
    assert texts(path, filter="text != '3' and score is not None") == list("0124678")
    with pytest.raises(SourceError) as caught:
        texts(path, filter="score > 0.6")
    assert str(caught.value).startswith(
        f"{path}:5: the column 'score' holds strings (large_string), and is compared with numbers;"
    )
    with pytest.raises(SourceError, match=r"jsonl:1: the column 'score[.]x' holds"):
        texts(path, filter="text != '0' and score.x is None")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:4]))
    assert texts(path, filter="score > 0.6") == ["0", "2", "3"]
    assert texts(path, filter=f"score == {2**63}") == ["2"]
    assert texts(path, filter="score < 1") == ["1"]


@pytest.mark.parametrize("how", [{"field": "text"}, {"map": "tests.sources.row_functions:text"}])
def test_a_row_with_a_null_is_judged_by_what_it_has(tmp_path: Path, how: Row) -> None:
    path = tmp_path / "rows.jsonl"
    rows: list[Row] = [{"text": "0", "a": 1, "b": None}, {"text": "1", "b": "x"}, {"text": "2"}]
    rows += [{"text": "3", "a": 2, "b": 2}, {"text": "4", "a": "y", "b": "y"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for num_documents in (1, 2, 10):
        options = {**how, "limits": BatchLimits(num_documents=num_documents)}
        assert texts(path, filter="a == b", **options) == ["3", "4"]
        assert texts(path, filter="a == b or b is None", **options) == ["0", "2", "3", "4"]
    with path.open("a") as file:
        file.write('{"text": "5", "a": 5, "b": "z"}\n')
    with pytest.raises(SourceError, match="jsonl:6: the column 'a' holds numbers"):
        texts(path, filter="a == b", **how)


def test_unsigned_numbers_are_exact(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    values = pa.array([2**64 - 1, 2**64 - 2, 5], pa.uint64())
    pq.write_table(pa.table({"text": ["a", "b", "c"], "hash": values}), path)

    assert texts(path, filter=f"hash == {2**64 - 1}") == ["a"]
    assert texts(path, filter=f"hash in [{2**64 - 2}]") == ["b"]
    assert texts(path, filter="hash == 5 or hash < 0") == ["c"]
    assert texts(path, filter="hash in [5]") == ["c"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("lagn == 'en'", "'lagn'.* did you mean 'lang'"),
        ("meta.lagn == 'en'", "'lagn'.* did you mean 'lang'|'meta.lagn'"),
        ("lang.x == 'en'", "'lang.x' holds no object: a string"),
        ("score.startswith('a')", "'score' holds numbers .* takes a string"),
        ("lang + 1 > 2", "'lang' holds strings .* takes a number"),
        ("meta == 'a'", "'meta' holds .*, and is compared with strings"),
        ("not lang", "'lang' holds strings .* takes a boolean"),
        ("lang", "'lang' holds strings .* takes a boolean"),
        ("lang in [1]", "'lang' holds strings .* among numbers"),
        ("good < True", "booleans have no order"),
        ("len(score) == 1", "'score' holds numbers .* takes a string"),
    ],
)
def test_a_type_that_does_not_fit_is_named_with_its_file(
    tmp_path: Path, text: str, problem: str
) -> None:
    row = {"text": "a", "lang": "en", "score": 1, "good": True, "meta": {"lang": "en"}}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    for path in (tmp_path / "a.jsonl", tmp_path / "a.parquet"):
        with pytest.raises((SourceError, OptionError), match=problem) as caught:
            texts(path, filter=text)
        assert path.name in str(caught.value)
