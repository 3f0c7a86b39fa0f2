"""Every token of a store leads to the row whose text, encoded, has that id at that place."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.building import BuildSpec, Feed, build_store
from shardmill.building.splits import HashSplit
from shardmill.errors import BuildError, OptionError
from shardmill.inspect.blame import Blame, blame_tokens
from shardmill.records import Ragged
from shardmill.sources import (
    BatchLimits,
    ConcatSource,
    JsonlSource,
    MemorySource,
    ParquetSource,
    TextSource,
)
from shardmill.store import open_store, verify
from shardmill.store.layout import ORIGINS
from shardmill.tokenizers import ByteTokenizer
from shardmill.tokenizers.base import as_list

SMALL = BatchLimits(num_bytes=60, num_documents=4)
KINDS = ("jsonl", "parquet", "lines", "texts")


class Mute(ByteTokenizer):
    """A text that begins with "~" has no token."""

    def encode_batch(self, texts) -> Ragged:
        return super().encode_batch(["" if text[0] == "~" else text for text in as_list(texts)])


TOKENIZER = Mute(byte_offset=1, specials={"eot": "<e>"})

texts = st.sampled_from(["", "~", "a", "bb", "ccc dd", "x" * 30, "caf\u00e9", None, b"{broken"])
contents = st.lists(texts, max_size=6)
folders = st.dictionaries(
    st.sampled_from(KINDS), st.lists(contents, min_size=1, max_size=3), min_size=1
)


class Corpus:
    """Files of several kinds, and what every row of them is, in the order of a build."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rows, self.num_files = folder, list[tuple[str, str, str | None]](), 0

    def add(self, files) -> None:
        """Rows with text are distinguished by a number, except those without tokens."""
        for kind in KINDS:
            for content in files.get(kind, ()):
                number, self.num_files = self.num_files, self.num_files + 1
                (self.folder / kind).mkdir(parents=True, exist_ok=True)
                named = [
                    f"{text}{number}.{row}" if isinstance(text, str) and text else text
                    for row, text in enumerate(content)
                ]
                getattr(self, f"_{kind}")(self.folder / kind / f"{number:03d}", named)

    def _jsonl(self, path, rows) -> None:
        lines = [b"\n"]
        for row in rows:
            blank = b"\n" if row == "" else b""
            named = {"text": row, "id": f"own {len(lines)}"}
            lines.append(blank + (row if isinstance(row, bytes) else json.dumps(named).encode()))
            line = b"\n".join(lines).count(b"\n") + 1
            if isinstance(row, str):
                self.rows.append((f"{path.name}.jsonl:{line}", row, f"own {len(lines) - 1}"))
        path.with_suffix(".jsonl").write_bytes(b"\n".join(lines))

    def _parquet(self, path, rows) -> None:
        values = [None if isinstance(row, bytes) else row for row in rows]
        own = [f"p{number}" for number in range(len(rows))]
        table = pa.table({"text": pa.array(values, pa.string()), "id": pa.array(own, pa.string())})
        pq.write_table(table, path.with_suffix(".parquet"), row_group_size=2)
        self.rows += [
            (f"{path.name}.parquet:row {number}", row, f"p{number}")
            for number, row in enumerate(values)
            if row is not None
        ]

    def _lines(self, path, rows) -> None:
        kept = [row if isinstance(row, str) else "" for row in rows]
        path.with_suffix(".txt").write_text("\n".join(kept))
        self.rows += [(f"{path.name}.txt:{n}", row, None) for n, row in enumerate(kept, 1)]

    def _texts(self, path, rows) -> None:
        text = "\n".join(str(row) for row in rows)
        path.with_suffix(".txt").write_text(text)
        self.rows.append((f"{path.name}.txt", text, None))

    def source(self) -> ConcatSource:
        made = {
            "jsonl": lambda at: JsonlSource(at, field="text", on_bad="skip", limits=SMALL),
            "parquet": lambda at: ParquetSource(at, field="text", limits=SMALL),
            "lines": lambda at: TextSource(at, split="line", limits=SMALL),
            "texts": lambda at: TextSource(at, limits=SMALL),
        }
        kinds = [kind for kind in KINDS if (self.folder / kind).is_dir()]
        return ConcatSource([made[kind](self.folder / kind) for kind in kinds], name="all")

    def wanted(self, fill, eot):
        """split -> (token id, row id, own id, characters) of each token, found by a plain loop."""
        found = {split: [] for split, _ in fill}
        left, splits = [limit for _, limit in fill], [split for split, _ in fill]
        for row_id, text, own in self.rows:
            if not text or text[0] == "~":
                continue
            tokens = [
                (byte + 1, row_id, own, character)
                for character in text
                for byte in character.encode()
            ]
            tokens += [(0, row_id, own, "")] if eot else []
            while splits and left[0] == 0:
                left.pop(0), splits.pop(0)
            if not splits:
                break
            room = len(tokens) if left[0] is None else left[0]
            found[splits[0]] += tokens[:room]
            left[0] = None if left[0] is None else left[0] - len(tokens[:room])
        return found


def blamed(store: Path, split: str, source, **how):
    total = open_store(store).num_tokens(split)
    if not total:
        return []
    found = blame_tokens(store, split, range(total), inputs=source, tokenizer=TOKENIZER, **how)
    assert [one.token for one in found] == list(range(total))
    return [(one.token_id, one.row_id, one.own_id, one.characters) for one in found]


