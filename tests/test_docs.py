"""What the documents show works: every block of code runs, every link leads somewhere."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs_blocks import LANGUAGES, NUMBERS_DIFFER, UNTIL_STOPPED, blocks_of, commands_in
from tests.docs_run import PageRun, environment_for, write_commands, write_world
from tests.services import LoopbackS3

ROOT = Path(__file__).parent.parent
FORMAT = ROOT / "shardmill/store/FORMAT.md"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), FORMAT])

NOT_RUN: dict[str, dict[str, str]] = {
    "README.md": {"pip install 'shardmill[torch,hub,sentencepiece,hf,fast]'": "installs"},
    "cli.md": {
        "shardmill bench 'data/*.jsonl' --tokenizer spm.model --seconds 0.5    "
        "# your text, your tokenizer": "seconds: tests/cli/test_bench.py asks for fewer",
        "shardmill bench --store store                                         "
        "# only reading": "as above",
    },
    "clusters.md": {
        "shardmill build 'data/*.jsonl' --out store --tokenizer spm.model --run-on ray "
        "                      # a Ray of this machine": "tests/cli/test_run_on_ray.py",
        "shardmill build 'data/*.jsonl' --out store --tokenizer spm.model --run-on ray "
        "--ray-address auto    # the cluster this node is in": "tests/building has a cluster",
    },
    "preference.md": {
        "python examples/train_dpo.py    # needs trl and accelerate": "tests/trainers runs it",
    },
    "remote.md": {"pip install 'shardmill[s3]'": "installs"},
    "tutorial.md": {
        "make setup": "installs",
        ". .venv/bin/activate": "the commands are those of this environment",
    },
    "training.md": {
        "make demo                                   # its stores are used, if they are there": (
            ".ci/run"
        ),
        "python examples/train_tiny_gpt.py           # 300 steps, a few minutes on two cores": (
            "minutes: the tutorial and tests/examples run it with --quick"
        ),
        "python examples/train_tiny_gpt.py --resume  # after a kill": "as above",
    },
}
"""Page -> lines of its commands that are not run here, each with the reason or with what runs it.
A line that is no longer on its page fails the test, so the list cannot grow old."""


def page_id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix().removeprefix("docs/")


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return write_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def bucket() -> Iterator[dict[str, str]]:
    """The environment of a client of a server of its own: pages use the same places in it."""
    with LoopbackS3() as server:
        server.make_bucket("bucket")
        yield server.environment()


def has_code(path: Path) -> bool:
    return path != FORMAT and any(block.language != "text" for block in blocks_of(path))


@pytest.mark.slow
@pytest.mark.timeout(900)  # many processes: on a busy machine a page takes minutes
@pytest.mark.parametrize("path", [path for path in PAGES if has_code(path)], ids=page_id)
def test_the_blocks_of_a_page_run(path: Path, world: Path, tmp_path: Path, request) -> None:
    shutil.copytree(world.parent, tmp_path / "copy", symlinks=True)
    reach = {"AWS_EC2_METADATA_DISABLED": "true"}
    if "s3://" in path.read_text():
        reach |= request.getfixturevalue("bucket")
    lines = NOT_RUN.get(page_id(path), {})
    run = PageRun(
        folder=tmp_path / "copy/page",
        environment=environment_for(write_commands(tmp_path / "bin"), reach),
        not_run=frozenset(lines),
    )
    run.run(path)
    assert sorted(run.passed_over) == sorted(lines), "NOT_RUN names lines that are not there"
    assert run.missing == []


def test_lines_that_are_not_run_are_on_pages_that_are() -> None:
    assert set(NOT_RUN) <= {page_id(path) for path in PAGES}
    assert all(reason for lines in NOT_RUN.values() for reason in lines.values())


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_every_block_says_what_it_is(path: Path) -> None:
    fences = sum(line.lstrip().startswith("```") for line in path.read_text().splitlines())
    blocks = blocks_of(path)
    assert fences == 2 * len(blocks), f"{path.name}: a fence that is not understood"
    for block in blocks:
        assert block.language in LANGUAGES, f"{block}: wanted one of {sorted(LANGUAGES)}"
        known = block.file or block.title in {"", NUMBERS_DIFFER, UNTIL_STOPPED}
        assert known, f"{block}: the title {block.title!r} says nothing to the tests"
        if block.language == "text":
            assert not commands_in(block.body), f"{block} holds commands: make it sh or console"


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_programs_that_a_page_writes_are_used_by_it(path: Path) -> None:
    blocks = blocks_of(path)
    for number, block in enumerate(blocks):
        if block.language == "python" and block.file:
            later = [other.body for other in blocks[number + 1 :] if other.language == "sh"]
            assert any(block.file in body for body in later), f"{block}: nobody runs {block.file}"


def test_the_readme_goes_from_text_to_a_training_loop_in_five_lines_and_four_names() -> None:
    first = next(block for block in blocks_of(ROOT / "README.md") if block.language == "python")
    assert len([line for line in first.body.splitlines() if line]) <= 5
    assert len(set(re.findall(r"\bsm\.(\w+)", first.body))) <= 4
    assert "for " in first.body


def test_the_reader_of_the_format_is_run_by_its_own_test() -> None:
    (reader,) = [block for block in blocks_of(FORMAT) if block.language == "python"]
    assert "def read_store" in reader.body  # tests/store/test_format.py runs it on stores
