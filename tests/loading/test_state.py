"""A state is refused by name, or continues exactly."""

from __future__ import annotations

import json
import re
from itertools import islice

import numpy as np
import pytest

from shardmill.errors import StateMismatchError
from shardmill.loading import Loader, SampleStream, TokenSource
from shardmill.records import Ragged
from shardmill.testing.stores import build_small_store
from tests.loading.stores import open_stream

KEYS = ("version", "kind", "samples", "data", "order", "mix", "seed", "sources")
OPTIONS = {"seq_len": 8, "seed": 1, "weights": [3, 1]}


@pytest.fixture
def state(stores) -> dict:
    loader = Loader(open_stream(stores, ["wiki", "web"], **OPTIONS), batch_size=2)
    list(islice(loader, 4))
    return loader.state_dict()


def refusal(stream: SampleStream, state: object) -> str:
    with pytest.raises(StateMismatchError) as caught:
        Loader(stream, batch_size=2).load_state_dict(state)  # type: ignore[arg-type]
    return str(caught.value)


def test_a_state_is_small_global_and_plain(state):
    assert json.loads(json.dumps(state)) == state
    assert len(json.dumps(state)) < 1024
    assert (state["version"], state["kind"], state["samples"]) == (1, "shardmill.loader", 8)
    assert sorted(state) == sorted([*KEYS, "shuffle", "seq_len"])
    assert [name for name, _ in state["sources"]] == ["wiki", "web"]


def test_a_loaded_state_is_saved_as_it_was(stores, state):
    loader = Loader(open_stream(stores, ["wiki", "web"], **OPTIONS), batch_size=5, world=3, rank=2)
    loader.load_state_dict(json.loads(json.dumps(state)))
    assert loader.state_dict() == state
    iter(loader)
    assert loader.state_dict() == state


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 2}, "seed: the state has 1, this loader 2"),
        ({"seq_len": 9}, "seq_len: the state has 8, this loader 9"),
        ({"shuffle": "block"}, "shuffle: the state has 'global', this loader 'block'"),
        ({"weights": [1, 1]}, "weights, temperature or phases: not those of the state"),
        ({"temperature": 2.0}, "weights, temperature or phases"),
        ({"phases": [(99, [1, 1])]}, "weights, temperature or phases"),
    ],
)
def test_another_order_is_refused_by_what_differs_and_nothing_else(stores, state, change, words):
    message = refusal(open_stream(stores, ["wiki", "web"], **{**OPTIONS, **change}), state)
    assert words in message
    reasons = message.removeprefix("this state belongs to another run: ").split(". Open the")[0]
    # another seq_len makes other windows, so the data differ in number too
    assert len(reasons.split("; ")) == (2 if "seq_len" in change else 1)
    assert "start a new run without this state" in message


def test_two_differences_are_both_named(stores, state):
    stream = open_stream(stores, ["wiki", "web"], **{**OPTIONS, "seed": 7, "shuffle": "none"})
    message = refusal(stream, state)
    assert "seed: the state has 1, this loader 7" in message
    assert "shuffle: the state has 'global', this loader 'none'" in message


def test_sources_are_compared_by_name(stores, state):
    weights = {**OPTIONS, "weights": [3, 1, 1]}
    more = refusal(open_stream(stores, ["wiki", "web", "code"], **weights), state)
    assert "source 'code' is in this loader only" in more
    other = refusal(open_stream(stores, ["wiki", "code"], **OPTIONS), state)
    assert "source 'web' is in the state only; source 'code' is in this loader only" in other
    turned = refusal(open_stream(stores, ["web", "wiki"], **OPTIONS), state)
    assert "in the order ['wiki', 'web'], this loader in ['web', 'wiki']" in turned


def test_other_data_under_the_same_name_are_refused(stores, state, tmp_path):
    """One token of 611 is another one."""
    tokens = stores["wiki"].tokens.copy()
    tokens[300] ^= 1
    starts = stores["wiki"].starts
    lengths = np.diff(starts, append=len(tokens))
    build_small_store(tmp_path / "wiki", {"train": Ragged.from_lengths(tokens, lengths)})
    sources = [
        TokenSource(folder, seq_len=8) for folder in (tmp_path / "wiki", stores["web"].folder)
    ]
    message = refusal(SampleStream(sources, seed=1, weights=[3, 1]), state)
    assert "source 'wiki': other data" in message
    assert "'web'" not in message


def test_a_copy_of_the_store_elsewhere_is_the_same_data(stores, state, tmp_path):
    import shutil

    for name in ("wiki", "web"):
        shutil.copytree(stores[name].folder, tmp_path / f"copy of {name}")
    sources = [
        TokenSource(tmp_path / f"copy of {name}", seq_len=8, name=name) for name in ("wiki", "web")
    ]
    loader = Loader(SampleStream(sources, seed=1, weights=[3, 1]), batch_size=2)
    loader.load_state_dict(state)
    assert loader.samples == 8


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "version: the state has 2, which a later shardmill wrote"),
        ({"version": 0}, "version: the state has 0, wanted 1"),
        ({"version": True}, "version: the state has True, wanted 1"),
        ({"version": 1.0}, "version: the state has 1.0, wanted 1"),
        ({"kind": "other"}, "kind 'other', wanted 'shardmill.loader'"),
        ({"extra": 1}, "unknown keys ['extra'] and lacks []"),
        ({"samples": -1}, "samples: the state has -1, wanted a whole number"),
        ({"samples": 8.0}, "samples: the state has 8.0, wanted a whole number"),
        ({"samples": True}, "samples: the state has True, wanted a whole number"),
        ({"samples": "8"}, "samples: the state has '8', wanted a whole number"),
        ({"samples": None}, "samples: the state has None, wanted a whole number"),
        ({"seed": 1.0}, "seed: the state has 1.0, this loader 1"),
        ({"seed": True}, "seed: the state has True, this loader 1"),
        ({"seq_len": "8"}, "seq_len: the state has '8', this loader 8"),
        ({"data": "0"}, "data: other tokens, names or numbers of windows in at least one of 2"),
        ({"order": "0"}, "order: made by the rules of another version"),
        ({"sources": None}, "sources: the state has None, this loader 2"),
        ({"sources": [["wiki"]]}, "sources: the state has 1, this loader 2"),
        ({"sources": {"wiki": 1}}, "sources: the state has {'wiki': 1}, this loader 2"),
    ],
)
def test_a_state_that_was_changed_is_refused(stores, state, change, words):
    stream = open_stream(stores, ["wiki", "web"], **OPTIONS)
    assert words in refusal(stream, {**state, **change})


