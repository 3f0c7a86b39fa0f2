"""Expressions that say which rows are kept: `lang == "en" and score > 0.6`.

Python's grammar, read with `ast` and never executed: only what is listed in `ALLOWED` is accepted.
Arrow's kernels evaluate it on whole columns. Each row is judged alone by the kinds of its own
values, so how rows are batched never matters: rows of JSON whose values differ in kind are
evaluated kind by kind. Nulls are those of SQL: what is compared with a null is null, `and` and `or`
know what a null cannot change, and a row is kept only where the whole is true.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache, reduce
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from shardmill.errors import OptionError
from shardmill.records import IntArray
from shardmill.sources.batches import Mask, strings_to_arrow, to_binary

ALLOWED = (
    "allowed are columns (score, meta.lang, col('odd name')), literals, and, or, not, "
    "== != < <= > >=, in [...], is None, is not None, + - * /, len(x), x.startswith('..'), "
    "x.endswith('..') and x.contains('..')"
)

_MOST_CHARACTERS = 10_000
_MOST_DEPTH = 50

ColumnPath: TypeAlias = tuple[str, ...]
"""A column, and the fields inside its objects."""
Values: TypeAlias = "pa.Array | list[Any]"
"""Of one column: an array, or Python values whose kinds may differ from row to row."""


@dataclass(frozen=True, slots=True)
class Filter:
    """A checked expression."""

    text: str
    body: ast.expr
    columns: tuple[ColumnPath, ...]  # those it names, each once


class NotAnObject(NamedTuple):
    """What is found where an object with fields was wanted."""

    kind: str


class MisfitError(Exception):
    """A value that an operation does not take. Only used inside this package."""

    def __init__(self, problem: str, node: ast.AST, *values: _Value) -> None:
        super().__init__(problem)
        self.node = node
        self.columns = [one.path for one in values if one.path is not None]
        # a row in which one of these is null is not at fault


@lru_cache(maxsize=64)
def parse_filter(text: str) -> Filter:
    """The expression, or an error that says where and what is allowed."""
    if len(text) > _MOST_CHARACTERS:
        raise _refusal(text, f"{len(text):,} characters, wanted at most {_MOST_CHARACTERS:,}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "\d" is taken as it is written
            body = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        shift = len(text) - len(text.lstrip())
        where = f"at character {error.offset + shift}, " if error.offset else ""
        raise _refusal(text, f"{where}{error.msg}") from None
    except (ValueError, MemoryError, RecursionError) as error:
        raise _refusal(text, f"cannot be read ({error or 'nested too deep'})") from None
    columns: dict[ColumnPath, None] = {}
    try:
        _check(body, columns, _MOST_DEPTH)
        nulls = {path: _Value("null", pa.nulls(0), path) for path in columns}
        _need(_Evaluation(nulls).value(body), "boolean", "the whole expression", body)
    except MisfitError as error:
        segment = ast.get_source_segment(text.strip(), error.node) or ""
        where = f"at character {_offset(text, error.node)}, {_short(segment, 60)!r}: "
        raise _refusal(text, f"{where}{error}") from None
    return Filter(text, body, tuple(columns))


def _refusal(text: str, problem: str) -> OptionError:
    return OptionError(f"{{filter}}: {problem}; {ALLOWED}", filter=_short(text, 80))


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


def _offset(text: str, node: Any) -> int:
    """Where a part begins, in characters from 1."""
    lines = text.lstrip().splitlines(keepends=True)
    before = sum(map(len, lines[: node.lineno - 1]))
    within = lines[node.lineno - 1].encode()[: node.col_offset].decode()  # ast counts bytes
    return len(text) - len(text.lstrip()) + before + len(within) + 1


_COMPARISONS = {
    ast.Eq: "equal",
    ast.NotEq: "not_equal",
    ast.Lt: "less",
    ast.LtE: "less_equal",
    ast.Gt: "greater",
    ast.GtE: "greater_equal",
}
_ARITHMETIC = {ast.Add: "add", ast.Sub: "subtract", ast.Mult: "multiply", ast.Div: "divide"}
_METHODS = {"startswith": "starts_with", "endswith": "ends_with", "contains": "match_substring"}


def _check(node: ast.AST, columns: dict[ColumnPath, None], depth: int) -> None:
    """Refuse what is not allowed, and note the columns. Literals of lists are checked here too."""
    if not depth:
        raise MisfitError(f"nested deeper than {_MOST_DEPTH}", node)
    path = column_path(node)
    if path is not None:
        columns[path] = None
        return
    parts: Sequence[ast.AST]
    match node:
        case ast.Constant():
            _literal(node)
            return
        case ast.BoolOp():
            parts = node.values
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            parts = [node.operand]
        case ast.BinOp() if type(node.op) in _ARITHMETIC:
            parts = [node.left, node.right]
        case ast.Compare():
            parts = _compared(node)
        case ast.Call(func=ast.Name(id="len"), args=[inside], keywords=[]):
            parts = [inside]
        case ast.Call(func=ast.Attribute(value=text, attr=name), args=[wanted], keywords=[]) if (
            name in _METHODS
        ):
            if not isinstance(wanted, ast.Constant) or not isinstance(wanted.value, str):
                raise MisfitError(f"{name} takes one string, written out", node)
            parts = [text, wanted]
        case _:
            raise MisfitError("not allowed here", node)
    for part in parts:
        _check(part, columns, depth - 1)


def _compared(node: ast.Compare) -> list[ast.AST]:
    """The operands of comparisons that are expressions themselves."""
    parts: list[ast.AST] = [node.left]
    for op, right in zip(node.ops, node.comparators, strict=True):
        is_none = isinstance(right, ast.Constant) and right.value is None
        if isinstance(op, ast.Is | ast.IsNot):
            if not is_none or len(node.ops) > 1:
                raise MisfitError("wanted 'x is None' or 'x is not None'", node)
        elif isinstance(op, ast.In | ast.NotIn):
            if len(node.ops) > 1:
                raise MisfitError("'in' cannot be part of a chain", node)
            _literals(right)
        elif is_none:
            raise MisfitError("nothing equals a null; write 'x is None'", node)
        elif type(op) in _COMPARISONS:
            parts.append(right)
        else:
            raise MisfitError("not allowed here", node)
    return parts


def column_path(node: ast.AST) -> ColumnPath | None:
    """The column that a name, a dotted name or col("name") stands for; None for anything else."""
    match node:
        case ast.Name(id=name):
            return (name,)
        case ast.Attribute():
            inner = []
            while isinstance(node, ast.Attribute):  # a chain may be long
                inner.append(node.attr)
                node = node.value
            first = None if isinstance(node, ast.Attribute) else column_path(node)
            return None if first is None else (*first, *reversed(inner))
        case ast.Call(func=ast.Name(id="col"), args=[ast.Constant(value=str(name))], keywords=[]):
            return (_encodable(name, node),)
    return None


def _encodable(text: str, node: ast.AST) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise MisfitError("half a surrogate pair is no text", node) from None
    return text


class _Value(NamedTuple):
    """A column, a literal, or what was made of them."""

    kind: str  # null, boolean, number, string, list, other
    array: Any  # pa.Array or pa.Scalar
    path: ColumnPath | None = None  # of a column
    found: str = ""  # what a value of the kind "other" is


@lru_cache
def _unknown() -> _Value:
    """Made when it is asked for: the first value of Arrow takes a gigabyte of addresses."""
    return _Value("null", pa.scalar(None, pa.bool_()))


def _literal(node: ast.Constant) -> _Value:
    value = node.value
    if isinstance(value, bool):
        return _Value("boolean", pa.scalar(value))
    if isinstance(value, str):
        return _Value("string", pa.scalar(_encodable(value, node), pa.large_string()))
    if isinstance(value, int) and value < 2**64:
        return _Value("number", pa.scalar(value, pa.int64() if value < 2**63 else pa.uint64()))
    if isinstance(value, int | float):
        try:
            return _Value("number", pa.scalar(float(value)))
        except OverflowError:
            raise MisfitError("larger than any number of a column", node) from None
    raise MisfitError("not a literal that a column can hold", node)


@lru_cache(maxsize=256)
def _literals(node: ast.AST) -> _Value:
    """The values of a list, which have one kind."""
    items = node.elts if isinstance(node, ast.List | ast.Tuple | ast.Set) else []
    values = [_item(item) for item in items]
    kinds = {value.kind for value in values}
    if len(kinds) != 1:
        raise MisfitError("wanted a list of literals of one kind, without None", node)
    types = {value.array.type for value in values}
    kind = types.pop() if len(types) == 1 else pa.float64()
    return _Value(kinds.pop(), pa.array([value.array.as_py() for value in values], kind))


def _item(node: ast.AST) -> _Value:
    """A literal, which may have a sign."""
    sign = 1
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        sign, node = -1, node.operand
    if not isinstance(node, ast.Constant) or node.value is None:
        raise MisfitError("wanted a list of literals of one kind, without None", node)
    value = _literal(node)
    if sign < 0:
        _need(value, "number", "-", node)
        return _negative(value)
    return value


def _negative(value: _Value) -> _Value:
    """A literal number below zero."""
    number = -value.array.as_py()
    fits = isinstance(number, int) and number >= -(2**63)
    return _Value("number", pa.scalar(number, pa.int64() if fits else pa.float64()))


def _need(value: _Value, kind: str, what: str, node: ast.AST) -> None:
    if value.kind not in (kind, "null"):
        raise MisfitError(f"{_shown(value)}, but {what} takes a {kind}", node, value)


_PLURALS = {
    "boolean": "booleans",
    "number": "numbers",
    "string": "strings",
    "list": "lists",
    "null": "nulls",
}


def _shown(value: _Value) -> str:
    """As the subject of an error."""
    if value.path is None:
        return f"found a {value.kind}"
    name = ".".join(value.path)
    held = value.found or f"{_PLURALS[value.kind]} ({value.array.type})"
    return f"the column {name!r} holds {held}"


class _Evaluation:
    """An expression on some rows, of which each column has one kind."""

    def __init__(self, columns: Mapping[ColumnPath, _Value]) -> None:
        import pyarrow.compute as pc  # 40 ms, which only a filter takes

        self._columns, self._pc = columns, pc

    def value(self, node: ast.AST) -> _Value:
        path = column_path(node)
        if path is not None:
            return self._columns[path]
        match node:
            case ast.Constant():
                return _literal(node)
            case ast.BoolOp():
                name = "and" if isinstance(node.op, ast.And) else "or"
                join = self._pc.and_kleene if name == "and" else self._pc.or_kleene
                return _Value("boolean", reduce(join, [self._truth(n, name) for n in node.values]))
            case ast.UnaryOp(op=ast.Not()):
                return _Value("boolean", self._pc.invert(self._truth(node.operand, "not")))
            case ast.UnaryOp(operand=ast.Constant() as literal):
                return _item(node) if _literal(literal).kind == "number" else self._minus(node)
            case ast.UnaryOp():
                return self._minus(node)
            case ast.BinOp():
                return self._arithmetic(node)
            case ast.Compare():
                return self._comparison(node)
            case ast.Call(
                func=ast.Attribute(value=inside, attr=name), args=[ast.Constant() as arg]
            ):
                text = self.value(inside)
                _need(text, "string", name, inside)
                if text.kind == "null":
                    return _unknown()
                found = getattr(self._pc, _METHODS[name])(text.array, pattern=arg.value)
                return _Value("boolean", found)
            case ast.Call(args=[inside]):
                return self._length(inside)
        raise AssertionError(ast.dump(node))

    def _truth(self, node: ast.AST, what: str) -> Any:
        value = self.value(node)
        _need(value, "boolean", what, node)
        return _unknown().array if value.kind == "null" else value.array

    def _length(self, inside: ast.AST) -> _Value:
        value = self.value(inside)
        if value.kind == "null":
            return _unknown()
        if value.kind == "list":
            return _Value("number", self._pc.list_value_length(value.array).cast(pa.int64()))
        _need(value, "string", "len", inside)
        return _Value("number", self._pc.utf8_length(value.array).cast(pa.int64()))

    def _minus(self, node: ast.UnaryOp) -> _Value:
        value = self.value(node.operand)
        _need(value, "number", "-", node.operand)
        if value.kind == "null":
            return _unknown()
        return _Value("number", self._pc.negate(self._as_float(value.array)))

    def _arithmetic(self, node: ast.BinOp) -> _Value:
        """In float64: a division by zero is null."""
        sides = [self.value(node.left), self.value(node.right)]
        name = _ARITHMETIC[type(node.op)]
        for side, inside in zip(sides, (node.left, node.right), strict=True):
            _need(side, "number", name, inside)
        if any(side.kind == "null" for side in sides):
            return _unknown()
        left, right = (self._as_float(side.array) for side in sides)
        found = getattr(self._pc, name)(left, right)
        if name == "divide":
            is_zero = self._pc.equal(right, 0.0)
            found = self._pc.if_else(is_zero, pa.scalar(None, pa.float64()), found)
        return _Value("number", found)

    def _comparison(self, node: ast.Compare) -> _Value:
        """Of a chain, each two neighbours."""
        left = self.value(node.left)
        found: list[Any] = []
        for op, inside in zip(node.ops, node.comparators, strict=True):
            if isinstance(op, ast.Is | ast.IsNot):
                check = self._pc.is_null if isinstance(op, ast.Is) else self._pc.is_valid
                _refuse_no_object(left, node)
                return _Value("boolean", check(left.array))
            if isinstance(op, ast.In | ast.NotIn):
                return self._membership(left, inside, node, is_in=isinstance(op, ast.In))
            right = self.value(inside)
            found.append(self._compared(type(op), left, right, node))
            left = right
        return _Value("boolean", reduce(self._pc.and_kleene, found))

    def _compared(self, op: type[ast.cmpop], left: _Value, right: _Value, node: ast.AST) -> Any:
        for one, other in ((left, right), (right, left)):
            _refuse_no_object(one, node)
            is_pair = one.kind in (other.kind, "null") or other.kind == "null"
            if one.path is not None and not is_pair:
                what = f"{_PLURALS.get(other.kind, other.found)}"
                problem = f"{_shown(one)}, and is compared with {what}"
                raise MisfitError(problem, node, one, other)
            if one.kind in ("list", "other"):
                raise MisfitError(f"{_shown(one)}, which cannot be compared", node, one)
        if "null" in (left.kind, right.kind):
            return _unknown().array
        if left.kind != right.kind:
            raise MisfitError(f"a {left.kind} is compared with a {right.kind}", node, left, right)
        if left.kind == "boolean" and op not in (ast.Eq, ast.NotEq):
            raise MisfitError("booleans have no order", node, left, right)
        return getattr(self._pc, _COMPARISONS[op])(*self._alike(left.array, right.array))

    def _membership(self, left: _Value, inside: ast.AST, node: ast.AST, *, is_in: bool) -> _Value:
        wanted = _literals(inside)
        if left.kind == "null":
            return _unknown()
        if left.kind != wanted.kind:
            what = f"which is looked for among {_PLURALS[wanted.kind]}"
            raise MisfitError(f"{_shown(left)}, {what}", node, left)
        values, among = self._alike(left.array, wanted.array)
        if values.type == pa.float64():  # -0.0 is 0.0
            values, among = self._pc.add(values, 0.0), self._pc.add(among, 0.0)
        found = self._pc.is_in(values, value_set=among)
        found = self._pc.if_else(self._pc.is_valid(values), found, pa.scalar(None, pa.bool_()))
        return _Value("boolean", found if is_in else self._pc.invert(found))

    def _alike(self, left: Any, right: Any) -> tuple[Any, Any]:
        """Both sides in one type; Arrow itself would refuse some numbers or round them."""
        types = {left.type, right.type}
        if len(types) == 1:
            return left, right
        if types == {pa.int64(), pa.uint64()}:
            return left.cast(pa.decimal128(20, 0)), right.cast(pa.decimal128(20, 0))
        return self._as_float(left), self._as_float(right)

    def _as_float(self, values: Any) -> Any:
        return self._pc.cast(values, pa.float64(), safe=False)


def _refuse_no_object(value: _Value, node: ast.AST) -> None:
    if value.found.startswith(_NO_OBJECT):
        raise MisfitError(_shown(value), node, value)


_NO_OBJECT = "no object: "


def _value_of(array: pa.Array, path: ColumnPath) -> _Value:
    """A column of one Arrow type."""
    kind, types = array.type, pa.types
    if types.is_dictionary(kind):
        return _value_of(array.dictionary_decode(), path)
    if array.null_count == len(array):
        return _Value("null", array, path)
    if types.is_boolean(kind):
        return _Value("boolean", array, path)
    if types.is_integer(kind):
        return _Value("number", array if types.is_uint64(kind) else array.cast(pa.int64()), path)
    if types.is_floating(kind) or types.is_decimal(kind):
        return _Value("number", array.cast(pa.float64(), safe=False), path)
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return _Value("string", _repaired(array.cast(pa.large_string())), path)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _Value("list", array, path)
    return _Value("other", array, path, f"values of the type {kind}")


def _repaired(texts: pa.LargeStringArray) -> pa.LargeStringArray:
    """With U+FFFD for bytes that are not UTF-8, as documents have it."""
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        found = to_binary(texts).to_pylist()
        strings = [None if data is None else data.decode("utf-8", "replace") for data in found]
        return pa.array(strings, pa.large_string())
    return texts


# The kinds of Python values. An integer that no int64 holds is a uint64, else a float.
_NULL, _BOOLEAN, _INTEGER, _UNSIGNED, _FLOAT, _STRING, _LIST, _OTHER, _NOTHING_INSIDE = range(9)
_CODES: dict[type, int] = {type(None): _NULL, bool: _BOOLEAN, float: _FLOAT, str: _STRING}
_CODES |= {list: _LIST, Decimal: _FLOAT, NotAnObject: _NOTHING_INSIDE}


def _code(value: object) -> int:
    if type(value) is int:
        if -(2**63) <= value < 2**63:
            return _INTEGER
        return _UNSIGNED if 0 < value < 2**64 else _FLOAT
    return _CODES.get(type(value), _OTHER)


def _of_python(values: Sequence[Any], code: int, path: ColumnPath) -> _Value:
    """Values of one kind, and nulls."""
    if code == _NULL:
        return _Value("null", pa.nulls(len(values)), path)
    if code == _BOOLEAN:
        return _Value("boolean", pa.array(values, pa.bool_()), path)
    if code in (_INTEGER, _UNSIGNED):
        kind = pa.int64() if code == _INTEGER else pa.uint64()
        return _Value("number", pa.array(values, kind), path)
    if code == _FLOAT:
        return _Value("number", pa.array(list(map(_as_float, values)), pa.float64()), path)
    if code == _STRING:
        return _Value("string", strings_to_arrow(values)[0], path)
    if code == _LIST:
        bare = [None if value is None else [None] * len(value) for value in values]
        return _Value("list", pa.array(bare, pa.list_(pa.null())), path)
    shown = pa.array([None if value is None else True for value in values], pa.bool_())
    first = next(value for value in values if value is not None)
    if code == _NOTHING_INSIDE:
        found = f"{_NO_OBJECT}{first.kind}"
    else:
        found = "objects" if isinstance(first, dict) else f"{type(first).__name__} values"
    return _Value("other", shown, path, found)


def _as_float(value: Any) -> float | None:
    try:
        return None if value is None else float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def evaluate(
    found: Filter, columns: Mapping[ColumnPath, Values], num_rows: int
) -> tuple[Mask, dict[int, str]]:
    """Which rows are kept, and the problems of those with values that do not fit."""
    kept, problems = np.zeros(num_rows, np.bool_), dict[int, str]()
    codes = {
        path: np.fromiter(map(_code, values), np.int64, num_rows)
        for path, values in columns.items()
        if isinstance(values, list)
    }
    pending = list(_groups(list(codes.values()), num_rows))
    while pending:
        rows = pending.pop()
        given = {
            path: _given(values, codes.get(path), rows, path) for path, values in columns.items()
        }
        try:
            value = _Evaluation(given).value(found.body)
            _need(value, "boolean", "a filter", found.body)
        except MisfitError as misfit:
            filled = [_is_filled(given[path].array) for path in misfit.columns]
            at_fault = np.logical_and.reduce([np.ones(len(rows), np.bool_), *filled])
            problems |= dict.fromkeys(rows[at_fault].tolist(), str(misfit))
            # Nulls fit everywhere, so the other rows are judged without these.
            parts = at_fault if at_fault.any() else filled[0]
            pending += [part for part in (rows[~parts], rows[parts & ~at_fault]) if len(part)]
            continue
        if value.kind == "null":
            continue
        if isinstance(value.array, pa.Scalar):
            kept[rows] = bool(value.array.as_py())
        else:
            kept[rows] = value.array.fill_null(False).to_numpy(zero_copy_only=False)
    return kept, problems


def _is_filled(values: pa.Array) -> Mask:
    found: Mask = values.is_valid().to_numpy(zero_copy_only=False)
    return found


def _given(values: Values, codes: IntArray | None, rows: IntArray, path: ColumnPath) -> _Value:
    """A column of some rows, in which its values have one kind."""
    if isinstance(values, list):
        assert codes is not None
        return _of_python(
            [values[row] for row in rows.tolist()], int(codes[rows].max(initial=0)), path
        )
    return _value_of(values if len(rows) == len(values) else values.take(pa.array(rows)), path)


def _groups(codes: Sequence[IntArray], num_rows: int) -> Iterable[IntArray]:
    """Rows whose values have the same kinds; a column of one kind may have nulls."""
    key = np.zeros(num_rows, np.int64)
    for found in codes:
        if len(np.unique(found[found != _NULL])) > 1:
            _, key = np.unique(key * (_NOTHING_INSIDE + 1) + found, return_inverse=True)
    if not key.any():
        return [np.arange(num_rows)]
    return [np.flatnonzero(key == one) for one in np.unique(key)]


def inside(value: Any, keys: Sequence[str], kind_of: Callable[[object], str]) -> Any:
    """What is inside an object, by the names on the way; a missing field is None."""
    for key in keys:
        if value is None:
            return None
        if not isinstance(value, dict):
            return NotAnObject(kind_of(value))
        value = value.get(key)
    return value
