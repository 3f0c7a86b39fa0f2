"""Small stores of every kind, and a real server in front of them."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shardmill.building import BuildSpec, Feed, build_chats, build_plan, build_store
from shardmill.chat import bind_template, known_template
from shardmill.inspect.api import GET, Desk, Query
from shardmill.inspect.server import open_server
from shardmill.inspect.stores import Shelf, Tokenizers
from shardmill.loading.config import read_config
from shardmill.records import Conversation
from shardmill.sources import MemoryChats, MemorySource
from shardmill.store import PlanOptions
from shardmill.tokenizers import open_tokenizer

SPECIALS = {"sys": "<|s|>", "usr": "<|u|>", "asst": "<|a|>", "eot": "<|e|>"}
OPENED = open_tokenizer("byte:4", specials=SPECIALS)
HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "</script><!-- ' \" ` ${1}",
    "\u202e\u2066 bidi \u200b\u2028\u2029",
    "nul \x00 and \x1b[31m",
    "x\ufeff\ufffd\U0001f600\U0001f468\u200d\U0001f469",
]
TEXTS = HOSTILE + [f"Page {n} says {'hello ' * (n % 5)}" + "\u00e9" * (n % 3) for n in range(60)]
CONFIG = """
[data]
shuffle = "block"
seed = 7
pack_sequences = true

[[data.datasets]]
name = "pages"
path = "{pages}"
weight = 3

[[data.datasets]]
name = "other"
path = "{pages}/val"
weight = 1

[[data.phases]]
start_step = 3
dataset_weights = {{ pages = 0, other = 1 }}
"""


def chats() -> list[Conversation]:
    return [
        Conversation(
            messages=[
                {"role": "user", "content": f"q{n}"},
                {"role": "assistant", "content": "a\U0001f600" * (1 + n % 7)},
                {"role": "user", "content": HOSTILE[n % len(HOSTILE)]},
                {"role": "assistant", "content": "b" * (n % 3 + 1)},
            ]
        )
        for n in range(40)
    ]


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`chats` with three plans, `pages` of two splits, and `train.toml`, a mixture of those."""
    place = tmp_path_factory.mktemp("stores")
    feed = Feed(source=MemorySource(TEXTS), fill=(("val", 300), ("train", None)))
    spec = BuildSpec(append_eot=True, shard_bytes=256)
    build_store([feed], place / "pages", tokenizer=OPENED, spec=spec)
    build_chats(
        MemoryChats(chats()),
        place / "chats",
        template=bind_template(known_template("four-marker"), OPENED),
        tokenizer=OPENED,
        spec=BuildSpec(),
    )
    build_plan(place / "chats", "train", options=PlanOptions(seq_len=160))
    wide = PlanOptions(seq_len=256, align_to=8, algorithm="first-fit")
    build_plan(place / "chats", "train", options=wide, name="wide")
    split = PlanOptions(seq_len=21, algorithm="concatenate", long="split")
    build_plan(place / "chats", "train", options=split, name="split")
    (place / "train.toml").write_text(CONFIG.format(pages=place / "pages"))
    return place


def open_desk(place: Path, *, tokenizer: bool = True) -> Desk:
    names = ["byte:4"] if tokenizer else []
    shelf = Shelf([place / "chats", place / "pages"], Tokenizers(names, SPECIALS))
    return Desk(shelf, read_config(place / "train.toml"))


@pytest.fixture(scope="session")
def desk(place: Path) -> Desk:
    return open_desk(place)


def ask(desk: Desk, address: str, **values: Any) -> Any:
    """The answer of an address, through JSON and back."""
    query = Query({name: str(value) for name, value in values.items()})
    found = GET[f"/api{address}"](desk, query)
    query.done()
    return json.loads(json.dumps(found, allow_nan=False))


@pytest.fixture(scope="session")
def plan_names(place: Path) -> list[str]:
    return sorted(path.stem for path in (place / "chats" / "packs").iterdir())


@dataclass(frozen=True, slots=True)
class Client:
    """Requests to a server, as they are written."""

    host: str
    port: int

    def send(
        self, path: str, method: str = "GET", headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=600)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            given = {"Host": f"{self.host}:{self.port}"} | (headers or {})
            for name, value in given.items():
                for one in value.split("\n") if value else ():
                    connection.putheader(name, one)
            connection.endheaders()
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, found, answer.read()
        finally:
            connection.close()

    def json(self, path: str, **options: Any) -> tuple[int, Any]:
        status, headers, body = self.send(path, **options)
        assert headers["content-type"] == "application/json"
        return status, json.loads(body)


@contextmanager
def serving(desk: Desk, page: Path) -> Iterator[Client]:
    """A real server on loopback for the length of a block."""
    with open_server(desk, "127.0.0.1", 0, page) as server:
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            yield Client("127.0.0.1", server.hosts.port)
        finally:
            server.stop()
            thread.join(600)
    assert not thread.is_alive()


@pytest.fixture(scope="session")
def client(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    page = tmp_path_factory.mktemp("page")
    (page / "index.html").write_text("<!doctype html><title>page</title>")
    (page / "app.js").write_text("void 0")
    (page / "notes.txt").write_text("not served")
    (page / "link.js").symlink_to(place / "pages" / "meta.json")
    (page.parent / "beside.js").write_text("not served")
    with serving(open_desk(place), page) as found:
        yield found
