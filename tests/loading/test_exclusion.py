"""What is excluded is never given, and nothing else changes its place."""

from __future__ import annotations

import json
import logging
import pickle
import shutil
import tempfile
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardmill.building import build_plan
from shardmill.errors import ManifestError, OptionError, StateMismatchError
from shardmill.loading import (
    ChatRows,
    Loader,
    PackSource,
    SampleStream,
    TokenSource,
    exclusion,
    plan_step,
)
from shardmill.loading.exclusion import ExcludedItems, excluded_windows, replacements
from shardmill.records import Ragged
from shardmill.sampling import Permutation
from shardmill.store import PlanOptions, exclude_documents, exclude_spans
from shardmill.store.exclusions import as_spans, merge_spans, remove_exclusion
from shardmill.testing.loading import (
    RankShape,
    assert_only_excluded_places_change,
    assert_order_is_one,
    assert_resume_is_elastic,
    assert_resumes_exactly,
    has_token,
    rows_of,
    saved,
)
from shardmill.testing.stores import (
    build_small_chat_store,
    build_small_store,
    chat_examples,
    make_examples,
)
from tests.loading.stores import SIZES, Small, open_stream, write_small
from tests.packs import FIVE, plan_options

EXAMPLES = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture
def pair(stores, tmp_path) -> dict[str, Small]:
    """Two stores of this test's own."""
    found = {}
    for name in ("wiki", "web"):
        shutil.copytree(stores[name].folder, tmp_path / name)
        found[name] = Small(tmp_path / name, stores[name].tokens, stores[name].starts)
    return found


