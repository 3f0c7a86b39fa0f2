"""memmap_padded_v1: what is written is read, and nothing else is ever there."""

from __future__ import annotations

import gc
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardmill.errors import (
    BuildError,
    DamagedStoreError,
    ManifestError,
    OptionError,
    ShardmillError,
    StoreExistsError,
    StoreNotFoundError,
    TokenRangeError,
)
from shardmill.formats.packed import (
    MemmapShard,
    MemmapShardWriter,
    PackedShard,
    PackedShardWriter,
    open_memmap_shard,
    open_packed,
    verify_memmap_shard,
)
from shardmill.formats.packed import memmap as writer_module
from shardmill.formats.packed.files import npy_header
from tests.formats.packed import Bin, assert_holds_bins, packed_bins

FILES = ["input_ids.npy", "loss_mask.npy", "packed_len.npy", "seq_offsets.npy", "seq_starts.npy"]
BINS: list[Bin] = [
    ([1, 2, 3], [0, 1, 0], [0]),
    ([4, 5, 6, 7], [0, 0, 1, 0], [0, 2]),
    ([8, 9], [0, 0], [0, 1]),
]


def write(folder: Path, bins: list[Bin], *, pack_size: int = 10, order=None, **options) -> dict:
    total = sum(len(starts) for _, _, starts in bins)
    writer = MemmapShardWriter(folder, len(bins), pack_size, total, **options)
    for number in order if order is not None else range(len(bins)):
        writer.write_bin(number, *(np.array(part) for part in bins[number]))
    return writer.finalize()


@settings(deadline=None, max_examples=15)
@given(
    bins=packed_bins(pack_size=9),
    dtype=st.sampled_from(["uint16", "int32", "uint32", "int64"]),
    data=st.data(),
)
def test_what_is_written_in_any_order_is_read(bins: list[Bin], dtype: str, data) -> None:
    order = data.draw(st.permutations(range(len(bins))))
    with tempfile.TemporaryDirectory() as folder:
        manifest = write(Path(folder) / "one", bins, pack_size=9, order=order, dtype=dtype)
        again = write(Path(folder) / "two", bins, pack_size=9, dtype=dtype)
        assert manifest == again  # hashes and all: the order of writing leaves no trace
        shard = open_memmap_shard(Path(folder) / "one")
        assert_holds_bins(shard, bins)
        assert shard.dtype == np.dtype(dtype)
        assert verify_memmap_shard(Path(folder) / "one") == []


def test_the_six_files_are_as_specified(tmp_path) -> None:
    manifest = write(tmp_path / "shard", BINS)
    assert sorted(path.name for path in (tmp_path / "shard").iterdir()) == [
        *FILES[:2],
        "manifest.json",
        *FILES[2:],
    ]
    arrays = {name: np.load(tmp_path / "shard" / name) for name in FILES}
    assert arrays["input_ids.npy"].tolist() == [
        [1, 2, 3, 0, 0, 0, 0, 0, 0, 0],
        [4, 5, 6, 7, 0, 0, 0, 0, 0, 0],
        [8, 9, 0, 0, 0, 0, 0, 0, 0, 0],
    ]
    assert arrays["loss_mask.npy"].sum(axis=1).tolist() == [1, 1, 0]
    assert arrays["packed_len.npy"].tolist() == [3, 4, 2]
    assert arrays["seq_offsets.npy"].tolist() == [0, 1, 3, 5]
    assert arrays["seq_starts.npy"].tolist() == [0, 0, 2, 0, 1]
    assert [array.dtype.str for array in arrays.values()] == ["<i4", "|u1", "<u4", "<u4", "<u4"]
    assert manifest == json.loads((tmp_path / "shard/manifest.json").read_text())
    wanted = {
        "version": "1.0",
        "format": "memmap_padded_v1",
        "num_bins": 3,
        "pack_size": 10,
        "dtype": "<i4",
        "loss_mask_dtype": "<u1",
        "index_dtype": "<u4",
        "bins_written": 3,
        "seq_offsets_dtype": "<u4",
        "loss_mask_alignment": "label",
        "num_sequences": 5,
        "num_tokens": 9,
        "trained_labels": 2,
    }
    assert {name: manifest[name] for name in wanted} == wanted
    assert sorted(manifest["files"]) == FILES


