"""The Hugging Face hub: datasets at a commit, their files, and byte ranges of those files.

The client libraries are imported on first use, here only. HF_ENDPOINT and the client's other
variables apply. Retries are the caller's (`storage.retry`): the client's own are kept short.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from shardmill.arguments import whole_number
from shardmill.errors import OptionError, SourceError, missing_extra
from shardmill.records import JSON
from shardmill.storage.retry import RetryPolicy
from shardmill.urls import Url

_CLIENT_TRIES = 1  # of the client's own loops, above the five of each request
_PARQUET_ENDINGS = (".parquet", ".geoparquet", ".gpq")
_PARQUET_BUILDER = "packaged_modules.parquet.parquet"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubOptions:
    """Everything about a hub dataset except its name."""

    config: str | None = None
    split: str = "train"
    field: str | None = None  # None: "text", else the first string column
    revision: str | None = None  # a branch, tag or commit; None: the head
    shuffle: tuple[int, int] | None = None  # seed and buffer size
    max_retries: int = 5
    retry_delay: float = 1.0  # seconds before the first retry; doubles each time

    def __post_init__(self) -> None:
        whole_number(self.max_retries, "max_retries", least=0)
        if self.retry_delay < 0:
            raise OptionError("{retry_delay}: wanted 0 or more", retry_delay=self.retry_delay)
        if self.shuffle is not None and self.shuffle[1] < 1:
            raise OptionError(
                "{shuffle}: wanted (seed, buffer size of at least 1)", shuffle=self.shuffle
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    """One file of a dataset at a commit, which never changes; read by retried requests."""

    dataset: str
    revision: str
    path: str  # in the dataset: "data/train-00000-of-00005.parquet"
    name: str = field(compare=False)  # the path after the dataset as the caller wrote it
    retry: RetryPolicy = field(compare=False)
    rows_before: int | None = field(default=None, compare=False)  # in the split; None: not known

    def __str__(self) -> str:
        return f"hub dataset {self.dataset}, {self.path}"

    @property
    def place(self) -> HubFile:
        """Where the file is, as of an `InputFile`."""
        return self

    @property
    def num_bytes(self) -> int:
        """Asks the hub, once."""
        return _file_size(self)

    def describe(self) -> dict[str, JSON]:
        return {"dataset": self.dataset, "revision": self.revision, "file": self.path}

    def row_id(self, row: int) -> str:
        """By the row in the split, as the client streams it, where that is known."""
        if self.rows_before is None:
            return f"{self.name}:row {row}"
        return f"{self.name.removesuffix(f'/{self.path}')}:row {self.rows_before + row}"


class NotByFilesError(SourceError):
    """A split is not just the rows of Parquet files, one after the other."""


Columns = tuple[tuple[str, bool], ...]  # each column's name, and whether it holds strings


def open_datasets() -> Any:
    try:
        import datasets
    except ImportError as missing:
        raise missing_extra("datasets", "hub") from missing
    return datasets


def _hub() -> tuple[Any, Any]:
    """The client of the hub, and the library's API at the configured endpoint."""
    endpoint = open_datasets().config.HF_ENDPOINT
    import huggingface_hub

    return huggingface_hub, huggingface_hub.HfApi(endpoint=endpoint)


def client_version() -> str:
    return f"datasets {open_datasets().__version__}"


class HubSplit:
    """One split of a hub dataset at a pinned commit. `options` are those of `HubOptions`."""

    def __init__(self, dataset: str, options: dict[str, Any]) -> None:
        try:
            self.options = HubOptions(**options)
        except TypeError as error:
            raise OptionError(f"hub dataset {dataset}: {error}") from error
        self.dataset = self.name = dataset
        self.place = f"hub dataset {dataset}"
        self.retry = RetryPolicy(
            max_retries=self.options.max_retries, delay=self.options.retry_delay
        )

    def __str__(self) -> str:
        config = f", {self.options.config}" if self.options.config else ""
        return f"hub dataset {Url(self.dataset)}{config}, split {self.options.split}"

    @cached_property
    def revision(self) -> str:
        """The commit that the branch or tag named when this was first asked."""
        where, wanted = self.place, self.options.revision
        if Path(self.dataset).exists():
            raise SourceError(
                f"{where}: the working folder has a local folder of this name, and the client "
                "would read that instead; run elsewhere, or open it as a folder"
            )
        _, api = _hub()
        sha = self.retry.call(lambda: api.dataset_info(self.dataset, revision=wanted).sha, where)
        if not sha:
            raise SourceError(f"{where}: the hub names no commit for {wanted!r}")
        return str(sha)

    def describe(self) -> dict[str, JSON]:
        """The rows and their order. Asks the hub for the commit."""
        shuffle: JSON = None
        if self.options.shuffle is not None:
            seed, size = self.options.shuffle
            # The order is the client's, so its version is part of it.
            shuffle = {"seed": seed, "buffer_size": size, "by": client_version()}
        return {
            "dataset": self.dataset,
            "config": self.options.config,
            "split": self.options.split,
            "revision": self.revision,
            "shuffle": shuffle,
        }

    def load(self, columns: tuple[str, ...] | None = None) -> Any:
        """The client's own stream, of some columns or of all.

        Its dataset cache is an empty folder: otherwise the client would fall back on whatever
        version it once kept when the hub cannot be reached.
        """
        with tempfile.TemporaryDirectory() as empty:
            stream = open_datasets().load_dataset(
                self.dataset,
                self.options.config,
                split=self.options.split,
                revision=self.revision,
                streaming=True,
                cache_dir=empty,
            )
        if columns is not None:
            stream = stream.select_columns(list(columns))
        if self.options.shuffle is not None:
            seed, buffer_size = self.options.shuffle
            stream = stream.shuffle(seed=seed, buffer_size=buffer_size)
        return stream

    def _features(self) -> Any:
        """What the client knows of the columns; None if nothing."""
        self.revision  # noqa: B018 - asked for with retries of its own

        def features() -> Any:
            with bounded_client():
                return self.load().features

        return self.retry.call(features, str(self))

    def declared_columns(self) -> Columns | None:
        """None if none are declared."""
        return _columns_of(self._features())

    def is_plain(self, column: str | None = None) -> bool:
        """Whether the client gives a column, or all, as they are stored: it decodes nothing."""
        known = self._features()
        return _is_plain(known if column is None else (known or {}).get(column))

    def parquet_files(self) -> tuple[tuple[HubFile, ...], Columns | None]:
        """The Parquet files of the split, as the client resolves and orders them, and the columns
        that are declared."""
        revision = self.revision

        def load() -> Any:
            with tempfile.TemporaryDirectory() as empty, bounded_client():
                return open_datasets().load_dataset_builder(
                    self.dataset, self.options.config, revision=revision, cache_dir=empty
                )

        builder = self.retry.call(load, str(self))
        config = builder.config
        splits = {str(name): list(files) for name, files in (config.data_files or {}).items()}
        urls = splits.get(self.options.split, [])
        files = [_file_at(url, self) for url in urls]
        known = tuple(file for file in files if file is not None)
        problem = ""
        if not any(base.__module__.endswith(_PARQUET_BUILDER) for base in type(builder).__mro__):
            problem = (
                f"its files are not Parquet: the client reads it with {type(builder).__name__}"
            )
        elif not urls:
            raise SourceError(f"{self}: no such split; found {', '.join(map(repr, splits))}")
        elif len(known) < len(files):
            problem = f"a file is not Parquet, or is elsewhere: {urls[:3]}"
        elif getattr(config, "filters", None) is not None:
            problem = "its configuration filters rows"
        elif getattr(config, "on_bad_files", "error") != "error":
            problem = "its configuration leaves out bad files"
        if problem:
            raise NotByFilesError(f"{self}: {problem}; open it with open_hub or HubSource")
        return known, _columns_of(builder.info.features)


