"""Disks that fill, fail or lie, and input that changes: one clear error or a correct store."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from shardmill.building import BuildSpec, Feed, build_store
from shardmill.errors import BuildError, ShardmillError, SourceError
from shardmill.sources import BatchLimits, JsonlSource
from shardmill.storage import atomic
from shardmill.store import verify
from shardmill.tokenizers import ByteTokenizer
from tests.building.workplaces import receipts
from tests.helpers import folder_digest

WORKERS = [1, 2]


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of many chunks and units, with rows that are dropped."""
    monkeypatch.setattr("shardmill.building.plan.CHUNK_BYTES", 1_500)
    rows = [json.dumps({"text": f"{number} " * 30}) for number in range(150)]
    rows[20] = rows[90] = "{"
    (tmp_path / "a.jsonl").write_text("\n".join(rows) + "\n")
    return tmp_path / "a.jsonl"


def build(corpus: Path, out: Path, **options: object) -> str:
    source = JsonlSource(corpus, on_bad="skip", limits=BatchLimits(num_documents=10))
    build_store(
        [Feed(source=source, fill=(("val", 700), ("train", None)))],
        out,
        tokenizer=ByteTokenizer(),
        spec=BuildSpec(shard_bytes=4_000),
        **{"unit_bytes": 8_000, "workers": 1, **options},
    )
    return folder_digest(out)


class Fault:
    """An OSError at one call of something, once."""

    def __init__(self, at: int, code: int = errno.EIO) -> None:
        self.left, self.code = at, code

    def __call__(self) -> None:
        self.left -= 1
        if self.left == -1:
            raise OSError(self.code, os.strerror(self.code), "somewhere")

    @property
    def struck(self) -> bool:
        return self.left < 0


def on_write(patch: pytest.MonkeyPatch, fault: Fault) -> None:
    class Failing(io.FileIO):
        def write(self, data) -> int:
            fault()
            return super().write(data)

    patch.setattr(atomic.io, "FileIO", Failing)


def before(owner: object, name: str) -> Callable[[pytest.MonkeyPatch, Fault], None]:
    def inject(patch: pytest.MonkeyPatch, fault: Fault) -> None:
        real = getattr(owner, name)

        def failing(*arguments, **options):
            fault()
            return real(*arguments, **options)

        patch.setattr(owner, name, failing)

    return inject


def said(action: Callable[[], object]) -> str | None:
    """What an action's error says; None when it has none."""
    try:
        action()
    except (BuildError, OSError) as error:
        return str(error)
    return None


FAULTS = {
    "write": on_write,
    "fsync": before(os, "fsync"),
    "replace": before(Path, "replace"),
    "rename": before(Path, "rename"),
}


@pytest.mark.slow
@pytest.mark.parametrize("where", FAULTS)
def test_after_a_disk_error_at_any_moment_a_resume_continues(corpus, where):
    wanted = build(corpus, corpus.parent / "whole")
    at, struck = 0, True
    while struck:
        out = corpus.parent / f"s{at}"
        with pytest.MonkeyPatch.context() as patch:
            fault = Fault(at)
            FAULTS[where](patch, fault)
            words = said(lambda out=out: build(corpus, out))
            struck = fault.struck
        assert words is None or "Input/output error" in words
        # a store that exists although an error was raised was published before it
        assert not out.exists() or folder_digest(out) == wanted
        assert out.exists() or words is not None
        assert build(corpus, out, resume=True) == wanted
        at += 1 if at < 6 else 7
    assert at > 0


@pytest.mark.slow
@pytest.mark.parametrize("workers", WORKERS)
def test_a_file_larger_than_the_system_allows_is_one_clear_error(corpus, workers):
    """RLIMIT_FSIZE is the system's own: no byte of ours is pretended."""
    code = (
        "import resource\n"
        "from pathlib import Path\n"
        "import tests.building.test_faults as faults\n"
        "from shardmill.building import plan\n"
        "plan.CHUNK_BYTES = 1_500\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3_500, resource.RLIM_INFINITY))\n"
        f"faults.build(Path({str(corpus)!r}), Path({str(corpus.parent / 's')!r}), "
        f"workers={workers}, resume=True)\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path.cwd())
    assert done.returncode == 1
    assert "File too large; nothing was published" in done.stderr.splitlines()[-1]
    wanted = build(corpus, corpus.parent / "whole")
    assert build(corpus, corpus.parent / "s", workers=workers, resume=True) == wanted


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate disk of 300 KB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk is not allowed here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("workers", WORKERS)
def test_a_full_disk_is_one_error_and_a_resume_continues_later(corpus, tiny_disk, workers):
    wanted = build(corpus, corpus.parent / "whole")

    def fill_it_up(_progress) -> None:
        with (tiny_disk / "others").open("ab") as file, suppress(OSError):
            while True:
                os.write(file.fileno(), bytes(4096))

    with pytest.raises(BuildError, match=r"No space left on device.*resume=True"):
        build(corpus, tiny_disk / "s", workers=workers, on_progress=fill_it_up)
    assert not (tiny_disk / "s").exists()
    (tiny_disk / "others").unlink()
    assert build(corpus, tiny_disk / "s", workers=workers, resume=True) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("workers", WORKERS)
def test_a_receipt_that_changes_before_it_is_read_is_made_again(corpus, workers):
    """Right after it was written, in a build that goes on."""
    wanted = build(corpus, corpus.parent / "whole")
    changed: list[Path] = []

    def flip_a_bit(_progress) -> None:
        found = [path for path in receipts(corpus.parent / "s") if path not in changed]
        for path in found[-1:] if len(changed) < 3 else ():
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 4
            path.write_bytes(data)
            changed.append(path)

    out = corpus.parent / "s"
    assert build(corpus, out, workers=workers, on_progress=flip_a_bit) == wanted
    assert changed


@pytest.mark.slow
@pytest.mark.parametrize("workers", WORKERS)
def test_a_disk_that_keeps_less_than_it_says_gives_an_error_or_the_right_store(corpus, workers):
    wanted = build(corpus, corpus.parent / "whole")
    at, struck, refused = 0, True, 0
    while struck:
        torn = []

        class Torn(io.FileIO):
            """At one write half of the bytes are lost."""

            def write(self, data, at=at, torn=torn) -> int:
                torn.append(len(data))
                if len(torn) == at + 1:
                    super().write(bytes(data)[: len(data) // 2])
                    return len(data)
                return super().write(data)

        out = corpus.parent / f"s{at}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(atomic.io, "FileIO", Torn)
            try:
                built = build(corpus, out, workers=workers)
            except ShardmillError:
                refused += 1
                assert not out.exists()
            else:
                assert built == wanted or len(torn) <= at
        assert build(corpus, out, workers=workers, resume=True) == wanted
        assert verify(out).problems == []
        struck = len(torn) > at
        at += 3
    assert refused


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("change", ["same size", "grows", "goes"])
def test_input_that_changes_under_the_build_is_refused(corpus, workers, change):
    data = corpus.read_bytes()

    def change_it(_progress) -> None:
        if change == "goes":
            corpus.unlink(missing_ok=True)
            return
        more = b'{"text": "more"}\n'
        corpus.write_bytes(data + more if change == "grows" else data.replace(b"7", b"8"))

    with pytest.raises(SourceError, match=r"a\.jsonl"):
        build(corpus, corpus.parent / "s", workers=workers, on_progress=change_it)
    assert not (corpus.parent / "s").exists()