def test_writer_and_reader_are_what_the_protocols_ask_for(tmp_path) -> None:
    writer = MemmapShardWriter(tmp_path / "a", 0, 4, 0)
    assert isinstance(writer, PackedShardWriter)
    writer.finalize()
    shard = open_packed(tmp_path / "a")
    assert isinstance(shard, MemmapShard)
    assert isinstance(shard, PackedShard)
    assert len(shard) == 0
    with pytest.raises(IndexError, match="bin 0 of 0"):
        shard.read_bin(0)


@pytest.mark.parametrize(
    ("bin_id", "ids", "mask", "starts", "error", "words"),
    [
        (0, [], [], [], OptionError, "0 tokens, wanted 1 to pack_size=4"),
        (0, [1, 2, 3, 4, 5], [0] * 5, [0], OptionError, "5 tokens, wanted 1 to pack_size=4"),
        (0, [1, 2], [0], [0], OptionError, "a loss_mask of 1 for 2 tokens"),
        (0, [1, 2], [0, 2], [0], OptionError, "other values than 0 and 1"),
        (0, [1, 2], [0.0, 0.5], [0], OptionError, "other values than 0 and 1"),
        (0, [1, 2], [0, 1], [], OptionError, "wanted the first to be 0"),
        (0, [1, 2], [0, 1], [1], OptionError, "wanted the first to be 0"),
        (0, [1, 2, 3], [0, 1, 1], [0, 1, 1], OptionError, "strictly increasing"),
        (0, [1, 2, 3], [0, 1, 1], [0, 2, 1], OptionError, "strictly increasing"),
        (0, [8, 9], [0, 1], [0, 1, 3], OptionError, "last start is 3, wanted less than the 2"),
        (0, [8, 9], [0, 1], [0, 2, 2], OptionError, "last start is 2, wanted less"),
        (0, [], [], [0], OptionError, "0 tokens, wanted 1 to pack_size=4"),
        (0, [1, 70_000], [0, 1], [0], TokenRangeError, "70,000 does not fit uint16"),
        (0, [1, -1], [0, 1], [0], TokenRangeError, "token id -1 does not fit uint16"),
        (0, [1.0, 2.0], [0, 1], [0], OptionError, "float64, wanted"),
        (0, [[1, 2]], [0, 1], [0], OptionError, "wanted one dimension"),
        (2, [1], [0], [0], OptionError, "bin 2 of 2 bins"),
        (-1, [1], [0], [0], OptionError, "bin_id=-1"),
        (1, [1], [0], [0], OptionError, "bin 1 is written twice"),
        (0, [1, 2, 3], [0, 1, 1], [0, 1, 2], OptionError, "4 starts of sequences, but total_seq"),
    ],
)
def test_a_bin_that_breaks_the_format_is_refused_and_changes_nothing(
    tmp_path, bin_id, ids, mask, starts, error, words
) -> None:
    with MemmapShardWriter(tmp_path / "a", 2, 4, 3, np.uint16) as writer:
        writer.write_bin(1, [5, 6], [0, 1], [0])
        with pytest.raises(error, match=words):
            writer.write_bin(bin_id, np.array(ids), np.array(mask), np.array(starts, np.int64))
        writer.write_bin(0, [1, 2], [1, 0], [0, 1])
        writer.finalize()
    assert_holds_bins(
        open_memmap_shard(tmp_path / "a"), [([1, 2], [1, 0], [0, 1]), ([5, 6], [0, 1], [0])]
    )
    assert verify_memmap_shard(tmp_path / "a") == []


