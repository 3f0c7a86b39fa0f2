"""Folders of token files that no manifest describes: files, headers, and who decided the dtype."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardmill.errors import DamagedStoreError, OptionError, StoreError, StoreNotFoundError
from shardmill.store.readers import TokenSpace, open_token_folder

RNG = np.random.default_rng(7)
GPT2 = RNG.zipf(1.3, 3000).clip(0, 50_255).astype("<u2") + np.uint16(100)
LLAMA = RNG.integers(300, 128_000, 3000).astype("<u4")


def tokens_of(folder: Path, pattern: str = "*.npy", **options: object) -> list[int]:
    found = open_token_folder(folder, pattern, **options)
    space = TokenSpace(found.files)
    assert space.num_tokens == found.num_tokens
    return space.read(0, space.num_tokens).tolist()


# .npy


@settings(deadline=None, max_examples=50)
@given(
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=4),
    dtype=st.sampled_from(["<u2", "<u4"]),
    version=st.sampled_from([(1, 0), (2, 0), (3, 0)]),
)
def test_npy_files_are_read_as_numpy_reads_them(sizes, dtype, version):
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for number, size in enumerate(sizes):
            ids = np.random.default_rng(number).integers(0, np.iinfo(dtype).max, size).astype(dtype)
            with (folder / f"s{number}.npy").open("wb") as file:
                np.lib.format.write_array(file, ids, version=version)
        wanted = [np.load(path).tolist() for path in sorted(folder.glob("*.npy"))]
        assert tokens_of(folder) == [token for tokens in wanted for token in tokens]
        assert open_token_folder(folder).dtype == {"<u2": "uint16", "<u4": "uint32"}[dtype]


def test_files_are_sorted_by_name(tmp_path):
    for name in ("shard_10", "shard_2", "a"):
        np.save(tmp_path / f"{name}.npy", np.array([len(name)], np.uint16))
    assert tokens_of(tmp_path) == [1, 8, 7]  # a, shard_10, shard_2


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((2, 3), np.uint16), "shape \\(2, 3\\), wanted one dimension"),
        (np.zeros((), np.uint16), "shape \\(\\), wanted one dimension"),
        (np.zeros(3, np.float32), "'<f4', wanted"),
        (np.zeros(3, np.int64), "'<i8', wanted .*astype"),
        (np.zeros(3, ">u2"), "'>u2', wanted .*little"),
        (np.zeros(3, np.uint8), "'\\|u1', wanted"),
        (np.zeros(3, [("a", "<u2")]), "wanted '<u2' or '<u4'"),
        (np.zeros(0, np.uint16), "holds no token"),
    ],
)
def test_an_array_that_is_no_row_of_tokens_is_refused_by_name(tmp_path, array, words):
    np.save(tmp_path / "good.npy", np.zeros(3, np.uint16))
    np.save(tmp_path / "hostile.npy", array)
    with pytest.raises(StoreError, match=f"hostile.npy: .*{words}"):
        open_token_folder(tmp_path)


def test_a_pickle_is_never_read(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)

    np.save(tmp_path / "a.npy", np.array([Bomb()], object), allow_pickle=True)
    with pytest.raises(StoreError, match=r"a.npy: holds '\|O'.* unpickled: that is never done"):
        open_token_folder(tmp_path)
    assert not (tmp_path / "exploded").exists()


@settings(deadline=None, max_examples=150)
@given(cut=st.integers(0, 400), extra=st.binary(max_size=40))
def test_a_npy_file_of_any_other_size_is_refused(cut, extra):
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "a.npy"
        np.save(path, np.arange(136, dtype=np.uint16))  # 400 bytes
        whole = path.read_bytes()
        path.write_bytes(whole[:cut] + extra)
        assert len(whole) == 400
        assume(path.stat().st_size != 400)
        with pytest.raises(StoreError, match=r"a\.npy"):
            open_token_folder(place)


@settings(deadline=None, max_examples=150)
@given(place=st.integers(0, 127), value=st.integers(0, 255))
def test_a_header_with_one_wrong_byte_is_right_or_refused_never_another_error(place, value):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.npy"
        np.save(path, np.arange(136, dtype=np.uint16))
        data = bytearray(path.read_bytes())
        data[place] = value
        path.write_bytes(data)
        try:
            found, refusal = tokens_of(Path(folder)), ""
        except StoreError as error:
            found, refusal = None, str(error)
        assert "a.npy" in refusal if found is None else found == np.load(path).tolist()


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': '<u2', 'fortran_order': False, 'shape': (-1,)}",
        b"{'descr': '<u2', 'fortran_order': False, 'shape': (True,)}",
        b"{'descr': '<u2', 'fortran_order': False, 'shape': (9223372036854775807,)}",
        b"{'descr': '<u2', 'shape': (4,)}",
        b"{'descr': '<u2', 'fortran_order': False, 'shape': 4}",
        b"{'descr': ['<u2'], 'fortran_order': False, 'shape': (4,)}",
        b"__import__('os').getcwd()",
        b"(" * 3000,
        b"\xff\xfe",
        b"[]",
        b"{[]: 1}",
    ],
)
def test_hostile_headers_are_refused(tmp_path, header):
    size = len(header).to_bytes(2, "little")
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00" + size + header + b"\0" * 8)
    with pytest.raises(StoreError, match=r"a\.npy"):
        open_token_folder(tmp_path)


def test_tokens_after_an_odd_header_are_refused_with_the_way_out(tmp_path):
    header = b"{'descr': '<u2', 'fortran_order': False, 'shape': (4,)}"
    size = len(header).to_bytes(2, "little")
    path = tmp_path / "a.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + size + header + np.arange(4, dtype="<u2").tobytes())
    with pytest.raises(StoreError, match="not aligned"):
        open_token_folder(tmp_path)
    np.save(path, np.load(path))
    assert tokens_of(tmp_path) == [0, 1, 2, 3]


def test_mixed_dtypes_are_refused_with_both_files_named(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(3, np.uint16))
    np.save(tmp_path / "b.npy", np.zeros(3, np.uint32))
    with pytest.raises(StoreError, match=r"mixed dtypes: .*a.npy is uint16, .*b.npy is uint32"):
        open_token_folder(tmp_path)


def test_a_dtype_against_the_header_is_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(3, np.uint16))
    assert open_token_folder(tmp_path, dtype=np.uint16).decided.rule == "header"
    with pytest.raises(OptionError, match="header says uint16, but dtype='uint32'"):
        open_token_folder(tmp_path, dtype="uint32")


# files


def test_no_matching_file_says_what_is_there(tmp_path):
    with pytest.raises(StoreNotFoundError, match=r"No files match '\*.npy'.*no token files"):
        open_token_folder(tmp_path)
    (tmp_path / "a.bin").write_bytes(b"1234")
    with pytest.raises(FileNotFoundError, match=r"No files match '\*.npy'.*there are .bin files"):
        open_token_folder(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"No files: .*absent is not a folder"):
        open_token_folder(tmp_path / "absent")


def test_patterns_that_match_something_else_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(3, np.uint16))
    (tmp_path / "a.bin").write_bytes(b"1234")
    with pytest.raises(OptionError, match="perhaps the same tokens twice"):
        open_token_folder(tmp_path, "a.*")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(OptionError, match=r"notes.txt: .*matches it"):
        open_token_folder(tmp_path, "*")
    for pattern in ("", "/etc/*"):
        with pytest.raises(OptionError, match="file_pattern"):
            open_token_folder(tmp_path, pattern)
    (tmp_path / "folder.npy").mkdir()
    with pytest.raises(OptionError, match=r"folder.npy: not a file"):
        open_token_folder(tmp_path)


def test_empty_files_and_broken_links_are_refused_by_name(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(3, np.uint16))
    (tmp_path / "b.npy").touch()
    with pytest.raises(StoreError, match=r"b.npy: empty \(0 bytes\)"):
        open_token_folder(tmp_path)
    (tmp_path / "b.npy").unlink()
    (tmp_path / "b.npy").symlink_to(tmp_path / "gone")
    with pytest.raises(StoreError, match=r"b.npy: .*broken link"):
        open_token_folder(tmp_path)


def test_nothing_stays_open_after_a_refusal(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(3, np.uint16))
    np.save(tmp_path / "b.npy", np.zeros((3, 1), np.uint16))
    with pytest.raises(StoreError):
        open_token_folder(tmp_path)
    held = {Path(file.path) for file in psutil.Process().open_files()}
    assert not held & set(tmp_path.iterdir())


# the dtype of .bin files


def bin_folder(folder: Path, *arrays: np.ndarray) -> Path:
    for number, array in enumerate(arrays):
        array.tofile(folder / f"shard_{number}.bin")
    return folder


def test_the_order_of_the_rules(tmp_path, caplog):
    folder = bin_folder(tmp_path, GPT2)
    caplog.set_level(logging.INFO)

    def decided(**options: object) -> tuple[str, str]:
        found = open_token_folder(folder, "*.bin", **options).decided
        return found.dtype, found.rule

    assert decided() == ("uint16", "contents")  # by its size alone it would be uint32
    assert "of uint16 (no metadata; of the two, only uint16 fits the bytes of" in caplog.text
    (folder / "metadata.yaml").write_text("name: x\ntokenized_info:\n  dtype: 'uint16' # here\n")
    assert decided() == ("uint16", "metadata.yaml")
    (folder / "meta.json").write_text(json.dumps({"token_dtype": "uint16-le"}))
    assert decided() == ("uint16", "meta.json")
    assert decided(dtype="uint16") == ("uint16", "argument")
    assert "says 'uint16-le'" in caplog.text


def test_a_declared_dtype_against_the_data_is_followed_and_warned_about(tmp_path, caplog):
    folder = bin_folder(tmp_path, GPT2)
    assert open_token_folder(folder, "*.bin", dtype="uint32").dtype == "uint32"
    assert "read as uint32, because the argument says 'uint32'" in caplog.text
    assert "shard_0.bin looks like uint16" in caplog.text


@settings(deadline=None, max_examples=60)
@given(
    vocab=st.integers(300, 65_536),
    num_tokens=st.integers(20, 40_000),
    seed=st.integers(0, 99),
)
def test_uint16_files_are_never_read_as_uint32(vocab, num_tokens, seed):
    ids = np.random.default_rng(seed).integers(0, vocab, num_tokens).astype("<u2")
    with tempfile.TemporaryDirectory() as place:
        assert open_token_folder(bin_folder(Path(place), ids), "*.bin").dtype == "uint16"
        assert tokens_of(Path(place), "*.bin") == ids.tolist()


@settings(deadline=None, max_examples=60)
@given(
    vocab=st.integers(300, 1_000_000),
    num_tokens=st.integers(20, 40_000),
    seed=st.integers(0, 99),
)
def test_uint32_files_are_never_read_as_uint16(vocab, num_tokens, seed):
    ids = np.random.default_rng(seed).integers(0, vocab, num_tokens).astype("<u4")
    with tempfile.TemporaryDirectory() as place:
        assert open_token_folder(bin_folder(Path(place), ids), "*.bin").dtype == "uint32"
        assert tokens_of(Path(place), "*.bin") == ids.tolist()


def test_counting_tokens_of_small_tests_are_understood(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert tokens_of(bin_folder(tmp_path / "a", np.arange(100, dtype="<u4")), "*.bin")[99] == 99
    assert tokens_of(bin_folder(tmp_path / "b", np.arange(100, dtype="<u2")), "*.bin")[99] == 99


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("zeros", np.zeros(1000, "<u2")),
        ("dna", RNG.integers(0, 6, 4000).astype("<u2")),
        ("few", np.array([5, 1, 7, 0], "<u2")),
        ("int64", RNG.integers(0, 50_000, 1000).astype("<i8")),
        ("big endian", RNG.integers(300, 128_000, 1000).astype(">u4")),
        ("one bad id", np.append(LLAMA, np.uint32(2**31)).astype("<u4")),
    ],
)
def test_what_stays_open_is_refused_with_the_way_out(tmp_path, name, array):
    bin_folder(tmp_path, array)
    with pytest.raises(StoreError, match=r"shard_0\.bin.*pass dtype='uint16' or 'uint32'"):
        open_token_folder(tmp_path, "*.bin")
    assert open_token_folder(tmp_path, "*.bin", dtype="uint16").num_tokens == array.nbytes // 2


def test_an_open_file_follows_a_clear_one(tmp_path):
    assert open_token_folder(
        bin_folder(tmp_path, GPT2, np.zeros(2, "<u2")), "*.bin"
    ).num_tokens == (3002)


def test_mixed_dtypes_in_bin_files_are_refused(tmp_path):
    with pytest.raises(StoreError, match=r"mixed dtypes: .*shard_0.bin is uint16, .*shard_1.bin"):
        open_token_folder(bin_folder(tmp_path, GPT2, LLAMA), "*.bin")


def test_truncated_bin_files_are_refused_by_name(tmp_path):
    (tmp_path / "a.bin").write_bytes(GPT2.tobytes()[:-1])
    with pytest.raises(StoreError, match=r"a.bin: 5,999 bytes, an odd number"):
        open_token_folder(tmp_path, "*.bin")
    (tmp_path / "a.bin").write_bytes(LLAMA.tobytes()[:-2])
    with pytest.raises(StoreError, match=r"a.bin: 11,998 bytes .*truncated\?"):
        open_token_folder(tmp_path, "*.bin")
    with pytest.raises(StoreError, match=r"a.bin: truncated, or not uint32: 11,998 bytes"):
        open_token_folder(tmp_path, "*.bin", dtype="uint32")


def test_half_a_uint32_in_the_size_means_uint16(tmp_path):
    found = open_token_folder(bin_folder(tmp_path, np.arange(3, dtype="<u2")), "*.bin")
    assert (found.dtype, found.num_tokens) == ("uint16", 3)


def test_a_known_vocabulary_makes_ids_impossible(tmp_path):
    ids = RNG.integers(0, 30, 2000).astype("<u2")  # high halves stay under two million
    bin_folder(tmp_path, ids)
    with pytest.raises(StoreError, match="could be"):
        open_token_folder(tmp_path, "*.bin")
    (tmp_path / "metadata.yaml").write_text("vocab_size: 30\n")
    assert open_token_folder(tmp_path, "*.bin").dtype == "uint16"


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("meta.json", "{", "meta.json: not JSON"),
        ("meta.json", "[]", "meta.json: a list"),
        ("meta.json", '{"dtype": "float32"}', "'float32' is no dtype"),
        ("meta.json", '{"dtype": "uint16-be"}', "'uint16-be' is no dtype"),
        ("meta.json", '{"dtype": ">u2"}', "'>u2' is no dtype"),
        ("meta.json", '{"dtype": ["uint16"]}', "dtype is \\['uint16'\\]"),
        ("meta.json", '{"dtype": "uint16", "token_dtype": "uint32-le"}', "uint16.*uint32"),
        ("meta.json", '{"vocab_size": -3}', "vocab_size is '-3'"),
        ("metadata.yaml", "a:\n  dtype: uint16\nb:\n  dtype: uint32\n", "uint16.*uint32"),
        ("metadata.yaml", "dtype: int8", "'int8' is no dtype"),
        ("metadata.yaml", "{dtype: uint16, vocab_size: 9}", "dtype and vocab_size in a form"),
        ("metadata.yaml", "tokens: {vocab_size: 100}", "says vocab_size in a form"),
        ("metadata.yaml", b"\xff\xfe", "cannot be read"),
    ],
)
def test_metadata_that_cannot_be_understood_is_refused(tmp_path, file, text, words):
    bin_folder(tmp_path, GPT2)
    (tmp_path / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises((StoreError, OptionError), match=words):
        open_token_folder(tmp_path, "*.bin")


def test_quoted_keys_are_read_and_text_in_a_block_is_not(tmp_path):
    bin_folder(tmp_path, GPT2)
    said = 'note: |\n  dtype: uint32\n  more\n"dtype": uint16  # dtype: uint32\n'
    (tmp_path / "metadata.yaml").write_text(said)
    assert open_token_folder(tmp_path, "*.bin").decided.rule == "metadata.yaml"
    assert open_token_folder(tmp_path, "*.bin").dtype == "uint16"


def test_metadata_without_a_dtype_leaves_the_question_to_the_data(tmp_path):
    bin_folder(tmp_path, GPT2)
    (tmp_path / "meta.json").write_text('{"dataset": "x"}')
    (tmp_path / "metadata.yaml").write_text("dtype: null\ntokenizer: gpt2\n")
    assert open_token_folder(tmp_path, "*.bin").decided.rule == "contents"


def test_a_file_that_shrinks_after_opening_is_refused_when_read(tmp_path):
    found = open_token_folder(bin_folder(tmp_path, GPT2), "*.bin")
    (tmp_path / "shard_0.bin").write_bytes(b"12")
    with pytest.raises(DamagedStoreError, match="found 2 bytes, wanted 6,000"):
        TokenSpace(found.files)
