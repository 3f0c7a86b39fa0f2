"""The reader that maps nothing: a file that is cut is an error, and few files are open at once."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.building import build_plan
from shardmill.errors import DamagedStoreError, OptionError, StoreError
from shardmill.loading import ChatRows, Loader, PackSource, SampleStream, TokenSource
from shardmill.records import Ragged, TokenFile
from shardmill.store import PlanOptions, list_plans, open_store
from shardmill.store.readers import ChatSpace, TokenSpace, open_tokens, token_space
from shardmill.store.readers import files as shard_files
from shardmill.store.readers.mapped import AddressRange
from shardmill.store.readers.token_space import file_system_of, reader_for
from shardmill.testing.stores import build_small_chat_store, build_small_store, make_examples
from tests.packs import FIVE
from tests.store.shards import ShardShape, read_shards, write_shards

pytestmark = pytest.mark.skipif(not hasattr(os, "preadv"), reason="no preadv here")


def open_files(folder: Path) -> int:
    """How many files of a folder this process holds open."""
    return sum(file.path.startswith(str(folder)) for file in psutil.Process().open_files())


CUT = """
import os, sys
from shardmill.building import build_plan
from shardmill.errors import DamagedStoreError
from shardmill.store.readers import TokenSpace
from shardmill.records import TokenFile
from pathlib import Path
path = Path(sys.argv[1])
space = TokenSpace([TokenFile(path=path, num_tokens=2**20, dtype="uint16")], reader=sys.argv[2])
space.gather([0, 2**19], 1000)  # opened, and mapped by a reader that maps
os.truncate(path, 2**20)  # the second half is gone
print(space.gather([0, 1000], 1000).sum(), flush=True)  # before the cut: still there
try:
    space.gather([0, 2**20 - 1000], 1000)
except DamagedStoreError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_shard_cut_after_opening_is_an_error_with_pread_and_kills_a_process_that_maps(tmp_path):
    found = {}
    for reader in ("pread", "mapped"):
        path = tmp_path / f"{reader}.bin"
        np.ones(2**20, "<u2").tofile(path)
        command = [sys.executable, "-c", CUT, str(path), reader]
        found[reader] = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found["pread"].stderr == ""
    kept, message = found["pread"].stdout.splitlines()
    assert kept == "2000"
    assert message.startswith(f"{tmp_path / 'pread.bin'}: found 1,048,576 bytes, wanted 2,097,152")
    assert found["mapped"].returncode == -signal.SIGBUS  # how maps work everywhere: docs/loading.md
    assert found["mapped"].stdout == "2000\n"


@pytest.mark.parametrize("size", [0, 1, 2047, 4094])
def test_a_read_over_the_end_never_leaves_zeros_without_an_error(tmp_path, size):
    files = write_shards(tmp_path, [ShardShape(2048, "uint16")] * 2)
    space = TokenSpace(files, reader="pread")
    space.read(0, 4096)
    os.truncate(files[1].path, size)
    out = np.zeros((1, 4096), np.uint16)
    for call in (lambda: space.gather([0], 4096, out), lambda: space.read(2040, 4096)):
        with pytest.raises(DamagedStoreError, match=f"found {size:,} bytes, wanted 4,096"):
            call()
    assert space.read(0, 2048).tolist() == read_shards(files[:1]).tolist()


def test_a_disk_error_names_the_file_and_the_way_out(tmp_path):
    """A folder in place of a file is what reads with an error on every system."""
    files = write_shards(tmp_path, [ShardShape(10, "uint16")])
    space = TokenSpace(files, reader="pread")
    space.read(0, 1)
    reader = space._reader()
    folder = os.open(tmp_path, os.O_RDONLY)
    os.dup2(folder, reader._held[0].number)
    os.close(folder)
    with pytest.raises(StoreError, match=r"shard_00000.bin: cannot be read at byte 0: Is a dir"):
        space.read(0, 1)


@settings(deadline=None, max_examples=60)
@given(
    positions=st.lists(st.integers(0, 2999), min_size=1, max_size=200),
    length=st.sampled_from([1, 2, 64]),
    dtype=st.sampled_from(["uint16", "int64"]),
)
def test_windows_that_overlap_touch_or_repeat_are_read_exactly(positions, length, dtype):
    with tempfile.TemporaryDirectory() as name:
        files = write_shards(Path(name), [ShardShape(1000, "uint16")] * 4)
        tokens = read_shards(files)
        space = TokenSpace(files, reader="pread")
        found = space.gather(positions, length, np.empty((len(positions), length), dtype))
        wanted = [tokens[start : start + length] for start in positions]
        np.testing.assert_array_equal(found, wanted)