def test_a_missing_bin_is_named_and_nothing_is_there(tmp_path) -> None:
    with MemmapShardWriter(tmp_path / "a", 3, 4, 3) as writer:
        writer.write_bin(2, [1], [0], [0])
        writer.write_bin(0, [1], [0], [0])
        with pytest.raises(OptionError, match="1 of 3 bins were not written, the first is 1"):
            writer.finalize()
        assert not (tmp_path / "a").exists()
        writer.write_bin(1, [1], [0], [0])
        writer.finalize()
    assert len(open_memmap_shard(tmp_path / "a")) == 3


def test_a_surplus_of_expected_starts_is_cut_off(tmp_path) -> None:
    writer = MemmapShardWriter(tmp_path / "a", 1, 4, 500)
    writer.write_bin(0, [1, 2], [0, 1], [0, 1])
    writer.finalize()
    assert np.load(tmp_path / "a/seq_starts.npy").tolist() == [0, 1]


def test_an_error_in_the_block_leaves_nothing(tmp_path) -> None:
    writer = MemmapShardWriter(tmp_path / "a", 3, 4, 3)

    def fail() -> None:
        with writer:
            writer.write_bin(0, [1], [0], [0])
            raise KeyError("stop")

    with pytest.raises(KeyError):
        fail()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OptionError, match="this writer is finished"):
        writer.write_bin(1, [1], [0], [0])


@pytest.mark.slow
def test_a_writer_that_is_dropped_leaves_nothing(tmp_path) -> None:
    writer = MemmapShardWriter(tmp_path / "a", 3, 4, 3)
    assert len(list(tmp_path.iterdir())) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it is dropped on purpose
        del writer
        gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_forked_copy_does_not_take_the_folder_away(tmp_path) -> None:
    writer = MemmapShardWriter(tmp_path / "a", 1, 4, 1)
    writer.write_bin(0, [1], [0], [0])
    child = os.fork()
    if child == 0:
        writer._remove()  # what collecting the copy does
        os._exit(0)
    os.waitpid(child, 0)
    writer.finalize()
    assert verify_memmap_shard(tmp_path / "a") == []


