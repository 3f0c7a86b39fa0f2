"""Text files of any ending, and one text that lines part into many documents."""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import OptionError, SourceError
from shardmill.sources import BatchLimits, TextSource, open_source
from shardmill.sources.source import read_document
from shardmill.testing.sources import (
    account,
    assert_cut_is_the_source,
    assert_divides_exactly,
    assert_ledger_balances,
    assert_resumes_exactly,
)

LIMITS = st.builds(
    BatchLimits, num_bytes=st.integers(1, 80), num_documents=st.integers(1, 9)
) | st.just(BatchLimits())
PIECES = ["\n", "\n", "\r\n", "# ", "# a\n", "## ", "text", "\u00e9", " ", "---\n", "\t", "#"]
PATTERNS = ["# ", "(# )", "---$", "#+ ?", "(?:# a|---)$", "text|# "]


def parted(text: str, split: str) -> list[str]:
    """The documents, by a loop over lines with Python's own expressions."""
    keeps = split != "blank-line" and re.compile(split).groups > 0
    pattern = re.compile(r"[ \t]*$" if split == "blank-line" else split)
    documents, lines = [], re.findall(r"[^\n]*\n|[^\n]+", text)
    current = ""
    for line in lines:
        bare = re.sub(r"\r?\n$", "", line)
        match = pattern.match(bare)
        if match is None:
            current += line
            continue
        documents.append(current)
        rest = bare[0 if keeps else match.end() :]
        current = rest + line[len(bare) :] if rest else ""
    documents.append(current)
    found = [re.sub(r"\r?\n\Z", "", one).replace("\r\n", "\n") for one in documents]
    return [one for one in found if one]


@settings(deadline=None, max_examples=80)
@given(
    text=st.lists(st.sampled_from(PIECES), max_size=25).map("".join),
    split=st.sampled_from(["blank-line", *PATTERNS]),
    suffix=st.sampled_from(["", "", ".gz"]),
    limits=LIMITS,
    num_bytes=st.integers(1, 60),
)
def test_a_text_is_parted_the_same_however_it_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    text: str,
    split: str,
    suffix: str,
    limits: BatchLimits,
    num_bytes: int,
) -> None:
    path = tmp_path_factory.mktemp("parts") / f"a.txt{suffix}"
    data = b"\xef\xbb\xbf" + text.encode()
    path.write_bytes(gzip.compress(data) if suffix else data)

    def make() -> Any:
        return TextSource(path, split=split, limits=limits)

    found = assert_ledger_balances(make())
    assert found.texts == parted(text, split)
    assert assert_resumes_exactly(make) == found
    assert_cut_is_the_source(make(), num_bytes)
    assert_divides_exactly(make, (1, 3))


def test_a_document_of_a_parted_text_is_found_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    path.write_text("intro\n\n# one\ntext\n\n\n# two\nmore\n# three\n")
    source = TextSource(path, split="(# )", limits=BatchLimits(num_bytes=5))
    wanted = ["intro\n", "# one\ntext\n\n", "# two\nmore", "# three"]
    for one in (source, *source.cut(10**6)):
        found = [read_document(one, None, number) for number in range(4)]
        assert [text for text, _ in found if text] == wanted  # type: ignore[misc]
        assert [where.id for _, where in found if where] == [f"a.md:{n}" for n in (1, 3, 7, 9)]  # type: ignore[misc]
    blank = TextSource(path, split="blank-line")
    assert account(blank.batches()).texts == ["intro", "# one\ntext", "# two\nmore\n# three"]
    _, where = read_document(blank, None, 2) or ("", None)
    assert where is not None
    assert where.id == "a.md:7"


@pytest.mark.parametrize("split", ["(?=a)", r"(a)\1", "(", "a{1000}{1000}", "x" * 1001])
def test_an_expression_that_takes_more_than_linear_time_is_refused(
    tmp_path: Path, split: str
) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(OptionError, match="regular expression"):
        TextSource(tmp_path / "a.txt", split=split)


def test_a_hostile_expression_does_not_hang(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 50_000 + "!\n")
    # Python's own expressions would take longer than the universe lasts.
    texts = account(TextSource(tmp_path / "a.txt", split="(?:a+)+$").batches()).texts
    assert texts == ["a" * 50_000 + "!"]


def test_a_document_without_an_end_is_refused_before_it_is_held(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("word\n" * 200_000)
    limits = BatchLimits(num_bytes=10_000, most_bytes=100_000)
    with pytest.raises(SourceError, match="no line that parts documents; with the available"):
        account(TextSource(tmp_path / "a.txt", split="blank-line", limits=limits).batches())


def write_repository(root: Path) -> None:
    """99 files in 10 languages, and what lies about in a repository."""
    endings = (".py", ".c", ".h", ".rs", ".go", ".js", ".ts", ".java", ".md", ".yaml")
    for number in range(99):
        path = root / f"src/{number % 7}/{number}{endings[number % 10]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"file {number}\n")
    (root / ".git").mkdir()
    (root / ".git/config").write_text("hidden")


def test_a_folder_of_source_code_is_one_source_of_texts(tmp_path: Path) -> None:
    write_repository(tmp_path)
    found = account(open_source(tmp_path).batches())
    assert sorted(found.texts) == sorted(f"file {number}\n" for number in range(99))
    assert account(open_source(tmp_path, ext=".c,.h").batches()).num_read == 20


def test_any_file_is_text_or_a_drop(tmp_path: Path) -> None:
    write_repository(tmp_path)
    extra = {"Makefile": b"all:", "package.json": b"{}", "logo.png": b"\x89PNG\0", "a.o": b"\xff"}
    extra |= {"late.c": b"a" * 9000 + b"\0", "utf16.c": b"\xff\xfea\0", "b.txt": b"b\xff\0"}
    for name, data in extra.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(SourceError, match=r"several kinds .*\(json: 1 \.json; text: .*kind='text'"):
        open_source(tmp_path)
    found = assert_ledger_balances(open_source(tmp_path, kind="text"))
    assert found.num_read == 99 + len(extra)
    dropped = [(drop.id, drop.reason) for drop in found.drops]
    assert dropped == [(name, "not_text") for name in ("a.o", "logo.png", "utf16.c")]
    assert found.counts["invalid_utf8"] == 1


def test_a_text_may_be_packed(tmp_path: Path) -> None:
    (tmp_path / "a.py.gz").write_bytes(gzip.compress(b"print()\n"))
    assert account(open_source(tmp_path).batches()).texts == ["print()\n"]
    (tmp_path / "a.py.gz").write_bytes(gzip.compress(b"print()\n")[:-3])
    with pytest.raises(SourceError, match="damaged or truncated"):
        account(open_source(tmp_path).batches())
