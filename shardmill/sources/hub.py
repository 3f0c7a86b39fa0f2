"""Rows of a Hugging Face dataset, streamed and never lost. The one importer of `datasets`.

In: a dataset, pinned to a commit.  Out: rows in order, each with the place behind it.
Promise: a dropped connection, a 5xx or a timeout is retried with growing, jittered pauses, and the
stream goes on at the exact row. A dead iterator is never asked again, so it cannot be taken for the
end. To go on, the last rows before the place are read again and compared: through the client's own
state where that leads to the same rows, else by counting from the start (always, when shuffled: the
client's shuffle buffer is not in its state). Other rows there are an error, never a guess.
Not here: which field is the text, batches. HF_ENDPOINT and the other variables of the client hold.
"""

from __future__ import annotations

import hashlib
import logging
import random
import sys
import tempfile
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from shardmill.errors import HubError, SourceError, missing_extra
from shardmill.records import JSON

try:
    import datasets
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
except ImportError as missing:
    raise missing_extra("datasets", "hub") from missing

logger = logging.getLogger(__name__)

Row = dict[str, Any]
_Rows = Generator[tuple[Row, JSON], None, None]

OVERLAP = 16
"""So many rows before a place are read again to recognise it (texts such as "" repeat)."""
_CLIENT_TRIES = 1  # of the client's own loops, above the five of each request
_MAX_DELAY = 60.0
_WAIT_STATUS = (408, 425, 429)
_HTTP_ROOTS = ("httpx", "httpx2", "requests")
# The HTTP library below differs between versions of the client; its root error is a base of theirs.
_TRANSPORT: tuple[type[Exception], ...] = tuple(
    base for base in HfHubHTTPError.__mro__ if base.__module__.partition(".")[0] in _HTTP_ROOTS
)
_TROUBLE: tuple[type[Exception], ...] = (OSError, EOFError, ValueError, RuntimeError, *_TRANSPORT)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubDataset:
    """What is read: one split of one configuration at one commit, in one order."""

    dataset: str  # "owner/name"
    config: str | None
    split: str
    revision: str  # a commit
    shuffle: tuple[int, int] | None  # seed and buffer size of the client's shuffle
    columns: tuple[str, ...] | None = None  # None: all

    def __str__(self) -> str:
        config = f", {self.config}" if self.config else ""
        return f"hub dataset {self.dataset}{config}, split {self.split}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How long to bear trouble: pauses of delay, 2 delay, 4 delay, ... at most a minute."""

    max_retries: int = 5  # in a row, without a new row between them
    delay: float = 1.0  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a stream goes on: behind its first `rows` rows, the last `overlap` of them known."""

    rows: int
    overlap: int
    digest: str  # of the last `overlap` rows
    state: JSON  # the client's state before them; None when shuffled


class Trail:
    """The last rows of a stream, enough to find the place behind them again."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._last: deque[tuple[Row, JSON]] = deque(maxlen=OVERLAP)

    def add(self, row: Row, state: JSON) -> None:
        """A row that was read, and the client's state before it."""
        self.num_rows += 1
        self._last.append((row, state))

    def place(self) -> Place | None:
        """None at the start of the stream."""
        if not self._last:
            return None
        return Place(
            rows=self.num_rows,
            overlap=len(self._last),
            digest=digest(row for row, _ in self._last),
            state=self._last[0][1],
        )


def resolve_revision(dataset: str, revision: str | None, retry: Retry) -> str:
    """The commit that a branch or tag (None: the head) stands for now."""
    if Path(dataset).exists():
        raise SourceError(
            f"hub dataset {dataset}: a local folder of this name lies in the working folder, and "
            "the client would read that instead; run elsewhere, or open it as a folder"
        )
    api = huggingface_hub.HfApi(endpoint=datasets.config.HF_ENDPOINT)
    failures = 0
    while True:
        try:
            sha = api.dataset_info(dataset, revision=revision).sha
        except _TROUBLE as error:
            failures += 1
            _wait_or_raise(error, failures, retry, f"hub dataset {dataset}", "nothing was read yet")
            continue
        if not sha:
            raise SourceError(f"hub dataset {dataset}: the hub names no commit for {revision!r}")
        return str(sha)


def stream_rows(
    source: HubDataset, place: Place | None, retry: Retry
) -> Iterator[tuple[Row, JSON]]:
    """Each row from `place` on, with the client's state before it."""
    failures = 0
    trail = Trail(place.rows if place else 0)
    while True:
        try:
            with closing(_rows_from(source, trail.place() or place)) as rows:
                for row, state in rows:
                    failures = 0
                    trail.add(row, state)
                    yield row, state
            return
        except SourceError:
            raise
        except _TROUBLE as error:
            failures += 1
            progress = f"{trail.num_rows:,} rows were read"
            _wait_or_raise(error, failures, retry, str(source), progress)


