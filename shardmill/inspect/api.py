"""Which address gives which facts.

In: a `Query`.  Out: a value for JSON, or an error of ours.
Promise: addresses and names are those of the contract in docs/inspector.md; every number is checked
before anything is read; nothing is looked up that is not on the shelf.
Not here: HTTP (web), the facts themselves.

Verify a store while people look at it.

In: a folder.  Out: how far it is, then every problem.
Promise: one check of a store at a time, in a thread that ends with the process; the store is only
read.
Not here: what is checked (shards.verify).
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import get_args

import shardmill
from shardmill.errors import OptionError, ShardmillError, StoreNotFoundError
from shardmill.inspect import documents, origin, overview, steps
from shardmill.inspect import documents as search
from shardmill.inspect import overview as plans
from shardmill.inspect.steps import Moment
from shardmill.inspect.stores import OpenStore, Query, Shelf
from shardmill.loading import SampleStream
from shardmill.loading.config import DataConfig
from shardmill.loading.order import Shuffle
from shardmill.records import JSON
from shardmill.store import verify

log = logging.getLogger(__name__)


MOST_PROBLEMS = 1000


class Check:
    """The last check of one store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._state = "never"
        self._done = self._total = 0
        self._problems: list[str] = []

    def start(self) -> None:
        """Begin one, unless one runs."""
        with self._lock:
            if self._state == "running":
                return
            self._state, self._done, self._total, self._problems = "running", 0, 0, []
        threading.Thread(target=self._run, name="verify", daemon=True).start()

    def facts(self) -> dict[str, JSON]:
        with self._lock:
            return {
                "state": self._state,
                "done_bytes": self._done,
                "total_bytes": self._total,
                "problems": [*self._problems[:MOST_PROBLEMS]],
                "num_problems": len(self._problems),
            }

    def statuses(self) -> dict[str, str] | None:
        """Files that are not well, after a check that came to its end; else None."""
        with self._lock:
            if self._state != "done":
                return None
            parts = [problem.partition(": ") for problem in self._problems]
        return {
            file: "missing" if what.startswith("missing") else "damaged" for file, _, what in parts
        }

    def _run(self) -> None:
        try:
            report = verify(self.folder, on_progress=self._progress)
        except (ShardmillError, OSError) as error:
            self._end("failed", [str(error)])
        except BaseException as error:
            self._end("failed", [f"{self.folder}: the check broke off: {error!r}"])
            raise
        else:
            self._end("done", report.problems)

    def _progress(self, done: int, total: int) -> None:
        self._done, self._total = done, total

    def _end(self, state: str, problems: list[str]) -> None:
        with self._lock:
            self._state, self._problems = state, problems
        log.info("%s: verified, %d problems", self.folder, len(problems))


MOST_VIEW = 10_000
"""Tokens of a document or row in one answer."""
_MOST_STREAMS = 4
_SHUFFLES: tuple[Shuffle, ...] = get_args(Shuffle)


class Desk:
    """What the requests of one server share."""

    def __init__(
        self, shelf: Shelf, config: DataConfig | None = None, inputs: Sequence[str] = ()
    ) -> None:
        """`inputs`: where the input of the stores is; see `find_inputs`."""
        self.shelf, self.config = shelf, config
        self.inputs = origin.find_inputs(shelf, inputs)
        self.checks = [Check(path) for path in shelf.paths]
        self._lock = threading.Lock()
        self._streams: OrderedDict[tuple[steps.OrderOptions, int], SampleStream] = OrderedDict()

    def check(self, query: Query) -> Check:
        number = query.number("store")
        self.shelf.path(number)
        return self.checks[number]

    def mixture(self, order: steps.OrderOptions, global_batch_size: int) -> SampleStream:
        """The config's stream; the last few are kept, since opening large stores takes a while."""
        if self.config is None:
            raise StoreNotFoundError(
                "no mixture: wanted store=NUMBER, or `shardmill view --config train.toml`"
            )
        key = order, global_batch_size
        with self._lock:
            if key not in self._streams:
                self._streams[key] = steps.config_stream(self.config, order, global_batch_size)
                while len(self._streams) > _MOST_STREAMS:
                    self._streams.popitem(last=False)
            self._streams.move_to_end(key)
            return self._streams[key]


def stores(desk: Desk, query: Query) -> JSON:  # noqa: ARG001 - every answer has this shape
    return {
        "version": shardmill.__version__,
        "stores": overview.store_list(desk.shelf),
        "mixture": desk.config is not None,
    }


def store(desk: Desk, query: Query) -> JSON:
    number = query.number("store")
    opened = desk.shelf.store(number)
    return overview.store_facts(number, opened, desk.shelf)


def shards(desk: Desk, query: Query) -> JSON:
    check = desk.check(query)
    manifest = desk.shelf.manifest(query.number("store"))
    split = query.choice("split", list(manifest.splits))
    return overview.shard_page(manifest, split, query.page(), check.statuses())


def verify_state(desk: Desk, query: Query) -> JSON:
    return desk.check(query).facts()


def verify_start(desk: Desk, query: Query) -> JSON:
    check = desk.check(query)
    query.done()  # before anything begins
    check.start()
    return check.facts()


def document_list(desk: Desk, query: Query) -> JSON:
    opened, split = _split(desk, query)
    return documents.document_page(opened, split, query.page())