def told_without_order(store: Path, split: str, source):
    """None when budgets cut texts to equal ones, so that the order of the splits must be said."""
    try:
        return blamed(store, split, source)
    except OptionError as error:
        if "equal texts" in str(error):
            return None
        raise


@pytest.mark.slow
@settings(deadline=None, max_examples=10)
@given(
    batches=st.lists(folders, min_size=1, max_size=2),
    grain_bytes=st.sampled_from([1, 40, 150, 10**6]),
    fill=st.sampled_from(
        [
            (("train", None),),
            (("val", 5), ("train", None)),
            (("val", 4), ("train", 30)),
            (("train", 40), ("test", 20), ("val", None)),
        ]
    ),
    eot=st.booleans(),
)
def test_every_token_leads_to_its_row(tmp_path_factory, batches, grain_bytes, fill, eot):
    folder = tmp_path_factory.mktemp("blame")
    corpus, store = Corpus(folder / "files"), folder / "store"
    spec = BuildSpec(dataset_name="d", append_eot=eot)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardmill.building.plan.CHUNK_BYTES", grain_bytes)
        for number, files in enumerate(batches):
            before = corpus.rows[:]
            corpus.add(files)
            feed = Feed(source=corpus.source(), fill=fill)
            how = {"tokenizer": TOKENIZER, "spec": spec, "workers": 1, "append": bool(number)}
            how |= {"max_loss": 1.0, "allow_empty": True}
            try:
                build_store([feed], store, **how)
            except (BuildError, OptionError):  # full
                assert number
                corpus.rows = before
        wanted = corpus.wanted(fill, eot)
        assert {split: blamed(store, split, corpus.source()) for split, _ in fill} == wanted
        assert verify(store).problems == []
        (store / ORIGINS).unlink()
        order = [split for split, _ in fill]
        found = {split: blamed(store, split, corpus.source(), fill=order) for split in order}
        assert found == wanted
        for split in order:
            assert told_without_order(store, split, corpus.source()) in (wanted[split], None)


@pytest.mark.slow
@settings(deadline=None, max_examples=15)
@given(
    batches=st.lists(folders, min_size=1, max_size=2),
    grain_bytes=st.sampled_from([1, 40, 150, 10**6]),
    fractions=st.sampled_from([(("val", 0.5),), (("val", 0.2), ("test", 0.3)), (("test", 0.4),)]),
    seed=st.integers(0, 5),
)
def test_every_token_leads_to_its_row_where_a_hash_chose_the_splits(
    tmp_path_factory, batches, grain_bytes, fractions, seed
):
    folder = tmp_path_factory.mktemp("blame")
    corpus, store = Corpus(folder / "files"), folder / "store"
    rule = HashSplit(seed=seed, fractions=fractions)
    fill = tuple((split, None) for split in rule.splits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardmill.building.plan.CHUNK_BYTES", grain_bytes)
        for number, files in enumerate(batches):
            corpus.add(files)
            feed = Feed(source=corpus.source(), fill=fill, by_hash=rule)
            spec = BuildSpec(dataset_name="d", split_rule=rule.words())
            how = {"tokenizer": TOKENIZER, "spec": spec, "workers": 1, "append": bool(number)}
            how |= {"max_loss": 1.0, "allow_empty": True}
            build_store([feed], store, **how)
        rows = [(row, text, own) for row, text, own in corpus.rows if text and text[0] != "~"]
        numbers = rule.of_texts(pa.array([text for _, text, _ in rows], pa.large_string()))
        wanted = {split: [] for split in rule.splits}
        for (row, text, own), number in zip(rows, numbers, strict=True):
            wanted[rule.splits[number]] += [
                (byte + 1, row, own, character) for character in text for byte in character.encode()
            ]
        source = corpus.source()
        assert {split: blamed(store, split, source) for split in rule.splits} == wanted
        assert verify(store).problems == []
        (store / ORIGINS).unlink()
        if any(wanted.values()):
            split = max(wanted, key=lambda name: len(wanted[name]))
            with pytest.raises(OptionError, match="drawn by a hash, and the table of origins"):
                blamed(store, split, source)


def test_a_stream_whose_splits_a_hash_chose_is_counted(tmp_path):
    rule = HashSplit(seed=1, fractions=(("val", 0.4),))
    source = MemorySource([f"text {number}" for number in range(30)], name="mine")
    feed = Feed(source=source, fill=(("train", None), ("val", None)), by_hash=rule)
    build_store([feed], tmp_path / "s", tokenizer=TOKENIZER, spec=BuildSpec())
    found = {
        one.text: one.row
        for split in rule.splits
        for one in blame_tokens(
            tmp_path / "s",
            split,
            range(open_store(tmp_path / "s").num_tokens(split)),
            inputs=source,
            tokenizer=TOKENIZER,
        )
    }
    assert found == {f"text {number}": number for number in range(30)}
    assert one_of(tmp_path / "s", source).found_by == "counting"


def one_of(store: Path, source) -> Blame:
    return blame_tokens(store, "train", range(1), inputs=source, tokenizer=TOKENIZER)[0]