def test_neighbouring_windows_cost_one_read(tmp_path, monkeypatch):
    """Conversations are gathered token by token: a system call each would be too many."""
    files = write_shards(tmp_path, [ShardShape(100_000, "uint16")])
    space = TokenSpace(files, reader="pread")
    calls = []
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *given: calls.append(given) or real(*given))
    positions = np.concatenate([np.arange(500, 9000), np.arange(70_000, 75_000)])
    found = space.gather(positions, 1)[:, 0]
    np.testing.assert_array_equal(found, read_shards(files)[positions])
    assert len(calls) == 2


def test_a_read_that_ends_early_is_taken_up_again(tmp_path, monkeypatch):
    """Network file systems may give less than was asked for."""
    files = write_shards(tmp_path, [ShardShape(5000, "uint32")])
    real = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda file, parts, at: real(file, [parts[0][: max(1, 99)]], at)
    )
    space = TokenSpace(files, reader="pread")
    np.testing.assert_array_equal(space.read(3, 4000), read_shards(files)[3:4000])


LIMITED = """
import os, pickle, resource, sys
import numpy as np
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
spaces = [pickle.load(open(sys.argv[1], "rb")) for _ in range(3)]
rng = np.random.default_rng(0)
for _ in range(40):
    for space in spaces:
        starts = rng.integers(0, space.num_tokens - 10, 200)
        assert (space.gather(starts, 10) == starts[:, None] // 8).any()
        wanted = (starts[:, None] + np.arange(10)) // 8
        np.testing.assert_array_equal(space.gather(starts, 10), wanted)
print(len(os.listdir("/proc/self/fd")))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts in /proc")
def test_thousands_of_shards_are_read_with_256_file_descriptors(tmp_path):
    files = []
    for number in range(3000):
        path = tmp_path / f"{number:05d}.bin"
        path.write_bytes(np.full(8, number, "<u2").tobytes())
        files.append(TokenFile(path=path, num_tokens=8, dtype="uint16"))
    pickled = tmp_path / "space.pickle"
    pickled.write_bytes(pickle.dumps(TokenSpace(files, reader="pread")))
    command = [sys.executable, "-W", "ignore", "-c", LIMITED, str(pickled)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert int(done.stdout) < 100


@pytest.mark.skipif(sys.platform != "linux", reason="counts in /proc")
def test_when_no_descriptor_is_left_the_reader_releases_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_files, "_make_room", lambda: None)  # the reader thinks it has few
    files = write_shards(tmp_path, [ShardShape(10, "uint16")] * 20)
    space = TokenSpace(files, reader="pread")
    space.read(0, 190)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = [int(link.name) for link in Path("/proc/self/fd").iterdir()]
    try:  # no descriptor above those in use may be given out
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(used), before[1]))
        fill = []
        try:
            while True:
                fill.append(os.dup(0))
        except OSError:
            assert space.read(185, 200).tolist() == read_shards(files)[185:200].tolist()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for one in fill:
            os.close(one)


@pytest.mark.skipif(sys.platform != "linux", reason="counts in /proc")
def test_closing_lets_go_of_every_file_and_so_does_a_forked_child(tmp_path):
    files = write_shards(tmp_path, [ShardShape(100, "uint16")] * 9)
    space = TokenSpace(files, reader="pread")
    space.read(0, 900)
    assert open_files(tmp_path) == 9
    child = os.fork()
    if not child:
        space.read(0, 100)  # opens its own: those of the parent are closed here
        os._exit(open_files(tmp_path))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert space.read(0, 900).tolist() == read_shards(files).tolist()
    space.close()
    assert open_files(tmp_path) == 0


def test_no_descriptor_is_closed_under_a_thread_that_reads_from_it(tmp_path):
    """One descriptor for nine shards: each read closes the one before, in eight threads."""
    files = write_shards(tmp_path, [ShardShape(2048, "uint16")] * 9)
    tokens = read_shards(files)
    space = TokenSpace(files, max_maps=1, reader="pread")
    wrong = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(150):
            starts = rng.integers(0, len(tokens) - 100, 6)
            found = space.gather(starts, 100)
            if not np.array_equal(found, tokens[starts[:, None] + np.arange(100)]):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.skipif(sys.platform != "linux", reason="maps an address range")
@pytest.mark.parametrize("code", [errno.EPERM, errno.ENODEV, errno.ENOMEM])
def test_a_file_system_that_refuses_maps_names_the_reader_that_needs_none(
    tmp_path, monkeypatch, code
):
    def refuse(*given) -> None:
        raise OSError(code, "refused")

    monkeypatch.setattr(AddressRange, "map_file", refuse)
    files = write_shards(tmp_path, [ShardShape(10, "uint16")])
    with pytest.raises(StoreError, match=r"shard_00000.bin: the kernel refused .*reader='pread'"):
        TokenSpace(files, reader="mapped").read(0, 1)


MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /home rw - nfs4 server:/home rw
31 22 0:41 / /scratch rw - lustre 10.0.0.1@tcp:/scratch rw
32 22 0:42 / /data\\040sets rw - wekafs host/default rw
33 30 0:43 / /home/me/local rw - xfs /dev/sdb rw
34 22 0:44 / /bucket rw - fuse.s3fs s3fs rw
35 22 0:45 / /tmp rw - tmpfs tmpfs rw
36 22 0:46 / /over rw - overlay overlay rw
37 22 0:47 / /twice rw - lustre x rw
38 22 0:48 / /twice rw - ext4 /dev/sdc rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "reader"),
    [
        ("/var/store/train", "ext4", "mapped"),
        ("/home/you/store", "nfs4", "pread"),
        ("/home/me/local/store", "xfs", "mapped"),
        ("/homes", "ext4", "mapped"),
        ("/scratch", "lustre", "pread"),
        ("/scratch/a/b", "lustre", "pread"),
        ("/data sets/web", "wekafs", "pread"),
        ("/bucket/web", "fuse.s3fs", "pread"),
        ("/tmp/x", "tmpfs", "mapped"),
        ("/over/x", "overlay", "mapped"),
        ("/twice/x", "ext4", "mapped"),
    ],
)
def test_the_file_system_chooses_the_reader(path, kind, reader):
    assert file_system_of(path, MOUNTS) == kind
    assert reader_for([path + "/shard_00000.bin"], MOUNTS) == reader


def test_auto_on_a_network_file_system_reads_the_same_tokens_and_says_how(tmp_path, monkeypatch):
    files = write_shards(tmp_path, [ShardShape(300, "uint16")] * 2)
    mounts = tmp_path / "mountinfo"
    mounts.write_text("1 0 8:1 / / rw - lustre x rw\n")
    monkeypatch.setattr(token_space, "_MOUNTS", mounts)
    with TokenSpace(files) as space, TokenSpace(files, reader="mapped") as mapped:
        assert (space.reader, mapped.reader) == ("pread", "mapped")
        assert repr(space) == "TokenSpace(600 uint16 tokens in 2 shards, pread)"
        np.testing.assert_array_equal(space.read(0, 600), mapped.read(0, 600))
        monkeypatch.undo()
        assert pickle.loads(pickle.dumps(space)).reader == "mapped"  # chosen where it arrives
    with TokenSpace(files, reader="pread") as space:
        assert pickle.loads(pickle.dumps(space)).reader == "pread"


def test_without_mounts_to_look_at_files_are_mapped():
    assert reader_for(["/scratch/a"], "") == "mapped"
    assert file_system_of("/x", "nonsense\n1 2 3\n") is None


@pytest.fixture
def store(tmp_path):
    rng = np.random.default_rng(5)
    documents = [rng.integers(0, 9000, size).tolist() for size in rng.integers(0, 90, 200)]
    build_small_store(
        tmp_path / "web", {"train": Ragged.from_sequences(documents)}, shard_bytes=1024
    )
    return tmp_path / "web"


def batches(source) -> list[list[np.ndarray]]:
    loader = Loader(SampleStream([source], seed=3), batch_size=3, documents=True, num_samples=30)
    fields = ("input_ids", "labels", "doc_ids", "position_ids", "cu_seqlens")
    return [[getattr(batch, name).copy() for name in fields] for batch in loader]


def assert_same(first, second) -> None:
    assert len(first) == len(second) > 3
    for one, other in zip(first, second, strict=True):
        for left, right in zip(one, other, strict=True):
            np.testing.assert_array_equal(left, right)


def test_a_loader_gives_the_same_batches_with_either_reader(store):
    sources = {name: TokenSource(store, seq_len=50, reader=name) for name in ("mapped", "pread")}
    assert sources["pread"].reader == "pread"
    assert "reader='pread'" in repr(sources["pread"])
    assert_same(batches(sources["pread"]), batches(sources["mapped"]))
    again = pickle.loads(pickle.dumps(sources["pread"]))
    assert again.reader == "pread"
    assert_same(batches(again), batches(sources["mapped"]))
    with open_tokens(open_store(store), "train", reader="pread") as space:
        assert space.reader == "pread"


def many_chats(number: int):
    """Conversations of 2 to 80 tokens, the last turn trained."""
    rng = np.random.default_rng(number)
    ids = [rng.integers(1, 60_000, size).tolist() for size in rng.integers(2, 80, number)]
    return make_examples(
        [([], [(1, [(i, False) for i in one[:-1]]), (2, [(one[-1], True)])]) for one in ids]
    )


def test_packed_rows_and_chats_are_the_same_with_either_reader(tmp_path):
    folder = tmp_path / "chats"
    build_small_chat_store(folder, {"train": many_chats(300)}, shard_bytes=300)
    build_plan(folder, options=PlanOptions(seq_len=64, long="split"))
    plan = list_plans(folder)[0]
    packs = [PackSource(folder, plan, pad_id=0, reader=name) for name in ("mapped", "pread")]
    assert [one.reader for one in packs] == ["mapped", "pread"]
    assert "reader='pread'" in repr(packs[1])
    assert_same(batches(packs[1]), batches(packs[0]))
    assert_same(batches(pickle.loads(pickle.dumps(packs[1]))), batches(packs[0]))
    every = np.arange(len(packs[0]))
    np.testing.assert_array_equal(packs[1].rows(every).ids, packs[0].rows(every).ids)
    np.testing.assert_array_equal(packs[1].rows(every).trained, packs[0].rows(every).trained)
    packs[1].prefetch(every)
    spaces = [ChatSpace(open_store(folder), "train", reader=n) for n in ("mapped", "pread")]
    order = np.random.default_rng(1).permutation(len(spaces[0]))
    left, right = (space.examples(order) for space in spaces)
    assert left.ids == right.ids
    np.testing.assert_array_equal(left.mask, right.mask)
    rows = [
        ChatRows(folder, seq_len=64, pad_id=0, reader=n).batch(order) for n in ("mapped", "pread")
    ]
    for key in ("input_ids", "labels", "item"):
        np.testing.assert_array_equal(getattr(rows[0], key), getattr(rows[1], key))


@pytest.mark.parametrize("make", [TokenSource, PackSource, ChatRows, open_tokens])
def test_a_wrong_reader_is_refused_with_the_choices(tmp_path, make):
    folder = tmp_path / "chats"
    build_small_chat_store(folder, {"train": FIVE})
    build_plan(folder, options=PlanOptions(seq_len=64, long="split"))
    build_small_store(tmp_path / "web", {"train": Ragged.from_sequences([[1, 2, 3]])})
    given = {
        TokenSource: ((tmp_path / "web",), {"seq_len": 2}),
        PackSource: ((folder, list_plans(folder)[0]), {"pad_id": 0}),
        ChatRows: ((folder,), {"seq_len": 64, "pad_id": 0}),
        open_tokens: ((open_store(tmp_path / "web"), "train"), {}),
    }
    arguments, options = given[make]
    with pytest.raises(OptionError, match="reader='prea': wanted 'auto', 'mapped', 'pread'"):
        make(*arguments, **options, reader="prea")


CUT_ALL = """
import os, sys
from pathlib import Path
from shardmill.errors import DamagedStoreError
from shardmill.loading import ChatRows, PackSource, TokenSource
folder, kind = Path(sys.argv[1]), sys.argv[2]
if kind == "web":
    source = TokenSource(folder, seq_len=20, reader="pread")
    read = lambda: source.borders(every).positions.tolist()
