"""Small real tokenizers that have every marker of the known templates."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from shardmill.protocols import Tokenizer
from shardmill.tokenizers import ByteTokenizer, TrainSpec, open_tokenizer, train_tokenizer

MARKERS = {
    "sys": "<|sys|>",
    "usr": "<|usr|>",
    "asst": "<|asst|>",
    "eot": "<|eot|>",
    "im_start": "<|im_start|>",
    "im_end": "<|im_end|>",
    "begin_of_text": "<|begin_of_text|>",
    "start_header_id": "<|start_header_id|>",
    "end_header_id": "<|end_header_id|>",
    "eot_id": "<|eot_id|>",
    "bos": "<bos>",
    "start_of_turn": "<start_of_turn>",
    "end_of_turn": "<end_of_turn>",
}
WORDS = (
    "The quick brown fox jumps over the lazy dog, and then it sleeps.\n"
    "user assistant system model tool <think> </think> <tool_call> </tool_call>\n"
    "Der schnelle braune Fuchs springt \u00fcber den faulen Hund. \U0001f600\n"
)
BINDABLE = (
    *("four-marker", "chatml", "llama-3", "gemma"),
    *("qwen2.5", "qwen3", "qwen3-instruct", "smollm3"),
)
"""The known templates whose markers these tokenizers have; test_families.py has all."""
CHAT_TOKENIZERS = ("byte", "byte-bpe", "bpe", "unigram")


@pytest.fixture(scope="session")
def chat_tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """Kind to tokenizer. The trained ones have few ids, so that words fall apart."""
    found: dict[str, Tokenizer] = {"byte": ByteTokenizer(byte_offset=20, specials=MARKERS)}
    folder: Path = tmp_path_factory.mktemp("chat-tokenizers")
    source = (Path(sysconfig.get_paths()["stdlib"]) / "base64.py").read_text()
    for kind in ("byte-bpe", "bpe", "unigram"):
        spec = TrainSpec(vocab_size=400, model_type=kind, specials=MARKERS)
        train_tokenizer(folder / kind, texts=[WORDS * 50, source], spec=spec)
        found[kind] = open_tokenizer(folder / kind)
    return found