def test_a_finished_shard_is_never_overwritten(tmp_path) -> None:
    write(tmp_path / "a", BINS)
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    with pytest.raises(StoreExistsError, match="a finished packed shard is here"):
        MemmapShardWriter(tmp_path / "a", 3, 4, 3)
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_folder_with_other_files_is_left_alone(tmp_path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(StoreExistsError, match=r"holds 'notes.txt' and no manifest.json"):
        MemmapShardWriter(tmp_path, 3, 4, 3)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_of_two_writers_of_one_folder_the_second_is_refused(tmp_path) -> None:
    one, two = (MemmapShardWriter(tmp_path / "a", 1, 4, 1) for _ in range(2))
    one.write_bin(0, [1], [0], [0])
    two.write_bin(0, [2], [0], [0])
    one.finalize()
    with pytest.raises(StoreExistsError):
        two.finalize()
    two.abort()
    assert open_memmap_shard(tmp_path / "a").read_bin(0).input_ids.tolist() == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((-1, 4, 4), {}, "num_bins=-1"),
        ((1, 0, 4), {}, "pack_size=0"),
        ((1, 2**32, 4), {}, "wanted at most 4,294,967,295"),
        ((1, 4, -1), {}, "total_seq_starts=-1"),
        ((1, 4.0, 4), {}, "pack_size=4.0"),
        ((1, 4, 4), {"dtype": np.float32}, "dtype=float32"),
        ((1, 4, 4), {"dtype": np.uint8}, "dtype=uint8"),
        ((1, 4, 4), {"loss_mask_alignment": "left"}, "loss_mask_alignment='left': wanted 'label'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(tmp_path, arguments, options, words) -> None:
    with pytest.raises(OptionError, match=words):
        MemmapShardWriter(tmp_path / "a", *arguments, **options)
    assert list(tmp_path.iterdir()) == []


def test_offsets_are_64_bit_when_32_do_not_suffice(tmp_path, monkeypatch) -> None:
    assert writer_module.offsets_dtype(2**32 - 1) == "<u4"
    assert writer_module.offsets_dtype(2**32) == "<u8"
    monkeypatch.setattr(writer_module, "offsets_dtype", lambda count: "<u8")
    manifest = write(tmp_path / "a", BINS)
    assert manifest["seq_offsets_dtype"] == "<u8"
    assert np.load(tmp_path / "a/seq_offsets.npy").dtype == np.uint64
    assert_holds_bins(open_memmap_shard(tmp_path / "a"), BINS)


def test_a_full_disk_is_an_error_and_nothing_is_there(tmp_path) -> None:
    import resource

    code = f"""
import resource, signal
from shardmill.formats.packed import MemmapShardWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096 * 8, resource.RLIM_INFINITY))
with MemmapShardWriter({str(tmp_path / "a")!r}, 4, 1024, 4) as writer:
    for number in range(4):
        writer.write_bin(number, [1] * 1024, [1] * 1024, [0])
    writer.finalize()
print("fits")
resource.setrlimit(resource.RLIMIT_FSIZE, (4096 * 2, resource.RLIM_INFINITY))
with MemmapShardWriter({str(tmp_path / "b")!r}, 4, 1024, 4) as writer:
    writer.write_bin(0, [1] * 1024, [1] * 1024, [0])
"""
    assert resource.RLIM_INFINITY == -1
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "fits\n", done.stderr
    assert BuildError.__name__ in done.stderr
    assert "cannot write: File too large; nothing was published" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.slow
def test_a_killed_writer_leaves_nothing_that_looks_finished(tmp_path) -> None:
    code = f"""
import sys
from shardmill.formats.packed import MemmapShardWriter
number = 0
while True:
    with MemmapShardWriter(f"{tmp_path}/shard{{number}}", 40, 64, 40) as writer:
        for bin_id in range(40):
            writer.write_bin(bin_id, [bin_id] * 64, [1] * 64, [0])
        writer.finalize()
    number += 1
    print(number, flush=True)
"""
    finished = leftovers = 0
    for wait in (0.003, 0.007, 0.012, 0.018):
        worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert worker.stdout is not None
        worker.stdout.readline()
        time.sleep(wait)
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait()
        worker.stdout.close()
        for folder in list(tmp_path.iterdir()):
            if folder.name.startswith("shard"):
                assert verify_memmap_shard(folder) == []
                assert open_memmap_shard(folder).read_bin(39).input_ids.tolist() == [39] * 64
                finished += 1
            else:
                assert folder.name.startswith(".shard")
                assert folder.name.endswith(".tmp")
                leftovers += 1
            shutil.rmtree(folder)
    assert finished >= 4
    assert leftovers >= 1, "no kill hit a writer at work"


def test_a_shard_at_work_has_no_manifest_until_the_end(tmp_path) -> None:
    writer = MemmapShardWriter(tmp_path / "a", 1, 4, 1)
    writer.write_bin(0, [1], [0], [0])
    (staged,) = tmp_path.iterdir()
    assert not (staged / "manifest.json").exists()
    with pytest.raises(StoreNotFoundError, match="no finished packed shard"):
        open_memmap_shard(staged)
    with pytest.raises(StoreNotFoundError):
        open_memmap_shard(tmp_path / "a")
    writer.abort()


def test_pickling_carries_no_map_and_refuses_a_shard_written_again(tmp_path) -> None:
    write(tmp_path / "a", BINS)
    shard = open_memmap_shard(tmp_path / "a")
    shard.read_bin(0)
    data = pickle.dumps(shard)
    assert len(data) < 500
    assert_holds_bins(pickle.loads(data), BINS)
    shutil.rmtree(tmp_path / "a")
    write(tmp_path / "a", BINS[:2])
    with pytest.raises(DamagedStoreError, match="was written again"):
        pickle.loads(data)


def test_closing_keeps_what_was_read(tmp_path) -> None:
    write(tmp_path / "a", BINS)
    with open_memmap_shard(tmp_path / "a") as shard:
        found = shard.read_bin(1)
    assert found.input_ids.tolist() == [4, 5, 6, 7]
    shard.close()
    assert shard.read_bin(0).input_ids.tolist() == [1, 2, 3]


def old_shard(folder: Path) -> None:
    """As the plan's own writer leaves it: surplus starts stay zero, no hashes, no alignment."""
    folder.mkdir()
    rows = np.zeros((2, 4), np.int32)
    rows[0, :3], rows[1, :2] = [1, 2, 3], [4, 5]
    masks = np.zeros((2, 4), np.uint8)
    masks[0, :3] = [0, 1, 1]
    np.save(folder / "input_ids.npy", rows)
    np.save(folder / "loss_mask.npy", masks)
    np.save(folder / "packed_len.npy", np.array([3, 2], np.uint32))
    np.save(folder / "seq_offsets.npy", np.array([0, 2, 3], np.uint32))
    np.save(folder / "seq_starts.npy", np.array([0, 1, 0, 0, 0], np.uint32))
    manifest = {
        "version": "1.0",
        "format": "memmap_padded_v1",
        "num_bins": 2,
        "pack_size": 4,
        "dtype": "<i4",
        "loss_mask_dtype": "<u1",
        "index_dtype": "<u4",
        "bins_written": 2,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2))


def test_an_old_shard_is_read_with_a_warning(tmp_path, caplog) -> None:
    old_shard(tmp_path / "a")
    shard = open_memmap_shard(tmp_path / "a")
    assert "does not say how its loss masks are aligned: taken as 'roll_right'" in caplog.text
    assert shard.loss_mask_alignment == "roll_right"
    assert_holds_bins(shard, [([1, 2, 3], [0, 1, 1], [0, 1]), ([4, 5], [0, 0], [0])])
    assert verify_memmap_shard(tmp_path / "a") == []
    caplog.clear()
    chosen = open_memmap_shard(tmp_path / "a", loss_mask_alignment="label")
    assert chosen.loss_mask_alignment == "label"
    assert caplog.text == ""


def test_an_old_shard_may_have_other_keys_but_not_half_of_ours(tmp_path) -> None:
    old_shard(tmp_path / "a")
    path = tmp_path / "a/manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "tokenizer": "mine"}))
    assert len(open_memmap_shard(tmp_path / "a", loss_mask_alignment="label")) == 2
    path.write_text(json.dumps({**manifest, "loss_mask_alignment": "label"}))
    with pytest.raises(ManifestError, match="changed or damaged"):
        open_memmap_shard(tmp_path / "a")


def test_an_alignment_that_contradicts_the_manifest_is_refused(tmp_path) -> None:
    write(tmp_path / "a", BINS, loss_mask_alignment="roll_right")
    assert open_memmap_shard(tmp_path / "a").loss_mask_alignment == "roll_right"
    with pytest.raises(OptionError, match="aligned 'roll_right', not 'label'"):
        open_memmap_shard(tmp_path / "a", loss_mask_alignment="label")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("change", ["shorter", "longer", "missing", "other dtype", "other shape"])
def test_a_file_that_does_not_match_the_manifest_is_not_opened(tmp_path, name, change) -> None:
    write(tmp_path / "a", BINS)
    path = tmp_path / "a" / name
    data, array = path.read_bytes(), np.load(path)
    if change == "shorter":
        path.write_bytes(data[:-1])
    elif change == "longer":
        path.write_bytes(data + b"\0")
    elif change == "missing":
        path.unlink()
    elif change == "other dtype":
        np.save(path, array.astype(np.float32))
    else:
        np.save(path, array[:-1])
    with pytest.raises(DamagedStoreError, match=name):
        open_memmap_shard(tmp_path / "a")
    assert any(name in problem for problem in verify_memmap_shard(tmp_path / "a"))


@pytest.mark.parametrize(
    ("name", "index", "value", "words"),
    [
        ("packed_len", 1, 11, "11 tokens, wanted at most pack_size=10"),
        ("packed_len", 1, 0, "0 tokens"),
        ("packed_len", 1, 2, "last start is 2, wanted less than the 2"),
        ("seq_offsets", 2, 1, "its starts are 1..1 of 5"),
        ("seq_offsets", 2, 9, r"its starts are 1..9 of 5"),
        ("seq_starts", 1, 1, "wanted the first to be 0"),
        ("seq_starts", 2, 0, "strictly increasing"),
        ("loss_mask", (1, 1), 7, "other values than 0 and 1"),
    ],
)
def test_a_damaged_index_is_found_where_it_is_read_and_by_verify(
    tmp_path, name, index, value, words
) -> None:
    write(tmp_path / "a", BINS)
    array = np.load(tmp_path / f"a/{name}.npy")
    array[index] = value
    np.save(tmp_path / f"a/{name}.npy", array)
    shard = open_memmap_shard(tmp_path / "a")
    with pytest.raises(DamagedStoreError, match=words):
        shard.read_bin(1)
    assert verify_memmap_shard(tmp_path / "a") == [
        f"{tmp_path / 'a' / name}.npy: its sha256 is not the one in the manifest"
    ]


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("sound") / "a"
    write(folder, BINS)
    return folder


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_a_changed_byte_is_an_error_or_found_by_verify(sound, data) -> None:
    with tempfile.TemporaryDirectory() as top:
        folder = Path(shutil.copytree(sound, Path(top) / "a"))
        path = folder / data.draw(st.sampled_from([*FILES, "manifest.json"]))
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        before = content[at]
        content[at] ^= data.draw(st.integers(1, 255))
        blank = b" \t\r\n"  # one for another between the words of the manifest changes nothing
        assume(path.suffix != ".json" or before not in blank or content[at] not in blank)
        path.write_bytes(content)
        try:
            shard = open_memmap_shard(folder)
            for number in range(len(shard)):
                shard.read_bin(number)
        except ShardmillError:
            pass
        assert verify_memmap_shard(folder) != []


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "nonsense", '{"format": "other"}', "[" * 5000, "\xff"]
)
def test_an_invalid_manifest_is_refused(tmp_path, text) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ManifestError, match=r"manifest\.json"):
        open_memmap_shard(tmp_path)


