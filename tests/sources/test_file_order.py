"""Laws about files in the order of a seed: drawn from names alone, and nothing else moves."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.building import BuildSpec, Feed, build_store
from shardmill.errors import OptionError
from shardmill.sources import open_source
from shardmill.sources.formats import jsonl
from shardmill.testing.sources import assert_cut_is_the_source, assert_resumes_exactly
from shardmill.tokenizers import ByteTokenizer
from tests.helpers import folder_digest

NAMES = st.lists(
    st.text("abcXYZ019-_ \u00e9", min_size=1, max_size=8).map(str.strip).filter(bool),
    unique=True,
    min_size=1,
    max_size=8,
)
WRITERS = {
    ".txt": lambda path, texts: path.write_text("".join(texts)),
    ".jsonl": lambda path, texts: path.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    ),
    ".parquet": lambda path, texts: pq.write_table(pa.table({"text": texts}), path),
}


def write(folder: Path, names: list[str], suffix: str) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}{suffix}" for name in names]
    for path in paths:
        WRITERS[suffix](path, [f"{path.stem} 1;", f"{path.stem} 2;"])
    return paths


def words_of(source) -> list[str]:
    texts = [text for batch in source.batches() for text in batch.texts.to_pylist()]
    return [word for text in texts for word in text.split(";") if word]


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(names=NAMES, seed=st.integers(-(2**70), 2**70), suffix=st.sampled_from(sorted(WRITERS)))
def test_the_order_depends_on_seed_and_names_alone(tmp_path_factory, names, seed, suffix):
    root = tmp_path_factory.mktemp("order")
    here = write(root / "here", names, suffix)
    there = write(root / "there" / "deep", names, ".jsonl")
    found = words_of(open_source(root / "here", seed=seed))
    files = found[::2]
    assert sorted(files) == sorted(f"{path.stem} 1" for path in here)
    assert found[1::2] == [f"{file.removesuffix(' 1')} 2" for file in files]
    stems = [file.removesuffix(" 1") for file in files]
    if suffix == ".jsonl":
        assert words_of(open_source([str(path) for path in there], seed=seed)) == found
        assert words_of(open_source([str(path) for path in there[::-1]], seed=seed)) == found
        assert words_of(open_source(f"{there[0].parent}/*{suffix}", seed=seed)) == found
    # A file that is added moves no other.
    write(root / "here", ["new file"], suffix)
    more = words_of(open_source(root / "here", seed=seed))
    assert [word.removesuffix(" 1") for word in more[::2] if not word.startswith("new")] == stems


def test_seeds_give_different_orders(tmp_path):
    names = [f"{number:02}" for number in range(20)]
    write(tmp_path / "a", names, ".jsonl")
    by_name = words_of(open_source(tmp_path / "a"))
    orders = {tuple(words_of(open_source(tmp_path / "a", seed=seed))) for seed in range(5)}
    assert by_name == sorted(by_name)
    assert len(orders | {tuple(by_name)}) == 6
    described = [open_source(tmp_path / "a", seed=seed).describe() for seed in (None, 0, 0, 1)]
    assert described[1] == described[2]
    assert described[0] != described[1] != described[3]


def test_files_of_several_inputs_are_mixed(tmp_path):
    names = [f"{number:02}" for number in range(12)]
    write(tmp_path / "pages", names, ".jsonl")
    write(tmp_path / "tables", [f"t{name}" for name in names], ".parquet")
    source = open_source([tmp_path / "pages", tmp_path / "tables"], seed=7)
    kinds = [word.startswith("t") for word in words_of(source)]
    assert sorted(kinds) == [False] * 24 + [True] * 24
    assert kinds not in (sorted(kinds), sorted(kinds, reverse=True))
    assert_cut_is_the_source(source, 100)
    assert_resumes_exactly(lambda: open_source([tmp_path / "pages", tmp_path / "tables"], seed=7))


def test_a_field_is_looked_for_once_whatever_the_number_of_files(tmp_path, monkeypatch):
    looked = []
    look = jsonl.JsonlFormat._field_in
    monkeypatch.setattr(
        jsonl.JsonlFormat,
        "_field_in",
        lambda self, file, limits: looked.append(file) or look(self, file, limits),
    )
    for number in range(30):
        (tmp_path / f"{number}.jsonl").write_text('{"body": "some words"}\n')
    source = open_source([tmp_path], seed=1).limited(1000)
    paths = [str(path) for path in sorted(tmp_path.iterdir())]
    assert words_of(source) == ["some words"] * 30
    assert len(looked) == 1
    assert words_of(open_source(paths, seed=1)) == ["some words"] * 30


def test_only_files_can_be_ordered_by_a_seed(tmp_path):
    write(tmp_path, ["a"], ".txt")
    with pytest.raises(OptionError, match="owner/name is not a list of files"):
        open_source("hub:owner/name", seed=3)
    with pytest.raises(OptionError, match=r"seed=0\.5: wanted a whole number"):
        open_source(tmp_path, seed=0.5)


@pytest.mark.slow
def test_one_and_two_workers_write_the_same_bytes_in_the_order_of_a_seed(tmp_path):
    root, seed = tmp_path, 7
    names = [f"{number:02}" for number in range(9)]
    write(root / "in/pages", names, ".jsonl")
    write(root / "in/tables", names, ".parquet")
    digests = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardmill.building.plan.CHUNK_BYTES", 60)
        for workers in (1, 2):
            source = open_source([root / "in/pages", root / "in/tables"], seed=seed)
            out = root / str(workers)
            build_store(
                [Feed(source=source, fill=(("train", None),))],
                out,
                tokenizer=ByteTokenizer(),
                spec=BuildSpec(seed=seed),
                workers=workers,
                unit_bytes=200,
            )
            digests.add(folder_digest(out))
    assert len(digests) == 1