@pytest.mark.parametrize("key", KEYS)
def test_a_state_without_one_of_its_keys_is_refused(stores, state, key):
    del state[key]
    assert key in refusal(open_stream(stores, ["wiki", "web"], **OPTIONS), state)


@pytest.mark.parametrize("state", [None, [], "state", 8, {}, {"epoch": 3, "samples": 8}])
def test_what_is_no_state_is_refused(stores, state):
    message = refusal(open_stream(stores, ["wiki"], seq_len=8), state)
    assert re.match("a state is a dict|this is a state of kind None, wanted", message)


def test_a_refused_state_changes_nothing(stores, state):
    loader = Loader(open_stream(stores, ["wiki", "web"], **OPTIONS), batch_size=2)
    batches = iter(loader)
    next(batches)
    with pytest.raises(StateMismatchError):
        loader.load_state_dict({**state, "seed": 5})
    assert loader.samples == 2
    assert next(batches).samples == range(2, 4)


@pytest.mark.slow
def test_two_hundred_sources_fit_and_their_differences_are_named(stores):
    folder = stores["wiki"].folder

    def stream(count: int, last: str = "wiki") -> SampleStream:
        paths = [folder] * (count - 1) + [stores[last].folder]
        names = [f"source number {number} of many" for number in range(count)]
        pairs = zip(paths, names, strict=True)
        return SampleStream([TokenSource(path, seq_len=8, name=name) for path, name in pairs])

    loader = Loader(stream(200), batch_size=2)
    list(islice(loader, 3))
    state = loader.state_dict()
    assert len(json.dumps(state)) < 1024
    assert state["sources"] == 200
    again = Loader(stream(200), batch_size=2)
    again.load_state_dict(state)
    assert again.samples == 6
    assert "sources: the state has 200, this loader 199" in refusal(stream(199), state)
    assert "in at least one of 200 sources" in refusal(stream(200, last="web"), state)


def test_one_source_with_a_very_long_name_fits_too(stores):
    source = TokenSource(stores["wiki"].folder, seq_len=8, name="x" * 5000)
    loader = Loader(SampleStream([source]), batch_size=2)
    assert len(json.dumps(loader.state_dict())) < 1024
    loader.load_state_dict(loader.state_dict())


STRANGE = (
    *(0, -1, 7, 2**31, 2**62, 2**62 + 1, 2**63 - 10, 2**63 - 1, 2**63, 2**64, 10**30),
    *(1.0, 0.5, float("nan"), float("inf"), "8", "", None, True, [], [1], {}, {"samples": 1}),
)


def places_in(value, path=()):
    """Where every value of a state is, nested ones too."""
    yield path
    if isinstance(value, dict):
        inner = value.items()
    else:
        inner = enumerate(value if isinstance(value, list) else ())
    for key, part in inner:
        yield from places_in(part, (*path, key))


def changed(state, path, value):
    copy = json.loads(json.dumps(state))
    if not path:
        return value
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return copy


def test_a_position_past_every_number_is_refused_with_what_was_found_and_wanted(stores, state):
    stream = open_stream(stores, ["wiki", "web"], **OPTIONS)
    message = refusal(stream, {**state, "samples": 2**63 - 10})
    assert (
        "the state has 9,223,372,036,854,775,798, wanted a whole number from 0 to 4,611," in message
    )
    for samples in (2**62 + 1, 2**63, 10**30):
        assert "wanted a whole number from 0 to 4,611," in refusal(
            stream, {**state, "samples": samples}
        )
    for names in (["wiki", "web"], ["wiki"]):
        options = OPTIONS if len(names) == 2 else {"seq_len": 8, "seed": 1}
        loader = Loader(open_stream(stores, names, **options), batch_size=2)
        loader.load_state_dict({**loader.state_dict(), "samples": 2**62})  # the last that is taken
        assert next(iter(loader)).samples == range(2**62, 2**62 + 2)


@pytest.mark.parametrize("value", STRANGE, ids=repr)
def test_a_state_with_any_value_replaced_is_refused_by_our_errors_or_read(stores, state, value):
    for path in places_in(state):
        loader = Loader(open_stream(stores, ["wiki", "web"], **OPTIONS), batch_size=2, ahead=0)
        try:
            loader.load_state_dict(changed(state, path, value))
        except StateMismatchError:
            continue
        list(islice(loader, 2))
        loader.counters()
        assert loader.samples == loader.state_dict()["samples"]
