"""Conversations and templates for the tests of the template sandbox."""

# ruff: noqa: E501 - a template is easier to read in one line

from __future__ import annotations

import json
from typing import Any

Chat = tuple[list[dict[str, Any]], list[dict[str, Any]] | None]

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather <now> & later in a 'city'.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Its name", "default": "Z\u00fcrich"},
                "unit": {"type": "string", "enum": ["C", "F"], "nullable": True},
                "days": {"type": "array", "items": {"type": "integer"}},
                "where": {
                    "type": "object",
                    "properties": {"lat": {"type": "number"}},
                    "required": ["lat"],
                },
                "any": {"oneOf": [{"type": "string"}, {"type": "number", "default": 1.5}]},
            },
            "required": ["city"],
        },
        "return": {"type": "string", "description": "Words"},
    },
}
CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "No arguments.",
        "parameters": {"type": "object", "properties": {}},
    },
}


def said(*turns: tuple[str, Any], **more: Any) -> list[dict[str, Any]]:
    """Messages of role and content; `more` goes into the last one."""
    messages: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in turns]
    messages[-1].update(more)
    return messages


def _call(arguments: Any, name: str = "get_weather", number: str = "call00001") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": number, "type": "function", "function": function}


def _calling(arguments: Any) -> list[dict[str, Any]]:
    return [
        *said(("system", "Be exact."), ("user", "Weather?")),
        {"role": "assistant", "content": "Let me look.", "tool_calls": [_call(arguments)]},
        {"role": "tool", "content": '{"sky": "<grey>"}', "tool_call_id": "call00001"},
        *said(("assistant", "Grey."), ("user", "Thanks"), ("assistant", "Sure.")),
    ]


PARTS = [{"type": "text", "text": " Look "}, {"type": "text", "text": "here.\n"}]
CHATS: dict[str, Chat] = {
    "question": (said(("user", "2 + 2?")), None),
    "answered": (said(("user", "2 + 2?"), ("assistant", "4")), None),
    "system": (
        said(("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello <b>&</b>")),
        None,
    ),
    "turns": (said(*[("user", " a\n"), ("assistant", "b ")] * 4, ("user", "c")), None),
    "tools": (said(("system", "S"), ("user", "Weather?")), [WEATHER, CLOCK]),
    "tools, no system": (said(("user", "Weather?"), ("assistant", "No.")), [WEATHER]),
    "a call": (_calling({"city": "Z\u00fcrich", "days": [1, 2], "deep": {"a": None}}), [WEATHER]),
    "a call in text": (_calling(json.dumps({"city": "Bern"})), [WEATHER, CLOCK]),
    "two calls": (
        [
            *said(("user", "Both?")),
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [_call({"city": "Bern"}), _call({}, "clock", "call00002")],
            },
            {"role": "tool", "content": "grey", "tool_call_id": "call00001", "name": "get_weather"},
            {"role": "tool", "content": "12:00", "tool_call_id": "call00002", "name": "clock"},
        ],
        [WEATHER, CLOCK],
    ),
    "reasoning": (
        said(("user", "Why?"), ("assistant", "So."), ("user", "And?"))
        + said(("assistant", "Thus."), reasoning_content="First this,\nthen that."),
        None,
    ),
    "thinking": (said(("user", "Why?"), ("assistant", "So."), thinking="Hm."), None),
    "think tags": (
        said(("user", "Why?"), ("assistant", "<think>\nHm.\n</think>\n\nSo."), ("user", "Ok")),
        None,
    ),
    "parts": (said(("system", PARTS), ("user", PARTS), ("assistant", PARTS)), None),
    "empty": (said(("system", ""), ("user", ""), ("assistant", "")), None),
    "no content": (said(("user", "Hi"), ("assistant", None)), None),
    "other roles": (said(("developer", "D"), ("user", "Hi"), ("narrator", "N")), None),
    "two of one": (
        said(("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", "d")),
        None,
    ),
    "nothing": ([], None),
}

