"""The real hub client against a hub on loopback, in fair weather and in foul."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.services import Fault, LoopbackHub

pytest.importorskip("datasets")
pytestmark = pytest.mark.slow

TEXTS = [f"document {number} " + "xyz" * (number % 40) for number in range(150)]
SHARDS = 5


class Client:
    """The other end of `hub_client.py`."""

    def __init__(self, hub: LoopbackHub, home: Path) -> None:
        script = str(Path(__file__).with_name("hub_client.py"))
        with (home / "stderr").open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", script],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**hub.environment(home), "HF_HUB_DOWNLOAD_TIMEOUT": "3"},
                cwd=home,
            )

    def __call__(self, do: str, dataset: str, **job: Any) -> Any:
        answer = self.answer(do, dataset, **job)
        assert "result" in answer, answer
        return answer["result"]

    def answer(self, do: str, dataset: str, **job: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, "dataset": dataset, **job}) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate(timeout=600)


def write_parquet(folder: Path, texts: list[str | None], *, column: str = "text") -> Path:
    """A dataset of five Parquet files, as the hub holds them."""
    (folder / "data").mkdir(parents=True)
    size = -(-len(texts) // SHARDS)
    for shard in range(SHARDS):
        part = texts[shard * size : (shard + 1) * size]
        if not part:
            break  # the client refuses a file without rows
        table = pa.table({"id": range(len(part)), column: pa.array(part, pa.string())})
        name = f"train-{shard:05d}-of-{SHARDS:05d}.parquet"
        pq.write_table(table, folder / "data" / name, row_group_size=20)
    return folder


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackHub]:
    root = tmp_path_factory.mktemp("hub")
    with LoopbackHub() as running:
        running.publish("own/docs", write_parquet(root / "docs", list(TEXTS)))
        lines = root / "lines"
        lines.mkdir()
        rows = [json.dumps({"n": number, "text": text}) for number, text in enumerate(TEXTS)]
        (lines / "train.jsonl").write_text("\n".join(rows))
        running.publish("own/lines", lines)
        yield running


@pytest.fixture(scope="module")
def client(hub: LoopbackHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    running = Client(hub, tmp_path_factory.mktemp("home"))
    yield running
    running.close()


@pytest.fixture(autouse=True)
def fair_weather(hub: LoopbackHub) -> Iterator[None]:
    hub.faults.clear()
    hub.requests.clear()
    yield
    hub.faults.clear()


@pytest.mark.parametrize("dataset", ["own/docs", "own/lines"])
def test_a_hub_dataset_resumes_exactly_from_every_batch(client: Client, dataset: str) -> None:
    assert client("guarantees", dataset)["texts"] == TEXTS


def test_a_shuffled_hub_dataset_has_the_clients_order_and_resumes_exactly(client: Client) -> None:
    order = client("direct", "own/docs", shuffle=[7, 40])
    assert order != TEXTS
    assert sorted(order) == sorted(TEXTS)

    assert client("guarantees", "own/docs", options={"shuffle": [7, 40]})["texts"] == order


@pytest.mark.parametrize("options", [{}, {"shuffle": [7, 40]}])
def test_resuming_again_and_again_loses_nothing(client: Client, options: dict[str, Any]) -> None:
    whole = client("read", "own/docs", options=options)["texts"]
    texts: list[str] = []
    cursor = None
    while True:
        part = client("read", "own/docs", options=options, cursor=cursor, max_batches=2)
        if not part["texts"]:
            break
        texts += part["texts"]
        cursor = part["cursor"]

    assert texts == whole
    assert len(texts) == 150


def test_resuming_through_the_clients_state_leaves_out_the_files_before_it(
    hub: LoopbackHub, client: Client
) -> None:
    cursor = client("read", "own/docs", max_batches=9)["cursor"]
    assert 116 < cursor["rows"] < 150  # in the fourth or fifth of five files of 30
    hub.requests.clear()
    rest = client("read", "own/docs", cursor=cursor, options={"field": "text"})

    assert rest["texts"] == TEXTS[cursor["rows"] :]
    read = {request.path.rsplit("/", 1)[1] for request in hub.requests if request.range}
    assert "train-00001-of-00005.parquet" not in read
    assert "train-00004-of-00005.parquet" in read


def test_a_client_state_that_leads_elsewhere_is_not_used(client: Client) -> None:
    first = client("read", "own/docs", max_batches=3)
    later = client("read", "own/docs", max_batches=6)
    crossed = {**first["cursor"], "state": later["cursor"]["state"]}

    assert client("read", "own/docs", cursor=crossed)["texts"] == TEXTS[first["num_read"] :]


@pytest.mark.parametrize("options", [{}, {"shuffle": [7, 40]}])
def test_a_cursor_of_other_data_is_refused(client: Client, options: dict[str, Any]) -> None:
    cursor = client("read", "own/docs", max_batches=4, options=options)["cursor"]
    found = client("read", "own/docs", options=options, cursor={**cursor, "digest": "0" * 64})

    assert found["error"][0] == "SourceError"
    assert "would lose or repeat rows" in found["error"][1]
    assert found["texts"] == []


@pytest.mark.parametrize("options", [{}, {"shuffle": [7, 40]}])
@pytest.mark.parametrize(
    "fault",
    [
        Fault(path=".parquet", drop_after=500, times=3, skip=1),
        Fault(path=".parquet", status=503, times=9, skip=2),
        Fault(path=".parquet", status=500, times=9),
        Fault(path=".parquet", hang=True, times=1, skip=1),
        Fault(path="/api/", drop_after=10, times=2),
    ],
    ids=["cut in mid-file", "503 in the data", "500 at once", "too slow", "cut info"],
)
def test_faults_are_retried_and_nothing_is_lost(
    hub: LoopbackHub, client: Client, fault: Fault, options: dict[str, Any]
) -> None:
    whole = client("read", "own/docs", options=options)["texts"]
    struck = replace(fault)
    hub.faults.append(struck)
    found = client("read", "own/docs", options={**options, "retry_delay": 0.01})

    assert found["error"] == []
    assert found["texts"] == whole
    assert struck.times < fault.times


def test_a_listing_that_fails_is_retried(hub: LoopbackHub, client: Client, tmp_path: Path) -> None:
    hub.publish("own/fresh", write_parquet(tmp_path / "fresh", ["a", "b", "c"]))
    fault = Fault(path="/tree/", status=503, times=8)
    hub.faults.append(fault)
    found = client("read", "own/fresh", options={"retry_delay": 0.01})

    assert found["error"] == []
    assert found["texts"] == ["a", "b", "c"]
    assert fault.times == 0


def test_an_unreachable_hub_is_named_and_the_cursor_stays_valid(
    hub: LoopbackHub, client: Client
) -> None:
    hub.faults.append(Fault(path="train-00002", status=503, times=10_000))
    options = {"retry_delay": 0.01, "max_retries": 2}
    broken = client("read", "own/docs", options=options)

    kind, message = broken["error"]
    assert kind == "HubError"
    assert "own/docs" in message
    assert "after 3 tries" in message
    assert "resume" in message
    assert 0 < len(broken["texts"]) < 150
    hub.faults.clear()
    rest = client("read", "own/docs", options=options, cursor=broken["cursor"])
    assert broken["texts"] + rest["texts"] == TEXTS


def test_a_hub_that_never_answers_is_an_error_not_an_empty_dataset(
    hub: LoopbackHub, client: Client
) -> None:
    hub.stop()
    try:
        found = client("read", "own/docs", options={"retry_delay": 0.01, "max_retries": 1})
    finally:
        hub.start()

    assert found["error"][0] == "HubError"
    assert "after 2 tries" in found["error"][1]


def test_the_revision_is_pinned_to_a_commit(
    hub: LoopbackHub, client: Client, tmp_path: Path
) -> None:
    old = hub.publish("own/moving", write_parquet(tmp_path / "old", ["old"] * 9))
    assert client("describe", "own/moving")["revision"] == old
    new = hub.publish("own/moving", write_parquet(tmp_path / "new", ["new"] * 9))

    assert client("describe", "own/moving")["revision"] == new
    assert client("read", "own/moving")["texts"] == ["new"] * 9
    assert client("read", "own/moving", options={"revision": old})["texts"] == ["old"] * 9


def test_nulls_are_dropped_and_empty_texts_counted(
    hub: LoopbackHub, client: Client, tmp_path: Path
) -> None:
    texts = ["a\r\nb", None, "", "\ufeffc", None, "d"]
    hub.publish("own/holes", write_parquet(tmp_path / "holes", texts, column="body"))
    found = client("read", "own/holes")

    assert found["texts"] == ["a\nb", "c", "d"]
    assert found["num_read"] == 6
    assert found["counts"] == {"empty": 1, "invalid_utf8": 0}
    assert found["drops"] == [["own/holes:row 1", "no_text"], ["own/holes:row 4", "no_text"]]
    assert client("describe", "own/holes")["field"] == "body"


def test_whole_rows_are_retried_too(hub: LoopbackHub, client: Client) -> None:
    hub.faults.append(Fault(path=".jsonl", drop_after=3000, times=2, skip=1))
    rows = client("rows", "own/lines", options={"retry_delay": 0.01})

    assert rows == [{"n": number, "text": text} for number, text in enumerate(TEXTS)]


@pytest.mark.parametrize(
    ("dataset", "options", "words"),
    [
        ("own/nothing", {}, "own/nothing"),
        ("own/docs", {"revision": "no-such-branch"}, "revision"),
        ("own/docs", {"split": "vali"}, "vali"),
        ("own/docs", {"field": "body"}, "'id', 'text'"),
        ("own/docs", {"field": "id"}, "wanted a string"),
    ],
)
def test_what_is_missing_is_an_error_at_once(
    hub: LoopbackHub, client: Client, dataset: str, options: dict[str, Any], words: str
) -> None:
    found = client("read", dataset, options={"retry_delay": 30, **options})

    assert found["error"][0] == "SourceError"
    assert words in found["error"][1]


def test_the_client_talks_to_loopback_only(hub: LoopbackHub, client: Client) -> None:
    client("read", "own/docs")

    assert len(hub.requests) > 3
    assert {request.status for request in hub.requests} <= {200, 206, 404}


def test_files_of_a_dataset_are_read_in_place(
    hub: LoopbackHub, client: Client, tmp_path: Path
) -> None:
    rows = [json.dumps({"text": text}) for text in TEXTS]
    rows[3] = "{}"
    (tmp_path / "files/data").mkdir(parents=True)
    (tmp_path / "files/data/rows.jsonl").write_text("\n".join(rows))
    write_parquet(tmp_path / "files/more", list(TEXTS))
    commit = hub.publish("own/files", tmp_path / "files")
    for where in ("own/files/data/*.jsonl", f"own/files@{commit}/data/rows.jsonl"):
        found = client("far", f"hf://datasets/{where}", size=2000)
        assert found["texts"] == [text for number, text in enumerate(TEXTS) if number != 3]
        assert found["drops"] == [["rows.jsonl:4", "no_text"]]
        assert found["num_pieces"] > 3
        (file,) = found["describe"]["files"]
        assert (file["file"], len(file["blob_id"])) == ("rows.jsonl", 40)
    found = client("far", "hf://datasets/own/files/more", size=2000)
    assert found["texts"] == TEXTS
    assert found["num_pieces"] > SHARDS
    read = [r for r in hub.requests if r.method == "GET" and "own/files/resolve" in r.path]
    assert read
    assert all(request.range for request in read)


def test_a_file_of_a_dataset_is_retried(hub: LoopbackHub, client: Client, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files/rows.jsonl").write_text("".join(f'{{"text": "{n}"}}\n' for n in range(99)))
    hub.publish("own/trouble", tmp_path / "files")
    hub.faults += [
        Fault(path="rows.jsonl", method="GET", times=2, status=503),
        Fault(path="rows.jsonl", method="GET", times=1, drop_after=100),
        Fault(path="rows.jsonl", method="GET", times=1, short_by=7),
    ]
    found = client("far", "hf://datasets/own/trouble/rows.jsonl", size=300)
    assert found["texts"] == [str(number) for number in range(99)]
    assert [fault.times for fault in hub.faults] == [0, 0, 0]
