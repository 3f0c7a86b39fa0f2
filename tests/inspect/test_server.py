"""Who may ask what of the server, over real connections."""

from __future__ import annotations

import json
import socket
import time

import pytest

from shardmill.inspect.server import HEADERS, PAGE, Hosts
from tests.inspect.conftest import HOSTILE, open_desk, serving

STORES = "/api/stores"


def test_the_page_and_the_stores_are_served_with_all_headers(client):
    status, headers, body = client.send("/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert body == b"<!doctype html><title>page</title>"
    assert client.send("/index.html")[2] == body
    status, headers, body = client.send("/app.js")
    assert (status, headers["content-type"], body) == (
        *(200, "text/javascript; charset=utf-8"),
        b"void 0",
    )
    status, headers, body = client.send(STORES)
    assert (status, headers["cache-control"]) == (200, "no-store")
    assert [one["name"] for one in json.loads(body)["stores"]] == ["chats", "pages"]
    assert client.send(STORES, "HEAD")[::2] == (200, b"")


@pytest.mark.parametrize(
    ("path", "method", "headers"),
    [
        ("/", "GET", {}),
        (STORES, "GET", {}),
        ("/nothing", "GET", {}),
        (f"{STORES}/99", "GET", {}),
        (STORES, "DELETE", {}),
        (f"{STORES}/0/verify", "POST", {}),
        (STORES, "GET", {"Host": "evil.example"}),
    ],
)
def test_every_answer_has_the_headers_and_allows_no_other_origin(client, path, method, headers):
    _, found, _ = client.send(path, method, {"Origin": "http://evil.example", **headers})
    assert {name: found[name.lower()] for name in HEADERS} == HEADERS
    assert "access-control-allow-origin" not in found
    assert "server" not in found


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:{port}", 200),
        ("localhost:{port}", 200),
        ("LocalHost:{port}", 200),
        ("[::1]:{port}", 200),
        ("evil.example", 421),
        ("evil.example:{port}", 421),
        ("127.0.0.1.evil.example:{port}", 421),
        ("127.0.0.1", 421),
        ("127.0.0.1:1", 421),
        ("192.168.0.1:{port}", 421),
        ("127.0.0.1:{port}@evil.example", 421),
        ("127.0.0.1:{port}\nevil.example", 400),
        ("", 400),
    ],
)
def test_only_our_own_host_is_answered(client, host, status):
    for path in ("/", STORES):
        headers = {"Host": host.format(port=client.port)}
        found, _, body = client.send(path, headers=headers)
        assert found == status
        assert status == 200 or b"stores" not in body


def test_bound_to_all_addresses_a_name_is_still_refused():
    hosts = Hosts(host="0.0.0.0", port=8000)
    numbers = ["192.168.0.7:8000", "[fe80::1]:8000", "localhost:8000"]
    assert [hosts.known(one) for one in numbers] == [True, True, True]
    assert not hosts.known("evil.example:8000")
    assert Hosts(host="127.0.0.1", port=80).known("localhost")
    assert Hosts(host="box.lan", port=8000).known("box.lan:8000")
    assert Hosts(host="::1", port=8000).known("[::1]:8000")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_but_reading_is_served(client, method):
    headers = {"X-Shardmill": "1"}
    for path in (STORES, f"{STORES}/0", "/"):
        status, facts = client.json(path, method=method, headers=headers)
        assert (status, list(facts)) == (405, ["error"])


def test_a_check_is_started_by_our_own_page_alone(client):
    own, path = f"http://127.0.0.1:{client.port}", f"{STORES}/0/verify"
    for headers in (
        {},
        {"X-Shardmill": "0"},
        {"Origin": own},
        {"X-Shardmill": "1", "Origin": "http://evil.example"},
        {"X-Shardmill": "1", "Origin": "null"},
        {"X-Shardmill": "1", "Origin": f"{own}\n{own}"},
        {"X-Shardmill": "1", "Sec-Fetch-Site": "cross-site"},
    ):
        assert client.json(path, method="POST", headers=headers)[0] == 403
    assert client.json(path)[1]["state"] == "never"
    headers = {"X-Shardmill": "1", "Origin": own, "Sec-Fetch-Site": "same-origin"}
    assert client.json(f"{path}?split=train", method="POST", headers=headers)[0] == 400
    assert client.json(path)[1]["state"] == "never"
    status, facts = client.json(path, method="POST", headers=headers)
    assert (status, facts["problems"]) == (202, [])
    while (facts := client.json(path)[1])["state"] == "running":
        time.sleep(0.01)
    assert (facts["state"], facts["problems"]) == ("done", [])
    assert facts["done_bytes"] == facts["total_bytes"] > 0