# One line of everything that templates use.
LANGUAGE = r"""
{{ messages[0].role }} {{ messages[0]['content'] }} {{ messages[-1].nothing }} {{ messages[9] }}
{{ messages[0].items()|list }} {{ messages[0]|items|list }} {{ messages[0].keys() }}
{{ messages[:1] }} {{ messages[::-1]|length }} {{ 'abc'[1:] ~ 'abc'[-1] ~ 'abc'[:-1:2] }}
{{ 'a' in 'abc' }} {{ 'x' not in messages[0] }} {{ 1 < 2 in [2] }} {{ 1 < 3 < 2 }} {{ 2 == 2.0 != 3 }}
{{ 'a' in 'abc' not in ['q'] == false }} {{ not 'a' in [] }}
{{ 1 + 2 * 3 - 4 / 2 // 1 % 5 ** 2 }} {{ -2 ** 2 }} {{ +3 }} {{ -(bos_token|length) }} {{ 7 // 2 }} {{ 2 ** -1 }}
{{ 'a' + 'b' + bos_token + eos_token + 'c' }} {{ [1] + [2] + [3] }} {{ 'ab' * 2 }} {{ 3 * [1] }}
{{ '%s-%05.1f|%3d' % ('a', 1.25, 7) }} {{ '%(a)s' % {'a': 1} }} {{ '%s %s'|format('a', 'b') }}
{{ '{} {0}'|length }} {{ '{:>5}|{x!r}|{y[a]}|{1}'.format('a', 2, x='q', y={'a': 1}) if false }}
{{ '{:>5}|{x!r}|{y[a]}|{y.a}'.format('a', x='q', y={'a': 1}) }}
{{ '<b>'|e }} {{ '<b>'|safe + '<i>' }} {{ ('<b>'|safe) ~ '<i>' }} {{ ['<b>'|safe, '<i>']|join }}
{{ '<b>'|safe|upper + '<' }} {{ ('<'|safe).join(['<', '>']) }} {{ ('%s'|safe) % '<' }}
{{ ('<b>'|safe)|string + '<' }} {{ ('a<b'|safe)|replace('<', '>') + '<' }} {{ ('<'|safe * 2) + '<' }}
{% set block %}<b>{{ '<b>'|safe }}{% endset %}{{ block + '<' }}
{{ messages|tojson }} {{ messages|tojson(indent=2) }} {{ messages|tojson(separators=(',', ':'), sort_keys=true) }}
{{ 'Z\u00fcrich'|tojson(ensure_ascii=true) }} {{ {'b': 1, 'a': [1.5, none, true]}|tojson(sort_keys=true, indent='-') }}
{{ [3, 1, 2]|sort }} {{ ['b', 'A', 'c']|sort }} {{ ['b', 'A']|sort(case_sensitive=true, reverse=true) }}
{{ messages|sort(attribute='content')|map(attribute='role')|join(',') }}
{{ messages|selectattr('role', 'equalto', 'user')|list|length }} {{ messages|rejectattr('nothing')|list|length }}
{{ [1, 2, 3]|select('odd')|list }} {{ [1, 2, 3]|reject('odd')|sum }} {{ [[1], [2]]|sum(start=[]) }}
{{ ['a', 'A', 'b']|unique|join }} {{ [1, 2]|first }}{{ [1, 2]|last }} {{ []|first }} {{ [1, 2]|max }}{{ [2, 1]|min }}
{{ messages|map(attribute='nothing', default='none')|join(', ') }} {{ ['a', 'b']|map('upper')|join('-') }}
{{ {'b': 1, 'A': 2}|dictsort }} {{ {'b': 1, 'A': 2}|dictsort(true, 'value', reverse=true) }}
{{ ' a '|trim }}|{{ 'xax'|trim('x') }} {{ 'hello world'|title }} {{ 'aB'|capitalize }} {{ 'a b'|wordcount }}
{{ 'a\nb\n\nc'|indent }} {{ 'a\nb'|indent(2, true) }} {{ 'a\nb'|indent('> ', first=true, blank=true) }}
{{ 'a'|center(5) }}| {{ 'aab'|replace('a', 'x', 1) }} {{ 'abc'|reverse }} {{ [1, 2]|reverse|list }}
{{ '42'|int + 1 }} {{ 'x'|int(7) }} {{ '1.5'|float }} {{ 1.25|round(1) }} {{ 2.5|round(0, 'ceil')|int }} {{ -3|abs }}
{{ nothing|default('d') }} {{ ''|d('e', true) }} {{ nothing is defined }} {{ none is none }} {{ 1 is number }}
{{ 'a' is string }} {{ {} is mapping }} {{ [] is sequence }} {{ [] is iterable }} {{ 4 is even }} {{ 4 is divisibleby(2) }}
{{ 'a' is eq('a') }} {{ 1 is in([1]) }} {{ 'a' is lower }} {{ true is true }} {{ 1 is lt(2) }} {{ 1 is sameas(1) }}
{{ 'a,b,,c'.split(',') }} {{ ' a  b '.split() }} {{ 'a,b,c'.rsplit(',', 1) }} {{ 'a\nb'.splitlines() }}
{{ 'a-b-c'.partition('-') }} {{ 'a-b'.rpartition('-') }} {{ 'abc'.find('c') }} {{ 'abab'.rfind('b') }} {{ 'aa'.count('a') }}
{{ ' a '.strip() }}|{{ 'xxa'.lstrip('x') }}|{{ 'a\n'.rstrip() }}|{{ 'ab'.startswith(('a', 'b')) }}|{{ 'ab'.endswith('b') }}
{{ 'a'.replace('a', 'b') }} {{ '-'.join(['a', 'b']) }} {{ 'ab'.removeprefix('a') }} {{ '7'.zfill(3) }} {{ 'a'.ljust(3) }}|
{{ {'a': 1}.get('a') }} {{ {'a': 1}.get('b', 2) }} {{ [1, 2].index(2) }} {{ (1, 1).count(1) }} {{ 1.0.is_integer() if false }}
{% for m in messages if m.role != 'user' %}{{ loop.index }}/{{ loop.length }}{{ loop.first }}{{ loop.last }}{{ m.content }}{% if loop.previtem is defined %}{{ loop.previtem.role }}{% endif %}{% else %}none{% endfor %}
{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 5 %}{% break %}{% endif %}{{ i }}{{ loop.cycle('a', 'b') }}{% endfor %}
{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}={{ v }}{{ loop.changed(v) }}{{ ', ' if not loop.last }}{% endfor %}
{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}
{% macro m(a, b='x') %}({{ a }}{{ b }}{{ varargs }}{{ kwargs }}){% endmacro %}{{ m(1) }}{{ m(1, 2, 3, c=4) }}{{ m(*[1, 2], **{'b2': 3}) }}
{% macro c() %}[{{ caller(1) }}]{% endmacro %}{% call(x) c() %}{{ x }}{{ messages|length }}{% endcall %}
{% set n = namespace(a=1, b=[]) %}{% for m in messages %}{% set n.a = n.a + 1 %}{% set n.b = n.b + [m.role] %}{% endfor %}{{ n.a }}{{ n.b }}
{% set x, y = 1, (2, 3) %}{{ x }}{{ y }}{% with z = 5 %}{{ z }}{% endwith %}{% filter upper %}abc{{ bos_token }}{% endfilter %}
{% set d = dict(a=1, b=2) %}{{ d }}{{ dict([['a', 1]]) }}{% raw %}{{ raw }}{% endraw %}{# comment #}
{% set n = namespace() %}{% set n.x %}a{{ bos_token }}{% endset %}{{ n.x }}{% set t | upper %}b{% endset %}{{ t }}
{% generation %}said {{ messages[0].role }}{% endgeneration %}{{ strftime_now('%d %b %Y') }}
{{ 'yes' if add_generation_prompt else 'no' }}{{ 'only' if false }}{{ tools is none }}{{ documents is none }}
{{ 1e3 }} {{ 1_000 }} {{ 0x10 }} {{ [1, 'a', {'b': none}] }} {{ (1,) }} {{ () }} {{ range(3) }} {{ none }} {{ true }}
"""
LINES = LANGUAGE.strip().splitlines()

