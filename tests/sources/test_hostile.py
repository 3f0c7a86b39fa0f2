"""Input that a careless or hostile hand made: each document once, each line judged alone."""

from __future__ import annotations

import glob
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardmill.errors import OptionError, SourceError
from shardmill.sources import BatchLimits, JsonlSource, iter_jsonl_rows, open_source
from shardmill.storage.files import find_local


def texts(source) -> list[str]:
    return [text for batch in source.batches() for text in batch.texts.to_pylist()]


def test_a_hidden_folder_does_not_hide_a_link_to_it(tmp_path):
    (tmp_path / ".cache/v1").mkdir(parents=True)
    (tmp_path / ".cache/v1/a.txt").write_text("hi")
    (tmp_path / "o.txt").write_text("other")
    (tmp_path / "current").symlink_to(".cache/v1")
    assert texts(open_source(tmp_path)) == ["hi", "other"]


def test_a_glob_follows_a_loop_of_links_once(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "sub/loop").symlink_to("..")
    assert texts(open_source(f"{tmp_path}/**/*.txt")) == ["one"]


def test_a_glob_ends_on_links_that_lead_into_one_another(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_text(name)
        for number in range(6):
            (tmp_path / name / f"self{number}").symlink_to(".")
            (tmp_path / name / f"up{number}").symlink_to("..")
    assert sorted(texts(open_source(f"{tmp_path}/**/*.txt"))) == ["a", "b"]


@pytest.mark.parametrize(
    "pattern",
    [
        *("*.txt", "*/*.txt", "**/*.txt", "d?/**/x*.txt", "**/d1/*", ".h/*.txt", "**/.h/*.txt"),
        *("d[12]/*.txt", "**", "**/**/y.txt", "*/d2/**", "none/*.txt", ".*.txt", "d1/../d2/*.txt"),
    ],
)
def test_a_glob_finds_what_python_finds(tmp_path, pattern):
    for folder in (".", "d1", "d2", "d1/d2", "d1/d2/d1", ".h", "d1/.h", "d.txt"):
        (tmp_path / folder).mkdir(exist_ok=True)
        for name in ("x1.txt", "y.txt", ".z.txt"):
            (tmp_path / folder / name).write_text(folder)
    where = f"{tmp_path}/{pattern}"
    paths = glob.glob(where, recursive=True)  # noqa: PTH207 - it is what we compare with
    wanted = {path for path in paths if Path(path).is_file()}
    _, found = find_local(Path(where), (".txt",))
    assert {str(path) for path in found} == wanted


def test_a_url_without_a_bucket_is_one_clear_error():
    with pytest.raises(OptionError, match="names no bucket"):
        open_source("s3://", kind="jsonl")


def test_a_file_that_two_inputs_name_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    for inputs in (["a.txt", "a.txt"], ["*.txt", "a*.txt"]):
        with pytest.raises(SourceError, match="once"):
            open_source([f"{tmp_path}/{name}" for name in inputs])


@pytest.mark.parametrize("number", [b"Inf", b"-NaN", b"NaN", b"-Infinity"])
@pytest.mark.parametrize("size", [1, 200, 10**6])
def test_a_number_json_does_not_know_is_read_the_same_in_every_block(tmp_path, number, size):
    row = b'{"text": "i", "n": ' + number + b"}\n"
    (tmp_path / "a.jsonl").write_bytes(row * 20 + b"5\n \n" + b" " + row)
    limits = BatchLimits(num_bytes=size, num_documents=1000)
    source = JsonlSource(tmp_path / "a.jsonl", field="text", on_bad="skip", limits=limits)
    assert len(texts(source)) == 21


@pytest.mark.parametrize("key", ["a\\\\b", 'a\\"b', "a\\u0001b"])
def test_a_field_with_an_odd_name_is_read(tmp_path, key):
    (tmp_path / "a.jsonl").write_text(f'{{"{key}": "hello"}}\n')
    assert texts(JsonlSource(tmp_path / "a.jsonl")) == ["hello"]


def test_a_field_whose_name_is_not_unicode_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"\\ud800": "hello"}\n')
    with pytest.raises(SourceError, match="not valid Unicode"):
        texts(JsonlSource(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(("depth", "is_read"), [(400, True), (5000, False)])
def test_a_deep_row_is_repaired_or_a_source_error(tmp_path, depth, is_read):
    deep = "[" * depth + "]" * depth
    (tmp_path / "a.jsonl").write_text(f'{{"s": "\\ud800", "a": {deep}}}\n')
    if is_read:
        (row,) = iter_jsonl_rows(tmp_path / "a.jsonl")
        assert row["s"] == "\ufffd"
        assert repr(row["a"]) == deep
    else:
        with pytest.raises(SourceError, match=r"a\.jsonl, line 1"):
            list(iter_jsonl_rows(tmp_path / "a.jsonl"))


def test_a_column_name_that_is_not_utf8_is_refused(tmp_path):
    pq.write_table(pa.table({"texx": ["hello"]}), tmp_path / "a.parquet")
    path = tmp_path / "a.parquet"
    path.write_bytes(path.read_bytes().replace(b"texx", b"te\xff\xfe"))
    with pytest.raises(SourceError):
        texts(open_source(path))


@pytest.mark.parametrize("name", ["a" * 5000 + ".txt", "a\0b.txt"])
def test_a_name_no_file_can_have_is_refused(name):
    with pytest.raises(SourceError):
        open_source(name)