def test_a_large_shard_opens_in_no_time(tmp_path) -> None:
    """100,000 x 4,096: two sparse files of 2 GB."""
    folder = tmp_path / "a"
    folder.mkdir()
    for name, dtype, shape in [
        ("input_ids", "<i4", (100_000, 4096)),
        ("loss_mask", "|u1", (100_000, 4096)),
    ]:
        with (folder / f"{name}.npy").open("wb") as file:
            header = npy_header(dtype, shape)
            file.write(header)
            file.truncate(len(header) + shape[0] * shape[1] * np.dtype(dtype).itemsize)
    np.save(folder / "packed_len.npy", np.full(100_000, 4096, np.uint32))
    np.save(folder / "seq_offsets.npy", np.arange(0, 400_001, 4, dtype=np.uint32))
    np.save(folder / "seq_starts.npy", np.tile([0, 1000, 2000, 3000], 100_000).astype(np.uint32))
    manifest = {
        "version": "1.0",
        "format": "memmap_padded_v1",
        "num_bins": 100_000,
        "pack_size": 4096,
        "dtype": "<i4",
        "loss_mask_dtype": "<u1",
        "index_dtype": "<u4",
        "bins_written": 100_000,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    seconds = []
    for _ in range(5):
        start = time.process_time()  # not the time of the clock: the machine may be busy
        shard = open_memmap_shard(folder, loss_mask_alignment="label")
        found = shard.read_bin(99_999)
        seconds.append(time.process_time() - start)
        assert found.seq_boundaries == [0, 1000, 2000, 3000, 4096]
    assert min(seconds) < 0.05, seconds
