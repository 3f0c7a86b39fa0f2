"""Which address gives which facts.

The addresses are those of docs/inspector.md. Every value of a request is checked before anything is
read, and nothing is read but the stores that were named.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import shardmill
from shardmill.errors import OptionError, ShardmillError, StoreNotFoundError
from shardmill.inspect import documents, rows
from shardmill.inspect.blame import blame_token
from shardmill.inspect.inputs import find_inputs
from shardmill.inspect.stores import OpenStore, Shelf, shard_page
from shardmill.loading import SampleStream
from shardmill.loading.config import DataConfig, open_stream
from shardmill.loading.order import Shuffle
from shardmill.records import JSON
from shardmill.store import verify
from shardmill.store.readers import PackSpace

log = logging.getLogger(__name__)

MOST_PAGE = 500
"""Entries of a list in one answer."""
MOST_PROBLEMS = 1000
_MOST_STREAMS = 4
_MOST_TEXT = 1000  # characters of a value
_DIGITS = re.compile(r"-?[0-9]{1,18}", re.ASCII)
_AROUND, _MOST_OWN = 200, 300  # characters around a token whose origin is shown, and its own


class Query:
    """The values of one request. What is missing, unknown, no number or out of bounds is an
    `OptionError` that names it, what was found and what is wanted."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = dict(values)
        self._asked: set[str] = set()

    def number(
        self, name: str, default: int | None = None, *, least: int = 0, most: int = 2**53 - 1
    ) -> int:
        """A whole number; without a default it must be there."""
        value = self.optional(name)
        if value is None:
            if default is None:
                raise OptionError(f"{name} is missing: wanted {name}=NUMBER")
            return default
        wanted = f"wanted a whole number from {least:,} to {most:,}"
        if not _DIGITS.fullmatch(value):
            raise OptionError(f"{name}={value[:40]!r}: {wanted}")
        if not least <= int(value) <= most:
            raise OptionError(f"{name}={int(value):,}: {wanted}")
        return int(value)

    def whole(self, name: str, *, least: int = 0, most: int = 2**53 - 1) -> int | None:
        """A whole number, or None when it was not sent."""
        return None if self.optional(name) is None else self.number(name, least=least, most=most)

    def page(self, limit: int = 100, *, most: int = MOST_PAGE) -> tuple[int, int]:
        """start and limit."""
        return self.number("start", 0), self.number("limit", limit, least=1, most=most)

    def choice(self, name: str, choices: Sequence[str], default: str | None = None) -> str:
        value = self.optional(name)
        if value is None and default is not None:
            return default
        if value is None or value not in choices:
            found = f"{name} is missing" if value is None else f"{name}={value[:80]!r}"
            raise OptionError(f"{found}: wanted one of {', '.join(map(repr, choices))}")
        return value

    def text(self, name: str) -> str:
        value = self.optional(name)
        if not value:
            raise OptionError(f"{name} is missing: wanted {name}=TEXT")
        return value

    def optional(self, name: str) -> str | None:
        """As it was sent; "" counts as not sent."""
        self._asked.add(name)
        value = self._values.get(name) or None
        if value is not None and len(value) > _MOST_TEXT:
            raise OptionError(f"{name}: {len(value):,} characters; wanted at most {_MOST_TEXT:,}")
        return value

    def done(self) -> None:
        """After the answer is made: refuse names that were not read."""
        unknown = sorted(self._values.keys() - self._asked)
        if unknown:
            raise OptionError(
                f"{', '.join(name[:40] for name in unknown[:8])}: unknown here; wanted any of "
                f"{', '.join(sorted(self._asked)) or 'nothing'}"
            )