def test_a_page_of_another_site_reads_nothing(client):
    for site in ("cross-site", "same-site"):
        assert client.json(STORES, headers={"Sec-Fetch-Site": site})[0] == 403
    assert client.json(STORES, headers={"Sec-Fetch-Site": "same-origin"})[0] == 200
    assert client.send("/", headers={"Sec-Fetch-Site": "cross-site"})[0] == 200  # a link to us


@pytest.mark.parametrize(
    "path",
    [
        "/../beside.js",
        "/%2e%2e/beside.js",
        "/%2e%2e%2fbeside.js",
        "/..%2fbeside.js",
        "/..%5cbeside.js",
        "//beside.js",
        "/./app.js",
        "/notes.txt",
        "/link.js",
        "/app.js/",
        "/app.js%00",
        "/api",
        "/api/",
        "/api/stores/",
        "/api/../app.js",
        "/api/stores/0/plans/..%2f..%2fmeta",
        "/api/stores/0/plans/%2e%2e",
        "/api/stores/0/plans/%2fetc%2fpasswd/rows",
        "/etc/passwd",
        "//etc/passwd",
    ],
)
def test_no_file_is_read_that_is_not_listed(client, path):
    status, facts = client.json(path)
    assert (status, list(facts)) == (404, ["error"])


HUGE = "9" * 400
BAD = [
    ("0/documents?start=-1", "start=-1: wanted a whole number from 0"),
    (f"0/documents?start={HUGE}", "start='999"),
    ("0/documents?start=1e3", "start='1e3'"),
    ("0/documents?start=%D9%A3", "start="),  # a digit, but no ASCII one
    ("0/documents?limit=0", "limit=0: wanted a whole number from 1 to 500"),
    ("0/documents?limit=501", "limit=501"),
    ("0/documents?start=1&start=2", "twice"),
    ("0/documents?limt=5", "limt: unknown here; wanted any of limit, split, start, store"),
    ("0/documents?store=1", "twice"),
    ("0/documents?split=..%2ftrain", "split='../train': wanted one of 'train'"),
    ("1/documents", "split is missing: wanted one of 'train', 'val'"),
    ("1/documents?split=test", "split='test'"),
    ("1/shards?split=test", "split='test'"),
    ("0/documents/-1", "document=-1"),
    (f"0/documents/{HUGE}", "document='999"),
    ("0/documents/1?limit=10001", "limit=10,001"),
    ("-1", "store=-1"),
    ("x", "store='x'"),
    ("0/plans/train-160?split=val", "of the split 'train', not of 'val'"),
    ("0/plans/train-160/rows?sort=up", "sort='up': wanted one of 'row', 'waste'"),
    ("0/search", "q is missing"),
    ("0/search?q=x&kind=regex", "kind='regex'"),
    ("0/search?q=x&after=7", "after='7': wanted the `next`"),
    ("0/search?q=x&after=999999999.0", "after='999999999.0'"),
    ("0/search?q=" + "x" * 201, "201 characters; wanted at most 200"),
    ("0/search?q=" + "x" * 1001, "1,001 characters"),
    ("0/search?q=40&kind=id", "no document of split 'train'"),
    ("0/search?q=other&kind=source", "no source of this store"),
]


@pytest.mark.parametrize(("path", "message"), BAD, ids=range(len(BAD)))
def test_a_wrong_number_or_name_is_refused(client, path, message):
    status, facts = client.json(f"{STORES}/{path}")
    assert status == 400, facts
    assert message in facts["error"]