def some_spans(size: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Short ones, of which much is left."""
    one = st.tuples(st.integers(0, size - 1), st.integers(1, 30))
    return st.lists(one, max_size=4).map(
        lambda found: [(start, min(start + length, size)) for start, length in found]
    )


@pytest.mark.slow
@EXAMPLES
@given(
    data=st.data(),
    seq_len=st.integers(1, 40),
    shuffle=st.sampled_from(["global", "block", "none"]),
    seed=st.integers(0, 3),
)
def test_an_exclusion_changes_only_the_excluded_places(stores, data, seq_len, shuffle, seed):
    names = ["wiki", "code", "web"]
    spans = {name: data.draw(some_spans(SIZES[name])) for name in names[:2]}
    options = {"seq_len": seq_len, "shuffle": shuffle, "seed": seed, "weights": [3, 1, 1]}
    with tempfile.TemporaryDirectory() as top:
        own = {name: Small(Path(top, name), *_arrays(stores[name])) for name in names}
        for name in names:
            shutil.copytree(stores[name].folder, own[name].folder)
        before = open_stream(own, names, **options)
        for name, found in spans.items():
            if found:
                exclude_spans(own[name].folder, found, reason="test")
        if not all(_is_left(own[name].folder, seq_len) for name in spans):
            with pytest.raises(OptionError, match="have an excluded token"):
                open_stream(own, names, **options)
            return
        after = open_stream(own, names, **options)
        assert_only_excluded_places_change(before, after, spans, 300)
        assert after.fingerprint == before.fingerprint


def _arrays(small: Small) -> tuple[np.ndarray, np.ndarray]:
    return small.tokens, small.starts


def _is_left(folder: Path, seq_len: int) -> bool:
    excluded = TokenSource(folder, seq_len=seq_len).excluded
    return excluded is None or excluded.num_left > 0


def test_no_excluded_token_is_in_a_batch(tmp_path):
    documents = Ragged.from_lengths(np.arange(600), [30] * 20)  # each id says its place
    build_small_store(tmp_path / "s", {"train": documents}, shard_bytes=100)
    exclude_documents(tmp_path / "s", [3, 4, 19], reason="takedown")
    stream = SampleStream([TokenSource(tmp_path / "s", seq_len=8)], seed=3)
    seen = []
    for batch in islice(Loader(stream, batch_size=37, documents=True), 6):  # three epochs
        seen += [batch.input_ids.reshape(-1), batch.labels[batch.labels >= 0]]
    found = np.unique(np.concatenate(seen))
    assert found.tolist() == [*range(89), *range(152, 569)]  # 90..150, 570..600: whole windows go


def test_guarantees_of_order_and_resume_hold_under_exclusions(pair):
    exclude_spans(pair["wiki"].folder, [(100, 160), (400, 401)], reason="test")
    exclude_documents(pair["web"].folder, [0, 7, 8], reason="test")
    options = {"seq_len": 8, "seed": 5, "weights": [1, 2], "phases": [(70, [1, 0])]}

    def make(*, batch_size: int, rank: int, world: int) -> Loader:
        stream = open_stream(pair, ["wiki", "web"], **options)
        return Loader(stream, batch_size=batch_size, rank=rank, world=world, documents=True)

    assert_order_is_one(make, [RankShape(3, 2), RankShape(7, 1), RankShape(1, 5)], 150)
    assert_resumes_exactly(lambda: make(batch_size=6, rank=1, world=2), 14)
    runs = [(RankShape(2, 3), 5), (RankShape(5, 1), 7), (RankShape(1, 4), 9)]
    assert_resume_is_elastic(make, runs)
    stream = open_stream(pair, ["wiki", "web"], **options)
    assert stream.take(range(150)).item.tolist() != stream.take_all(range(150)).item.tolist()


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(
    examples=chat_examples(max_examples=12),
    options=plan_options(),
    data=st.data(),
)
def test_rows_of_a_plan_with_an_excluded_token_are_replaced(examples, options, data):
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top, "s")
        build_small_chat_store(folder, {"train": examples})
        plan = build_plan(folder, options=options, allow_empty=True)
        before = PackSource(folder, plan.path, pad_id=7)
        if len(before) < 2:
            return
        spans = data.draw(some_spans(len(examples.mask)))
        if spans:
            exclude_spans(folder, spans, reason="test")
        after = PackSource(folder, plan.path, pad_id=7)
        hit = [item for item in range(len(before)) if has_token(before, item, spans)]
        listed = (
            []
            if after.excluded is None
            else np.flatnonzero(after.excluded.hits(np.arange(len(after)))).tolist()
        )
        assert listed == hit
        if len(hit) < len(before):
            streams = [SampleStream([source], seed=3) for source in (before, after)]
            found = assert_only_excluded_places_change(*streams, {"s": spans}, 3 * len(before))
            assert found == 3 * len(hit)


@given(
    data=st.data(),
    stride=st.integers(1, 9),
    more=st.integers(0, 9),
    num_items=st.integers(0, 30),
)
def test_windows_are_excluded_exactly_when_they_have_an_excluded_token(
    data, stride, more, num_items
):
    length = stride + more
    pairs = data.draw(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=5))
    spans = merge_spans(as_spans(pairs))
    tokens = {t for start, stop in pairs for t in range(start, stop)}
    assert {t for start, stop in spans.tolist() for t in range(start, stop)} == tokens
    wanted = [i for i in range(num_items) if tokens & set(range(i * stride, i * stride + length))]
    found = excluded_windows(spans, name="x", num_items=num_items, stride=stride, length=length)
    hits = [] if found is None else np.flatnonzero(found.hits(np.arange(num_items))).tolist()
    assert hits == wanted
    assert (0 if found is None else found.num_excluded) == len(wanted)


def excluded_items(num_items: int, gone: set[int]) -> ExcludedItems:
    ranges = merge_spans(as_spans([(item, item + 1) for item in sorted(gone)]))
    return ExcludedItems(
        name="x", num_items=num_items, ranges=ranges, num_tokens=len(gone), sha256="0" * 64
    )


@given(
    num_items=st.integers(2, 200),
    left=st.integers(1, 20),
    seed=st.integers(0, 50),
    walk=st.sampled_from([0, 1, 64]),
)
def test_a_stand_in_is_the_next_in_an_order_of_its_own(num_items, left, seed, walk):
    rng = np.random.default_rng(seed)
    gone = set(rng.permutation(num_items)[: max(1, num_items - left)].tolist())
    gone -= {0} if len(gone) == num_items else set()
    excluded = excluded_items(num_items, gone)
    order = Permutation(num_items, seed, "any")
    plain = order.take(range(num_items)).tolist()
    wanted = []
    for item in sorted(gone):
        at = plain.index(item)
        turned = plain[at + 1 :] + plain[:at]
        wanted.append(next(other for other in turned if other not in gone))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exclusion, "_WALK", walk)
        found = replacements(np.array(sorted(gone)), excluded, order)
    assert found.tolist() == wanted


@given(
    num_items=st.integers(5, 60),
    first=st.sets(st.integers(0, 59), min_size=1, max_size=10),
    more=st.sets(st.integers(0, 59), max_size=10),
    seed=st.integers(0, 9),
)
def test_more_exclusions_change_only_the_replacements_they_meet(num_items, first, more, seed):
    first = {item for item in first if item < num_items - 1}
    both = first | {item for item in more if item < num_items - 1}
    if not first:
        return
    items, epochs = np.arange(num_items), np.arange(num_items) % 3
    before = excluded_items(num_items, first).replace(items, epochs, seed=seed).tolist()
    after = excluded_items(num_items, both).replace(items, epochs, seed=seed).tolist()
    assert not set(before) & first
    assert not set(after) & both
    for old, new in zip(before, after, strict=True):
        assert new == old or old in both


def test_replacements_differ_by_seed_epoch_and_name():
    items, gone = np.zeros(40, np.int64), {0}
    excluded = excluded_items(10_000, gone)
    by_epoch = excluded.replace(items, np.arange(40), seed=0)
    assert len(set(by_epoch.tolist())) > 30
    assert excluded.replace(items, np.arange(40), seed=1).tolist() != by_epoch.tolist()
    again = excluded_items(10_000, gone)
    assert again.replace(items, np.arange(40), seed=0).tolist() == by_epoch.tolist()


def test_nearly_everything_may_be_excluded(tmp_path):
    build_small_store(tmp_path / "s", {"train": Ragged.from_lengths(np.arange(60_001), [60_001])})
    exclude_spans(tmp_path / "s", [(0, 30_000), (30_006, 60_001)], reason="test")
    stream = SampleStream([TokenSource(tmp_path / "s", seq_len=2)])
    assert len(stream.sources[0]) == 30_000
    found = stream.take(range(40_000))
    assert set(found.item.tolist()) == {15_000, 15_001}
    exclude_spans(tmp_path / "s", [(30_000, 30_006)], reason="test")
    with pytest.raises(OptionError, match="source 's': all of its 30,000 samples have an excluded"):
        SampleStream([TokenSource(tmp_path / "s", seq_len=2)])


def test_a_source_without_a_sample_left_may_stay_when_it_never_comes(pair):
    exclude_spans(pair["wiki"].folder, [(0, 611)], reason="test")
    stream = open_stream(pair, ["wiki", "web"], seq_len=8, weights=[0, 1])
    assert set(stream.take(range(50)).source.tolist()) == {1}
    for weights, phases in (([1, 1], ()), ([0, 1], [(9, [1, 1])])):
        with pytest.raises(OptionError, match="source 'wiki': all of its 76 samples"):
            open_stream(pair, ["wiki", "web"], seq_len=8, weights=weights, phases=phases)


def test_a_damaged_list_stops_the_reader(pair):
    exclude_documents(pair["wiki"].folder, [1], reason="test")
    path = pair["wiki"].folder / "exclude.json"
    path.write_bytes(path.read_bytes().replace(b"test", b"tess"))
    with pytest.raises(ManifestError, match="its sha256 is not the one it says"):
        TokenSource(pair["wiki"].folder, seq_len=8)


def test_a_plan_tells_replacements_and_whose_place_they_have(pair):
    exclude_spans(pair["wiki"].folder, [(100, 190)], reason="test")
    stream = open_stream(pair, ["wiki"], seq_len=8, seed=2)
    batch = next(iter(Loader(stream, batch_size=76)))
    plan = plan_step(stream, samples=0, batch_size=76)
    assert [row.window for row in plan] == batch.item.tolist()
    wanted = stream.take_all(range(76)).item.tolist()
    found = [row.window if row.instead_of is None else row.instead_of for row in plan]
    assert found == wanted
    assert sorted(row.instead_of for row in plan if row.instead_of is not None) == list(
        range(12, 24)
    )
    for row, ids in zip(plan, batch.input_ids, strict=True):
        assert pair["wiki"].tokens[row.start : row.stop - 1].tolist() == ids.tolist()


def test_a_copy_by_pickle_gives_what_the_first_one_gives(pair):
    exclude_spans(pair["wiki"].folder, [(100, 190)], reason="test")
    stream = open_stream(pair, ["wiki"], seq_len=8)
    data = pickle.dumps(stream)
    exclude_spans(pair["wiki"].folder, [(300, 390)], reason="more, while it travels")
    again = pickle.loads(data)
    assert again.take(range(200)).item.tolist() == stream.take(range(200)).item.tolist()
    assert again.exclusions == stream.exclusions


def test_states_resume_under_other_exclusions_with_one_warning(pair, caplog):
    def opened() -> Loader:
        return Loader(open_stream(pair, ["wiki", "web"], seq_len=8, seed=1), batch_size=4)

    plain = opened()
    list(islice(plain, 3))
    before = saved(plain)
    assert "exclusions" not in before
    exclude_spans(pair["web"].folder, [(96, 121)], reason="test")
    with caplog.at_level(logging.WARNING):
        going_on = opened()
        going_on.load_state_dict(before)
    assert len(caplog.records) == 1
    facts = going_on.state_dict()["exclusions"]
    assert caplog.messages[0] == (
        "Loader: the exclusions changed since this state was saved, from none to "
        f"{facts['sha256']} (25 tokens); samples that are excluded now are replaced by others of "
        "their source, every other one keeps its place"
    )
    rest, wanted = ([rows_of(batch) for batch in islice(one, 60)] for one in (going_on, plain))
    changed = [
        a != b
        for left, right in zip(rest, wanted, strict=True)
        for a, b in zip(left, right, strict=True)
    ]
    assert 0 < sum(changed) <= 10  # 4 of 225 windows, a little over an epoch
    under = saved(going_on)
    assert {**under, "samples": 12} == {**before, "exclusions": facts}
    caplog.clear()
    opened().load_state_dict(under)
    assert caplog.messages == []
    remove_exclusion(pair["web"].folder, 1)
    opened().load_state_dict(under)
    assert f"from {facts['sha256']} (25 tokens) to none;" in caplog.messages[0]


@pytest.mark.parametrize("wrong", [7, "a", {}, {"sha256": "x"}, {"sha256": 1, "tokens": 2}])
def test_a_state_with_malformed_exclusions_is_refused(pair, wrong):
    loader = Loader(open_stream(pair, ["wiki"], seq_len=8), batch_size=4)
    with pytest.raises(StateMismatchError, match="exclusions: the state has"):
        loader.load_state_dict({**loader.state_dict(), "exclusions": wrong})


def test_a_state_of_many_sources_stays_small(tmp_path):
    sources = []
    for number in range(12):
        name = f"a-rather-long-name-of-a-source-{number}"
        write_small(tmp_path / name, 200, number)
        exclude_spans(tmp_path / name, [(0, number + 1)], reason="test")
        sources.append(TokenSource(tmp_path / name, seq_len=8))
    state = Loader(SampleStream(sources), batch_size=2).state_dict()
    assert state["sources"] == 12
    assert state["exclusions"]["tokens"] == 78
    assert len(json.dumps({**state, "samples": 2**63 - 1})) < 1024


def test_an_excluded_conversation_gives_no_row_and_is_reported(tmp_path, caplog):
    build_small_chat_store(tmp_path / "s", {"train": FIVE})
    plain = ChatRows(tmp_path / "s", seq_len=6, fit="drop", pad_id=0)
    exclude_documents(tmp_path / "s", [0], reason="takedown")
    exclude_spans(tmp_path / "s", [(24, 25)], reason="a token of the last one")
    rows = ChatRows(tmp_path / "s", seq_len=6, fit="drop", pad_id=0)
    found, whole = rows.rows([4, 0, 1, 2, 3, 0]), plain.rows([4, 0, 1, 2, 3, 0])
    dropped = {reason: who.tolist() for reason, who in found.plan.dropped.items()}
    assert dropped == {"excluded": [0, 1, 5], "too_long": [3], "nothing_trained_in_row": [4]}
    assert found.plan.kept.tolist() == [2]
    assert found.ids.tolist() == whole.ids[whole.plan.kept == 2].tolist()
    assert rows.batch([4, 0, 1]).item.tolist() == [1]
    counts = rows.fit_counts()
    assert dict(counts.dropped) == {"excluded": 2, "too_long": 1, "nothing_trained_in_row": 1}
    assert (counts.examples, counts.tokens_kept, counts.tokens_dropped) == (5, 2, 23)
    assert "excluded: 3" in caplog.text


def test_an_excluded_conversation_that_is_too_long_is_no_error(tmp_path):
    build_small_chat_store(tmp_path / "s", {"train": FIVE})
    with pytest.raises(OptionError, match="13 tokens"):
        ChatRows(tmp_path / "s", seq_len=6, fit="error", pad_id=0).rows([0, 2])
    exclude_documents(tmp_path / "s", [2], reason="takedown")
    rows = ChatRows(tmp_path / "s", seq_len=6, fit="error", pad_id=0)
    assert rows.rows([0, 2]).plan.kept.tolist() == [0]
    assert dict(rows.fit_counts().dropped) == {"excluded": 1, "nothing_trained_in_row": 1}


def test_only_the_piece_with_the_excluded_token_goes(tmp_path):
    """A conversation of 13 tokens in rows of 5, one piece each: 0..5, 4..9, 8..13."""
    turns = [(2, [(number, True) for number in range(12)])]
    build_small_chat_store(tmp_path / "s", {"train": make_examples([([99], turns)])})
    plan = build_plan(tmp_path / "s", options=PlanOptions(seq_len=4, long="split"))
    pieces = [PackSource(tmp_path / "s", plan.path, pad_id=0).span(row) for row in range(3)]
    assert sorted((piece.start, piece.stop) for piece in pieces) == [(0, 5), (4, 9), (8, 13)]
    exclude_spans(tmp_path / "s", [(6, 8)], reason="test")
    excluded = PackSource(tmp_path / "s", plan.path, pad_id=0).excluded
    assert excluded is not None
    assert [pieces[row].start for row in np.flatnonzero(excluded.hits(np.arange(3)))] == [4]
