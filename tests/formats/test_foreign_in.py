"""llm.c, datatrove and Dolma files become stores, token for token."""

from __future__ import annotations

import gzip
import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import DamagedStoreError, OptionError, StoreError, StoreNotFoundError
from shardmill.formats.convert import ConvertOptions, convert
from shardmill.formats.token_files import (
    ForeignFile,
    Separator,
    open_datatrove,
    open_dolma,
    open_llmc,
)
from shardmill.store import open_store
from shardmill.testing.stores import assert_store_laws, documents, read_documents


def found(file: ForeignFile) -> list[list[int]]:
    return [ids.tolist() for batch in file.batches() for ids in batch]


def llmc(path: Path, tokens, magic: int = 20240520, version: int = 1, claimed=None) -> Path:
    head = np.zeros(256, "<i4")
    head[:3] = magic, version, len(tokens) if claimed is None else claimed
    body = np.array(tokens, "<u2" if magic == 20240520 else "<u4")
    path.write_bytes(head.tobytes() + body.tobytes())
    return path


def test_llmc_is_one_document_unless_a_separator_is_given(tmp_path):
    path = llmc(tmp_path / "a.bin", [9, 4, 9, 5, 6, 9, 7])
    assert found(open_llmc(path)) == [[9, 4, 9, 5, 6, 9, 7]]
    first = Separator(token=9, first=True)
    assert found(open_llmc(path, separator=first)) == [[9, 4], [9, 5, 6], [9, 7]]
    assert found(open_llmc(path, separator=Separator(token=9))) == [[9], [4, 9], [5, 6, 9], [7]]


def test_llama_3_files_have_four_bytes_a_token(tmp_path):
    path = llmc(tmp_path / "a.bin", [128000, 5], 20240801, 7)
    assert found(open_llmc(path)) == [[128000, 5]]


def test_llmc_damage_is_refused_by_name(tmp_path):
    with pytest.raises(DamagedStoreError, match="holds 3 tokens, but its header says 4"):
        open_llmc(llmc(tmp_path / "a.bin", [1, 2, 3], claimed=4))
    with pytest.raises(StoreError, match="magic 20240521 version 1"):
        open_llmc(llmc(tmp_path / "a.bin", [1], 20240521))
    with pytest.raises(StoreError, match="magic 20240520 version 2"):
        open_llmc(llmc(tmp_path / "a.bin", [1], version=2))
    (tmp_path / "b.bin").write_bytes(b"x" * 100)
    with pytest.raises(DamagedStoreError, match="less than the header"):
        open_llmc(tmp_path / "b.bin")
    with pytest.raises(StoreNotFoundError):
        open_llmc(tmp_path / "c.bin")


def datatrove(path: Path, lists, width: int = 2, said: str | None = "gpt2|2") -> Path:
    kind = "<u2" if width == 2 else "<u4"
    path.write_bytes(b"".join(np.array(ids, kind).tobytes() for ids in lists))
    ends = np.cumsum([len(ids) for ids in lists])
    Path(f"{path}.index").write_bytes(ends.astype("<u8").tobytes())
    if said is not None:
        Path(f"{path}.metadata").write_text(f"{said}\n{sum(map(len, lists))}\n5 T")
    return path


def test_datatrove_documents_are_those_of_its_index(tmp_path):
    path = datatrove(tmp_path / "a.ds", [[1, 2], [], [65535]])
    assert found(open_datatrove(path)) == [[1, 2], [], [65535]]
    path = datatrove(tmp_path / "b.ds", [[70000], [1]], 4, "llama|3|4")
    assert found(open_datatrove(path)) == [[70000], [1]]


def test_the_width_of_datatrove_tokens_is_never_guessed(tmp_path):
    path = datatrove(tmp_path / "a.ds", [[1, 2], [3, 4]], said=None)
    with pytest.raises(OptionError, match="how wide its tokens are"):
        open_datatrove(path)
    assert found(open_datatrove(path, dtype="uint16")) == [[1, 2], [3, 4]]
    with pytest.raises(DamagedStoreError, match="end before they start or after"):
        found(open_datatrove(path, dtype="uint32"))
    path = datatrove(tmp_path / "b.ds", [[1, 2]])
    with pytest.raises(OptionError, match=r"its \.metadata says"):
        open_datatrove(path, dtype="uint32")


def test_a_datatrove_loss_mask_is_not_dropped_unasked(tmp_path):
    path = datatrove(tmp_path / "a.ds", [[1, 2, 3]])
    loss = Path(f"{path}.loss")
    loss.write_bytes(b"\x01\x01\x01")
    assert found(open_datatrove(path)) == [[1, 2, 3]]
    loss.write_bytes(b"\x01\x00\x00")
    with pytest.raises(StoreError, match="leaves 2 of 3 tokens out of the loss"):
        open_datatrove(path)
    assert found(open_datatrove(path, ignore_loss=True)) == [[1, 2, 3]]
    loss.write_bytes(b"\x01")
    with pytest.raises(DamagedStoreError, match="1 bytes for 3 tokens"):
        open_datatrove(path)


