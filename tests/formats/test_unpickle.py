"""A legacy file is interpreted, never unpickled: hostile ones are refused and nothing runs."""

from __future__ import annotations

import copyreg
import io
import itertools
import os
import pickle
import pickletools
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import DamagedStoreError, StoreError
from shardmill.formats.packed.legacy import iter_legacy_bins
from shardmill.formats.packed.pickle_runs import decode_run, encode_run

BIN = {"input_ids": [1, 300, 70000], "loss_mask": [0, 1, 0], "seq_start_id": [0, 2]}
MARKER = "it_ran"


class Calls:
    """Pickles as a call of any function."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def save(path: Path, elements: list, protocol: int = 4) -> Path:
    """What np.save does, with any element."""
    array = np.empty(len(elements), object)
    array[:] = elements
    return write(path, pickle.dumps(array, protocol=protocol), len(elements))


def write(path: Path, data: bytes, count: int) -> Path:
    head = f"{{'descr': '|O', 'fortran_order': False, 'shape': ({count},), }}".encode()
    path.write_bytes(b"\x93NUMPY\x01\x00v\x00" + head.ljust(117) + b"\n" + data)
    return path


def read(path: Path) -> list[dict[str, list[int]]]:
    return [
        {
            "input_ids": found.input_ids.tolist(),
            "loss_mask": found.loss_mask.tolist(),
            "seq_start_id": found.seq_starts.tolist(),
        }
        for found in iter_legacy_bins(path)
    ]


def hostile_objects() -> dict[str, object]:
    touch = f"open({MARKER!r}, 'w').close()"
    return {
        "os.system": Calls(os.system, f"touch {MARKER}"),
        "builtins.eval": Calls(eval, touch),
        "builtins.exec": Calls(exec, touch),
        "builtins.getattr": Calls(getattr, np.ndarray, "tofile"),
        "builtins.open": Calls(open, MARKER, "w"),
        "builtins.bytearray": Calls(bytearray, 2**40),
        "subprocess": Calls(subprocess.call, ["touch", MARKER]),
        "numpy.load": Calls(np.load, MARKER),
        "numpy.save": Calls(np.save, MARKER, [1]),
        "numpy.testing.runstring": Calls(np.testing.runstring, touch, {}),
        "numpy.fromfile": Calls(np.fromfile, "/dev/zero"),
        "numpy.zeros": Calls(np.zeros, 2**40),
        "copyreg": Calls(copyreg._reconstructor, dict, object, None),
        "path": Path(MARKER),
        "float": 0.5,
        "set": {1},
        "bytearray": bytearray(b"x"),
        "nested array": np.array([None, [1]], object),
        "complex dtype": np.array([1j]),
        "floats": np.array([1.0, 0.0]),
        "two dimensions": np.zeros((2, 2), np.int64),
        "structured": np.zeros(2, [("a", "i4")]),
        "metadata": np.zeros(2, np.dtype("i4", metadata={"x": 1})),
        "datetime": np.zeros(2, "M8[s]"),
        "masked": np.ma.array([1, 2]),
        "a list in a list": [[1]],
        "a dict in a list": [{}],
        "text": "abc",
        "none": None,
    }


@pytest.mark.parametrize("name", hostile_objects())
def test_a_hostile_object_is_refused_and_does_not_run(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    hostile = hostile_objects()[name]
    places = {
        "element": [BIN, hostile],
        "value": [BIN | {"input_ids": hostile}],
        "inside": [BIN | {"input_ids": [1, hostile, 2]}],
        "key": [BIN | {"extra": hostile}],
    }
    for elements, protocol in itertools.product(places.values(), (2, 3, 4, 5)):
        save(Path("bad.npy"), elements, protocol)
        with pytest.raises(StoreError, match=r"bad\.npy"):
            read(Path("bad.npy"))
        assert [path.name for path in tmp_path.iterdir()] == ["bad.npy"]


GOOD = b"\x80\x04\x8c\x15numpy.core.multiarray\x8c\x0c_reconstruct\x93"


@pytest.mark.slow
@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04cos\nsystem\n\x8c\x06touch xR.",
        b"\x80\x04cbuiltins\neval\n.",
        b"\x80\x04cnumpy.f2py.crackfortran\nmyeval\n.",
        b"\x80\x04cnumpy.core.multiarray\n_reconstruct.__globals__\n.",
        b"\x80\x04\x8c\x05numpy\x8c\x0edtype.__init__\x93.",
        b"\x80\x04cnumpy\nload\n.",
        b"\x80\x04(ios\nsystem\n.",  # INST
        b"\x80\x04(cnumpy\nndarray\no.",  # OBJ
        b"\x80\x04cnumpy\nndarray\n)\x81.",  # NEWOBJ
        b"\x80\x04cnumpy\nndarray\n)}\x92.",  # NEWOBJ_EX
        b"\x80\x04\x82\x01.",  # EXT1
        b"\x80\x04\x83\x01\x00.",
        b"\x80\x04\x84\x01\x00\x00\x00.",
        b"\x80\x04Ppid\n.",  # PERSID
        b"\x80\x04K\x01Q.",  # BINPERSID
        b"\x80\x05\x97.",  # NEXT_BUFFER
        b"\x80\x05\x98.",
        b"\x80\x05\x96" + struct.pack("<Q", 2**60) + b".",  # BYTEARRAY8
        b"\x80\x04\x8e" + struct.pack("<Q", 2**60) + b".",  # BINBYTES8
        b"\x80\x04\x8d" + struct.pack("<Q", 2**60) + b".",  # BINUNICODE8
        b"\x80\x04B\xff\xff\xff\x7f.",
        b"\x80\x04X\xff\xff\xff\xff.",
        b"\x80\x04]r\xff\xff\xff\xff.",  # LONG_BINPUT far away: a memo of 32 GB
        b"\x80\x04j\xff\xff\xff\x7f.",
        b"\x80\x04\x8b\xff\xff\xff\x7f.",  # LONG4
        b"\x80\x04\x8a\xff" + b"\x01" * 255 + b".",
        b"\x80\x04I99999999999999999999\n.",
        b"\x80\x04}K\x01b.",  # BUILD on a dict
        b"\x80\x04]}b.",
        b"\x80\x04" + b"]" * 70_000 + b".",  # deep
        b"\x80\x04" + b"(" * 70_000 + b".",
        b"\x80\x04" + b"\x8c\x01a\x94" * 70_000 + b".",  # many names
        b"\x80\x042.",  # DUP
        b"\x80\x040.",  # POP
        b"\x80\x04]\x94h\x00a.",  # a list inside of itself
        GOOD + b"\x8c\x05numpy\x8c\x07ndarray\x93J\xff\xff\xff\x7f\x85C\x01b\x87R.",  # huge
        GOOD + b"\x8c\x05numpy\x8c\x06matrix\x93K\x00\x85C\x01b\x87R.",
        b"\x80\x01.",
        b"\x80\x06.",
        b"",
        b".",
        b"\x80\x04]",
        b"\x80\x04].",
        b"\x80\x04u.",
        b"\x80\x04K\x01a.",
        b"\x80\x04\x87.",
        b"\x80\x04(\x94.",  # MEMOIZE of a MARK
        b"\x80\x03]q\x00]q\x00.",  # BINPUT, twice the same
        b"\x80\x03]q\x01.",  # BINPUT, not in order
    ],
)
def test_a_crafted_pickle_is_refused_at_once(tmp_path, data):
    with pytest.raises(StoreError, match=r"bad\.npy"):
        read(write(tmp_path / "bad.npy", data, 1))


def test_reading_imports_nothing_that_a_file_names(tmp_path):
    path = write(tmp_path / "bad.npy", b"\x80\x04cantigravity\nfly\n.", 1)
    code = (
        "import sys\n"
        "from shardmill.formats.packed.legacy import iter_legacy_bins\n"
        "import pickle, _pickle\n"
        "def never(*a, **k): raise SystemExit('unpickled')\n"
        "pickle.load = pickle.loads = pickle.Unpickler = _pickle.Unpickler = never\n"
        f"try: list(iter_legacy_bins({str(path)!r}))\n"
        "except ValueError as error: print(error)\n"
        "sys.exit('antigravity' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "refused: the name antigravity.fly" in done.stdout


numbers = st.lists(
    st.integers(0, 255) | st.integers(0, 65535) | st.integers(0, 2**31 - 1), min_size=1
)


def elements_of(values: list[int]) -> bytes:
    """A pickled list from its first element on. (The size of the frame may look like a MARK.)"""
    data = pickle.dumps(values, protocol=4)
    return data[data.index(b"]\x94(") + 3 :]


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(0, 300), max_size=3000))
def test_a_run_of_numbers_is_decoded_as_pickle_does(values):
    if len(values) > 1:
        data = elements_of(values)
        found, taken = decode_run(data)
        assert found.tolist() == values
        assert data[taken:] == b"e."
    assert pickle.loads(b"\x80\x04](" + encode_run(np.array(values, np.int64)) + b"e.") == values


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.integers(-5, 2**31 - 1), min_size=2, max_size=40), cut=st.integers(0, 200)
)
def test_a_run_that_is_cut_off_gives_the_numbers_before_the_cut(values, cut):
    data = elements_of(values)
    found, taken = decode_run(data[:cut])
    assert taken <= cut
    assert found.tolist() == values[: len(found)]
    rest, _ = decode_run(data[taken:])
    assert [*found.tolist(), *rest.tolist()] == values


def as_arrays(bins, kind):
    if kind == "lists":
        return bins
    if kind == "arrays":
        dtypes = {"input_ids": np.int32, "loss_mask": np.bool_, "seq_start_id": ">i8"}
        return [{key: np.array(one[key], dtypes[key]) for key in one} for one in bins]
    if kind == "scalars":
        return [{key: list(np.array(one[key], np.int64)) for key in one} for one in bins]
    return [one | {"loss_mask": [bool(flag) for flag in one["loss_mask"]]} for one in bins]


@st.composite
def packed_bins(draw):
    bins = []
    for ids in draw(st.lists(numbers, max_size=6)):
        mask = draw(st.lists(st.integers(0, 1), min_size=len(ids), max_size=len(ids)))
        starts = sorted({0, *draw(st.lists(st.integers(0, len(ids) - 1), max_size=3))})
        bins.append({"input_ids": ids, "loss_mask": mask, "seq_start_id": starts})
    return bins


KINDS = ["lists", "arrays", "scalars", "booleans"]


@settings(max_examples=80, deadline=None)
@given(bins=packed_bins(), kind=st.sampled_from(KINDS), protocol=st.sampled_from([3, 4]))
def test_what_numpy_saved_is_read_as_it_was(tmp_path_factory, bins, kind, protocol):
    path = tmp_path_factory.mktemp("legacy") / "a.npy"
    save(path, as_arrays(bins, kind), protocol)
    assert read(path) == bins


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_np_save_itself_is_read(tmp_path, kind):
    long = {"input_ids": list(range(2500)), "loss_mask": [1] * 2500, "seq_start_id": [0, 1200]}
    bins = [BIN, long] * 700
    np.save(tmp_path / "a.npy", as_arrays(bins, kind) if kind != "scalars" else bins[:20])
    assert read(tmp_path / "a.npy") == (bins if kind != "scalars" else bins[:20])


@pytest.mark.parametrize(("dtype", "flags"), [(np.dtype("<i4"), 0), (np.dtype(object), 63)])
def test_a_dtype_with_flags_of_another_one_is_refused(tmp_path, dtype, flags):
    """numpy believes them, and treats numbers as pointers."""
    assert dtype.__reduce__()[2][-1] == flags
    bins = [{key: np.array(value, "<i4") for key, value in BIN.items()}]
    path = save(tmp_path / "a.npy", bins)
    raw, end = path.read_bytes(), b"J\xff\xff\xff\xffK" + bytes([flags])
    assert raw.count(end) == 1
    for wrong in (1, 2, 4, 62, 127):
        path.write_bytes(raw.replace(end, end[:-1] + bytes([wrong])))
        with pytest.raises(StoreError, match="refused: a state for dtype"):
            read(path)


def test_numpy_1_module_paths_are_known(tmp_path):
    array = np.empty(1, object)
    array[0] = {key: np.array(value) for key, value in BIN.items()}
    data = pickle.dumps(array, protocol=3)
    assert b"numpy._core.multiarray" in data
    write(tmp_path / "a.npy", data.replace(b"numpy._core.", b"numpy.core."), 1)
    assert read(tmp_path / "a.npy") == [BIN]


def test_an_empty_list_is_no_bins(tmp_path):
    np.save(tmp_path / "a.npy", [])
    assert read(tmp_path / "a.npy") == []


def test_shared_bins_lists_and_arrays_are_read_as_often_as_they_are_there(tmp_path):
    mask, starts = [0, 1, 1], np.array([0])
    shared = [{"input_ids": [i, 2, 3], "loss_mask": mask, "seq_start_id": starts} for i in range(9)]
    save(tmp_path / "a.npy", [*shared, shared[0], shared[0]])
    found = read(tmp_path / "a.npy")
    assert [one["input_ids"][0] for one in found] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0]
    assert all(one["loss_mask"] == mask and one["seq_start_id"] == [0] for one in found)


def test_a_reference_too_far_back_is_refused_by_name(tmp_path):
    big = [
        {"input_ids": np.arange(2**20), "loss_mask": np.ones(2**20, bool), "seq_start_id": [0]}
        for _ in range(5)
    ]
    save(tmp_path / "a.npy", [*big, big[0]])
    with pytest.raises(StoreError, match="no longer kept; save it with a copy for each bin"):
        read(tmp_path / "a.npy")


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(data=st.data(), kind=st.sampled_from(KINDS))
def test_a_damaged_file_gives_an_error_of_ours_or_bins(tmp_path_factory, data, kind):
    path = tmp_path_factory.mktemp("legacy") / "a.npy"
    save(path, as_arrays([BIN, BIN | {"input_ids": [5, 6, 7]}], kind))
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(raw) - 1))
        if data.draw(st.integers(0, 4)) == 0:
            del raw[place:]
            break
        raw[place] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    try:
        found = read(path)
    except StoreError:
        return
    assert found == judged(path)


@pytest.mark.parametrize("protocol", [4, 5])
def test_frames_of_a_large_file_are_read_and_impossible_ones_refused(tmp_path, protocol):
    """np.save cuts a pickle into frames of 64 KiB, in the middle of lists and of bins."""
    bins = [
        {"input_ids": [i, *range(2999)], "loss_mask": [1] * 3000, "seq_start_id": [0, 7]}
        for i in range(12)
    ]
    path = save(tmp_path / "a.npy", bins, protocol)
    raw = path.read_bytes()
    frames = [
        place
        for opcode, _, place in pickletools.genops(raw[128:])
        if place is not None and opcode.name == "FRAME"
    ]
    assert len(frames) > 2
    assert read(path) == bins
    num_read = num_refused = 0
    for place in frames:
        at = 128 + place + 1
        size = int.from_bytes(raw[at : at + 8], "little")
        for wrong in (size + 1, len(raw), 2**63 - 1, 2**63, 2**64 - 1):
            path.write_bytes(raw[:at] + wrong.to_bytes(8, "little") + raw[at + 8 :])
            with pytest.raises(DamagedStoreError, match="frame"):
                read(path)
        # values need not be in frames: one that ends early is right if no value is cut in two
        for early in (0, 5, 100, 101, size // 2, size // 2 + 1):
            path.write_bytes(raw[:at] + early.to_bytes(8, "little") + raw[at + 8 :])
            try:
                assert read(path) == bins
                num_read += 1
            except DamagedStoreError:
                num_refused += 1
    assert min(num_read, num_refused) > 0


def judged(path: Path) -> list[dict[str, list[int]]]:
    """The bins that Python's own unpickler finds."""
    found = Judge(io.BytesIO(path.read_bytes()[128:])).load()
    return [{key: [int(i) for i in one[key]] for key in one} for one in found.tolist()]


class Judge(pickle._Unpickler):
    """Python's own reader, with names of this format only and a memo that cannot be blown up."""

    def find_class(self, module, name):
        assert module.startswith("numpy")
        assert name in ("_reconstruct", "ndarray", "dtype", "scalar")
        return super().find_class(module, name)


def test_truncation_at_every_byte_is_noticed(tmp_path):
    path = save(tmp_path / "a.npy", [BIN, BIN])
    raw = path.read_bytes()
    for size in range(len(raw)):
        path.write_bytes(raw[:size])
        with pytest.raises(StoreError):
            read(path)
    path.write_bytes(raw + b"x")
    with pytest.raises(DamagedStoreError, match="1 bytes after its end"):
        read(path)