def _columns_of(features: Any) -> Columns | None:
    if features is None:
        return None
    strings = ("string", "large_string")
    return tuple((name, getattr(kind, "dtype", "") in strings) for name, kind in features.items())


def _is_plain(feature: Any) -> bool:
    """Numbers, strings, and lists and objects of them."""
    if isinstance(feature, dict):
        return all(map(_is_plain, feature.values()))
    inner = getattr(feature, "feature", None)  # of a list
    return _is_plain(inner) if inner is not None else type(feature).__name__ == "Value"


def _file_at(url: str, source: HubSplit) -> HubFile | None:
    """ "hf://datasets/owner/name@commit/data/a.parquet" as a file of that commit."""
    found = re.fullmatch("hf://datasets/([^@]+)@([^/]+)/(.+)", url)
    if not found or found[2] != source.revision or "::" in url:
        return None
    path = found[3]
    if not path.lower().endswith(_PARQUET_ENDINGS):
        return None
    name = f"{source.dataset}/{path}"
    return HubFile(
        dataset=found[1], revision=source.revision, path=path, name=name, retry=source.retry
    )


@lru_cache(maxsize=2**14)
def _file_size(file: HubFile) -> int:
    """Bytes of a file, as the hub lists it."""
    _, api = _hub()
    found = file.retry.call(
        lambda: api.get_paths_info(
            file.dataset, [file.path], revision=file.revision, repo_type="dataset"
        ),
        str(file),
    )
    sizes = [getattr(entry, "size", None) for entry in found]
    if len(sizes) != 1 or sizes[0] is None:
        raise SourceError(f"{file}: is not in commit {file.revision}; was the dataset rewritten?")
    return int(sizes[0])


def fetch_range(file: HubFile, num_bytes: int, start: int, stop: int) -> bytes:
    """Bytes `start..stop` of a file of `num_bytes`: all of them, or an error."""
    client, api = _hub()
    url = client.hf_hub_url(
        file.dataset, file.path, repo_type="dataset", revision=file.revision, endpoint=api.endpoint
    )
    headers = {
        **client.utils.build_hf_headers(),
        "range": f"bytes={start}-{stop - 1}",
        "accept-encoding": "identity",
    }
    timeout = client.constants.HF_HUB_DOWNLOAD_TIMEOUT
    # We do the retries: the client's pauses could not be interrupted.
    response = client.utils.http_backoff(
        "GET", url, headers=headers, timeout=timeout, max_retries=0
    )
    client.utils.hf_raise_for_status(response)
    total = response.headers.get("content-range", "").rpartition("/")[2]
    if total.isdecimal() and int(total) != num_bytes:
        raise SourceError(
            f"{file}: {int(total):,} bytes now, {num_bytes:,} when it was listed; a file of a "
            "commit never changes, so the hub or a proxy before it is wrong: start again"
        )
    data = response.content
    if len(data) != stop - start:
        raise ConnectionError(
            f"{file}: {len(data):,} bytes came, {stop - start:,} were asked for (from {start:,})"
        )
    return bytes(data)


@contextmanager
def bounded_client() -> Iterator[None]:
    """Shorten the client's own retries (20 tries of 5 to 60 s), which hide what happens."""
    config = open_datasets().config
    limits = {"MAX_RETRIES": _CLIENT_TRIES, "RETRY_INTERVAL": 1}
    with ExitStack() as undo:
        for name in dir(config):
            for suffix, value in limits.items():
                if name.startswith("STREAMING_") and name.endswith(suffix):
                    undo.callback(setattr, config, name, getattr(config, name))
                    setattr(config, name, value)
        yield
