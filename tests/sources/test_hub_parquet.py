"""Parquet on a hub, read in place: the real client against a hub on loopback."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.services import Fault, LoopbackHub, Request
from tests.sources.test_hub import TEXTS, Client, write_parquet

pytest.importorskip("datasets")
pytestmark = pytest.mark.slow

QUICK = {"retry_delay": 0.01}
GROUPS, FILES, FAT = 4, 3, 300_000
_numbers = itertools.count()


def fat_texts() -> list[str]:
    """Twelve that no compression makes small: a footer request must not reach the row groups."""
    letters = "".join(map(chr, range(0x4E00, 0x9E00)))
    draw = random.Random(5)
    return ["".join(draw.choices(letters, k=FAT // 3)) for _ in range(GROUPS * FILES)]


FAT_TEXTS = fat_texts()


def write_fat(folder: Path) -> Path:
    """Three files of four row groups, one text each."""
    (folder / "data").mkdir(parents=True)
    for number in range(FILES):
        texts = FAT_TEXTS[number * GROUPS : (number + 1) * GROUPS]
        path = folder / f"data/train-{number:05d}-of-{FILES:05d}.parquet"
        pq.write_table(pa.table({"id": range(GROUPS), "text": texts}), path, row_group_size=1)
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def hub(root: Path) -> Iterator[LoopbackHub]:
    with LoopbackHub() as running:
        running.publish("own/docs", write_parquet(root / "docs", list(TEXTS)))
        running.publish("own/fat", write_fat(root / "fat"))
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


@pytest.fixture
def fresh(hub: LoopbackHub, tmp_path: Path) -> Iterator[Client]:
    """A process that has read nothing yet, so knows no footer."""
    home = tmp_path / "home"
    home.mkdir()
    running = Client(hub, home)
    yield running
    running.close()


@pytest.fixture
def unread(hub: LoopbackHub, root: Path) -> str:
    """A copy of own/docs that no client has read, so that none knows a footer of it."""
    dataset = f"own/docs{next(_numbers)}"
    hub.publish(dataset, root / "docs")
    return dataset


def read(client: Client, dataset: str, **job: Any) -> Any:
    return client("read", dataset, kind="parquet", **job)


def data_requests(hub: LoopbackHub, file: str) -> list[tuple[int, int]]:
    """The ranges of a file of own/fat that were requested, half-open, without its footer's."""
    commit = hub.find("own/fat", "main")
    assert not isinstance(commit, str)
    (name,) = [name for name in commit.files if file in name]
    size = commit.files[name].stat().st_size
    # By its whole name: a late answer to an earlier test may still be logged.
    wanted = [request for request in hub.requests if name in request.path and request.range]
    return [span for span in map(span_of, wanted) if span[1] < size]


def span_of(request: Request) -> tuple[int, int]:
    assert request.range is not None
    first, last = request.range.removeprefix("bytes=").split("-")
    return int(first), int(last) + 1


def test_parquet_on_a_hub_resumes_exactly_from_every_batch(client: Client) -> None:
    assert client("guarantees", "own/docs", kind="parquet")["texts"] == TEXTS


def test_parquet_on_a_hub_divides_into_files_or_row_groups(client: Client) -> None:
    assert client("divided", "own/docs", kind="parquet", at_least=[1, 5, 6, 99]) == [5, 5, 10, 10]
    files = client("pieces", "own/docs", kind="parquet", at_least=5)
    groups = client("pieces", "own/docs", kind="parquet", at_least=6)

    assert [piece["file"] for piece in files] == [
        f"data/train-{number:05d}-of-00005.parquet" for number in range(5)
    ]
    assert [(piece["file"][11:16], piece["row_group"]) for piece in groups] == [
        (f"{number:05d}", group) for number in range(5) for group in range(2)
    ]
    assert {piece["revision"] for piece in groups} == {
        client("describe", "own/docs", kind="parquet")["revision"]
    }