def column_kinds(source: HubDataset, retry: Retry) -> list[tuple[str, bool]]:
    """Each column and whether it holds strings: as declared, else as in the first row."""
    failures = 0
    while True:
        try:
            with _bounded_client():
                features = _load(source).features
            break
        except _TROUBLE as error:
            failures += 1
            _wait_or_raise(error, failures, retry, str(source), "nothing was read yet")
    if features is not None:
        strings = ("string", "large_string")
        return [(name, getattr(kind, "dtype", "") in strings) for name, kind in features.items()]
    for row, _ in stream_rows(source, None, retry):
        return [(name, isinstance(value, str)) for name, value in row.items()]
    return []


def digest(rows: Iterable[Row]) -> str:
    """Recognises rows: equal rows, equal digests."""
    found = repr([sorted(row.items()) for row in rows])
    return hashlib.sha256(found.encode("utf-8", "surrogatepass")).hexdigest()


def client_version() -> str:
    return f"datasets {datasets.__version__}"


def _rows_from(source: HubDataset, place: Place | None) -> _Rows:
    if place is None:
        yield from _open(source, None)
        return
    if place.state is not None:
        with closing(_open(source, place.state)) as rows:
            if _is_at(rows, place):
                yield from rows
                return
        logger.warning("%s: the client's state leads elsewhere; counting rows instead", source)
    with closing(_open(source, None)) as rows:
        num_before = place.rows - place.overlap
        deque(islice(rows, num_before), maxlen=0)
        if not _is_at(rows, place):
            raise SourceError(
                f"{source}: rows {num_before:,} to {place.rows - 1:,} are not those that were read "
                f"before, so going on would lose or repeat rows ({client_version()} orders them "
                "differently, or the data changed); build anew, or with the earlier client"
            )
        yield from rows


def _is_at(rows: _Rows, place: Place) -> bool:
    """Read the overlap: is it the one that was read before?"""
    return digest(row for row, _ in islice(rows, place.overlap)) == place.digest


def _open(source: HubDataset, state: JSON) -> _Rows:
    """A fresh stream from the start or from the client's state."""
    with _bounded_client():
        stream = _load(source)
        if state is not None:
            stream.load_state_dict(state)
        before = None if source.shuffle else stream.state_dict()
        with closing(iter(stream)) as rows:
            for row in rows:
                yield row, before
                before = None if source.shuffle else stream.state_dict()


def _load(source: HubDataset) -> Any:
    """The client's own stream. Its dataset cache is an empty folder: when the hub cannot be reached
    it would else fall back on whatever version it once kept."""
    with tempfile.TemporaryDirectory() as empty:
        stream = datasets.load_dataset(
            source.dataset,
            source.config,
            split=source.split,
            revision=source.revision,
            streaming=True,
            cache_dir=empty,
        )
    if source.columns is not None:
        stream = stream.select_columns(list(source.columns))
    if source.shuffle is not None:
        seed, buffer_size = source.shuffle
        stream = stream.shuffle(seed=seed, buffer_size=buffer_size)
    return stream


@contextmanager
def _bounded_client() -> Iterator[None]:
    """Shorten the client's own loops (20 tries of 5 to 60 s): ours retry, and say so."""
    config = datasets.config
    wanted = {name: _CLIENT_TRIES for name in dir(config) if _is_limit(name, "MAX_RETRIES")}
    wanted |= {name: 1 for name in dir(config) if _is_limit(name, "RETRY_INTERVAL")}
    before = {name: getattr(config, name) for name in wanted}
    for name, value in wanted.items():
        setattr(config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def _is_limit(name: str, suffix: str) -> bool:
    return name.startswith("STREAMING_") and name.endswith(suffix)


def _wait_or_raise(error: Exception, failures: int, retry: Retry, what: str, progress: str) -> None:
    found = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if not is_transient(error):
        raise SourceError(
            f"{what}: {found}; {progress}; no retry would help: check the name, configuration, "
            "split, revision and your access"
        ) from error
    if failures > retry.max_retries:
        raise HubError(
            f"{what}: unreachable at {datasets.config.HF_ENDPOINT} after {failures} tries "
            f"({found}); {progress}; when the hub answers again, resume: nothing is lost"
        ) from error
    pause = min(retry.delay * 2 ** (failures - 1), _MAX_DELAY) * random.uniform(0.5, 1.0)
    logger.warning(
        "%s: %s; try %d of %d in %.1f s", what, found, failures + 1, retry.max_retries + 1, pause
    )
    time.sleep(pause)


def is_transient(error: BaseException) -> bool:
    """May a later try succeed? Decided by the first telling error in the chain of causes."""
    link: BaseException | None = error
    while link is not None:
        status = getattr(getattr(link, "response", None), "status_code", None)
        if isinstance(status, int):
            return status >= 500 or status in _WAIT_STATUS
        if isinstance(link, OfflineModeIsEnabled):
            return False
        if isinstance(link, _transient_kinds()):
            return True
        link = link.__cause__ or link.__context__
    return False


def _transient_kinds() -> tuple[type[BaseException], ...]:
    kinds: list[type[BaseException]] = [ConnectionError, TimeoutError, *_TRANSPORT]
    if "aiohttp" in sys.modules:  # the client imports it only when it needs it
        kinds.append(sys.modules["aiohttp"].ClientError)
    return tuple(kinds)
