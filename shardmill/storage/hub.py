"""The Hugging Face client: what is asked of it, and when to ask again. Its one importer.

In: a dataset, pinned to a commit.  Out: the client's stream of rows, or the files of a split and
ranges of their bytes.
Promise: a dropped connection, a 5xx or a timeout is retried with growing, jittered pauses; what no
retry mends is an error at once. A range of bytes comes whole or not at all.
Not here: rows that are never lost (`hubrows`), Parquet (`hubfiles`), documents. HF_ENDPOINT and the
other variables of the client hold.
"""

from __future__ import annotations

import logging
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from shardmill.errors import HubError, SourceError, missing_extra
from shardmill.threads import pause
from shardmill.urls import safe_cause, scrub

try:
    import datasets
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # they are in its __all__
        build_hf_headers,
        hf_raise_for_status,
        http_backoff,
    )
except ImportError as missing:
    raise missing_extra("datasets", "hub") from missing

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_CLIENT_TRIES = 1  # of the client's own loops, above the five of each request
_MAX_DELAY = 60.0
_WAIT_STATUS = (408, 425, 429)
_PARQUET_ENDINGS = (".parquet", ".geoparquet", ".gpq")
_PARQUET_BUILDER = "packaged_modules.parquet.parquet"
_HTTP_ROOTS = ("httpx", "httpx2", "requests")
# The HTTP library below differs between versions of the client; its root error is a base of theirs.
_TRANSPORT: tuple[type[Exception], ...] = tuple(
    base for base in HfHubHTTPError.__mro__ if base.__module__.partition(".")[0] in _HTTP_ROOTS
)
TROUBLE: tuple[type[Exception], ...] = (OSError, EOFError, ValueError, RuntimeError, *_TRANSPORT)


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
class HubFile:
    """One file of a dataset at a commit, which never changes."""

    dataset: str
    revision: str
    path: str  # in the dataset: "data/train-00000-of-00005.parquet"

    def __str__(self) -> str:
        return f"hub dataset {self.dataset}, {self.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetSplit:
    """The files of a split, in the client's order."""

    files: tuple[HubFile, ...]
    columns: tuple[tuple[str, bool], ...] | None  # as declared: name, and whether it holds strings


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How long to bear trouble: pauses of delay, 2 delay, 4 delay, ... at most a minute."""

    max_retries: int = 5  # in a row, without a new row between them
    delay: float = 1.0  # seconds


def resolve_revision(dataset: str, revision: str | None, retry: Retry) -> str:
    """The commit that a branch or tag (None: the head) stands for now."""
    if Path(dataset).exists():
        raise SourceError(
            f"hub dataset {dataset}: a local folder of this name lies in the working folder, and "
            "the client would read that instead; run elsewhere, or open it as a folder"
        )
    api = huggingface_hub.HfApi(endpoint=datasets.config.HF_ENDPOINT)

    def ask() -> str | None:
        return api.dataset_info(dataset, revision=revision).sha

    sha = retried(ask, retry, f"hub dataset {dataset}")
    if not sha:
        raise SourceError(f"hub dataset {dataset}: the hub names no commit for {revision!r}")
    return str(sha)


def client_version() -> str:
    return f"datasets {datasets.__version__}"


def load_stream(source: HubDataset) -> Any:
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


def parquet_split(source: HubDataset) -> ParquetSplit | str:
    """The Parquet files of a split as the client resolves them; or why it is not just files."""
    with tempfile.TemporaryDirectory() as empty, bounded_client():
        builder = datasets.load_dataset_builder(
            source.dataset, source.config, revision=source.revision, cache_dir=empty
        )
    if not any(base.__module__.endswith(_PARQUET_BUILDER) for base in type(builder).__mro__):
        return f"its files are not Parquet: the client reads it with {type(builder).__name__}"
    config = builder.config
    splits = {str(name): list(files) for name, files in (config.data_files or {}).items()}
    if not splits.get(source.split):
        raise SourceError(f"{source}: no such split; found {', '.join(map(repr, splits))}")
    files = [_file_at(url, source.revision) for url in splits[source.split]]
    known = tuple(file for file in files if file is not None)
    if len(known) < len(files):
        return f"a file is not Parquet, or lies elsewhere: {splits[source.split][:3]}"
    if getattr(config, "filters", None) is not None:
        return "its configuration filters rows"
    if getattr(config, "on_bad_files", "error") != "error":
        return "its configuration leaves out bad files"
    return ParquetSplit(files=known, columns=columns_of(builder.info.features))


def columns_of(features: Any) -> tuple[tuple[str, bool], ...] | None:
    """Each declared column and whether it holds strings; None when nothing is declared."""
    if features is None:
        return None
    strings = ("string", "large_string")
    return tuple((name, getattr(kind, "dtype", "") in strings) for name, kind in features.items())


def _file_at(url: str, revision: str) -> HubFile | None:
    """ "hf://datasets/owner/name@commit/data/a.parquet" as a file of that commit."""
    dataset, at, rest = url.removeprefix("hf://datasets/").partition("@")
    found, slash, path = rest.partition("/")
    is_ours = url.startswith("hf://datasets/") and at and slash and "::" not in url
    if not is_ours or found != revision or not path.lower().endswith(_PARQUET_ENDINGS):
        return None
    return HubFile(dataset=dataset, revision=revision, path=path)


def file_size(file: HubFile) -> int:
    """Bytes of a file, as the hub lists it."""
    api = huggingface_hub.HfApi(endpoint=datasets.config.HF_ENDPOINT)
    found = api.get_paths_info(
        file.dataset, [file.path], revision=file.revision, repo_type="dataset"
    )
    sizes = [getattr(entry, "size", None) for entry in found]
    if len(sizes) != 1 or sizes[0] is None:
        raise SourceError(f"{file}: is not in commit {file.revision}; was the dataset rewritten?")
    return int(sizes[0])


def fetch_range(file: HubFile, start: int, stop: int, num_bytes: int) -> bytes:
    """Bytes `start..stop` of a file that has `num_bytes`: all of them, or an error."""
    endpoint = datasets.config.HF_ENDPOINT
    url = huggingface_hub.hf_hub_url(
        file.dataset, file.path, repo_type="dataset", revision=file.revision, endpoint=endpoint
    )
    asked = {"range": f"bytes={start}-{stop - 1}", "accept-encoding": "identity"}
    timeout = huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT
    headers = {**build_hf_headers(), **asked}
    # the tries are ours to count: the client's pauses could not be ended
    response = http_backoff("GET", url, headers=headers, timeout=timeout, max_retries=0)
    hf_raise_for_status(response)
    _check_size(file, num_bytes, response.headers.get("content-range", ""))
    data = response.content
    if len(data) != stop - start:
        raise ConnectionError(
            f"{file}: {len(data):,} bytes came, {stop - start:,} were asked for (from {start:,})"
        )
    return bytes(data)


def _check_size(file: HubFile, num_bytes: int, content_range: str) -> None:
    total = content_range.rpartition("/")[2]
    if total.isdecimal() and int(total) != num_bytes:
        raise SourceError(
            f"{file}: {int(total):,} bytes now, {num_bytes:,} when it was listed; a file of a "
            "commit never changes, so the hub or something before it is wrong: start anew"
        )


@contextmanager
def bounded_client() -> Iterator[None]:
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


def retried(ask: Callable[[], Answer], retry: Retry, what: str) -> Answer:
    """The answer, asked for again while the trouble may pass."""
    failures = 0
    while True:
        try:
            return ask()
        except SourceError:
            raise
        except TROUBLE as error:
            failures += 1
            wait_or_raise(error, failures, retry, what, "nothing was read yet")


def wait_or_raise(error: Exception, failures: int, retry: Retry, what: str, progress: str) -> None:
    """Pause before the next try; or raise when there should be none."""
    words = scrub(str(error)).splitlines()
    found = f"{type(error).__name__}: {words[0] if words else ''}"
    if not is_transient(error):
        raise SourceError(
            f"{what}: {found}; {progress}; no retry would help: check the name, configuration, "
            "split, revision and your access"
        ) from safe_cause(error)
    if failures > retry.max_retries:
        raise HubError(
            f"{what}: unreachable at {datasets.config.HF_ENDPOINT} after {failures} tries "
            f"({found}); {progress}; when the hub answers again, resume: nothing is lost"
        ) from safe_cause(error)
    seconds = min(retry.delay * 2 ** (failures - 1), _MAX_DELAY) * random.uniform(0.5, 1.0)
    logger.warning(
        "%s: %s; try %d of %d in %.1f s", what, found, failures + 1, retry.max_retries + 1, seconds
    )
    pause(seconds)


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