def test_parquet_on_a_hub_is_cut_into_runs_of_row_groups_and_of_small_files(
    client: Client,
) -> None:
    groups = client("cut", "own/fat", kind="parquet", size=int(2.5 * FAT))
    assert [(piece["file"][11:16], piece["row_groups"]) for piece in groups] == [
        (f"{number:05d}", [start, start + 2]) for number in range(FILES) for start in (0, 2)
    ]
    single = client("cut", "own/fat", kind="parquet", size=1)
    assert [piece["row_group"] for piece in single] == [*range(GROUPS)] * FILES
    (whole,) = client("cut", "own/docs", kind="parquet", size=10**9)
    assert [part["file"] for part in whole["parts"]] == [
        f"data/train-{number:05d}-of-00005.parquet" for number in range(5)
    ]


def test_the_documents_are_those_that_the_client_streams(
    hub: LoopbackHub, client: Client, tmp_path: Path
) -> None:
    texts = ["a\r\nb", None, "", "\ufeffc", None, "d", "\u4e2d", "e", "", None, "f", "g"]
    hub.publish("own/holes", write_parquet(tmp_path / "holes", texts, column="body"))
    ours = read(client, "own/holes")
    theirs = client("read", "own/holes")

    assert ours["texts"] == theirs["texts"] == ["a\nb", "c", "d", "\u4e2d", "e", "f", "g"]
    assert ours["num_read"] == theirs["num_read"] == 12
    assert ours["counts"] == theirs["counts"] == {"empty": 2, "invalid_utf8": 0}
    # Rows 1, 4 and 9 of the dataset; each file holds three rows.
    assert ours["drops"] == [
        ["own/holes/data/train-00000-of-00005.parquet:row 1", "no_text"],
        ["own/holes/data/train-00001-of-00005.parquet:row 1", "no_text"],
        ["own/holes/data/train-00003-of-00005.parquet:row 0", "no_text"],
    ]
    described = client("describe", "own/holes", kind="parquet")
    assert described["kind"] == "hub"
    assert described["field"] == "body"
    assert described["num_files"] == 4


def test_rows_are_filtered_joined_and_mapped_in_a_stream_as_by_row_groups(
    hub: LoopbackHub, client: Client, tmp_path: Path
) -> None:
    rows = [
        {"text": text, "title": title, "n": number, "meta": {"lang": "en" if number % 3 else None}}
        for number, (text, title) in enumerate(
            zip(["a", None, "", "d\r\n", None, "f"], ["A", "B", "", None, None, "F"], strict=True)
        )
    ]
    (tmp_path / "mapped/data").mkdir(parents=True)
    path = tmp_path / "mapped/data/train-00000-of-00001.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    hub.publish("own/mapped", tmp_path / "mapped")
    wanted: list[tuple[dict[str, Any], list[str], int, list[int]]] = [
        ({"filter": "n != 5 and meta.lang == 'en'"}, [], 3, [1, 4]),
        ({"fields": ["title", "text"], "join": "-"}, ["A-a", "B", "d\n", "F-f"], 0, [4]),
        ({"map": "row_functions:text"}, ["a", "d\n", "f"], 0, [1, 4]),
        ({"map": "row_functions:text", "filter": "n > 1"}, ["d\n", "f"], 2, [4]),
    ]
    for options, texts, num_filtered, missing in wanted:
        streamed = client("read", "own/mapped", kind="named", options=options)
        assert streamed["texts"] == texts, (options, streamed["error"], streamed)
        assert streamed["counts"].get("filtered", 0) == num_filtered
        assert [one for one, _ in streamed["drops"]] == [f"own/mapped:row {n}" for n in missing]
        assert client("cut", "own/mapped", kind="named", size=1, options=options), options
        assert client("kind", "own/mapped", kind="best", options=options) == "HubParquetSource"
        assert client("guarantees", "own/mapped", kind="best", options=options)["texts"] == texts


