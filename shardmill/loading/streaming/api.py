"""`shardmill.stream`: text straight to batches, without a store in between."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, SupportsIndex, TypeAlias

from shardmill.arguments import choices, whole_number
from shardmill.errors import OptionError
from shardmill.loading.api import chosen_form, rank_and_world
from shardmill.loading.fim import (
    FimOptions,
    FimRules,
    check_vocabulary,
    fim_options,
    fim_rules,
)
from shardmill.loading.streaming.documents import StreamOrder
from shardmill.loading.streaming.rows import BinRules
from shardmill.loading.streaming.stream import (
    BATCH_DOCUMENTS,
    BatchShape,
    LossRules,
    Pipeline,
    TextStream,
)
from shardmill.loading.streaming.tokenizer import DocumentIds, StreamTokenizer
from shardmill.protocols import Source, Tokenizer
from shardmill.sampling.order import checked_seed
from shardmill.sources import BatchLimits, open_source
from shardmill.tokenizers import ByteTokenizer, EngineChoice, open_tokenizer
from shardmill.tokenizers.base import usual_id

Inputs: TypeAlias = str | Path | Sequence[str | Path] | Source
Pack: TypeAlias = Literal["sequential", "first-fit", "best-fit"]
PACKS: tuple[Pack, ...] = ("sequential", "first-fit", "best-fit")


def stream(
    inputs: Inputs,
    *,
    tokenizer: str | Path | Tokenizer,
    seq_len: SupportsIndex,
    batch_size: SupportsIndex,
    seed: int = 0,
    rank: SupportsIndex | None = None,
    world: SupportsIndex | None = None,
    to: str = "numpy",
    pack: Pack = "sequential",
    shuffle: bool = True,
    repeat: bool = True,
    field: str | None = None,
    fields: Sequence[str] | None = None,
    join: str | None = None,
    filter: str | None = None,
    map: str | Callable[[dict[str, Any]], str | None] | None = None,
    strip_front_matter: bool = False,
    on_bad: Literal["error", "skip"] | None = None,
    append_eot: bool = True,
    eot: str | None = None,
    max_doc_tokens: int | None = None,
    num_streams: int | None = None,
    engine: EngineChoice = "auto",
    fim: float | FimOptions | None = None,
) -> TextStream | Any:
    """Training batches straight from text, with `state_dict` and `load_state_dict`.

    `inputs` are files, folders, globs, URLs or hub datasets (`hub:owner/name`), as for `build`, or
    a `Source`. `tokenizer`, `field`, `fields`, `join`, `filter`, `map`, `strip_front_matter`,
    `on_bad`, `append_eot`, `eot` and `engine` are those of `build`; `seq_len`, `batch_size`,
    `seed`, `rank`, `world` and `to` those of `load`.

    `pack`: "sequential" lays documents end to end and cuts every `seq_len + 1` tokens; "first-fit"
    and "best-fit" keep documents whole, except those that are longer than a row. `shuffle` draws
    the order of files and of documents in blocks of 10,000. `repeat`: epochs without end, each in
    its own order. `max_doc_tokens` cuts longer documents. `num_streams`: a state can be loaded on
    any number of ranks that divides it; None is the number of ranks. `fim`: the share of rows in
    which documents are rearranged to fill in the middle, as in `load`, or `FimOptions`.
    """
    arguments = {**locals(), "rank": 0, "world": 1, "to": "numpy"}
    form = chosen_form(to)
    if pack not in PACKS:
        raise OptionError("{pack}: " + choices(str(pack), PACKS, verb="wanted"), pack=pack)
    own_rank, own_world = rank_and_world(rank, world)
    seed = checked_seed(seed)
    if num_streams is not None:
        whole_number(num_streams, "num_streams")
    if isinstance(tokenizer, str | Path):
        tokenizer = open_tokenizer(str(tokenizer), specials=None if eot is None else {"eot": eot})
    elif eot is not None:
        raise OptionError(
            "{eot}: the tokenizer is open already, with the names that it has", eot=eot
        )
    ids = _document_ids(tokenizer, append_eot=append_eot, max_doc_tokens=max_doc_tokens)
    vocab_size = max(ids.eos_id or 0, ids.pad_id, tokenizer.vocab_size - 1) + 1
    if isinstance(inputs, str | Path | Sequence):
        options: dict[str, Any] = {"limits": BatchLimits(num_documents=BATCH_DOCUMENTS)}
        wanted: dict[str, Any] = {
            "field": field,
            "fields": fields,
            "join": join,
            "filter": filter,
            "map": map,
        }
        wanted |= {"strip_front_matter": strip_front_matter or None, "on_bad": on_bad}
        options |= {name: value for name, value in wanted.items() if value is not None}
        inputs = open_source(inputs, **options)
    bins = None
    if pack != "sequential":
        bins = BinRules(algorithm=pack, seed=seed if shuffle else None)
    pipeline = Pipeline(
        source=inputs,
        tokenizer=StreamTokenizer(
            tokenizer=tokenizer, ids=ids, vocab_size=vocab_size, engine=engine
        ),
        order=StreamOrder(seed=seed, shuffle=shuffle, repeat=repeat),
        bins=bins,
        loss=LossRules(),
        shape=BatchShape(
            batch_size=whole_number(batch_size, "batch_size"),
            seq_len=whole_number(seq_len, "seq_len"),
        ),
        num_streams=num_streams,
        fim=_fim_rules(fim, tokenizer, ids, vocab_size, seed),
        remake=partial(_open_again, arguments),
    )
    return form(TextStream(pipeline, rank=own_rank, world=own_world))


def _fim_rules(
    fim: float | FimOptions | None,
    tokenizer: Tokenizer,
    ids: DocumentIds,
    vocab_size: int,
    seed: int,
) -> FimRules | None:
    options = fim_options(fim)
    if options is None:
        return None
    if isinstance(options.rate, Mapping):
        raise OptionError("{fim}: wanted one share, since a stream has one source", fim=fim)
    framing = {"bos": ids.bos_id, "eos": ids.eos_id}
    named = {name: number for name, number in framing.items() if number is not None}
    named = {**tokenizer.special_token_ids(), **named}
    rules = fim_rules(options, named, repr(tokenizer), seed=seed, path=())
    check_vocabulary(rules.tokens, vocab_size, repr(tokenizer))
    return rules


def _open_again(arguments: dict[str, Any]) -> Pipeline:
    """The parts of a stream in another process."""
    opened = stream(**arguments)
    assert isinstance(opened, TextStream)
    return opened.pipeline


def _document_ids(
    tokenizer: Tokenizer, *, append_eot: bool, max_doc_tokens: int | None
) -> DocumentIds:
    """The tokenizer's own ids. A byte tokenizer without names ends documents with the id 256."""
    named = tokenizer.special_token_ids()
    eos = usual_id("eos", named)
    if eos is None and append_eot:
        if not isinstance(tokenizer, ByteTokenizer) or named:
            raise OptionError(
                f"{{append_eot}}: {tokenizer!r} names no end token (its special tokens: "
                f"{', '.join(sorted(named)) or 'none'}); name one with {{eot}}, or pass "
                "append_eot=False",
                append_eot=True,
                eot=...,
            )
        eos = tokenizer.vocab_size
    if max_doc_tokens is not None:
        whole_number(max_doc_tokens, "max_doc_tokens")
    pad = named.get("pad", eos if eos is not None else named.get("bos", 0))
    return DocumentIds(
        bos_id=named.get("bos"),
        eos_id=eos,
        pad_id=pad,
        add_bos=False,
        add_eos=append_eot,
        max_doc_tokens=max_doc_tokens,
    )
