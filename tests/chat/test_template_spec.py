"""Templates as data: files, errors, and what becomes of them with a tokenizer."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from shardmill.chat import (
    KNOWN_TEMPLATES,
    Insert,
    Marker,
    TemplateSpec,
    Text,
    TrainPolicy,
    bind_template,
    known_template,
    load_template_spec,
    spec_from_json,
    template_spec,
)
from shardmill.errors import OptionError, TemplateError, TokenizerError
from shardmill.protocols import Texts, Tokenizer
from shardmill.records import Conversation, Ragged
from shardmill.tokenizers import ByteTokenizer, adapt_tokenizer
from tests.chat.conftest import MARKERS

TOML = """
name = "small"
begin = [{marker = "bos"}]
trim = true
[roles.user]
before = [{marker = "usr"}]
end = [{marker = "eot"}]
[roles.assistant]
before = [{marker = "asst"}, {text = "says"}, {text = ": "}]
end = [{marker = "eot"}]
after = [{text = "\\n"}]
[tool_call]
between = [{text = " and "}]
before = [{marker = "im_start"}]
"""


def small() -> dict[str, Any]:
    turn = {"end": [{"marker": "eot"}]}
    return {
        "name": "small",
        "roles": {
            "user": {"before": [{"marker": "usr"}], **turn},
            "assistant": {"before": [{"marker": "asst"}], **turn},
        },
    }


def test_a_toml_file_is_a_template(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(TOML)
    spec = load_template_spec(path)
    assert (spec.name, spec.begin, spec.trim) == ("small", (Marker("bos"),), True)
    assert spec.roles["assistant"].before == (Marker("asst"), Text("says"), Text(": "))
    assert spec.roles["assistant"].after == (Text("\n"),)
    assert spec.tool_call == Insert(between=(Text(" and "),), before=(Marker("im_start"),))
    assert (spec.reasoning, spec.tools, spec.fold_system) == (None, None, None)


@pytest.mark.parametrize("name", KNOWN_TEMPLATES)
def test_a_known_template_written_to_a_json_file_is_the_same_template(
    name: str, tmp_path: Path
) -> None:
    path = tmp_path / "template.json"
    path.write_text(json.dumps(known_template(name).to_json()))
    assert load_template_spec(path) == known_template(name)


KNOWN_SHA256 = {
    "four-marker": "85f2e39c8abbc05b9f97da0e5341775457af4e7c4746a2c8c75218ac4d99597a",
    "chatml": "a31133324a3354b44d5dc1de7bb053aa22754adc60e80afc14bc222a94aea7db",
    "llama-3": "6f22b75c22acfd8bf4adb4ad7e5642ebc9aa9f695ce1f78af5e97c55670f7d7b",
    "gemma": "27da1c85956e338b18d3d37e3768f038ce8b151da90254dd9f8c5a34145f9a2d",
    "qwen2.5": "59fd584711a5e3261c5225c6ceaee99577d76c901813a1518a6a797484e9bfbd",
    "qwen3": "a39b8f0b90ecdab598ec2ced7154110a8d7cf835108dfa749b85fabc871b9f60",
    "qwen3-instruct": "829715828d6938e121bd96c9ed813fbc11ed034b9d4f65cafd3389fcbd57f306",
    "mistral": "134e969362f33245f5d254e29be694e8d9d79dccb695f2ef004ad8e1fd0c76ec",
    "mistral-v3": "ca23d7525ee0f40e59120924da744fba435183dbbc604c0c2929d3957413bab4",
    "phi-3": "d3cb010fbf186b881d1e6135665f85fdb7bc31fad188fc75d9064e3ef56f4f72",
    "phi-4": "d8e07b8ac98ef494d9fd443d93b93e3b2712b8b67a44ca28bb1f0c22eb680c4d",
    "smollm3": "0f1aa835138f1feafecae21ae8af152a685e5cdf29729e63372283a619d923b2",
    "glm-4.5": "0f8b8f29e4b4596c99d9be1b9109675227e5be8569af1f6e1a822d6386d4f773",
    "deepseek-r1": "e6871f932bedfa8394c68378b74fd5ac2120f707e096fa6bf29d3bf10d306305",
    "gpt-oss": "e1fdb9c6f558a5957eb39d4c1ac02a5e4b123ea9008a56329ea41370d0f42a28",
}


def markers_in(data: object) -> set[str]:
    """Every marker of a template in JSON."""
    if isinstance(data, dict):
        found = set().union(*map(markers_in, data.values()))
        return found | {data["marker"]} if "marker" in data else found
    return set().union(*map(markers_in, data)) if isinstance(data, list) else set()


def bytes_for(spec: TemplateSpec) -> ByteTokenizer:
    """A tokenizer that has the markers of a template."""
    names = sorted(markers_in(spec.to_json()))
    strings = {name: name if name[0] in "<[" else f"<|{name}|>" for name in names}
    return ByteTokenizer(byte_offset=len(names), specials=strings)


def test_the_known_templates_are_the_files_in_the_package() -> None:
    folder = Path(template_spec.__file__).parent / "templates"
    assert {path.name for path in folder.iterdir()} == {f"{name}.json" for name in KNOWN_SHA256}
    specs = {name: known_template(name) for name in KNOWN_TEMPLATES}
    assert {
        name: bind_template(spec, bytes_for(spec)).describe()["sha256"]
        for name, spec in specs.items()
    } == KNOWN_SHA256


def change(path: str, value: object) -> dict[str, Any]:
    """The small template with one thing changed; None takes it away."""
    data = copy.deepcopy(small())
    *way, last = path.split(".")
    place = data
    for key in way:
        place = place[key]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return data


def joined(path: str, value: object) -> dict[str, Any]:
    return {**change(path, value), "join": True}


def shared(end: str) -> dict[str, Any]:
    """Answers that end with this marker."""
    return {**change("roles.assistant.end", [{"marker": end}]), "join": True, "shared_ends": True}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (change("role", {}), r"unknown key 'role'; did you mean 'roles'\?"),
        (change("roles.user.befor", []), r"roles.user: unknown key 'befor'; did you mean 'before'"),
        (change("roles.human", {}), "roles: unknown key 'human'; known here: system, user"),
        (change("roles.user.before", [{"mark": "usr"}]), r"before\[0\]: unknown key 'mark'; did"),
        (change("reasoning", {"between": []}), "reasoning: unknown key 'between'"),
        (change("name", None), "name is None"),
        (change("name", 3), "name is 3"),
        (change("roles", None), "roles is None, wanted an object"),
        (change("roles.user", None), "roles has no user"),
        (change("roles.user.before", []), "roles.user.before: has no marker"),
        (change("roles.user.before", [{"text": "U:"}]), "has no marker, so text could imitate"),
        (change("roles.assistant.end", None), "roles.assistant.end: has no marker"),
        (change("roles.user.before", "usr"), "before is 'usr', wanted a list of pieces"),
        (change("begin", [{"marker": "a", "text": "b"}]), r"begin\[0\] is .* wanted"),
        (change("begin", [{}]), r"begin\[0\] is \{\}, wanted"),
        (change("begin", [{"text": ""}]), r"begin\[0\].text is '', wanted a text"),
        (change("begin", [{"text": "\ud800"}]), "wanted a text"),
        (change("begin", [{"marker": 3}]), r"begin\[0\].marker is 3"),
        (change("trim", "yes"), "trim is 'yes'"),
        (change("fold_system", 3), "fold_system is 3"),
        (change("tools", {}), "there is no roles.system"),
        (change("default_system", "s"), "default_system is written in the system turn, but there"),
        (change("default_system", "\ud800"), "default_system is '\\\\ud800', wanted a text"),
        (change("join", 1), "join is 1, wanted true or false"),
        (change("no_reasoning", [{"text": "x"}]), 'no_reasoning needs "join": true'),
        (change("roles.user.json", True), r'roles.user.json needs "join": true'),
        (change("roles.user.content", {"befor": []}), r"user.content: unknown key 'befor'; did"),
        (change("roles.user.content", {"after": [{"text": "x"}]}), r"user.content needs \"join\""),
        (joined("roles.user.json", "yes"), "json is 'yes', wanted true or false"),
        (joined("roles.user.content", {"between": [{"text": "x"}]}), "only tool results can share"),
        (joined("roles.user.content", {"before": [{"value": "name"}]}), "unknown key 'value'"),
        (joined("roles.assistant.content", {"after": [{"text": "x"}]}), "no content.after"),
        (joined("roles.assistant.json", True), "wanted no `json`"),
        (joined("call_end", [{"marker": "x"}]), "call_end needs tool_call"),
        (joined("call_end", [{"text": "x"}]), "call_end: has no marker"),
        (joined("call_end", [{"marker": "usr"}]), "opens turns"),
        (joined("preamble", {"between": []}), "preamble: unknown key 'between'"),
        (joined("tools_end", [{"marker": "x"}]), "tools_end needs tools"),
        (joined("tool_call", {"before": [{"value": "nam"}]}), "'nam', wanted 'name' or 'id'"),
        (change("tools_first", True), 'tools_first needs "join": true'),
        (joined("tools_first", True), "tools_first needs tools"),
        (joined("argument", {}), "argument needs tool_call"),
        (joined("argument", {"before": [{"value": "name"}]}), "is 'name', wanted 'key'"),
        ({**joined("argument", {}), "tool_call": {}}, 'argument needs {"value": "name"} in tool'),
        (change("shared_ends", True), 'shared_ends needs "join": true'),
        (shared("asst"), "opens turns"),
        (change("tool_call", {"before": [{"value": "id"}]}), 'a {"value": ...} needs "join": true'),
        ([], r"template is \[\], wanted an object"),
    ],
)
def test_a_wrong_template_is_refused_with_the_key(data: object, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        spec_from_json(data)


def test_a_system_turn_and_a_folded_system_exclude_each_other() -> None:
    data = small()
    data["roles"]["system"] = data["roles"]["user"]
    data["fold_system"] = "\n"
    with pytest.raises(TemplateError, match=r"both roles\.system and fold_system"):
        spec_from_json(data)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match=r"a\.yaml: wanted a file that ends in"):
        load_template_spec(tmp_path / "a.yaml")
    with pytest.raises(TemplateError, match=r"gone\.json: cannot be read: No such file"):
        load_template_spec(tmp_path / "gone.json")
    for name, data in (("a.json", b"{"), ("a.toml", b"= 3"), ("b.json", b"\xff")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(TemplateError, match=f"{name}: not {name[2:].upper()}"):
            load_template_spec(tmp_path / name)
    (tmp_path / "c.json").write_text('{"nam": 1}')
    with pytest.raises(TemplateError, match=r"c.json: unknown key 'nam'; did you mean 'name'"):
        load_template_spec(tmp_path / "c.json")


def test_an_unknown_name_shows_the_nearest() -> None:
    with pytest.raises(OptionError, match=r"'chatlm'; did you mean 'chatml'\? Known here: four-"):
        known_template("chatlm")


def byte_tokenizer() -> ByteTokenizer:
    return ByteTokenizer(byte_offset=20, specials=MARKERS)


def test_markers_are_found_by_name_and_by_string(chat_tokenizers: dict[str, Tokenizer]) -> None:
    for tokenizer in chat_tokenizers.values():
        names = tokenizer.special_token_ids()
        by_string = bind_template(known_template("chatml"), tokenizer)
        assert by_string.markers == {
            "<|im_start|>": names["im_start"],
            "<|im_end|>": names["im_end"],
        }
        by_name = bind_template(known_template("four-marker"), tokenizer)
        assert by_name.markers == {name: names[name] for name in ("sys", "usr", "asst", "eot")}
        assert by_name.marker_ids == {names[name] for name in ("sys", "usr", "asst", "eot")}
        assert by_name.end_ids == (names["eot"],)


def test_a_missing_marker_is_named_with_the_markers_there_are() -> None:
    few = ByteTokenizer(byte_offset=4, specials={"eot": "<|eot|>", "usr": "<|usr|>"})
    with pytest.raises(
        TokenizerError,
        match=r"'chatml', system.before: the marker '<\|im_start\|>' is not one special token of "
        r"ByteTokenizer.*which has 'eot' \(0\), 'usr' \(1\); use",
    ):
        bind_template(known_template("chatml"), few)
    with pytest.raises(TokenizerError, match="which has no special tokens"):
        bind_template(known_template("chatml"), ByteTokenizer())


class Own:
    """A caller's tokenizer: letters, and what the test says of specials."""

    vocab_size = 300

    def __init__(self, specials: dict[str, int], marker: int | None = None) -> None:
        self.specials, self.marker = specials, marker

    def encode(self, text: str) -> list[int]:
        return [min(ord(letter), 255) for letter in text]

    def special_token_ids(self) -> dict[str, int]:
        return self.specials