def test_a_named_dataset_of_parquet_files_is_cut_and_its_drops_are_the_streams(
    hub: LoopbackHub, client: Client, tmp_path: Path
) -> None:
    texts = ["a\r\nb", None, "", "\ufeffc", None, "d", "\u4e2d", "e", "", None, "f", "g"]
    folder = tmp_path / "body"
    (folder / "data").mkdir(parents=True)
    for number, size in enumerate([5, 1, 4, 2]):
        part = [texts.pop(0) for _ in range(size)]
        table = pa.table({"body": pa.array(part, pa.large_string()), "n": range(size)})
        name = f"data/train-{number:05d}-of-00004.parquet"
        pq.write_table(table, folder / name, row_group_size=2)
    hub.publish("own/body", folder)
    before = client("describe", "own/body", kind="named")

    for size in (1, 50, 10**9):  # the guarantee compares with the client's stream
        pieces = client("cut", "own/body", kind="named", size=size)
    assert [part["file"][5:16] for part in pieces[0]["parts"]] == [
        f"train-{number:05d}" for number in range(4)
    ]
    single = client("cut", "own/body", kind="named", size=1)
    assert [(piece["file"][11:16], piece["row_group"]) for piece in single] == [
        (f"{number:05d}", group)
        for number, groups in enumerate([(0, 1, 2), (None,), (0, 1), (None,)])
        for group in groups
    ]
    assert client("read", "own/body", kind="named")["drops"] == [
        [f"own/body:row {row}", "no_text"] for row in (1, 4, 9)
    ]
    assert client("describe", "own/body", kind="named") == before
    assert "num_files" not in before


def test_a_fresh_process_reads_a_piece_with_its_own_credentials(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    found = []
    for number in range(2):
        home = tmp_path / str(number)
        home.mkdir()
        running = Client(hub, home)
        if number == 0:
            pieces = running("sent", "own/fat", kind="named", size=1)
        else:
            hub.requests.clear()
            found = running("received", "own/fat", piece=pieces[6])
        running.close()

    assert found == [FAT_TEXTS[6]]
    assert len(pieces) == 12
    assert max(len(piece) // 2 for piece in pieces) < 2000
    assert not any(b"verysecret" in bytes.fromhex(piece) for piece in pieces)
    # Nothing but its own file is looked at: neither the dataset nor the files before it.
    assert {request.path.rpartition("/")[2] for request in hub.requests} == {
        "train-00001-of-00003.parquet",
        hub.find("own/fat", "main").sha,  # type: ignore[union-attr]
    }


def test_what_only_the_client_can_give_is_one_piece(
    hub: LoopbackHub, client: Client, tmp_path: Path
) -> None:
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines/train.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    hub.publish("own/lines", tmp_path / "lines")
    stored: dict[str, tuple[str, list[Any]]] = {
        "numbers": ("string", [1, 2]),
        "quoted": ("json", ['"a"', '"b"']),
    }
    for name, (declared, texts) in stored.items():
        (tmp_path / name / "data").mkdir(parents=True)
        pq.write_table(pa.table({"text": texts}), tmp_path / name / "data/train.parquet")
        (tmp_path / name / "README.md").write_text(
            f"---\ndataset_info:\n  features:\n  - name: text\n    dtype: {declared}\n---\n"
        )
        hub.publish(f"own/{name}", tmp_path / name)

    assert client("is_whole", "own/docs", kind="named", options={"shuffle": [7, 40]})
    for dataset, texts in (("lines", ["a", "b"]), ("numbers", ["1", "2"]), ("quoted", ["a", "b"])):
        assert client("is_whole", f"own/{dataset}", kind="named"), dataset
        assert client("read", f"own/{dataset}", kind="named")["texts"] == texts


def test_a_configuration_and_its_splits_are_resolved_by_the_client(
    hub: LoopbackHub, client: Client, tmp_path: Path
) -> None:
    folder = tmp_path / "two"
    for name, texts in (("b/x", ["two"]), ("b/a", ["one"]), ("b/held", ["out"]), ("c/z", ["no"])):
        path = folder / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"text": texts, "first": ["not this"]}), path)
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: big\n  data_files:\n"
        "  - split: train\n    path: [b/x.parquet, b/a.parquet]\n"
        "  - split: held\n    path: b/held.parquet\n"
        "- config_name: other\n  data_files: c/z.parquet\n---\n"
    )
    hub.publish("own/two", folder)

    for options in ({"config": "big"}, {"config": "big", "split": "held"}, {"config": "other"}):
        found = read(client, "own/two", options=options)
        assert found["error"] == []
        assert found["texts"] == client("read", "own/two", options=options)["texts"]
    assert found["texts"] == ["no"]