class Check:
    """The last verification of one store, in a thread that ends with the process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._state = "never"
        self._progress = 0, 0
        self._problems: list[str] = []

    def start(self) -> None:
        """Begin one, unless one runs."""
        with self._lock:
            if self._state == "running":
                return
            self._state, self._progress, self._problems = "running", (0, 0), []
        threading.Thread(target=self._run, name="verify", daemon=True).start()

    def facts(self) -> dict[str, JSON]:
        with self._lock:
            return {
                "state": self._state,
                "done_bytes": self._progress[0],
                "total_bytes": self._progress[1],
                "problems": [*self._problems[:MOST_PROBLEMS]],
                "num_problems": len(self._problems),
            }

    def statuses(self) -> dict[str, str] | None:
        """Files that are not sound, after a finished check; else None."""
        with self._lock:
            if self._state != "done":
                return None
            parts = [problem.partition(": ") for problem in self._problems]
        return {
            file: "missing" if what.startswith("missing") else "damaged" for file, _, what in parts
        }

    def _run(self) -> None:
        def note(done: int, total: int) -> None:
            self._progress = done, total

        state, problems = "failed", list[str]()
        try:
            problems = verify(self.folder, on_progress=note).problems
            state = "done"
        except (ShardmillError, OSError) as error:
            problems = [str(error)]
        except BaseException as error:
            problems = [f"{self.folder}: the check broke off: {error!r}"]
            raise
        finally:
            with self._lock:
                self._state, self._problems = state, problems
            log.info("%s: verified, %d problems", self.folder, len(problems))


class Desk:
    """What the requests of one server share."""

    def __init__(
        self, shelf: Shelf, config: DataConfig | None = None, inputs: Sequence[str] = ()
    ) -> None:
        """`inputs`: where the input of the stores is; see `find_inputs`."""
        self.shelf, self.config = shelf, config
        self.inputs = find_inputs(shelf, inputs)
        self.checks = [Check(path) for path in shelf.paths]
        self.mixture = lru_cache(_MOST_STREAMS)(self._open_mixture)

    def check(self, query: Query) -> Check:
        number = query.number("store")
        self.shelf.path(number)
        return self.checks[number]

    def split(self, query: Query) -> tuple[OpenStore, str]:
        """The store and the split that a request names; an only split need not be named."""
        opened = self.shelf.store(query.number("store"))
        only = opened.splits[0] if len(opened.splits) == 1 else None
        return opened, query.choice("split", opened.splits, only)

    def plan(self, query: Query) -> tuple[OpenStore, str, PackSpace]:
        """The store and the plan that a request names."""
        opened, name = self.shelf.store(query.number("store")), query.text("plan")
        return opened, name, opened.plan(name, query.optional("split"))

    def _open_mixture(
        self, seq_len: int, seed: int | None, shuffle: Shuffle | None, global_batch_size: int
    ) -> SampleStream:
        """The config's stream. `mixture` keeps the last few: opening large stores takes a while."""
        if self.config is None:
            raise StoreNotFoundError(
                "no mixture: wanted store=NUMBER, or `shardmill view --config train.toml`"
            )
        config = replace(self.config, shuffle=shuffle or self.config.shuffle)
        return open_stream(config, seq_len=seq_len, global_batch_size=global_batch_size, seed=seed)


def stores(desk: Desk, query: Query) -> JSON:  # noqa: ARG001 - every answer has this shape
    return {
        "version": shardmill.__version__,
        "stores": desk.shelf.lines(),
        "mixture": desk.config is not None,
    }


def store(desk: Desk, query: Query) -> JSON:
    return desk.shelf.facts(query.number("store"))


def shards(desk: Desk, query: Query) -> JSON:
    check = desk.check(query)
    manifest = desk.shelf.manifest(query.number("store"))
    split = query.choice("split", list(manifest.splits))
    return shard_page(manifest, split, query.page(), check.statuses())


def verify_state(desk: Desk, query: Query) -> JSON:
    return desk.check(query).facts()


def verify_start(desk: Desk, query: Query) -> JSON:
    check = desk.check(query)
    query.done()  # before anything starts
    check.start()
    return check.facts()


def blame(desk: Desk, query: Query) -> JSON:
    """The row that a token came from; of a long text only what is around the token."""
    opened, split = desk.split(query)
    token, number = query.number("token"), query.number("store")
    inputs = desk.inputs[number]() if number in desk.inputs else None
    texts = opened.reading.texts
    if texts is None:
        raise OptionError(
            f"the origin of a token is proved with its tokenizer: {opened.reading.why}"
        )
    found = blame_token(opened.store, split, token, inputs=inputs, tokenizer=texts.tokenizer)
    start = len(found.text) if found.start is None else found.start
    stop = start if found.stop is None else found.stop
    return {
        "source": found.source,
        "file": found.file,
        "row": found.row_id,
        "own_id": found.own_id,
        "turn": found.turn,
        "role": found.role,
        "from": found.start,
        "to": found.stop,
        "text_before": found.text[max(0, start - _AROUND) : start],
        "text": found.text[start:stop][:_MOST_OWN],
        "text_after": found.text[stop : stop + _AROUND],
        "note": found.note,
    }


Answer = Callable[[Desk, Query], JSON]

_STORE = "/api/stores/{store}"
GET: Mapping[str, Answer] = {
    "/api/stores": stores,
    _STORE: store,
    f"{_STORE}/shards": shards,
    f"{_STORE}/verify": verify_state,
    f"{_STORE}/documents": documents.document_page,
    f"{_STORE}/documents/{{document}}": documents.document_view,
    f"{_STORE}/histogram": documents.histogram,
    f"{_STORE}/search": documents.search,
    f"{_STORE}/plans/{{plan}}": rows.plan_facts,
    f"{_STORE}/plans/{{plan}}/rows": rows.row_page,
    f"{_STORE}/plans/{{plan}}/rows/{{row}}": rows.row_view,
    f"{_STORE}/blame": blame,
    "/api/step": rows.step,
    "/api/mixture": rows.mixture,
}
LONG: tuple[Answer, ...] = (documents.search, blame, rows.step)
"""Answers that may take a second or more."""
POST: Mapping[str, Answer] = {f"{_STORE}/verify": verify_start}
"""Everything that does more than read."""
