"""What a template does with recorded values, it does with plain ones; on other texts, too."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from shardmill.chat.jinja.engine import JinjaEngine
from shardmill.chat.jinja.forms import compile_write
from shardmill.chat.jinja.template import JinjaTemplate, open_jinja_template
from shardmill.chat.jinja.values import Trace, shape_of, source_of
from shardmill.chat.policy import TrainPolicy
from shardmill.errors import TemplateError
from shardmill.records import Conversation
from tests.chat.jinja_kit import CHATML, byte_level, make_tokenizer

Messages = list[dict[str, Any]]

# Random templates. Each kind of expression is made of smaller ones.

_LITERALS = [
    "''",
    "' '",
    "'a'",
    "'ab'",
    "'b'",
    "'\\n'",
    "'<b>'",
    "'%s'",
    "'{}'",
    "'1'",
    "('<a>'|safe)",
]
_TEXT_METHODS = [
    *("upper()", "lower()", "strip()", "lstrip()", "rstrip()", "title()", "capitalize()"),
    *("casefold()", "swapcase()", "strip('a')", "lstrip('b')", "rstrip(' a')"),
]
_TEXT_FILTERS = [
    *(
        "upper",
        "lower",
        "trim",
        "trim('a')",
        "capitalize",
        "title",
        "string",
        "safe",
        "e",
        "indent",
    ),
    *(
        "tojson",
        "reverse|string",
        "first",
        "last",
        "default('k')",
        "default('k', true)",
        "center(9)",
    ),
    *("replace('a', '<')", "list|string", "wordcount|string", "length|string", "reverse"),
]
_QUESTIONS = ["isupper()", "isdigit()", "isspace()", "isalnum()", "istitle()", "isascii()"]
_KINDS = [
    *("string", "mapping", "sequence", "iterable", "number", "integer", "float", "boolean", "none"),
    *("defined", "undefined", "true", "false", "lower", "upper"),
]
_ORDERS = ["==", "!=", "<", "<=", ">", ">="]


@functools.cache
def _texts(depth: int) -> st.SearchStrategy[str]:
    atoms = st.sampled_from(["c", "d", "o.a", "l[0]", "ns.t", "calls[0].function.name", *_LITERALS])
    if depth == 0:
        return atoms
    text, number, truth, some = (
        _texts(depth - 1),
        _numbers(depth - 1),
        _truths(depth - 1),
        _lists(depth - 1),
    )
    many = st.sampled_from([-3, -1, 0, 1, 2, 5])
    return st.one_of(
        atoms,
        st.builds("({}).{}".format, text, st.sampled_from(_TEXT_METHODS)),
        st.builds("({})|{}".format, text, st.sampled_from(_TEXT_FILTERS)),
        st.builds("({} + {})".format, text, text),
        st.builds("({} ~ {})".format, text, st.one_of(text, number, truth, some)),
        st.builds("({} if {} else {})".format, text, truth, text),
        st.builds("({})[{}]".format, text, many),
        st.builds("({})[{}:]".format, text, many),
        st.builds("({})[:{}]".format, text, many),
        st.builds("({})[::-1]".format, text),
        st.builds("({}).replace({}, {})".format, text, text, text),
        st.builds("({})|replace({}, {})".format, text, text, text),
        st.builds("({})|trim({})".format, text, text),
        st.builds("({}).split({})[{}]".format, text, text, many),
        st.builds("({}).rsplit({}, 1)[{}]".format, text, text, many),
        st.builds("({}).partition({})[{}]".format, text, text, st.sampled_from([0, 1, 2])),
        st.builds("({}).removeprefix({})".format, text, text),
        st.builds("({}).join({})".format, text, some),
        st.builds("({})|join({})".format, some, text),
        st.builds(
            "({})|{}".format,
            some,
            st.sampled_from(["first", "last", "max", "min", "string", "tojson"]),
        ),
        st.builds("({})[{}]".format, some, many),
        st.builds("({} % ({},))".format, text, text),
        st.builds("({} % {})".format, text, text),
        st.builds("({} * 2)".format, text),
        st.builds("({}).format({})".format, text, text),
        st.builds("({})|format({})".format, text, text),
        st.builds("{{{}: {}, 'a': 'z'}}[{}]".format, text, text, text),
        st.builds(
            "({{'k': {}, 'l': {}}}|tojson)".format, text, st.one_of(text, number, truth, some)
        ),
        st.builds("o[{}]".format, text),
        st.builds("o.get({}, {})".format, text, text),
        st.builds(
            "o|{}".format,
            st.sampled_from(["tojson", "string", "length|string", "list|join", "tojson(indent=1)"]),
        ),
        st.builds("shout({})".format, text),
        st.builds("({})|string".format, st.one_of(number, truth)),
        st.builds("({} or {})".format, text, text),
        st.builds("({} and {})".format, text, text),
    )


@functools.cache
def _numbers(depth: int) -> st.SearchStrategy[str]:
    atoms = st.sampled_from(
        ["0", "1", "2", "c|length", "d|length", "l|length", "o.n", "calls|length"]
    )
    if depth == 0:
        return atoms
    text, number, some = _texts(depth - 1), _numbers(depth - 1), _lists(depth - 1)
    return st.one_of(
        atoms,
        st.builds("(({})|length)".format, st.one_of(text, some)),
        st.builds("({} {} {})".format, number, st.sampled_from("+-*"), number),
        st.builds("({} % 3)".format, number),
        st.builds("(-{})".format, number),
        st.builds("({})|abs".format, number),
        st.builds("({}).{}({})".format, text, st.sampled_from(["count", "find", "rfind"]), text),
        st.builds("({})|int".format, text),
        st.builds("({}|round|int)".format, number),
        st.builds("({}).count({})".format, some, text),
    )


@functools.cache
def _truths(depth: int) -> st.SearchStrategy[str]:
    atoms = st.sampled_from(
        ["true", "false", "c", "'a' in c", "o.yes", "loop.last", "c == d", "c < d", "o"]
    )
    if depth == 0:
        return atoms
    text, number, truth, some = (
        _texts(depth - 1),
        _numbers(depth - 1),
        _truths(depth - 1),
        _lists(depth - 1),
    )
    anything = st.one_of(
        text, number, truth, some, st.sampled_from(["o", "none", "missing", "o.none", "l", "calls"])
    )
    return st.one_of(
        atoms,
        st.builds("(not {})".format, truth),
        st.builds("({} {} {})".format, truth, st.sampled_from(["and", "or"]), truth),
        st.builds("({} {} {})".format, text, st.sampled_from([*_ORDERS, "in", "not in"]), text),
        st.builds("({} {} {})".format, number, st.sampled_from(_ORDERS), number),
        st.builds("({} {} {})".format, some, st.sampled_from(["==", "!="]), some),
        st.builds(
            "({} {} {})".format,
            text,
            st.sampled_from(["in", "not in"]),
            st.one_of(some, st.just("o")),
        ),
        st.builds("({} == {})".format, anything, anything),
        st.builds("({}).{}".format, text, st.sampled_from(_QUESTIONS)),
        st.builds("({}).{}({})".format, text, st.sampled_from(["startswith", "endswith"]), text),
        st.builds("({} is {})".format, anything, st.sampled_from(_KINDS)),
        st.builds("({} is {}({}))".format, text, st.sampled_from(["eq", "ne", "lt", "in"]), text),
        st.builds("({} is {})".format, number, st.sampled_from(["odd", "even", "divisibleby(2)"])),
        st.builds("o[{}] is defined".format, text),
    )


@functools.cache
def _lists(depth: int) -> st.SearchStrategy[str]:
    atoms = st.sampled_from(
        ["l", "[c, d]", "[]", "messages|map(attribute='content')|list", "o.l", "[c]"]
    )
    if depth == 0:
        return atoms
    text, some = _texts(depth - 1), _lists(depth - 1)
    return st.one_of(
        atoms,
        st.builds("[{}, {}]".format, text, text),
        st.builds("({} + {})".format, some, some),
        st.builds("({})[{}:]".format, some, st.sampled_from([-1, 0, 1])),
        st.builds("({})[::-1]".format, some),
        st.builds("({}).split({})".format, text, text),
        st.builds("({}).split()".format, text),
        st.builds("({}).splitlines()".format, text),
        st.builds(
            "({})|{}|list".format,
            some,
            st.sampled_from(
                [
                    *("reverse", "sort", "unique", "map('upper')", "map('trim')", "map('length')"),
                    *(
                        "select('eq', c)",
                        "reject('in', d)",
                        "select",
                        "map('string')",
                        "sort(reverse=true)",
                    ),
                ]
            ),
        ),
        st.builds("({})|list".format, text),
        st.just("o|list"),
        st.just("o.keys()|list"),
        st.just("o.values()|map('string')|list"),
        st.just("messages|selectattr('content', 'eq', c)|map(attribute='role')|list"),
        st.just("o|dictsort|map('first')|list"),
        st.just("calls|map(attribute='function.name')|list"),
    )


@functools.cache
def _bodies(depth: int) -> st.SearchStrategy[str]:
    written = st.builds(
        "{{{{ {} }}}}".format, st.one_of(_texts(2), _numbers(2), _truths(2), _lists(2))
    )
    if depth == 0:
        return written
    body = _bodies(depth - 1)
    return st.one_of(
        written,
        st.builds("{{% if {} %}}{}{{% else %}}{}{{% endif %}}".format, _truths(2), body, body),
        st.builds(
            "{{% for c in {} %}}{}{{{{ loop.index }}}}{{% else %}}E{{% endfor %}}".format,
            _lists(1),
            body,
        ),
        st.builds(
            "{{% for c in l %}}{{% if loop.changed({}) %}}{}{{% endif %}}{{% endfor %}}".format,
            _texts(1),
            body,
        ),
        st.builds("{{% for k, d in o.items() %}}{{{{ k }}}}{}{{% endfor %}}".format, body),
        st.builds("{{% set c %}}{}{{% endset %}}{}".format, body, body),
        st.builds("{{% set ns.t = {} %}}{}".format, _texts(2), body),
        st.builds(
            "{{% for m in messages %}}{{% set c = m.content %}}{}{{% endfor %}}".format, body
        ),
        st.builds("{{% call(c) wrap({}) %}}{}{{% endcall %}}".format, _texts(1), body),
        st.builds("{{% filter upper %}}{}{{% endfilter %}}".format, body),
        st.builds("{}{}".format, body, body),
    )


_HEAD = (
    "{% macro shout(x) %}{{ x }}!{% for m in messages %}{% endfor %}{% endmacro %}"
    "{% macro wrap(x) %}<{{ caller(x) }}>{% endmacro %}"
    "{% set ns = namespace(t='') %}"
    "{% set c = messages[0].content %}{% set d = messages[1].content %}"
    "{% set o = messages[0].o %}{% set l = messages[1].l %}{% set calls = messages[2].tool_calls %}"
    "{% for loop_once in [1] %}"
)
TEMPLATES = _bodies(2).map(lambda body: _HEAD + body + "{% endfor %}")

WORDS = st.one_of(
    st.sampled_from(
        [
            "",
            " ",
            "a",
            "b",
            "ab",
            "A",
            "a b",
            " a\n",
            "1",
            "<b>",
            "%s",
            "{}",
            "\ue000",
            "'\"\\",
            "a\0",
            "None",
        ]
    ),
    st.text("ab \n<'\"\\{%1\ue000", max_size=4),
)
_SCALARS = st.one_of(
    WORDS, st.none(), st.booleans(), st.sampled_from([0, 1, 2, 0.0, -0.0, 1.0, 2**70])
)


@st.composite
def conversations(draw: st.DrawFn) -> Messages:
    keys = st.one_of(st.sampled_from(["a", "b", "l", "n", "yes", "none"]), WORDS)
    inner = st.one_of(
        _SCALARS, st.lists(_SCALARS, max_size=2), st.dictionaries(WORDS, _SCALARS, max_size=2)
    )
    o = {
        "a": draw(WORDS),
        "n": draw(st.sampled_from([0, 1, 2])),
        "yes": draw(st.booleans()),
        "none": None,
        "l": draw(st.lists(WORDS, max_size=3)),
        **draw(st.dictionaries(keys, inner, max_size=2)),
    }
    names = draw(st.lists(WORDS, min_size=1, max_size=2))
    return [
        {"role": "system", "content": draw(WORDS), "o": o},
        {"role": "user", "content": draw(WORDS), "l": draw(st.lists(WORDS, max_size=3))},
        {
            "role": "assistant",
            "content": draw(WORDS),
            "tool_calls": [{"function": {"name": n}} for n in names],
        },
    ]


def _other_texts(draw: st.DrawFn, value: Any, key: str = "") -> Any:
    """The same with some other texts and numbers."""
    if isinstance(value, dict):
        return {name: _other_texts(draw, part, name) for name, part in value.items()}
    if isinstance(value, list):
        return [_other_texts(draw, part) for part in value]
    if key == "role" or not draw(st.booleans()):
        return value
    return draw(WORDS if isinstance(value, str) else _SCALARS)


@st.composite
def families(draw: st.DrawFn) -> list[Messages]:
    """A conversation, and others like it."""
    first = draw(conversations())
    return [first, *(_other_texts(draw, first) for _ in range(4)), draw(conversations())]


@functools.cache
def _tokenizer() -> Any:
    return make_tokenizer("x")


def plainly(source: str, messages: Messages) -> str | None:
    """What transformers writes; None if it raises."""
    try:
        return render_jinja_template([messages], chat_template=source)[0][0]
    except Exception:  # noqa: BLE001 - a template can raise anything
        return None


def learnt(source: str, messages: Messages) -> tuple[str, Any] | None:
    """What is written on recorded values, and the function that writes it for others; None if the
    sandbox refuses, or a blind rendering differs."""
    engine = JinjaEngine(_tokenizer(), source, {})
    found = []
    for blind in (False, True):
        trace = Trace(blind=blind)
        try:
            written = engine.written(trace, messages)
        except TemplateError:
            return None
        found.append((trace, written, [source_of(piece) for piece in written.pieces]))
    (trace, written, sources), (other, _, others) = found
    text = "".join(getattr(piece, "_said", piece) for piece in written.pieces)
    if trace.guards != other.guards or sources != others:
        return text, None
    return text, compile_write(trace.guards, sources)


def replayed(write: Any, messages: Messages) -> str | None:
    try:
        parts = write(messages, None)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return None
    return None if parts is None else "".join(parts)


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(source=TEMPLATES, family=families())
def test_recorded_values_behave_like_plain_ones_also_on_other_texts(
    source: str, family: list[Messages]
) -> None:
    first, *others = family
    found = learnt(source, first)
    if found is None:
        return
    text, write = found
    assert text == plainly(source, first)
    if write is None:
        return
    assert replayed(write, first) == text
    for other in others:
        again = replayed(write, other) if shape_of(other, None) == shape_of(first, None) else None
        assert again is None or again == plainly(source, other)


# What was once wrong: an expression at the start of a conversation, and two conversations.

_SETS = (
    "{% set c = messages[0].content %}{% set d = messages[1].content %}{% set o = messages[0].o %}"
)


def system(text: str, second: str = "x", **keys: Any) -> Messages:
    return [
        {"role": "system", "content": text, **keys},
        {"role": "user", "content": second},
        {"role": "assistant", "content": "fine"},
    ]


def rendered(template: JinjaTemplate, messages: Messages, **options: Any) -> list[int] | str:
    """The ids, or the reason of the drop."""
    found = template.render([Conversation(messages=messages, **options)], TrainPolicy())
    return found.drops[0].reason if found.drops else found.examples.ids[0].tolist()


def of_transformers(template: JinjaTemplate, messages: Messages) -> list[int]:
    found: list[int] = template.engine.of_transformers(messages).tolist()
    return found


_BACKWARDS = {"content": "a", "role": "system"}
_QUOTED = "a'b\"\\\n__class__"


def first_says(expression: str) -> JinjaTemplate:
    source = f"{{% if messages[0].role == 'system' %}}{_SETS}{expression}{{% endif %}}{CHATML}"
    return open_jinja_template(make_tokenizer(source))


@pytest.mark.parametrize(
    ("expression", "first", "second"),
    [
        ("{{ c[1] is defined }}", system("a"), system("ab")),
        ("{{ o.l[1] is defined }}", system("", o={"l": [1]}), system("", o={"l": [1, 2]})),
        ("{{ c == ('x'|safe) }}", system("y"), system("x")),
        ("{{ c in ('abc'|safe) }}", system("y"), system("b")),
        ("{{ 'xx'|trim(c) }}", system("y"), system("x")),
        ("{{ 'abc'|replace(c, 'k') }}", system("y"), system("b")),
        ("{{ c|length is number and c == 'x' }}", system("y"), system("x")),
        ("{{ (c|length) % 2 + (c|length) ** 2 }}", system("y"), system("xy")),
        ("{{ (c|safe) + d }}", system("a", "b"), system("a", "<b>")),
        ("{{ ('k'|safe) + d }}", system("a", "b"), system("a", "<b>")),
        ("{{ c.format(1) == 'x' }}", system("y"), system("x")),
        ("{{ c.partition('a') == ('x', '', '') and d == 'z' }}", system("x"), system("x", "z")),
        ("{{ '%s' % (c,) }}", system(""), system("x")),
        (
            "{% set x %}{% for m in messages %}{{ 'abc' if loop.first }}{% endfor %}{% endset %}"
            "{{ c in x }}{{ x == d }}",
            system("y"),
            system("b", "abc"),
        ),
        ("{{ o }}", system("", o={"a": 1, "b": 2}), system("", o={"b": 2, "a": 1})),
        ("{{ o }}", system("", o={"a": [1]}), system("", o={"a": [True]})),
        ("{{ o.a }}", system("", o={"a": 0.0}), system("", o={"a": -0.0})),
        ("{{ o }}", system("", o=0.0), system("", o=-0.0)),
        ("{{ o|list }}", system("", o={1: 2}), system("", o={True: 2})),
        ("{{ o }}", system("", o=[float("nan")]), system("", o=[float("inf")])),
        ("{{ o.a }}", system("", o={"a": float("inf")}), system("", o={"a": 1.5})),
        ("{{ messages[0]|list }}", system("a"), [_BACKWARDS, *system("a")[1:]]),
        (
            "{{ messages[0]|list }}",
            system("system"),
            [{"content": "system", "role": "system"}, *system("a")[1:]],
        ),
        (
            "{{ messages[1] == o }}",
            system("", o={"role": "user", "content": "n"}),
            system("", o={"role": "user", "content": "x"}),
        ),
        ("{{ o }}", system("", o={_QUOTED: "'"}), system("", o={_QUOTED: '"'})),
    ],
)
def test_what_a_template_sees_of_a_text_is_seen_again(
    expression: str, first: Messages, second: Messages
) -> None:
    template = first_says(expression)
    for messages in (first, second, first, second):
        assert rendered(template, messages) == of_transformers(template, messages)


def test_a_text_changed_too_often_to_be_compiled_is_written_by_the_template() -> None:
    changed = (
        "{% set ns = namespace(t=c) %}{% for i in range(300) %}"
        "{% set ns.t = ('(' + ns.t).replace('(', '') %}{% endfor %}{{ ns.t }}"
    )
    template = first_says(changed)
    for messages in (system("a"), system("b")):
        assert rendered(template, messages) == of_transformers(template, messages)
    assert template.forms.count == 0


def test_values_that_are_no_json_are_listed_or_dropped() -> None:
    template = first_says("{{ o }}")
    assert rendered(template, system("", o=([1],))) == of_transformers(
        template, system("", o=[[1]])
    )
    assert rendered(template, system("", o={1, 2})) == "bad_message"
    assert rendered(first_says("{{ o.a }}"), system("", o={"a": b"x"})) == "template_refuses"
    assert rendered(template, system("", o="\ud800")) == "invalid_unicode"


def test_tools_of_any_sequence_are_written_and_each_of_them() -> None:
    written = "{{ tools }}{% for tool in tools or [] %}{{ tool|tojson }}{% endfor %}"
    template = open_jinja_template(make_tokenizer(written + CHATML))
    tools, talk = [{"name": "b"}, {"name": "c"}], system("a")
    found = rendered(template, talk, tools=tuple(tools))
    assert found == template.engine.of_transformers(talk, tools).tolist()
    assert rendered(template, talk, tools=tools) == found
    one = open_jinja_template(make_tokenizer("{{ (tools or [0])[0]|tojson }}" + CHATML))
    assert rendered(one, talk, tools=tools) == "no_place_for_tools"


@pytest.mark.parametrize("calls", ["m.tool_calls[0]", "m.tool_calls[0].function.name"])
def test_calls_of_which_only_a_part_is_written_are_dropped(calls: str) -> None:
    source = CHATML.replace(
        "m['content'] +", f"m.content + (({calls}|tojson) if m.tool_calls else '') +"
    )
    template = open_jinja_template(make_tokenizer(source))
    look = {"type": "function", "function": {"name": "look", "arguments": {"lamp": "oil"}}}
    asked, called = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    found = rendered(template, [asked, {**called, "tool_calls": [look, look]}])
    assert found == "no_place_for_tool_calls"


def test_a_marker_that_nothing_writes_drops_nothing_whatever_came_before() -> None:
    for order in (1, -1):
        template = open_jinja_template(make_tokenizer(CHATML))
        for o in ("a", "<|im_end|>")[::order]:
            assert rendered(template, system("a", o=o)) == of_transformers(template, system("a"))


TIGHT = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '<|eot_id|>' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|eot_id|>' }}{% endif %}"
)


def _tight(specials: list[AddedToken | str], *, lower: bool = False) -> JinjaTemplate:
    model = Tokenizer.from_str(byte_level().to_str())
    if lower:
        model.normalizer = normalizers.Lowercase()
    model.add_special_tokens(specials)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|im_end|>")
    tokenizer.chat_template = TIGHT
    return open_jinja_template(tokenizer)


@pytest.mark.parametrize("side", ["lstrip", "rstrip"])
def test_markers_that_take_the_blanks_beside_them_take_them_from_every_text(side: str) -> None:
    names = ("<|im_start|>", "<|eot_id|>", "<|im_end|>")
    template = _tight(
        [AddedToken(name, special=True, normalized=False, **{side: True}) for name in names]
    )
    for text in ("a", " a", "a ", "\na\n", "", "a"):
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "b"}]
        assert rendered(template, messages) == of_transformers(template, messages)


def test_text_that_becomes_a_marker_in_another_spelling_or_with_its_neighbour_is_dropped() -> None:
    names = ("<|im_start|>", "<|eot_id|>", "<|im_end|>")
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    lower = _tight([AddedToken(name, special=True, normalized=True) for name in names], lower=True)
    assert rendered(lower, talk) == of_transformers(lower, talk)
    talk[0]["content"] = "<|IM_END|>"
    assert rendered(lower, talk) == "special_in_text"
    longer = _tight([*names, "<|eot_id|>x"])
    for text, kept in (("a", True), ("x", False)):
        talk[0]["content"] = text
        assert rendered(longer, talk) == (
            of_transformers(longer, talk) if kept else "special_in_text"
        )


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("m.content + messages[loop.index0 - 1].content", "trains_others"),
        ("messages[loop.index0 - 1].content[:1] + m.content", "trains_others"),
        ("m.content + m.content", "content_changed"),
        ("m.content + m.content[:1]", "content_changed"),
        (
            "m.content|replace('x', '') + '<|im_end|>' + m.content|replace('x', '')",
            "content_changed",
        ),
        ("m.content|replace('x', '') + m.content.split('x')[-1]", "content_changed"),
        ("m.content.strip('b')", "content_changed"),
    ],
)
def test_an_answer_holds_its_own_words_once(answer: str, reason: str) -> None:
    source = CHATML.replace(
        "m['content'] +", f"(({answer}) if m.role == 'assistant' else m.content) +"
    )
    template = open_jinja_template(make_tokenizer(source))
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bob"}]
    assert rendered(template, talk) == reason


def test_a_past_answer_without_an_end_token_is_compared_up_to_its_last_word() -> None:
    source = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + (' (old)' if not loop.last"
        " and m.role == 'assistant' else '') + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    template = open_jinja_template(make_tokenizer(source))
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert rendered(template, talk) == of_transformers(template, talk)
    assert rendered(template, talk * 2) == "prefix_changes"


LOOK = {"type": "function", "function": {"name": "look", "arguments": {"lamp": "oil"}}}
ASKED, CALLED = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("written", "first", "second", "reason"),
    [
        (
            "(m.tool_calls[0]|tojson if m.tool_calls is defined else '')",
            {"tool_calls": [LOOK]},
            {"tool_calls": [LOOK, LOOK]},
            "no_place_for_tool_calls",
        ),
        ("''", {"reasoning_content": ""}, {"reasoning_content": "so"}, "no_place_for_reasoning"),
    ],
)
def test_what_was_empty_or_alone_once_is_looked_at_again(
    written: str, first: dict[str, Any], second: dict[str, Any], reason: str
) -> None:
    source = CHATML.replace("m['content'] +", f"m.content + {written} +")
    template = open_jinja_template(make_tokenizer(source))
    assert isinstance(rendered(template, [ASKED, {**CALLED, **first}]), list)
    assert rendered(template, [ASKED, {**CALLED, **second}]) == reason


def test_a_second_tool_is_looked_for_again() -> None:
    source = "{{ tools[0]|tojson if tools }}" + CHATML
    template = open_jinja_template(make_tokenizer(source))
    assert isinstance(rendered(template, [ASKED, CALLED], tools=[{"name": "b"}]), list)
    found = rendered(template, [ASKED, CALLED], tools=[{"name": "b"}, {"name": "c"}])
    assert found == "no_place_for_tools"


def test_what_was_too_much_once_refuses_no_other_conversation() -> None:
    deep: dict[str, Any] = {}
    for _ in range(200):
        deep = {"a": deep}
    template = first_says("{{ o|tojson }}")
    assert rendered(template, system("a", o=deep)) == "template_refuses"
    fine = system("a", o={"a": "b"})
    assert rendered(template, fine) == of_transformers(template, fine)