def test_a_fresh_process_resumes_at_the_row_group_and_fetches_nothing_before_it(
    hub: LoopbackHub, client: Client, fresh: Client, root: Path
) -> None:
    cursor = read(client, "own/fat", max_batches=7)["cursor"]
    second = "data/train-00001-of-00003.parquet"
    assert cursor == {"file": second, "position": {"row_group": 2, "rows": 1}}
    hub.requests.clear()
    rest = read(fresh, "own/fat", cursor=cursor, options={"field": "text"})

    assert rest["texts"] == FAT_TEXTS[7:]
    asked = {request.path.rpartition("/")[2] for request in hub.requests if request.range}
    # The first file is asked for its footer, to find the columns; its rows are not read.
    assert asked == {f"train-{number:05d}-of-00003.parquet" for number in range(3)}
    assert data_requests(hub, "train-00000") == []
    # Row group 2 itself is read again, from its start: the cursor is inside it.
    chunk = pq.read_metadata(root / "fat" / second).row_group(2).column(1)
    starts = [start for start, _ in data_requests(hub, "train-00001")]
    assert min(starts) == min(chunk.dictionary_page_offset, chunk.data_page_offset)
    assert len(data_requests(hub, "train-00002")) == 1


def test_a_piece_fetches_only_its_row_group(hub: LoopbackHub, client: Client, root: Path) -> None:
    client("pieces", "own/fat", kind="parquet", at_least=12)
    hub.requests.clear()
    found = read(client, "own/fat", piece=[12, 6])

    assert found["texts"] == [FAT_TEXTS[6]]
    (span,) = data_requests(hub, "train-00001")
    chunk = pq.read_metadata(root / "fat/data/train-00001-of-00003.parquet").row_group(2).column(1)
    assert span[1] - span[0] == chunk.total_compressed_size
    assert not any("train-00002" in request.path for request in hub.requests)