def test_a_datatrove_index_that_does_not_cover_the_tokens_is_refused(tmp_path):
    path = datatrove(tmp_path / "a.ds", [[1, 2], [3]])
    for ends in ([2], [2, 4], [2, 1], [3, 2], [2**63]):
        Path(f"{path}.index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
        with pytest.raises(DamagedStoreError, match="index"):
            found(open_datatrove(path))
    Path(f"{path}.metadata").write_text("gpt2|2\n4\n")
    with pytest.raises(DamagedStoreError, match=r"holds 3 tokens, but its .metadata says 4"):
        open_datatrove(path)


def dolma(path: Path, lists, dtype: str = "<u2") -> Path:
    path.write_bytes(b"".join(np.array(ids, dtype).tobytes() for ids in lists))
    edges = np.cumsum([0, *(len(ids) for ids in lists)])
    rows = [
        f'{start},{stop},"id,\n{number}",src.gz,{number}\n'
        for number, (start, stop) in enumerate(pairwise(edges))
    ]
    with gzip.open(path.with_name(path.stem + ".csv.gz"), "wt") as file:
        file.writelines(rows)
    return path


def test_dolma_documents_are_those_of_its_csv(tmp_path):
    path = dolma(tmp_path / "part-0-00000.npy", [[1, 2, 50256], [3, 50256]])
    assert found(open_dolma(path, dtype="uint16")) == [[1, 2, 50256], [3, 50256]]
    (tmp_path / "part-0-00000.csv.gz").unlink()
    assert found(open_dolma(path, dtype="uint16")) == [[1, 2, 50256, 3, 50256]]
    end = Separator(token=50256)
    assert found(open_dolma(path, dtype="uint16", separator=end)) == [[1, 2, 50256], [3, 50256]]


def test_a_csv_that_leaves_tokens_out_is_refused(tmp_path):
    path = dolma(tmp_path / "a.npy", [[1, 2], [3]])
    for rows in ("0,2,a,b,c\n", "0,1,a,b,c\n2,3,a,b,c\n", "1,3,a,b,c\n", "0,2,a,b,c\n2,9,a,b,c\n"):
        with gzip.open(tmp_path / "a.csv.gz", "wt") as file:
            file.write(rows)
        with pytest.raises(DamagedStoreError):
            found(open_dolma(path, dtype="uint16"))
    (tmp_path / "a.csv.gz").write_bytes(b"no gzip")
    with pytest.raises(DamagedStoreError, match="cannot be read"):
        open_dolma(path, dtype="uint16")


def test_a_real_npy_is_read_by_its_header_and_bare_tokens_by_the_rule(tmp_path):
    np.save(tmp_path / "a.npy", np.array([1, 2, 3], np.uint32))
    assert found(open_dolma(tmp_path / "a.npy")) == [[1, 2, 3]]
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "b.npy").write_bytes(np.array([1, 2], "<u2").tobytes())
    with pytest.raises(StoreError, match="dtype"):
        open_dolma(tmp_path / "b" / "b.npy")


FORMATS = {"llmc": "a.bin", "datatrove": "a.ds", "dolma": "a.npy"}


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(wanted=documents(dtype="uint16"), name=st.sampled_from(sorted(FORMATS)))
def test_a_store_made_from_them_holds_every_token_and_document(tmp_path_factory, wanted, name):
    folder = tmp_path_factory.mktemp("in")
    lists, path = [ids.tolist() for ids in wanted], folder / FORMATS[name]
    if name == "llmc":
        lists = [[token for ids in lists for token in ids]] if len(wanted.values) else []
        llmc(path, [token for ids in lists for token in ids])
    elif name == "datatrove":
        datatrove(path, lists)
    elif not len(wanted.values):
        return
    else:
        dolma(path, lists)
    options = ConvertOptions(dtype="uint16" if name == "dolma" else None)
    receipt = convert(path, folder / "store", from_format=name, to_format="store", options=options)
    assert receipt["parity"]["equal"] is True
    assert (receipt["documents"], receipt["tokens"]) == (len(lists), len(wanted.values))
    assert [ids.tolist() for ids in read_documents(folder / "store", "train")] == lists
    assert_store_laws(folder / "store")
    assert open_store(folder / "store").manifest.produced_by == {"converted_from": name}


def test_a_folder_of_files_becomes_one_split_in_order_of_names(tmp_path):
    (tmp_path / "in").mkdir()
    for number in (10, 2, 1):
        datatrove(tmp_path / "in" / f"{number:05d}.ds", [[number], [number, number]])
    convert(tmp_path / "in", tmp_path / "s", from_format="datatrove", to_format="store")
    assert [ids.tolist() for ids in read_documents(tmp_path / "s", "train")] == [
        [1],
        [1, 1],
        [2],
        [2, 2],
        [10],
        [10, 10],
    ]


def test_a_failed_conversion_leaves_nothing(tmp_path):
    path = datatrove(tmp_path / "a.ds", [[1, 2], [3]])
    Path(f"{path}.index").write_bytes(struct.pack("<Q", 2))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DamagedStoreError):
        convert(path, tmp_path / "store", from_format="datatrove", to_format="store")
    assert sorted(tmp_path.iterdir()) == before
    with pytest.raises(OptionError, match="'dolma' to 'parquet': not offered"):
        convert(path, tmp_path / "x", from_format="dolma", to_format="parquet")
