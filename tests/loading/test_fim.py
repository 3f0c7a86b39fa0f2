"""Fill in the middle: nothing but the order of tokens changes, and the share is kept exactly."""

from __future__ import annotations

import json
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.building.api import build, pack
from shardmill.errors import OptionError, StateMismatchError
from shardmill.inspect.rows import Moment, read_row
from shardmill.loading import FimOptions, FimTokens, Loader, SampleStream, TokenSource, load
from shardmill.loading.config import open_stream, read_config
from shardmill.loading.fim import LEAST_TOKENS, fim_rules, find_tokens, plan_fim
from shardmill.records import IGNORE_INDEX
from shardmill.testing.loading import (
    RankShape,
    assert_order_is_one,
    assert_resume_is_elastic,
    assert_resumes_exactly,
)
from shardmill.tokenizers import TrainSpec, open_tokenizer, train_tokenizer
from tests.loading.fim_rows import (
    END,
    TOKENS,
    document_lists,
    documents_of,
    options,
    put_back,
    rows_of,
    write_store,
)

NAMES = {name: f"<|{name}|>" for name in ("fim_prefix", "fim_suffix", "fim_middle", "eot")}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`code` and `wiki`: short documents, so that every window of 64 holds some."""
    folder = tmp_path_factory.mktemp("fim")
    rng = np.random.default_rng(0)
    for name in ("code", "wiki"):
        write_store(folder / name, rng.integers(0, 25, 400).tolist())
    return folder


def open_stores(stores: Path, seq_len: int = 64, **more: Any) -> SampleStream:
    sources = [TokenSource(stores / name, seq_len=seq_len) for name in ("code", "wiki")]
    return SampleStream(sources, **{"weights": [3, 1], "fim": options(0.5), **more})


def batches_of(stream: SampleStream, count: int, **more: Any) -> list[Any]:
    with Loader(stream, **{"batch_size": 5, **more}) as loader:
        return list(islice(loader, count))


# what happens to a row


@given(lengths=document_lists(), seq_len=st.integers(10, 80), spm_rate=st.sampled_from([0, 0.5, 1]))
@settings(max_examples=40)
def test_a_row_is_the_same_tokens_in_another_order_and_loses_three_a_document(
    tmp_path_factory, lengths, seq_len, spm_rate
):
    folder = tmp_path_factory.mktemp("store")
    documents = {tuple(one[:-1]) for one in map(np.ndarray.tolist, write_store(folder, lengths))}
    source = TokenSource(folder, seq_len=seq_len)
    if not len(source):
        return
    plain = batches_of(SampleStream([source]), 8)
    stream = SampleStream([source], fim=options(1.0, spm_rate=spm_rate))
    rearranged = 0
    for before, after in zip(plain, batches_of(stream, 8), strict=True):
        for old, new in zip(rows_of(before), rows_of(after), strict=True):
            found, parts = put_back(new)
            assert len(new) == len(old) == seq_len + 1
            assert found == old[: len(old) - 3 * len(parts)]
            for prefix, middle, suffix in parts:
                assert (*prefix, *middle, *suffix) in documents
                assert middle
                assert not prefix or spm_rate < 1
            rearranged += len(parts)
    (counts,) = stream.fim_counts(0, 40).values()
    assert (counts.documents, counts.tokens_cut) == (rearranged, 3 * rearranged)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12), spm_rate=st.sampled_from([0, 1])
)
@settings(max_examples=30)
def test_all_documents_that_are_long_enough_and_stay_whole_are_rearranged(lengths, spm_rate):
    """Against a loop over the documents of one row."""
    documents = documents_of(lengths)
    row = documents.values[: len(documents.values) * 3 // 4]
    starts, stops = documents.offsets[:-1], documents.offsets[1:]
    whole = stops <= len(row)
    plan = plan_fim(len(row), starts[whole], stops[whole])
    wanted = []
    for start, stop in zip(starts[whole].tolist(), stops[whole].tolist(), strict=True):
        if stop - start >= LEAST_TOKENS and stop + 3 * (len(wanted) + 1) <= len(row):
            wanted.append(row[start : stop - 1].tolist())
    rules = fim_rules(options(1, spm_rate=spm_rate), {}, "here", seed=1, path=())
    rows = row[None][plan.rows]
    for found in rules.rearranged(rows, plan, np.array([7])[plan.rows]).tolist():
        parts = put_back(found)[1]
        assert [[*prefix, *middle, *suffix] for prefix, middle, suffix in parts] == wanted
    assert len(rows) == bool(wanted)


def test_a_document_is_cut_at_every_pair_of_tokens_alike():
    length = 9  # of text: 45 pairs of edges
    documents = documents_of([length])
    rows = np.pad(documents.values, (0, 3))[None].repeat(4500, axis=0)
    starts = np.arange(len(rows)) * rows.shape[1]
    plan = plan_fim(rows.shape[1], starts, starts + length + 1)
    rules = fim_rules(options(1), {}, "here", seed=0, path=())
    seen: dict[tuple[int, int], int] = {}
    spm = 0
    for row in rules.rearranged(rows, plan, np.arange(len(rows))).tolist():
        ((prefix, middle, suffix),) = put_back(row)[1]
        spm += not prefix
        seen[len(middle), len(suffix)] = seen.get((len(middle), len(suffix)), 0) + 1
    pairs = {(m, s) for m in range(1, length + 1) for s in range(length + 1 - m)}
    assert seen.keys() == pairs
    # half of the rows are PSM: 2,250 over 45 pairs are 50 each, with a deviation of 7
    psm = [seen[m, s] for m, s in pairs if m + s < length]
    assert min(psm) > 20
    assert max(psm) < 85
    # and 9 of 45 PSM have an empty prefix too
    assert 2250 + 450 - 150 < spm < 2250 + 450 + 150


def test_documents_of_text_read_back_with_the_tokenizer_that_names_the_marks(tmp_path):
    lines = [f"def f_{n}(x):\n    return x * {n} + '\u00e9\u4e16'\n" for n in range(300)]
    texts = [line * (1 + n % 3) for n, line in enumerate(lines)]
    (tmp_path / "code.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    spec = TrainSpec(vocab_size=330, model_type="byte-bpe", specials=NAMES)
    model = train_tokenizer(tmp_path / "model", texts=texts, spec=spec).model
    build(tmp_path / "code.jsonl", tmp_path / "store", tokenizer=model)
    tokenizer = open_tokenizer(model)
    ids = tokenizer.special_token_ids()
    marks = [ids[name] for name in NAMES]
    found = 0
    for spm_rate in (0, 1):
        fim = FimOptions(rate=1, spm_rate=spm_rate)
        loader = load(tmp_path / "store", seq_len=200, batch_size=4, fim=fim)
        for batch in islice(loader, 20):
            for row in rows_of(batch):
                # as the names of the test have them
                plain = [marks.index(one) if one in marks else one + 100_000 for one in row]
                for parts in put_back(plain)[1]:
                    text = [one - 100_000 for part in parts for one in part]
                    assert tokenizer.decode(text) in texts
                    found += 1
        loader.close()
    assert found > 100


def test_borders_and_labels_follow_the_documents(stores):
    for batch in batches_of(open_stores(stores), 20, documents=True):
        ends = batch.input_ids[:, :-1] == END
        assert (np.diff(batch.doc_ids, axis=1) == ends).all()
        begins = np.flatnonzero(np.diff(batch.doc_ids.reshape(-1))) + 1
        rows = np.arange(0, batch.input_ids.size, batch.input_ids.shape[1])
        edges = np.union1d(np.union1d(begins, rows), batch.input_ids.size)
        assert batch.cu_seqlens.tolist() == edges.tolist()
        # the label of an end belongs to the next document
        assert (batch.labels[batch.input_ids == END] == IGNORE_INDEX).all()
        same = batch.labels[:, :-1] != IGNORE_INDEX
        assert (batch.labels[:, :-1] == batch.input_ids[:, 1:])[same].all()


def test_a_folder_of_tokens_is_rearranged_like_the_store_of_the_same_documents(tmp_path):
    documents = write_store(tmp_path / "store", [5, 20, 0, 11, 30, 7, 9, 16] * 20)
    (tmp_path / "folder").mkdir()
    np.save(tmp_path / "folder" / "a.npy", documents.values.astype(np.uint32))
    found = []
    for source in (
        TokenSource(tmp_path / "store", seq_len=37, name="one"),
        TokenSource(tmp_path / "folder", seq_len=37, name="one", eos_token_id=END),
    ):
        stream = SampleStream([source], fim=options())
        found.append([rows_of(batch) for batch in batches_of(stream, 30)])
    assert found[0] == found[1]
    assert any(put_back(row)[1] for batch in found[0] for row in batch)


# which rows


@given(
    rate=st.floats(0, 1) | st.sampled_from([0.1, 1 / 3, 0.5, 0.9]),
    seed=st.integers(0, 2**64 - 1),
    start=st.integers(0, 2**60),
    length=st.integers(1, 3000),
)
def test_any_run_of_rows_has_its_share_to_less_than_one_row(rate, seed, start, length):
    rules = fim_rules(options(rate), {}, "here", seed=seed, path=("code",))
    found = int(rules.chosen(np.arange(start, start + length)).sum())
    assert abs(found - length * rate) < 1 + 1e-6
    assert rate not in (0, 1) or found == length * rate


@given(rate=st.floats(0, 1), seed=st.integers(0, 99), streams=st.integers(1, 40))
def test_streams_in_turn_have_the_share_each_and_together(rate, seed, streams):
    rules = fim_rules(options(rate), {}, "here", seed=seed, path=())
    numbers = np.arange(200)
    chosen = [rules.of_stream(one, streams).chosen(numbers) for one in range(streams)]
    for own in chosen:
        assert abs(np.cumsum(own) - (numbers + 1) * rate).max() < 1 + 1e-6
    together = np.cumsum(np.sum(chosen, axis=0))
    assert abs(together - (numbers + 1) * rate * streams).max() < 1 + 1e-6


@pytest.mark.parametrize("rate", [0.5, 0.3, {"code": 0.25}, {"code": 0.9, "wiki": 0.1}])
def test_each_source_of_a_mixture_has_its_own_share_in_every_run(stores, rate):
    stream = open_stores(stores, fim=options(rate))
    rates = rate if isinstance(rate, dict) else {"code": rate, "wiki": rate}
    taken = stream.take(np.arange(2000))
    changed = {
        int(batch.samples[row])
        for batch in batches_of(stream, 400)
        for row, found in enumerate(rows_of(batch))
        if put_back(found)[1]
    }
    for number, source in enumerate(stream.sources):
        own = np.flatnonzero(taken.source == number)
        found = np.cumsum([sample in changed for sample in own.tolist()])
        share = rates.get(source.name, 0)
        # every window has a document to rearrange, so what was chosen is what is seen
        assert abs(found - share * np.arange(1, len(own) + 1)).max() < 1
        for start, stop in pairwise(range(0, len(own), 37)):
            assert abs(found[stop] - found[start] - share * (stop - start)) < 1
    counts = stream.fim_counts(0, 2000)
    assert sum(one.rows for one in counts.values()) == len(changed)


# one order, exact resume


def test_every_number_of_ranks_reads_the_same_rows(stores):
    def make(**shape: int) -> Loader:
        return Loader(open_stores(stores), **shape)

    shapes = [RankShape(batch, world) for world in (1, 2, 3) for batch in (1, 4)]
    assert_order_is_one(make, shapes, 72)
    assert_resume_is_elastic(
        make, [(RankShape(3, 2), 4), (RankShape(2, 3), 3), (RankShape(5, 1), 4)]
    )


@pytest.mark.parametrize("documents", [False, True])
def test_a_resume_from_every_step_continues(stores, documents):
    for shuffle in ("global", "none"):
        stream = open_stores(stores, shuffle=shuffle)
        assert_resumes_exactly(
            lambda stream=stream: Loader(stream, batch_size=3, documents=documents), 15
        )


def test_counts_are_of_all_ranks_and_of_any_part_of_the_run(stores):
    loader = Loader(open_stores(stores), batch_size=4, rank=1, world=2)
    iterator = iter(loader)
    next(iterator)
    first = loader.fim_counts()
    next(iterator)
    both = loader.fim_counts()
    parts = put_back_all(batches_of(open_stores(stores), 16, batch_size=1))
    assert sum(one.documents for one in both.values()) == parts
    later = loader.fim_counts(since=8)
    assert {name: first[name] + later[name] for name in first} == both
    assert Loader(open_stores(stores, fim=None), batch_size=1).fim_counts().keys() == both.keys()


def put_back_all(batches: list[Any]) -> int:
    return sum(len(put_back(row)[1]) for batch in batches for row in rows_of(batch))


@pytest.mark.parametrize(
    ("saved", "own", "words"),
    [
        (None, options(0.5), "fim.rate: the state has 0, this loader 0.5"),
        (options(0.5), None, "fim.rate: the state has 0.5, this loader 0"),
        (options(0.5), options(0.25), "fim.rate: the state has 0.5, this loader 0.25"),
        (options(0.5), options({"code": 0.5}), "fim.rate"),
        (options(0.5), options(0.5, spm_rate=1), "fim.spm_rate: the state has 0.5, this loader 1"),
        (options(0.5), options(0.5, seed=3), "fim.seed: the state has 0, this loader 3"),
        (
            options(0.5),
            FimOptions(rate=0.5, tokens=FimTokens(prefix=1, suffix=0, middle=2, end=END)),
            "fim.tokens.prefix: the state has 0, this loader 1",
        ),
    ],
)
def test_a_state_with_other_options_is_refused_by_name(stores, saved, own, words):
    state = Loader(open_stores(stores, fim=saved), batch_size=1).state_dict()
    with pytest.raises(StateMismatchError) as caught:
        Loader(open_stores(stores, fim=own), batch_size=1).load_state_dict(state)
    assert words in str(caught.value)


def test_a_state_without_the_option_is_what_it_was_and_with_it_stays_small(stores):
    plain = Loader(open_stores(stores, fim=None), batch_size=1).state_dict()
    zero = Loader(open_stores(stores, fim=0), batch_size=1).state_dict()
    assert "fim" not in plain
    assert plain == zero
    many = [TokenSource(stores / "code", seq_len=64, name=f"part-{n:03}") for n in range(60)]
    rates = {one.name: 0.5 / (n + 1) for n, one in enumerate(many)}
    state = Loader(SampleStream(many, fim=options(rates)), batch_size=1).state_dict()
    assert len(json.dumps(state)) < 1024


# what is refused


@pytest.mark.parametrize(
    ("fim", "words"),
    [
        (1.5, "fim=1.5: wanted a share from 0 to 1"),
        (True, "fim=True: wanted a share"),
        (0.5, "source 'code' (*) names no tokens to mark prefix, suffix and middle with"),
        ({"cod": 0.5}, "there is no source 'cod'; the sources are code, wiki"),
    ],
)
def test_a_share_that_cannot_be_is_refused(stores, fim, words):
    with pytest.raises(OptionError) as caught:
        open_stores(stores, fim=fim)
    start, _, end = words.partition("*")
    assert start in str(caught.value)
    assert end in str(caught.value)


def test_tokens_of_no_vocabulary_and_equal_tokens_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 50)
    build(tmp_path / "a.txt", tmp_path / "store", tokenizer="byte:1", eot="<|eot|>")
    tokens = FimTokens(prefix=300, suffix=301, middle=302)
    with pytest.raises(OptionError, match=r"the id 302 is given, but .* has a vocabulary of 257"):
        load(tmp_path / "store", seq_len=8, batch_size=1, fim=FimOptions(rate=1, tokens=tokens))
    with pytest.raises(OptionError, match="wanted different ids"):
        FimTokens(prefix=1, suffix=1, middle=2)


def test_conversations_are_refused_by_name_unless_their_share_is_0(tmp_path):
    chat = {"messages": [{"role": r, "content": "hi " * 9} for r in ("user", "assistant")]}
    (tmp_path / "chats.jsonl").write_text((json.dumps(chat) + "\n") * 40)
    special = {name: f"<|{name}|>" for name in ("sys", "usr", "asst", "eot")}
    options_ = {"tokenizer": "byte:4", "template": "four-marker", "special": special}
    build(tmp_path / "chats.jsonl", tmp_path / "chat", **options_)
    pack(tmp_path / "chat", seq_len=64)
    write_store(tmp_path / "code", [30] * 40)
    mixed = {tmp_path / "chat": 1, tmp_path / "code": 1}
    with pytest.raises(OptionError, match=r"source 'chat' is not of documents \(PackSource"):
        load(mixed, seq_len=64, batch_size=2, fim=options(0.5))
    loader = load(mixed, seq_len=64, batch_size=2, fim=options({"code": 1.0}))
    plain = load(mixed, seq_len=64, batch_size=2)
    for new, old in islice(zip(loader, plain, strict=True), 10):
        chats = new.source == 0
        assert (new.input_ids[chats] == old.input_ids[chats]).all()
        assert (new.labels[chats] == old.labels[chats]).all()
        assert (new.input_ids[~chats] != old.input_ids[~chats]).any(axis=1).all()
    for one in (loader, plain):
        one.close()


def test_a_folder_whose_documents_are_unknown_is_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(200, dtype=np.uint16))
    with pytest.raises(OptionError, match=r"fim.*not known where the documents of source"):
        SampleStream([TokenSource(tmp_path, seq_len=8)], fim=options())


# config and inspection


def test_a_config_names_the_shares_of_its_sources(stores):
    listed = [{"name": name, "path": str(stores / name)} for name in ("code", "wiki")]
    data = {"datasets": listed, "fim_rate": 0.5, "fim_spm_rate": 0.25, "fim_seed": 9}
    data["fim_tokens"] = {"prefix": 0, "suffix": 1, "middle": 2, "end": 3}
    listed[1]["fim_rate"] = 0.125
    config = read_config({"data": data})
    stream = open_stream(config, seq_len=64, global_batch_size=4)
    wanted = options({"code": 0.5, "wiki": 0.125}, spm_rate=0.25, seed=9)
    assert stream.fim.facts == open_stores(stores, fim=wanted).fim.facts
    stream.close()
    with pytest.raises(OptionError, match=r"decides this; set data\.fim_rate there"):
        load({"data": data}, seq_len=64, batch_size=4, fim=0.5)
    for change, words in (
        ({"fim_rate": 2}, "data.fim_rate: found 2 (an integer), wanted at most 1"),
        ({"fim_tokens": {"prefix": 0}}, "data.fim_tokens: found prefix; wanted the ids of prefix"),
    ):
        with pytest.raises(OptionError) as caught:
            read_config({"data": data | change})
        assert words in str(caught.value)


def test_a_step_is_shown_as_it_was_trained(stores):
    stream = open_stores(stores)
    moment = Moment(stream=stream, samples=20, rank=0, world=1, batch_size=20, documents=True)
    loader = Loader(stream, batch_size=20, documents=True)
    batch = list(islice(loader, 2))[1]
    shown = [read_row(moment, plan) for plan in moment.plan()]
    loader.close()
    assert [row.window[:-1].tolist() for row in shown] == batch.input_ids.tolist()
    assert [row.labels.tolist() for row in shown] == batch.labels.tolist()
    for row in shown:
        ids = row.window.tolist()
        assert [ids[first] for first in sorted(row.rearranged)] == [0] * ids.count(0)
        for (_, start, stop), (first, last) in zip(row.plan.documents, row.columns, strict=True):
            assert last <= 65
            assert first == last or first in row.edges
            if first in row.rearranged:
                assert last - first == stop - start + 3
                assert ids[last - 1] == END
            elif first < last < 65:
                assert last - first == stop - start
    assert any(row.rearranged for row in shown)


@pytest.mark.parametrize(
    "names",
    [
        *(
            ("fim_prefix", "fim_suffix", "fim_middle"),
            ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
        ),
        (
            "<\uff5cfim\u2581begin\uff5c>",
            "<\uff5cfim\u2581hole\uff5c>",
            "<\uff5cfim\u2581end\uff5c>",
        ),
        *(("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"), ("<PRE>", "<SUF>", "<MID>")),
    ],
)
def test_marks_are_found_by_the_names_of_known_tokenizers(names):
    named = {"eot": 9, **dict(zip(names, (7, 3, 5), strict=True))}
    assert find_tokens(named, "here").ids == (7, 3, 5)
    with pytest.raises(OptionError, match="here names no tokens to mark"):
        find_tokens(dict(list(named.items())[:3]), "here")


def test_the_options_of_this_module_are_checked():
    assert TOKENS.ids == (0, 1, 2)
    for wrong in ({"spm_rate": -0.1}, {"seed": -1}, {"rate": "half"}):
        with pytest.raises(OptionError):
            FimOptions(**{"rate": 0.5, **wrong})