FAULTS = {
    "data cut in the middle": Fault(path=".parquet", drop_after=500, times=3, skip=1),
    "data cut again and again": Fault(path=".parquet", drop_after=500, times=5, skip=2),
    "data short": Fault(path=".parquet", short_by=3, times=3, skip=2),
    "503 in the data": Fault(path="train-00002", status=503, times=5, skip=1),
    "500 at once": Fault(path=".parquet", status=500, times=5),
    "429": Fault(path=".parquet", status=429, times=5, skip=2),
    "too slow": Fault(path="train-00001", hang=True, times=1),
    "size refused": Fault(path="/paths-info/", status=503, times=3),
    "size cut": Fault(path="/paths-info/", drop_after=10, times=2),
    "listing refused": Fault(path="/api/", status=503, times=4, skip=1),
    "info cut": Fault(path="/api/", drop_after=10, times=2),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_faults_are_retried_and_nothing_is_lost(
    hub: LoopbackHub, client: Client, unread: str, kind: str
) -> None:
    struck = replace(FAULTS[kind])
    hub.faults.append(struck)
    found = read(client, unread, options=QUICK)

    assert found["error"] == []
    assert found["texts"] == TEXTS
    assert found["num_read"] == 150
    assert struck.times == 0


@pytest.mark.parametrize("skip", [0, 6, 19])
@pytest.mark.parametrize("cut", [{"short_by": 1}, {"drop_after": 9, "times": 5}])
def test_after_a_fault_in_the_middle_of_a_file_no_row_is_lost(
    hub: LoopbackHub, client: Client, skip: int, cut: dict[str, int]
) -> None:
    # A row group is five requests here.
    first = read(client, "own/fat", block=2**16, options=QUICK)
    assert first["texts"] == FAT_TEXTS
    assert len(data_requests(hub, "train-00001")) == 20
    hub.requests.clear()
    fault = Fault(path="train-00001", skip=skip, **cut)
    hub.faults.append(fault)
    found = read(client, "own/fat", block=2**16, options=QUICK)

    assert fault.times == 0
    assert found["error"] == []
    assert found["texts"] == FAT_TEXTS
    assert len(data_requests(hub, "train-00000")) == 20


def test_an_unreachable_hub_is_named_and_the_cursor_stays_valid(
    hub: LoopbackHub, client: Client
) -> None:
    hub.faults.append(Fault(path="train-00002", status=503, times=10_000))
    options = {**QUICK, "max_retries": 2}
    broken = read(client, "own/docs", options=options)

    kind, message = broken["error"]
    assert kind == "HubError"
    assert "own/docs, data/train-00002-of-00005.parquet" in message
    assert "after 3 tries" in message
    assert "resume" in message
    assert broken["texts"] == TEXTS[: broken["num_read"]]
    assert 40 < broken["num_read"] < 61
    hub.faults.clear()
    rest = read(client, "own/docs", options=options, cursor=broken["cursor"])
    assert broken["texts"] + rest["texts"] == TEXTS


def test_a_hub_that_never_answers_is_an_error_not_an_empty_dataset(
    hub: LoopbackHub, client: Client
) -> None:
    hub.stop()
    try:
        found = read(client, "own/docs", options={**QUICK, "max_retries": 1})
    finally:
        hub.start()

    assert found["error"][0] == "HubError"
    assert "after 2 tries" in found["error"][1]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault(path="train-00001", status=404, times=99), "no retry would help"),
        (Fault(path="train-00001", status=403, times=99), "your access"),
        (Fault(path="train-00001", status=416, times=99), "no retry would help"),
    ],
    ids=["vanished", "no access", "shorter than listed"],
)
def test_a_file_that_cannot_be_read_is_an_error_at_once(
    hub: LoopbackHub, client: Client, unread: str, fault: Fault, words: str
) -> None:
    hub.faults.append(replace(fault))
    found = read(client, unread, options={"retry_delay": 30})

    assert found["error"][0] == "SourceError"
    assert "train-00001" in found["error"][1]
    assert words in found["error"][1]
    assert found["texts"] == TEXTS[: found["num_read"]]


def test_a_file_that_changed_under_its_commit_is_refused(
    hub: LoopbackHub, client: Client, tmp_path: Path
) -> None:
    folder = write_parquet(tmp_path / "moved", [f"text {n}" for n in range(50)])
    hub.publish("own/moved", folder)
    assert len(read(client, "own/moved")["texts"]) == 50
    path = folder / "data/train-00003-of-00005.parquet"
    path.write_bytes(path.read_bytes() + b"more")
    found = read(client, "own/moved", options={"retry_delay": 30})

    assert found["error"][0] == "SourceError"
    assert "train-00003" in found["error"][1]
    assert "when it was listed" in found["error"][1]


def damaged_footer(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4] + b"what")


