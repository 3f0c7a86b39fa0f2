"""The text that all builders get, its tokenizer, and the ids that must come out.

In: how much text.  Out: a `Corpus` in a folder.
Promise: real text, nothing repeated; `large` holds every document of `small` at every so many
places, so both have the same mix of it; each lies in two files of JSON lines, since several peers
give a file to a worker; the ids are those of the `tokenizers` library itself.
Not here: building.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from texts import some_documents, text_bytes

from shardmill.records import Ragged
from shardmill.tokenizers import TrainSpec, train_tokenizer

FILES = 2
_END = "eot"


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Where everything lies."""

    folder: str
    small_bytes: int  # of text, for whoever takes seconds for it
    large_bytes: int
    times: int  # every so many documents of `large` are those of `small`
    end: str  # the special token behind each document
    end_id: int

    def files(self, size: str) -> tuple[str, ...]:
        return tuple(f"{self.folder}/{size}-{number}.jsonl" for number in range(FILES))

    def num_bytes(self, size: str) -> int:
        return self.small_bytes if size == "small" else self.large_bytes

    @property
    def model(self) -> str:
        """A tokenizer.json, with the file beside it that transformers asks for."""
        return f"{self.folder}/hf/tokenizer.json"

    @property
    def own_model(self) -> str:
        """The same tokenizer.json as it was trained."""
        return f"{self.folder}/bpe/tokenizer.json"

    def wanted(self) -> Ragged:
        """The ids of `small`."""
        with np.load(f"{self.folder}/wanted.npz") as arrays:
            return Ragged(arrays["values"], arrays["offsets"])


def write_corpus(folder: Path, data: Path | None, megabytes: float, times: int) -> Corpus:
    """`megabytes` of text for `small`, and `times` as much for `large` if there is so much."""
    spec = TrainSpec(model_type="byte-bpe")
    # A special string in text is a special id for some and text for others, and our sources clean
    # text (a BOM, CR LF): not the question here.
    unlike = (*spec.specials.values(), "\ufeff", "\r\n")
    every = some_documents(data, megabytes * times)
    texts = [text for text in every if not any(string in text for string in unlike)]
    small = texts[::times]
    _write(folder, "small", small)
    _write(folder, "large", texts)
    train_tokenizer(folder / "bpe", texts=texts[::20], spec=spec)
    (folder / "hf").mkdir()
    shutil.copy(folder / "bpe/tokenizer.json", folder / "hf")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": spec.specials[_END]}
    (folder / "hf/tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    corpus = Corpus(
        folder=str(folder),
        small_bytes=text_bytes(small),
        large_bytes=text_bytes(texts),
        times=times,
        end=spec.specials[_END],
        end_id=_write_wanted(folder, small, spec.specials[_END]),
    )
    (folder / "corpus.json").write_text(json.dumps(asdict(corpus)), encoding="utf-8")
    return corpus


def open_corpus(folder: str) -> Corpus:
    return Corpus(**json.loads(Path(folder, "corpus.json").read_text(encoding="utf-8")))


def _write(folder: Path, size: str, texts: Sequence[str]) -> None:
    """Two files of about the same size: a worker for each should have as much to do."""
    ends = np.cumsum([len(text.encode()) for text in texts])
    cuts = np.searchsorted(ends, ends[-1] * np.arange(1, FILES) / FILES).tolist()
    for number, (start, stop) in enumerate(pairwise([0, *cuts, len(texts)])):
        with (folder / f"{size}-{number}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts[start:stop])


def _write_wanted(folder: Path, texts: Sequence[str], end: str) -> int:
    """Gives the id of the end."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "bpe/tokenizer.json"))
    end_id: int = tokenizer.token_to_id(end)
    rows = []
    for start in range(0, len(texts), 256):
        encoded = tokenizer.encode_batch(texts[start : start + 256], add_special_tokens=False)
        rows += [np.array([*one.ids, end_id], np.uint16) for one in encoded]
    ids = Ragged.from_lengths(np.concatenate(rows), [len(row) for row in rows])
    np.savez(folder / "wanted.npz", values=ids.values, offsets=ids.offsets)
    return end_id


def compare(found: Ragged, wanted: Ragged) -> str:
    """How the documents of one are those of the other: "in order", "reordered" or "differ"."""
    if found == wanted:
        return "in order"
    same = sorted(one.tobytes() for one in found) == sorted(one.tobytes() for one in wanted)
    return "reordered" if same else "differ"