def document(desk: Desk, query: Query) -> JSON:
    opened, split = _split(desk, query)
    number = query.number("document")
    return documents.document_view(opened, split, number, query.page(2000, most=MOST_VIEW))


def histogram(desk: Desk, query: Query) -> JSON:
    return documents.histogram(*_split(desk, query))


def search_documents(desk: Desk, query: Query) -> JSON:
    opened, split = _split(desk, query)
    kind = query.choice("kind", search.KINDS, "text")
    return search.search(opened, split, kind, query.text("q"), query.optional("after"))


def plan(desk: Desk, query: Query) -> JSON:
    return plans.plan_facts(*_plan(desk, query))


def plan_rows(desk: Desk, query: Query) -> JSON:
    sort = query.choice("sort", ("row", "waste"), "row")
    return plans.row_page(*_plan(desk, query), query.page(), sort)


def plan_row(desk: Desk, query: Query) -> JSON:
    number = query.number("row")
    return plans.row_view(*_plan(desk, query), number, query.page(MOST_VIEW, most=MOST_VIEW))


def blame(desk: Desk, query: Query) -> JSON:
    opened, split = _split(desk, query)
    token, number = query.number("token"), query.number("store")
    inputs = desk.inputs[number]() if number in desk.inputs else None
    return origin.origin_facts(opened, split, token, inputs)


def step(desk: Desk, query: Query) -> JSON:
    world = query.number("world", 1, least=1, most=2**20)
    batch_size = query.number("batch_size", least=1, most=2**16)
    rank = query.number("rank", 0, most=world - 1)
    number = query.number("step", most=2**40)
    rows = query.page(16, most=64)
    tokens = query.number("from", 0), query.number("tokens", 2048, least=1, most=MOST_VIEW)
    stream, apart = _stream(desk, query, world * batch_size)
    moment = Moment(
        stream=stream,
        samples=number * world * batch_size,
        rank=rank,
        world=world,
        batch_size=batch_size,
        documents=apart,
    )
    return steps.step_facts(moment, desk.shelf, rows, tokens)


def mixture(desk: Desk, query: Query) -> JSON:
    samples = query.whole("samples", least=1, most=2**50)
    points = query.whole("points", least=1, most=2000)
    batch = query.number("world", 1, least=1, most=2**20) * query.number(
        "batch_size", 1, least=1, most=2**16
    )
    stream = desk.mixture(_order(query, 1024), batch)
    facts = steps.mixture_facts(stream, desk.shelf, samples, points)
    return {**facts, "seq_len": stream.seq_len, "global_batch_size": batch, "seed": stream.seed}


def _split(desk: Desk, query: Query) -> tuple[OpenStore, str]:
    opened = desk.shelf.store(query.number("store"))
    only = opened.splits[0] if len(opened.splits) == 1 else None
    return opened, query.choice("split", opened.splits, only)


def _plan(desk: Desk, query: Query) -> tuple[OpenStore, str, str | None]:
    opened = desk.shelf.store(query.number("store"))
    return opened, query.text("plan"), query.optional("split")


def _stream(desk: Desk, query: Query, global_batch_size: int) -> tuple[SampleStream, bool]:
    """The stream that is meant, and whether labels at borders of documents are ignored."""
    config, apart = desk.config, query.optional("documents")
    if apart not in (None, "0", "1"):
        raise OptionError(f"documents={apart[:40]!r}: wanted 0 or 1")
    if query.optional("store") is None:
        own = config is not None and config.pack_sequences
        stream = desk.mixture(_order(query, None), global_batch_size)
        return stream, own if apart is None else apart == "1"
    opened, name = desk.shelf.store(query.number("store")), query.optional("plan")
    if name is not None:
        seq_len = opened.plan(name).plan.facts.options.seq_len
        order = _order(query, seq_len)
        return steps.store_stream(opened, query.optional("split"), name, order), apart == "1"
    opened, split = _split(desk, query)
    return steps.store_stream(opened, split, None, _order(query, None)), apart == "1"


def _order(query: Query, seq_len: int | None) -> steps.OrderOptions:
    chosen = query.choice("shuffle", _SHUFFLES, "as it is")
    return steps.OrderOptions(
        seq_len=query.number("seq_len", seq_len, least=1, most=2**24),
        seed=query.whole("seed"),
        shuffle=next((one for one in _SHUFFLES if one == chosen), None),
    )


Answer = Callable[[Desk, Query], JSON]

_STORE = "/api/stores/{store}"
GET: Mapping[str, Answer] = {
    "/api/stores": stores,
    _STORE: store,
    f"{_STORE}/shards": shards,
    f"{_STORE}/verify": verify_state,
    f"{_STORE}/documents": document_list,
    f"{_STORE}/documents/{{document}}": document,
    f"{_STORE}/histogram": histogram,
    f"{_STORE}/search": search_documents,
    f"{_STORE}/plans/{{plan}}": plan,
    f"{_STORE}/plans/{{plan}}/rows": plan_rows,
    f"{_STORE}/plans/{{plan}}/rows/{{row}}": plan_row,
    f"{_STORE}/blame": blame,
    "/api/step": step,
    "/api/mixture": mixture,
}
LONG: tuple[Answer, ...] = (search_documents, blame, step)
"""Answers that may take a second or more."""
POST: Mapping[str, Answer] = {f"{_STORE}/verify": verify_start}
"""Everything that does more than read."""