LONG = "{% set a = 'abcdefgh' * 100000 %}"  # 800,000 characters
DOUBLED = "{% set n = namespace(a='ab') %}{% for i in range(60) %}{% set n.a = STEP %}{% endfor %}"
SHARED = "{% set n = namespace(a=START) %}{% for i in range(64) %}{% set n.a = STEP %}{% endfor %}"
MANY = "{% for i in range(99999) %}{% for j in range(99999) %}BODY{% endfor %}{% endfor %}"
LISTS = SHARED.replace("START", "[]").replace("STEP", "[n.a, n.a]")
TUPLES = SHARED.replace("START", "()").replace("STEP", "(n.a, n.a)")


def _many(body: str) -> str:
    return MANY.replace("BODY", body)


def _doubled(step: str) -> str:
    return DOUBLED.replace("STEP", step)


HOSTILE: dict[str, str] = {
    # loops
    "range": "{% for i in range(10 ** 12) %}{% endfor %}",
    "loops": _many("x"),
    "empty loops": _many(""),
    "loops over text": LONG + "{% for c in a %}{% for d in a %}{% endfor %}{% endfor %}",
    "loops that reject": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "loops that reject slowly": LONG
    + "{% for i in range(99999) if a|upper == a|lower %}{% endfor %}",
    "loops of attributes": _many("{{ i.a }}" * 500),
    "loops of plain output": _many("{{ i }}" * 2000),
    "loops of comparisons": LONG + "{% set b = a[1:] ~ 'a' %}" + _many("{{ a == b }}"),
    "loops of order": LONG + "{% set b = a[:-1] ~ 'z' %}" + _many("{{ a < b }}"),
    "loops of slices": LONG + _many("{% set b = a[1:] %}"),
    "loops of in": LONG + _many("{{ 'zz' in a }}"),
    "loops of list in": "{% set a = range(99999)|list %}" + _many("{{ 'zz' in a }}"),
    "loop.length": _many("{{ loop.length }}{{ loop.last }}{{ loop.changed(i) }}"),
    "recursive loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "recursive loop, wide": "{% for x in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "stored loops": "{% set n = namespace(l='ab') %}{% for i in range(99999) %}{% for x in n.l %}"
    "{% set n.l = loop %}{% break %}{% endfor %}{% endfor %}{% for i in n.l %}{% endfor %}"
    + _many(""),
    # macros
    "macro calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "macro doubles": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(50) }}",
    "macro without output": "{% macro m(n) %}{% if n and m(n-1) == m(n-1) %}{% endif %}{% endmacro %}{{ m(55) }}",
    "macros call each other": "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}",
    "caller": "{% macro m() %}{{ caller() }}{% endmacro %}{% macro r() %}{% call m() %}{{ r() }}{% endcall %}{% endmacro %}{{ r() }}",
    "macro through namespace": "{% set n = namespace() %}{% macro m() %}{{ n.m() }}{% endmacro %}{% set n.m = m %}{{ m() }}",
    "many macros": "{% set n = namespace(l=[]) %}"
    + _many("{% macro m() %}{% endmacro %}{% set n.l = [n.l, m] %}"),
    "arguments": "{% macro m() %}{{ varargs|length }}{% endmacro %}"
    + _many("{{ m(*range(99999)) }}"),
    # texts
    "text times": "{{ 'a' * 10 ** 10 }}",
    "times text": "{{ 10 ** 10 * 'a' }}",
    "text twice": _doubled("n.a + n.a"),
    "text joined twice": _doubled("n.a ~ n.a"),
    "text three times": _doubled("n.a + 'x' + n.a"),
    "block twice": "{% set n = namespace(a='ab') %}{% for i in range(60) %}{% set b %}{{ n.a }}{{ n.a }}{% endset %}{% set n.a = b %}{% endfor %}",
    "filter block": "{% set n = namespace(a='ab') %}{% for i in range(60) %}{% set b %}{% filter upper %}{{ n.a }}{{ n.a }}{% endfilter %}{% endset %}{% set n.a = b %}{% endfor %}",
    "replace twice": _doubled("n.a|replace('b', 'bb')|replace('b', 'bb')"),
    "replace nothing": _doubled("n.a|replace('', n.a)"),
    "replace method": _doubled("n.a.replace('', n.a)"),
    "join twice": _doubled("[n.a, n.a]|join(n.a)"),
    "join method": _doubled("n.a.join([n.a, n.a])"),
    "format twice": _doubled("'%s%s'|format(n.a, n.a)"),
    "percent twice": _doubled("'%s%s' % (n.a, n.a)"),
    "percent names": _doubled("'%(a)s%(a)s' % {'a': n.a}"),
    "format method twice": _doubled("'{0}{0}'.format(n.a)"),
    "title twice": _doubled("(n.a ~ n.a)|title"),
    "indent twice": _doubled("(n.a ~ '\\n' ~ n.a)|indent(n.a|length)"),
    "tojson twice": _doubled("[n.a, n.a]|tojson"),
    "escape twice": _doubled("('<' ~ n.a ~ n.a)|e"),
    "escape by adding": "{% set n = namespace(a='<'|safe, b='<') %}{% for i in range(60) %}{% set n.b = n.b ~ (n.a + n.b) %}{% endfor %}",
    "upper grows": "{% set n = namespace(l=[]) %}{% set a = '\u0390' * 1000000 %}"
    + _many("{% set n.l = [n.l, a|upper] %}"),
    "kept texts": "{% set n = namespace(l=[]) %}{% set a = '\U0001f600' * 1000000 %}"
    + _many("{% set n.l = [n.l, a ~ j] %}"),
    "buffered texts": "{% set a = '\U0001f600' * 1000000 %}{% set b %}"
    + _many("{{ a ~ j }}")
    + "{% endset %}",
    "kept slices": "{% set n = namespace(l=[]) %}{% set a = '\U0001f600' * 1000000 %}"
    + _many("{% set n.l = [n.l, a[1:]] %}"),
    "center": "{{ 'a'|center(10 ** 9) }}",
    "ljust": "{{ 'a'.ljust(10 ** 9) }}",
    "zfill": "{{ 'a'.zfill(10 ** 9) }}",
    "expandtabs": "{{ '\\t'.expandtabs(10 ** 9) }}",
    "indent": "{{ 'a\\nb'|indent(10 ** 9) }}",
    "indent by text": LONG + "{{ ('a\\n' * 10000)|indent(a) }}",
    "percent width": "{{ '%99999999d' % 1 }}",
    "percent width of a name": "{{ '%((a))99999999d' % {'(a)': 1} }}",
    "percent star": "{{ '%*d' % (10 ** 9, 1) }}",
    "percent precision": "{{ '%.999999999f' % 1.5 }}",
    "percent by a test": "{{ '%99999999d' is odd }}",
    "percent by divisibleby": "{{ '%99999999d' is divisibleby(3) }}",
    "format filter width": "{{ '%99999999s'|format('a') }}",
    "format method width": "{{ '{:>999999999}'.format('a') }}",
    "format method nested width": "{{ '{:>{}}'.format('a', 10 ** 9) }}",
    "format method many": LONG + "{{ ('{0}' * 100000).format(a) }}",
    "tojson indent": "{{ [1]|tojson(indent=10 ** 9) }}",
    "tojson indented": "{% set n = namespace(a=1) %}{% for i in range(90) %}{% set n.a = [n.a, 1] %}{% endfor %}{% for i in range(9999) %}{{ n.a|tojson(indent=100) }}{% endfor %}",
    "tojson separators": LONG + "{{ range(9999)|list|tojson(separators=(a, a)) }}",
    "tojson many": LONG + _many("{% set b = a|tojson %}"),
    "pprint": LONG + "{{ [a]|pprint }}",
    "wordwrap": LONG + "{{ a|wordwrap(1) }}",
    "urlize": LONG + "{{ a|urlize }}",
    "lipsum": "{{ lipsum(n=10 ** 9) }}",
    "cycler": "{{ cycler(*range(99999)).next() }}",
    "strftime": "{{ strftime_now('%A' * 1000) }}",
    "search from the right": "{% set a = 'a' * 800000 %}{% set b = 'b' ~ 'a' * 400000 %}{{ a.rfind(b) }}",
    "strip by many": "{% set a = 'a' * 800000 %}"
    + _many("{{ a.strip('bcdefghijk' * 1000 ~ 'a') }}"),
    "split": "{% set a = 'a ' * 400000 %}{% set n = namespace(l=[]) %}"
    + _many("{% set n.l = [n.l, a.split()] %}"),
    "splitlines": "{% set a = 'a\\n' * 400000 %}{% set n = namespace(l=[]) %}"
    + _many("{% set n.l = [n.l, a.splitlines()] %}"),
    "output": LONG + "{{ a }}{{ a }}{{ a }}",
    # lists and dicts
    "list times": "{{ [0] * 10 ** 9 }}",
    "tuple times": "{{ (0, 1) * 10 ** 9 }}",
    "list twice": SHARED.replace("START", "[1]").replace("STEP", "n.a + n.a"),
    "range list": "{{ range(10 ** 9)|list }}",
    "kept lists": "{% set n = namespace(l=[]) %}"
    + _many("{% set n.l = [n.l, range(99999)|list] %}"),
    "kept dicts": "{% set n = namespace(l=[]) %}"
    + _many("{% set n.l = [n.l, {'a': 1}, {'b': 2}, dict(c=3)] %}"),
    "kept namespaces": "{% set n = namespace(l=[]) %}"
    + _many("{% set n.l = [n.l, namespace(), namespace(a=1)] %}"),
    "deep list": "{% set n = namespace(l=[]) %}" + _many("{% set n.l = [n.l] %}"),
    "deep list, written": "{% set n = namespace(l=[]) %}{% for i in range(50000) %}{% set n.l = [n.l] %}{% endfor %}{{ n.l }}",
    "deep tuple, hashed": "{% set n = namespace(l=()) %}{% for i in range(50000) %}{% set n.l = (n.l,) %}{% endfor %}{{ {n.l: 1} }}",
    "deep filters": "{% set n = namespace(l='a') %}{% for i in range(50000) %}{% set n.l = n.l|map('upper') %}{% endfor %}{{ n.l|list }}"
    + _many(""),
    "batch": "{{ [1]|batch(10 ** 9, 0)|list }}",
    "slice": "{{ [1]|slice(10 ** 9)|list }}",
    "sort": _many("{{ range(99999)|sort|length }}"),
    "sort texts": "{% set a = 'a' * 90000 %}{% set n = namespace(l=[]) %}{% for i in range(200) %}{% set n.l = n.l + [a ~ i] %}{% endfor %}"
    + _many("{{ n.l|sort|length }}"),
    "unique": _many("{{ range(99999)|unique|list|length }}"),
    "map": _many("{{ range(99999)|map('string')|list|length }}"),
    "map of long names": "{% set a = '.a' * 400000 %}{{ range(99999)|map(attribute=a, default={})|list }}",
    "select": _many("{{ range(99999)|select('odd')|list|length }}"),
    "sum of lists": "{{ ([[0] * 1000] * 10000)|sum(start=[])|length }}",
    "dictsort": "{% set d = dict([[1, 2]] * 90000) %}" + _many("{{ d|dictsort|length }}"),
    "fromkeys": "{{ dict.fromkeys(range(99999)) }}",
    "shared, written": LISTS + "{{ n.a }}",
    "shared, as a string": LISTS + "{{ n.a|string|length }}",
    "shared, joined": LISTS + "{{ 'a' ~ n.a }}",
    "shared, as JSON": LISTS + "{{ n.a|tojson|length }}",
    "shared, formatted": LISTS + "{{ '%s' % (n.a,) }}",
    "shared, by str.format": LISTS + "{{ '{}'.format(n.a) }}{{ '{!r}'.format(n.a) }}",
    "shared, replaced": LISTS + "{{ n.a|replace('a', 'b') }}",
    "shared, compared": LISTS
    + LISTS.replace("n.", "m.").replace("set n", "set m")
    + "{{ n.a == m.a }}",
    "shared, tested": LISTS
    + LISTS.replace("n.", "m.").replace("set n", "set m")
    + "{{ n.a is eq(m.a) }}",
    "shared, searched": LISTS
    + LISTS.replace("n.", "m.").replace("set n", "set m")
    + "{{ n.a in [m.a] }}",
    "shared, indexed": LISTS
    + LISTS.replace("n.", "m.").replace("set n", "set m")
    + "{{ [m.a].index(n.a) }}",
    "shared, sorted": LISTS
    + LISTS.replace("n.", "m.").replace("set n", "set m")
    + "{{ [n.a, m.a]|sort }}",
    "shared, raised": LISTS + "{{ raise_exception(n.a) }}",
    "shared, as a key": TUPLES + "{{ {n.a: 1} }}",
    "shared, looked up": TUPLES + "{{ {}[n.a] }}",
    "shared, got": TUPLES + "{{ {}.get(n.a) }}",
    "shared, in a dict": TUPLES + "{{ n.a in {} }}",
    "shared, as a dict": TUPLES + "{{ dict([[n.a, 1]]) }}",
    "shared, unique": TUPLES + "{{ [n.a]|unique|list }}",
    "shared, undefined": TUPLES + "{{ [][n.a].b }}",
    "shared, changed": LISTS
    + LISTS.replace("n.", "m.").replace("set n", "set m")
    + "{% for i in [n.a, m.a] %}{{ loop.changed(i) }}{% endfor %}",
    "namespace in itself": "{% set n = namespace() %}{% set n.n = n %}{{ [n] }}",
    "namespace in itself, JSON": "{% set n = namespace() %}{% set n.n = [n] %}{{ n.n|tojson }}",
    "set of keys": "{% set d = {'a': 1} %}{{ d.keys() - d.keys() }}",
    "same hashes": "{{ range(0, 99999 * (2 ** 61 - 1), 2 ** 61 - 1)|unique|list|length }}",
    "same hashes as keys": "{{ {(2 ** 61 - 1) * 5: 1} }}",
    "same hashes in tuples": "{{ dict([[((2 ** 61 - 1) * 5,), 1]]) }}",
    "shared, from pairs read once": TUPLES + "{{ dict([[n.a, 1]|map('default')]) }}",
    "starts with many": _many("{{ 'b'.startswith(('a',) * 99999) }}"),
    "negative times": "{% set a = 'abc' * -(10 ** 12) %}{% set b = [1] * -(10 ** 12) %}"
    + _many("x"),
    "negative indent": LONG + "{% set b = 'a\\nb'|indent(-(10 ** 12)) %}" + _many("x"),
    "many attributes": LONG + "{{ [{'a': a}]|sort(attribute='a,' * 20000 ~ 'a') }}",
    "few attributes": LONG + "{{ [{'a': a}]|sort(attribute='a,' * 49 ~ 'a') }}",
    "loop over loop": "{% for i in 'abc' %}{% for j in loop %}{% endfor %}{% endfor %}",
    "loop of a loop": "{% for i in [1] recursive %}{{ loop(loop) }}{% endfor %}",
    "title of words": _many("{{ ('a ' * 50000)|title|length }}"),
    "words": _many("{{ ('a ' * 50000)|wordcount }}"),
    "str.format of fields": _many("{{ ('{}' * 5000).format(*range(5000)) }}"),
    "long constants": _many("{{ 'a' * 70000 == '" + "a" * 70_000 + "' }}"),
    "long list constants": _many("{% set x = [" + "1," * 9_000 + "] %}"),
    "chain of undefined": "{% set n = namespace(u=1) %}" + _many("{% set n.u = [][n.u] %}"),
    "chain of methods": "{% set n = namespace(u=1) %}" + _many("{% set n.u = [n.u].index %}"),
    "chain of iterators": "{% set n = namespace(u=1) %}" + _many("{% set n.u = [n.u]|reverse %}"),
    "chain of views": "{% set n = namespace(u=1) %}" + _many("{% set n.u = {'a': n.u}.items() %}"),
    "chain of macros": "{% set n = namespace(m=1) %}{% macro f(old) %}{% macro m() %}{{ old }}{% endmacro %}{% set n.m = m %}{% endmacro %}"
    + _many("{{ f(n.m) }}"),
    "chain of namespaces": "{% set n = namespace(u=1) %}"
    + _many("{% set n.u = namespace(u=n.u) %}"),
    "JSON, deep and indented": "{% set n = namespace(a=1) %}{% for i in range(90) %}{% set n.a = [n.a, 1] %}{% endfor %}"
    + _many("{% set x = n.a|tojson(indent=1) %}"),
    "filters of one item": _many("{% set x = [1]|map('string')|select|list|first %}"),
    "plain arithmetic": _many("{% set x = i * j + i - j // 3 %}"),
    "missing items": _many("{% set x = i['a']['b'] if i['a'] is defined %}"),
    "text of a list": _many("{% set x = [i, j, [i, j]] ~ '' %}"),
    "indexed errors": _many("{% set x = [].a or {}.a or ''.a or i.a %}"),
    "split words": _many("{% set x = 'a b c d e f g h i j k l'.split() %}"),
    "joined words": _many("{% set x = ['a', 'b', i, j]|join(', ') %}"),
    "macro calls": "{% macro m(a, b=1) %}{{ a }}{{ b }}{% endmacro %}"
    + _many("{% set x = m(i) %}"),
    "JSON of little": _many("{% set x = {'a': i, 'b': [j]}|tojson %}"),
    "JSON of little, indented": _many("{% set x = {'a': i, 'b': [j]}|tojson(indent=2) %}"),
    "formatted": _many("{% set x = '{:>3} {}'.format(i, j) %}"),
    "formatted by percent": _many("{% set x = '%3d %s' % (i, j) %}"),
    "dates": _many("{% set x = strftime_now('%A %d %B %Y %H:%M:%S') %}"),
    "sorted little": _many("{% set x = [i, j, 3, 2]|sort %}"),
    "indented": _many("{% set x = 'a\\nb\\nc'|indent(4) %}"),
    # what is recorded of texts
    "recorded changes": "{% set n = namespace(t=messages[0].content) %}"
    + _many("{% set n.t = n.t.lower() %}"),
    "recorded parts": "{% set n = namespace(t='') %}"
    + _many("{% set n.t = n.t ~ messages[0].content[:0] %}"),
    "recorded parts, doubled": "{% set n = namespace(t=messages[0].content[:0]) %}"
    "{% for i in range(17) %}{% set n.t = n.t ~ n.t %}{% endfor %}" + _many("{{ n.t|trim }}"),
    "recorded parts, asked": "{% set n = namespace(t=messages[0].content[:0]) %}"
    "{% for i in range(17) %}{% set n.t = n.t ~ n.t %}{% endfor %}"
    + _many("{% if n.t == 'a' or n.t %}{% endif %}"),
    "recorded parts, written": "{% set n = namespace(t=messages[0].content[:0]) %}"
    "{% for i in range(14) %}{% set n.t = n.t ~ n.t %}{% endfor %}" + _many("{{ n.t }}"),
    "recorded slices": _many("{% for c in messages[0].content * 9999 %}{{ c }}{% endfor %}"),
    "list is itself": "{% set a = range(99999)|list %}" + _many("{{ a is sameas(a) }}"),
    "list in a cycle": "{% set a = range(99999)|list %}" + _many("{{ loop.cycle(1, a) }}"),
    "list and a length": "{% set a = range(99999)|list %}"
    + _many("{{ messages[0].content|length in [a] }}"),
    "list and pieces": "{% set a = range(99999)|list %}"
    + _many("{{ messages[0].content.split() == a }}"),
    "list and a test": "{% set a = range(99999)|list %}" + _many("{{ 1 is eq(a) }}"),
    # what Jinja computes when it compiles
    "constant times": "{% if false %}{{ 'a' * 10 ** 9 }}{% endif %}",
    "constant power": "{% if false %}{{ 7 ** (7 ** 9) }}{% endif %}",
    "constant or": "{% if false %}{{ ('a' or messages) * 10 ** 9 }}{% endif %}",
    "constant in a condition": "{{ 1 if true else ('a' if true else x) * 10 ** 9 }}",
    "constant filter": "{% if false %}{{ 'a'|center(10 ** 9) }}{% endif %}",
    "constant filters": "{% if false %}{{ '\"'" + "|tojson" * 40 + " }}{% endif %}",
    "constant format": "{% if false %}{{ '%999999999d' % 1 }}{% endif %}",
    # whether it runs here or in transformers
    "function's attribute": "{{ 'elsewhere' if cycler.current is defined }}",
    "function's arguments": "{{ 'elsewhere' if strftime_now.arguments is defined }}",
    "functions compared": "{{ 'elsewhere' if ''.upper == ''.upper }}",
    "functions searched": "{{ 'elsewhere' if ''.upper in [''.upper] }}",
    # numbers
    "power": "{{ 10 ** (10 ** 9) }}",
    "power by steps": SHARED.replace("START", "10").replace("STEP", "n.a * n.a") + "{{ n.a }}",
    "sum by steps": "{% set n = namespace(a=2 ** 2000) %}{% for i in range(99) %}{% set n.a = n.a + n.a %}{% endfor %}",
    "round up": "{{ 1|round(10 ** 9, 'ceil') }}",
    "round down": "{{ 1|round(-10 ** 9) }}",
    "digits": "{{ ('f' * 900000)|int(base=16) }}",
    # escapes
    "class": "{{ ''.__class__ }}",
    "mro": "{{ ''.__class__.mro() }}",
    "item": "{{ ''['__class__'] }}",
    "attr": "{{ ''|attr('__class__') }}",
    "map attribute": "{{ ['']|map(attribute='__class__')|list }}",
    "sort attribute": "{{ ['']|sort(attribute='__class__') }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "function's own": "{{ raise_exception.run }}",
    "method's own": "{{ ''.strip.bound }}",
    "macro's own": "{% macro m() %}{% endmacro %}{{ m._func }}",
    "macro's environment": "{% macro m() %}{% endmacro %}{{ m._environment.filters }}",
    "loop's own": "{% for i in [1] %}{{ loop._iterator }}{% endfor %}",
    "loop's class": "{% for i in [1] %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "self": "{{ self._TemplateReference__context }}",
    "undefined": "{{ nothing._undefined_obj }}",
    "undefined's class": "{{ nothing.__class__ }}",
    "format string": "{{ '{0.__class__}'.format('') }}",
    "format item": "{{ '{0[__class__]}'.format('') }}",
    "format function": "{{ '{0.run.__globals__}'.format(range) }}",
    "format_map": "{{ '{a.__class__}'.format_map({'a': ''}) }}",
    "safe format": "{{ ('{0.__class__}'|safe).format('') }}",
    "stored format": "{% set n = namespace(f=''.format) %}{{ ['{0.__class__}']|map('format', 1)|list }}{{ n.f.__self__ }}",
    "namespace's class": "{{ namespace(a=1).__class__ }}",
    "namespace's attributes": "{{ namespace(a=1)._Namespace__attrs }}",
    "namespace with underscores": "{{ namespace(__class__=1) }}",
    "namespace set": "{% set n = namespace() %}{% set n._a = 1 %}",
    "generator": "{{ (['a']|map('upper')).gi_frame.f_globals }}",
    "append": "{{ messages.append(1) }}",
    "update": "{{ messages[0].update({'a': 1}) }}",
    "set block of a message": "{% set m = messages[0] %}{% set m.role %}evil{% endset %}",
    "set of a message": "{% set m = messages[0] %}{% set m.role = 'evil' %}",
    "set of two of a message": "{% set m = messages[0] %}{% set a, m.role = 1, 2 %}",
    "indent of a list": "{{ messages|indent }}",
    "pop": "{{ messages[0].pop('role') }}",
    "import": "{% import 'os' as os %}",
    "import of itself": "{% from self import m %}",
    "include": "{% include '/etc/passwd' %}",
    "extends": "{% extends 'a' %}",
    "block": "{% block a %}{{ self.a() }}{% endblock %}",
    "autoescape": "{% autoescape true %}{% endautoescape %}",
    "unknown filter": "{{ 'a'|nothing }}",
    "unknown test": "{{ 'a' is nothing }}",
    "unknown filter by name": "{{ ['a']|map('nothing')|list }}",
    "call of a text": "{{ 'a'() }}",
    "names of ours": "{{ range(1, environment=2) }}",
    # parsing
    "long": "a" * 50_000_000,
    "deep brackets": "{{ " + "(" * 40_000 + "1" + ")" * 40_000 + " }}",
    "deep lists": "{{ " + "[" * 300 + "]" * 300 + " }}",
    "deep blocks": "{% if 1 %}" * 9_000,
    "closed deep blocks": "{% if 1 %}" * 3_000 + "{% endif %}" * 3_000,
    "hundred thousand blocks": "{% if 1 %}" * 100_000 + "{% endif %}" * 100_000,
    "deep loops": "{% for i in [1] %}" * 25 + "{% endfor %}" * 25,
    "deep macros": "{% macro m() %}" * 200 + "{% endmacro %}" * 200,
    "long sum": "{{ " + "1 + " * 20_000 + "1 }}",
    "long or": "{{ " + "1 or " * 15_000 + "1 }}",
    "long chain": "{{ a" + ".a" * 40_000 + " }}",
    "long filters": "{{ a" + "|d" * 40_000 + " }}",
    "long not": "{{ " + "not " * 20_000 + "1 }}",
    "long minus": "{{ " + "- " * 40_000 + "1 }}",
    "long if": "{{ " + "1 if 1 else " * 8_000 + "1 }}",
    "long elif": "{% if 0 %}" + "{% elif 0 %}" * 8_000 + "{% endif %}",
    "many outputs": "{{a}}" * 19_000,
    "many names": "".join(f"{{% set a{n} = 1 %}}" for n in range(4_500)),
    "many names in branches": "".join(
        f"{{% if 1 %}}{{% set a{n} = 1 %}}{{% endif %}}" for n in range(2_200)
    )
    + "{{ x.y.z() }}",
    "many macros, wide": "{% macro m() %}{% endmacro %}" * 3_000 + "{{ x.y.z() }}",
    "wide in deep loops": "{% for i in [1] %}" * 19
    + "{{ a }}" * 4_700
    + "{{ x.y.z() }}"
    + "{% endfor %}" * 19,
    "unclosed": "{{ 'a",
    "unclosed comment": "{#" * 40_000,
    "wrong tag": "{% nothing %}",
    "huge number": "{{ " + "9" * 90_000 + " }}",
    "repeated name": "{{ dict(a=1, a=2) }}",
    "infinite number": "{{ 1e999 * 1e999 }}",
}