def damaged_page(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(table, path, write_page_checksum=True, compression="none")
    data = path.read_bytes()
    assert data.count(b"text 33") == 1 + data.count(b"text 33\x00")
    path.write_bytes(data.replace(b"text 33", b"TEXT 33", 1))


def no_column(path: Path) -> None:
    pq.write_table(pa.table({"id": [1], "txet": ["x"]}), path)


def column_of_numbers(path: Path) -> None:
    pq.write_table(pa.table({"text": [1, 2]}), path)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (damaged_footer, "not a readable Parquet file"),
        (damaged_page, "not a readable Parquet file"),
        (no_column, "0 columns 'text', wanted one; found 'id', 'txet'"),
        (column_of_numbers, "holds int64, wanted strings or bytes"),
    ],
)
def test_a_damaged_file_is_named(
    hub: LoopbackHub, client: Client, tmp_path: Path, harm: Any, words: str
) -> None:
    folder = write_parquet(tmp_path / "harmed", [f"text {n}" for n in range(50)])
    harm(folder / "data/train-00003-of-00005.parquet")
    hub.publish(f"own/{harm.__name__}", folder)
    found = read(client, f"own/{harm.__name__}", options={"retry_delay": 30})

    assert found["error"][0] == "SourceError"
    assert "train-00003" in found["error"][1]
    assert words in found["error"][1]
    assert len(found["texts"]) <= 30


@pytest.mark.parametrize(
    ("dataset", "options", "words"),
    [
        ("own/nothing", {}, "own/nothing"),
        ("own/docs", {"revision": "no-such-branch"}, "revision"),
        ("own/docs", {"split": "vali"}, "no such split; found 'train'"),
        ("own/docs", {"field": "body"}, "'id', 'text'"),
        ("own/docs", {"field": "id"}, "wanted strings"),
    ],
)
def test_what_is_missing_is_an_error_at_once(
    client: Client, dataset: str, options: dict[str, Any], words: str
) -> None:
    found = read(client, dataset, options={"retry_delay": 30, **options})

    assert found["error"][0] == "SourceError"
    assert words in found["error"][1]


@pytest.mark.parametrize(
    "cursor",
    [
        {"file": "data/nothing.parquet", "position": {"row_group": 0, "rows": 1}},
        {"file": "data/train-00001-of-00005.parquet", "position": {"row_group": 2, "rows": 1}},
        {"file": "data/train-00001-of-00005.parquet", "position": {"row_group": 9, "rows": 0}},
        {"file": "data/train-00001-of-00005.parquet", "position": {"row_group": -1, "rows": 0}},
        {"file": "data/train-00001-of-00005.parquet"},
    ],
)
def test_a_cursor_of_other_data_is_refused(client: Client, cursor: Any) -> None:
    found = read(client, "own/docs", cursor=cursor)

    assert found["error"][0] == "SourceError"
    assert "cursor" in found["error"][1]
    assert found["texts"] == []


def test_open_hub_chooses_the_source(hub: LoopbackHub, client: Client, tmp_path: Path) -> None:
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines/train.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    hub.publish("own/lines", tmp_path / "lines")
    filtered = write_parquet(tmp_path / "filtered", ["a", "b", "c", "d", "e"])
    (filtered / "README.md").write_text(
        "---\nconfigs:\n- config_name: some\n  data_files: data/*.parquet\n"
        "  on_bad_files: skip\n---\n"
    )
    hub.publish("own/filtered", filtered)

    assert client("kind", "own/docs", kind="best") == "HubParquetSource"
    assert client("kind", "own/lines", kind="best") == "HubSource"
    assert client("kind", "own/filtered", kind="best") == "HubSource"
    assert client("kind", "own/docs", kind="best", options={"shuffle": [7, 40]}) == "HubSource"
    assert client("read", "own/lines", kind="best")["texts"] == ["a", "b"]
    refused = read(client, "own/lines")["error"]
    assert refused[0] == "NotByFilesError"
    assert "open it with open_hub" in refused[1]
    shuffled = client.answer("describe", "own/docs", kind="parquet", options={"shuffle": [7, 40]})
    assert shuffled["raised"][0] == "OptionError"


def test_the_client_talks_to_loopback_only(hub: LoopbackHub, client: Client) -> None:
    read(client, "own/docs")

    assert len(hub.requests) > 3
    assert {request.status for request in hub.requests} <= {200, 206, 404}