elif kind == "packs":
    source = PackSource(folder, "train-64-split", pad_id=0, reader="pread")
    read = lambda: source.batch(every).labels.tolist()
else:
    source = ChatRows(folder, seq_len=64, pad_id=0, reader="pread")
    read = lambda: source.batch(every).labels.tolist()
import numpy as np
every = np.arange(len(source))
before = read()
tokens = set(folder.glob("train/*.bin"))
for path in folder.rglob("*"):
    if path.is_file() and path not in tokens:
        os.truncate(path, 0)
assert read() == before
for path in tokens:
    os.truncate(path, 0)
try:
    if kind == "chats":
        read()
    source.fill(every[:1], *np.empty((2, 1, source.seq_len), np.int64))
except DamagedStoreError as error:
    print("refused")
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["web", "packs", "chats"])
def test_no_file_of_a_small_store_that_is_cut_kills_a_process_that_reads_with_pread(
    store, tmp_path, kind
):
    folder = store
    if kind != "web":
        folder = tmp_path / "chats"
        build_small_chat_store(folder, {"train": many_chats(2000)}, shard_bytes=300)
        build_plan(folder, options=PlanOptions(seq_len=64, long="split"))
    command = [sys.executable, "-c", CUT_ALL, str(folder), kind]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "refused\n"
