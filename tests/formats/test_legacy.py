"""Legacy shards: written on request, read in little memory, turned into memmap shards."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from shardmill.errors import (
    DamagedStoreError,
    ManifestError,
    OptionError,
    StoreExistsError,
    TokenRangeError,
)
from shardmill.formats.packed.formats import convert_legacy_to_memmap
from shardmill.formats.packed.legacy import LegacyPickleWriter, check_record, iter_legacy_bins
from shardmill.formats.packed.memmap import (
    MemmapShardWriter,
    open_memmap_shard,
    verify_memmap_shard,
)
from tests.formats.test_unpickle import BIN, packed_bins, read, save

LABEL = {"loss_mask_alignment": "label"}


def write(path: Path, bins, **options) -> dict:
    with LegacyPickleWriter(path, **options) as writer:
        for number, one in enumerate(bins):
            writer.write_bin(number, one["input_ids"], one["loss_mask"], one["seq_start_id"])
        return writer.finalize()


@settings(max_examples=50, deadline=None)
@given(bins=packed_bins())
def test_numpy_loads_what_the_writer_wrote(tmp_path_factory, bins):
    folder = tmp_path_factory.mktemp("legacy")
    record = write(folder / "a.npy", bins, pack_size=1000)
    assert np.load(folder / "a.npy", allow_pickle=True).tolist() == bins
    assert read(folder / "a.npy") == bins
    assert record["num_bins"] == len(bins)
    assert sorted(path.name for path in folder.iterdir()) == ["a.npy", "a.npy.json"]


@pytest.mark.slow
def test_numpy_loads_thousands_of_bins_as_dicts_of_lists(tmp_path):
    bins = [BIN | {"input_ids": [number, 2, 3]} for number in range(2001)]
    write(tmp_path / "a.npy", bins)
    found = np.load(tmp_path / "a.npy", allow_pickle=True)
    assert (found.shape, found.dtype) == ((2001,), np.dtype(object))
    assert found.tolist() == bins
    assert {type(value) for value in found[0].values()} == {list}


def test_a_writer_refuses_bins_out_of_order_and_leaves_nothing(tmp_path):
    with (
        LegacyPickleWriter(tmp_path / "a.npy") as writer,
        pytest.raises(OptionError, match="bin 1, but the next bin is 0"),
    ):
        writer.write_bin(1, [1], [0], [0])
    with pytest.raises(OptionError, match="4 tokens, wanted 1 to pack_size=3"):
        write(tmp_path / "a.npy", [BIN | {"input_ids": [1] * 4}], pack_size=3)
    with pytest.raises(TokenRangeError, match="token id 2,147,483,648 does not fit int32"):
        write(tmp_path / "a.npy", [BIN | {"input_ids": [1, 2, 2**31]}])
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "a.npy", [BIN])
    with pytest.raises(StoreExistsError, match=r"a\.npy: is here already"):
        write(tmp_path / "a.npy", [BIN])


@settings(max_examples=30, deadline=None)
@given(bins=packed_bins())
def test_conversion_keeps_every_token_mask_and_start(tmp_path_factory, bins):
    folder = tmp_path_factory.mktemp("legacy")
    save(folder / "a.npy", bins)
    longest = max((len(one["input_ids"]) for one in bins), default=1)
    manifest = convert_legacy_to_memmap(
        folder / "a.npy", folder / "m", pack_size=longest + 2, **LABEL
    )
    assert manifest["parity"]["equal"] is True
    shard = open_memmap_shard(folder / "m")
    assert (len(shard), shard.pack_size) == (len(bins), longest + 2)
    for number, wanted in enumerate(bins):
        found = shard.read_bin(number)
        assert found.input_ids.tolist() == wanted["input_ids"]
        assert found.loss_mask.tolist() == wanted["loss_mask"]
        assert found.seq_starts.tolist() == wanted["seq_start_id"]


def test_a_pack_size_that_is_too_small_is_refused(tmp_path):
    save(tmp_path / "a.npy", [BIN, BIN | {"input_ids": [1], "loss_mask": [0], "seq_start_id": [0]}])
    with pytest.raises(OptionError, match="pack_size=2, but bin 0 has 3 tokens"):
        convert_legacy_to_memmap(tmp_path / "a.npy", tmp_path / "m", pack_size=2, **LABEL)
    assert not (tmp_path / "m").exists()


def test_the_record_beside_the_file_is_used(tmp_path):
    write(tmp_path / "a.npy", [BIN], pack_size=9, loss_mask_alignment="roll_right")
    manifest = convert_legacy_to_memmap(tmp_path / "a.npy", tmp_path / "m")
    assert (manifest["pack_size"], manifest["loss_mask_alignment"]) == (9, "roll_right")
    for stated in ({"pack_size": 8}, {"loss_mask_alignment": "label"}):
        with pytest.raises(OptionError, match="record"):
            convert_legacy_to_memmap(tmp_path / "a.npy", tmp_path / "n", **stated)


def test_a_record_of_another_file_is_refused(tmp_path):
    write(tmp_path / "a.npy", [BIN], pack_size=9)
    save(tmp_path / "a.npy", [BIN])
    with pytest.raises(ManifestError, match="it belongs to another file"):
        convert_legacy_to_memmap(tmp_path / "a.npy", tmp_path / "m")
    (tmp_path / "a.npy.json").write_text(json.dumps({"format": "x"}))
    with pytest.raises(ManifestError):
        check_record(tmp_path / "a.npy")


def test_an_unknown_alignment_gives_a_warning(tmp_path, caplog):
    save(tmp_path / "a.npy", [BIN])
    with caplog.at_level(logging.WARNING):
        manifest = convert_legacy_to_memmap(tmp_path / "a.npy", tmp_path / "m", pack_size=3)
    assert manifest["loss_mask_alignment"] == "label"
    assert "nothing says how its loss masks are aligned: taken as 'label'" in caplog.text


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(bins=packed_bins())
def test_any_legacy_file_is_converted_with_two_arguments(tmp_path_factory, bins):
    folder = tmp_path_factory.mktemp("legacy")
    save(folder / "theirs.npy", bins)
    write(folder / "ours.npy", bins)
    for name in ("theirs", "ours"):
        manifest = convert_legacy_to_memmap(str(folder / f"{name}.npy"), str(folder / name))
        longest = max((len(one["input_ids"]) for one in bins), default=1)
        assert (manifest["num_bins"], manifest["pack_size"]) == (len(bins), longest)
        assert manifest["pack_size_rule"] == "longest_bin"
        shard = open_memmap_shard(folder / name)
        found = [shard.read_bin(number).input_ids.tolist() for number in range(len(bins))]
        assert found == [one["input_ids"] for one in bins]
        assert verify_memmap_shard(folder / name) == []


def test_a_start_at_the_end_of_a_legacy_bin_is_an_empty_sequence(tmp_path):
    """As the plan's own test writes it: the sequence has no tokens, so it has no start."""
    save(tmp_path / "a.npy", [BIN | {"seq_start_id": [0, 1, 3]}])
    assert [one.seq_boundaries for one in iter_legacy_bins(tmp_path / "a.npy")] == [[0, 1, 3]]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"loss_mask": [0, 1]}, "a loss_mask of 2 for 3 tokens"),
        ({"loss_mask": [0, 2, 0]}, "other values than 0 and 1"),
        ({"seq_start_id": [1]}, "wanted the first to be 0"),
        ({"seq_start_id": [0, 4]}, "the last start is 4"),
        ({"seq_start_id": [0, 3, 3]}, "the last start is 3"),
        ({"input_ids": [1, -2, 3]}, "token ids -2..3"),
        ({"input_ids": [1, 2**32, 3]}, "which no vocabulary has"),
        ({"input_ids": [], "loss_mask": []}, "0 tokens"),
    ],
)
def test_a_bin_that_breaks_the_invariant_is_refused_by_number(tmp_path, change, problem):
    save(tmp_path / "a.npy", [BIN, BIN | change])
    with pytest.raises(DamagedStoreError, match=rf"a\.npy, bin 1: .*{problem}"):
        list(iter_legacy_bins(tmp_path / "a.npy"))