def test_a_callers_tokenizer_is_asked_by_name_and_for_markers() -> None:
    named = {"sys": 256, "usr": 257, "asst": 258, "eot": 259}
    template = bind_template(known_template("four-marker"), adapt_tokenizer(Own(named)))
    conversation = Conversation(messages=[{"role": "assistant", "content": "A"}])
    rendered = template.render([conversation], TrainPolicy())
    assert rendered.examples.ids.values.tolist() == [258, 65, 259]

    class Knowing(Own):
        def marker_id(self, text: str) -> int | None:
            return {"<|im_start|>": 260, "<|im_end|>": 261}.get(text)

    found = bind_template(known_template("chatml"), adapt_tokenizer(Knowing({})))
    assert found.marker_ids == {260, 261}


@pytest.mark.parametrize(
    ("specials", "message"),
    [
        ({"sys": 256, "usr": 257, "asst": 258, "eot": 258}, "'asst' and 'eot' are both id 258|"
         "'eot' and 'asst' are both id 258"),
        ({"sys": 256, "usr": 257, "asst": 258, "eot": -1}, "'eot' is not one special token"),
        ({"sys": 256, "usr": 257, "asst": 258}, "'eot' is not one special token"),
    ],
)  # fmt: skip
def test_markers_need_different_ids_of_at_least_0(specials: dict[str, int], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        bind_template(known_template("four-marker"), adapt_tokenizer(Own(specials)))


def test_fixed_text_that_becomes_a_marker_is_refused() -> None:
    data = small()
    data["roles"]["user"]["before"].append({"text": "ABC"})
    own = adapt_tokenizer(Own({"usr": 256, "asst": 258, "eot": 66}))
    with pytest.raises(TokenizerError, match="encodes the plain text 'ABC' to a marker"):
        bind_template(spec_from_json(data), own)


def test_roles_with_the_same_opening_are_refused() -> None:
    class Deaf(ByteTokenizer):
        """Every text is one unknown id."""

        def encode_batch(self, texts: Texts) -> Ragged:
            return Ragged.from_sequences([[20]] * len(texts))

    deaf = Deaf(byte_offset=20, specials=MARKERS)
    with pytest.raises(TokenizerError, match="one is the beginning of the other"):
        bind_template(known_template("chatml"), deaf)


def test_the_sha256_covers_everything_that_decides_ids_and_mask() -> None:
    tokenizer = byte_tokenizer()
    base = bind_template(spec_from_json(small()), tokenizer).describe()
    assert base["kind"] == "tokens"
    assert base["name"] == "small"
    assert base["markers"] == {"usr": 1, "eot": 3, "asst": 2}
    assert base["end_ids"] == [3]
    assert base["spec"] == spec_from_json(small()).to_json()
    assert json.loads(json.dumps(base)) == base
    renamed = bind_template(spec_from_json(change("name", "other")), tokenizer).describe()
    assert renamed["sha256"] == base["sha256"]
    others = [
        change("trim", True),
        change("fold_system", ""),
        change("begin", [{"marker": "bos"}]),
        change("roles.user.after", [{"text": "\n"}]),
        change("reasoning", {}),
        change("tool_call", {}),
        change("roles.assistant.end", [{"marker": "im_end"}]),
    ]
    found = {bind_template(spec_from_json(data), tokenizer).describe()["sha256"] for data in others}
    assert len(found | {base["sha256"]}) == len(others) + 1


def test_adjacent_texts_are_encoded_as_one(chat_tokenizers: dict[str, Tokenizer]) -> None:
    data = small()
    data["roles"]["user"]["before"] += [{"text": "assis"}, {"text": "tant"}]
    tokenizer = chat_tokenizers["byte-bpe"]
    template = bind_template(spec_from_json(data), tokenizer)
    found = template.pieces["user.before"].tolist()
    assert found == [tokenizer.special_token_ids()["usr"], *tokenizer.encode("assistant")]
    assert len(found) < 1 + len(tokenizer.encode("assis")) + len(tokenizer.encode("tant"))


def test_an_end_that_opens_the_next_turn_is_refused() -> None:
    for opener in ("usr", "asst"):
        data = small()
        data["roles"]["assistant"]["end"] = [{"marker": "eot"}, {"marker": opener}]
        with pytest.raises(TemplateError, match="opens turns"):
            spec_from_json(data)


def test_an_opening_that_is_the_beginning_of_another_is_refused() -> None:
    data = small()
    data["roles"]["assistant"]["before"] = [{"marker": "usr"}, {"text": "bot:"}]
    tokenizer = ByteTokenizer(byte_offset=2, specials={"usr": "<|usr|>", "eot": "<|eot|>"})
    with pytest.raises(TokenizerError, match="the beginning of the other"):
        bind_template(spec_from_json(data), tokenizer)


def test_what_a_neighbour_marks_needs_no_marker_of_its_own(
    chat_tokenizers: dict[str, Tokenizer],
) -> None:
    """hi<asst>yo<eot>: no end of the user's turn, and a system turn that only comes first."""
    data = small()
    data["begin"] = [{"marker": "bos"}]
    data["roles"]["user"] = {"before": [{"marker": "usr"}]}
    data["roles"]["system"] = {}
    spec = spec_from_json(data)
    assert spec_from_json(spec.to_json()) == spec
    tokenizer = chat_tokenizers["byte"]
    rendered = bind_template(spec, tokenizer).render(
        [
            Conversation(messages=[{"role": role, "content": text} for role, text in said])
            for said in (
                [("system", "so"), ("user", "hi"), ("assistant", "yo")],
                [("user", "hi"), ("system", "so"), ("assistant", "yo")],
                [("system", ""), ("user", "hi"), ("assistant", "yo")],
            )
        ],
        TrainPolicy(),
    )
    text = tokenizer.decode(rendered.examples.ids.values)
    assert text == "<bos>so<|usr|>hi<|asst|>yo<|eot|>"
    assert rendered.examples.turn_starts.tolist() == [1, 3, 6]
    assert [drop.reason for drop in rendered.drops] == ["system_not_first", "no_place_for_system"]


@pytest.mark.parametrize(
    ("role", "spec"),
    [
        ("assistant.before", {"user": {"end": []}, "assistant": {"before": []}}),
        ("user.end", {"user": {"end": []}, "assistant": {"before": []}}),
        ("system.before", {"system": {"end": [{"marker": "eot"}]}}),
        ("assistant.end", {"assistant": {"end": []}}),
    ],
)
def test_a_missing_marker_that_no_neighbour_has_is_refused(role: str, spec: dict[str, Any]) -> None:
    data = small()
    for name, one in spec.items():
        data["roles"][name] = {**data["roles"].get(name, {}), **one}
    with pytest.raises(TemplateError, match="has no marker, so text could imitate it"):
        spec_from_json(data)


def test_an_end_that_opens_the_next_turn_is_written_once(
    chat_tokenizers: dict[str, Tokenizer],
) -> None:
    tokenizer = chat_tokenizers["byte"]
    template = bind_template(spec_from_json(shared("usr")), tokenizer)
    said = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    said += [("assistant", "e")]
    messages = [{"role": role, "content": text} for role, text in said]
    for more in ({}, {"name": "n"}):  # the short way and the other
        given = [Conversation(messages=[{**one, **more} for one in messages])] * 2
        rendered = template.render(given, TrainPolicy())
        assert rendered.examples.ids[0].tolist() == rendered.examples.ids[1].tolist()
        text = tokenizer.decode(rendered.examples.ids[0])
        assert text == "<|usr|>a<|eot|><|asst|>b<|usr|>c<|eot|><|asst|>d<|usr|><|asst|>e<|usr|>"
        assert rendered.examples.turn_starts[:5].tolist() == [0, 3, 6, 8, 11]
        trained = rendered.examples.ids[0][rendered.examples.mask[:14]]
        assert tokenizer.decode(trained) == "b<|usr|>d<|usr|>e<|usr|>"