STEP = "/api/step?store=1&split=train&seq_len=16&batch_size=2&step=0"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/api/step", "batch_size is missing"),
        ("/api/step?store=1&split=train&batch_size=2&step=0", "seq_len is missing"),
        (f"{STEP}&rank=1", "rank=1: wanted a whole number from 0 to 0"),
        (f"{STEP}&world=99999999", "world=99,999,999"),
        (f"{STEP}&shuffle=some", "shuffle='some': wanted one of"),
        (f"{STEP}&documents=yes", "documents='yes'"),
        (f"{STEP}&limit=65", "limit=65"),
        (STEP.replace("seq_len=16", "seq_len=16777217"), "seq_len=16,777,217"),
        (STEP.replace("seq_len=16", "seq_len=100000"), "no source has a window"),
        (STEP.replace("store=1", "store=0"), "wanted plan=NAME"),
        ("/api/step?store=0&plan=train-160&seq_len=9&batch_size=1&step=0", "seq_len=9"),
        ("/api/mixture?samples=0", "samples=0"),
        ("/api/mixture?samples=9&points=99999", "points=99,999"),
    ],
)
def test_a_step_that_makes_no_sense_is_refused(client, path, message):
    status, facts = client.json(path)
    assert status == 400, facts
    assert message in facts["error"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (f"{STORES}/2", "there is no store 2; the stores are 0 to 1, see /api/stores"),
        (
            f"{STORES}/0/documents/40",
            "there is no document 40: split 'train' has 40, numbered 0 to 39",
        ),
        (f"{STORES}/0/plans/train-160/rows/999999", "there is no row 999,999: the plan has"),
        (f"{STORES}/0/nothing", f"there is no address {STORES}/0/nothing; /api/stores lists"),
        ("/documents/5", "there is no address /documents/5"),
    ],
)
def test_what_is_not_there_is_a_404_that_says_so(client, path, message):
    status, facts = client.json(path)
    assert (status, list(facts)) == (404, ["error"])
    assert message in facts["error"]


def test_a_browser_at_an_unknown_address_gets_a_page_with_a_way_home(place):
    with serving(open_desk(place), PAGE) as other:
        for path in ("/stores/0", "/index.htm", "/<script>alert(1)</script>"):
            status, headers, body = other.send(path, headers={"Accept": "text/html,*/*"})
            assert (status, headers["content-type"]) == (404, "text/html; charset=utf-8")
            assert b"There is no such page" in body
            assert b'href="/"' in body
            assert b"alert" not in body
        status, facts = other.json("/api/nothing", headers={"Accept": "text/html,*/*"})
        assert (status, list(facts)) == (404, ["error"])


def test_what_cannot_be_looked_up_is_reported(client, place, tmp_path):
    status, facts = client.json(f"{STORES}/0/plans/nope")
    assert (status, "its plans are: train-160, train-split, train-wide" in facts["error"]) == (
        404,
        True,
    )
    status, facts = client.json(f"{STORES}/0/blame?token=5")
    assert (status, "name it with --input" in facts["error"]) == (400, True)
    desk = open_desk(place)
    desk.config = None
    with serving(desk, tmp_path) as other:
        assert other.json("/api/mixture?samples=9")[0] == 404
        assert other.json("/")[0] == 404  # no page is there


def test_hostile_text_is_json_and_nothing_else(client):
    status, headers, body = client.send(f"{STORES}/1/documents?split=val")
    assert (status, headers["content-type"]) == (200, "application/json")
    assert body.isascii()
    found = [one["preview"].removesuffix("<|e|>") for one in json.loads(body)["documents"]]
    assert found[: len(HOSTILE)] == HOSTILE
    _, facts = client.json(f"{STORES}/1/documents?split=%3Cscript%3E")
    assert "'<script>'" in facts["error"]


def test_a_damaged_store_is_reported_and_the_server_continues(client, place, tmp_path):
    import shutil

    from shardmill.inspect.api import Desk
    from shardmill.inspect.stores import Shelf, Tokenizers

    folder = shutil.copytree(place / "pages", tmp_path / "pages")
    (folder / "train_idx.npy").unlink()
    with serving(Desk(Shelf([folder], Tokenizers([], None))), tmp_path) as other:
        status, facts = other.json(f"{STORES}/0")
        assert (status, "missing" in facts["error"]) == (409, True)
        assert other.json(STORES)[1]["stores"][0]["error"] == facts["error"]
        assert other.json(f"{STORES}/0/shards?split=train")[1]["total"] > 1


def test_a_client_that_goes_away_stops_nothing(client):
    request = f"GET {STORES}/0/search?q=nowhere HTTP/1.1\r\nHost: 127.0.0.1:{client.port}\r\n\r\n"
    for _ in range(8):
        with socket.create_connection(("127.0.0.1", client.port)) as connection:
            connection.sendall(request.encode())
    with socket.create_connection(("127.0.0.1", client.port)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: ")  # and never the rest
    assert client.json(STORES)[0] == 200


def test_what_is_no_http_is_refused(client):
    for data in (b"\x16\x03\x01 hello\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a b\r\nX\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", client.port), timeout=600) as connection:
            connection.sendall(data)
            assert b" 400 " in connection.recv(65536).split(b"\r\n")[0] + b" "
    assert client.json(STORES)[0] == 200