def test_a_file_that_does_not_match_its_record_is_not_converted(tmp_path):
    write(tmp_path / "a.npy", [BIN], pack_size=8)
    raw = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "a.npy").write_bytes(raw.replace(b"M\x2c\x01", b"M\x2d\x01"))  # 300 is 301 now
    assert read(tmp_path / "a.npy")[0]["input_ids"] == [1, 301, 70000]
    with pytest.raises(DamagedStoreError, match="its sha256 is not the one in its record"):
        convert_legacy_to_memmap(tmp_path / "a.npy", tmp_path / "m")
    assert not (tmp_path / "m").exists()


def peak_kilobytes(code: str) -> int:
    """The most memory that was resident in a fresh process that runs `code`.

    Not ru_maxrss: the kernel begins that with the peak of the process that started this one.
    """
    head = "import numpy as np\nfrom pathlib import Path\nfrom shardmill.formats.packed import *\n"
    last = "print(Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0])"
    done = subprocess.run(
        [sys.executable, "-c", head + code + "\n" + last],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"MALLOC_TRIM_THRESHOLD_": "65536"},
    )
    return int(done.stdout.split()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lists", "arrays"])
def test_reading_and_converting_take_no_memory_that_grows_with_the_file(tmp_path, kind):
    """Some 16 MB (lists) and 130 MB (arrays) of bins; unpickled, the lists are 160 MB."""
    rng = np.random.default_rng(0)
    bins = []
    for _ in range(40 if kind == "lists" else 400):
        ids = rng.integers(0, 150_000, 2**16).astype(np.int32)
        mask = (ids % 2).astype(np.uint8)
        if kind == "lists":
            bins.append(
                {"input_ids": ids.tolist(), "loss_mask": mask.tolist(), "seq_start_id": [0]}
            )
        else:
            bins.append({"input_ids": ids, "loss_mask": mask, "seq_start_id": np.array([0])})
    path = save(tmp_path / "a.npy", bins)
    del bins
    assert path.stat().st_size > 15_000_000
    options = (
        f"{str(path)!r}, {str(tmp_path / 'm')!r}, pack_size=65536, loss_mask_alignment='label'"
    )
    idle = peak_kilobytes("")
    assert peak_kilobytes(f"for one in iter_legacy_bins({str(path)!r}): pass") - idle < 80_000
    assert peak_kilobytes(f"convert_legacy_to_memmap({options})") - idle < 100_000


@pytest.mark.slow
def test_reading_and_verifying_a_mapped_shard_keep_few_of_its_pages(tmp_path):
    """160 MB of bins; what is read of a map stays resident as long as the map."""
    ids, mask = np.arange(4096), np.ones(4096, np.uint8)
    with MemmapShardWriter(tmp_path / "m", 8000, 4096, 8000) as writer:
        for number in range(8000):
            writer.write_bin(number, ids, mask, [0])
        writer.finalize()
    idle, path = peak_kilobytes(""), str(tmp_path / "m")
    read_all = f"print(sum(int(one.input_ids[-1]) for one in open_memmap_shard({path!r}).bins()))"
    assert peak_kilobytes(read_all) - idle < 70_000
    assert peak_kilobytes(f"assert verify_memmap_shard({path!r}) == []") - idle < 70_000
