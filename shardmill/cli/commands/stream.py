"""`shardmill stream`: run a stream for a few steps, look at it, save and resume its state."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from shardmill.arguments import whole_number
from shardmill.cli.options import AsJson, read_state
from shardmill.cli.printing import Answer, Decode, Heading, ShownTokens, Span
from shardmill.cli.terminal import safe_bars
from shardmill.errors import LossError, OptionError, TokenizerError
from shardmill.records import IGNORE_INDEX, JSON, IntArray
from shardmill.storage.atomic import atomic_write

if TYPE_CHECKING:
    from shardmill.compat.chomp import StreamConfig
    from shardmill.loading.streaming import Counts, StreamTokenizer, TextStream
    from shardmill.records import Batch
    from shardmill.trainers.grain import BatchTuple, StreamIterator

    Stream = TextStream | StreamIterator


@dataclass(frozen=True, kw_only=True)
class StreamCommand:
    """Prints the rows that --show asks for, then one line: steps, tokens, speed. Without colours
    what is trained is in [[ ]]; each document of a row has its own heading.

    Example: shardmill stream stream.toml --set data.seed=7 --steps 100 --show 2

    Example: shardmill stream stream.toml --steps 20 --save-state state.json

    Example: shardmill stream stream.toml --state state.json

    Exit 0: made, or the data ended before. Exit 1: the data gave no document. Exit 2: a mistake in
    the call, the config or its input.
    """

    config: Annotated[Path, "CONFIG", "A .toml, .yaml or .json file."]
    override: Annotated[
        list[str] | None, "--set", "KEY=VALUE on top of the file, as often as you like."
    ] = None
    steps: Annotated[int, "How many batches to make."] = 10
    evaluate: Annotated[bool, "--eval", "Use the evaluation data."] = False
    process_index: Annotated[int | None, "Number of this process, from 0."] = None
    process_count: Annotated[int | None, "Number of processes."] = None
    state: Annotated[Path | None, "Continue after this state."] = None
    save_state: Annotated[Path | None, "Write the state after the last step."] = None
    show: Annotated[int, "How many rows to print as text."] = 0
    allow_empty: Annotated[bool, "Data without a document is no error."] = False
    as_json: AsJson = False

    def run(self) -> Answer:
        from shardmill.compat.chomp import config_dict, read_config
        from shardmill.compat.chomp.stream import effective_config

        whole_number(self.steps, "steps", least=0)
        whole_number(self.show, "show", least=0)
        saved = self.save_state
        if saved is not None:
            if not saved.parent.is_dir():
                raise OptionError(f"--save-state {saved}: there is no folder {saved.parent}")
            if os.path.lexists(saved) and (saved.is_symlink() or not saved.is_file()):
                raise OptionError(
                    f"--save-state {saved}: found a link, device, pipe or folder; wanted a new file"
                )
        settings = read_config(self.config, self.override or ())
        opened, tokenizer = _open(settings, self)
        with closing(opened):
            if self.state is not None:
                opened.set_state(read_state(self.state))
            before, began = opened.stats().total, time.perf_counter()
            try:
                steps, rows = _run(opened, self.steps, self.show)
            except LossError:
                if not self.allow_empty:
                    raise
                steps, rows = 0, []
            seconds, counts = time.perf_counter() - began, opened.stats().total - before
            if saved is not None:
                with atomic_write(saved) as file:
                    file.write(json.dumps(opened.get_state()).encode() + b"\n")
        decode, markers = _decoder(tokenizer)
        facts: dict[str, Any] = {
            "config": str(self.config),
            "effective": config_dict(effective_config(settings, tokenizer)),
            "vocab_size": tokenizer.vocab_size,
            "tokenizer": tokenizer.fingerprint,
            "steps": steps,
            "ended": steps < self.steps,
            "seconds": round(seconds, 3),
            "tokens_per_second": round(counts.tokens / max(seconds, 1e-9), 1),
            "counts": counts.to_dict(),
            "rows": [_row_facts(row, decode) for row in rows],
            "state": None if saved is None else str(saved),
        }
        pieces = (piece for row in rows for piece in _row_pieces(row, decode, markers))
        return Answer(facts, chain(pieces, [_receipt(facts, settings, counts)]))


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """One row of a batch."""

    step: int  # of this call, from 0
    row: int  # of the batch, from 0, micro-batch after micro-batch
    input_ids: IntArray  # (seq_len,)
    labels: IntArray  # (seq_len,)
    segment_ids: IntArray  # (seq_len,)

    def window(self) -> tuple[IntArray, IntArray]:
        """The inputs, followed by the last label if it is one; with their segments."""
        ids, segments, last = self.input_ids, self.segment_ids, int(self.labels[-1])
        if last == IGNORE_INDEX:
            return ids, segments
        # a trained label belongs to the document before it, or begins the next one where labels
        # cross boundaries: the batch does not say which
        return np.append(ids, last), np.append(segments, segments[-1])


def _open(settings: StreamConfig, options: StreamCommand) -> tuple[Stream, StreamTokenizer]:
    """Through Grain where it is installed: the same batches, some of them made ahead."""
    from shardmill.compat.chomp import build_eval_iterator, build_train_iterator, open_stream

    index, count = options.process_index, options.process_count
    if importlib.util.find_spec("grain") is not None:
        _import_quietly("shardmill.trainers.grain")
        build = build_eval_iterator if options.evaluate else build_train_iterator
        opened = build(settings, process_index=index, process_count=count)
        return opened, opened.tokenizer
    from shardmill.compat.chomp.stream import open_stream_tokenizer

    print("shardmill: grain is not installed: batches are not made ahead", file=sys.stderr)
    alone = open_stream(
        settings,
        purpose="eval" if options.evaluate else "train",
        process_index=index,
        process_count=count,
    )
    return alone, open_stream_tokenizer(settings)


def _import_quietly(module: str) -> None:
    """Grain warns on every import that it found no profiler of another library."""
    logging.disable(logging.WARNING)
    try:
        importlib.import_module(module)
    finally:
        logging.disable(logging.NOTSET)


def _run(opened: Stream, steps: int, show: int) -> tuple[int, list[_Row]]:
    """How many steps there were, and the first rows, to be shown."""
    rows: list[_Row] = []
    done = 0
    with safe_bars() as bars:
        task = bars.add_task("steps", total=steps)
        for step, batch in zip(range(steps), opened, strict=False):
            rows += _first_rows(batch, step, show - len(rows))
            done = step + 1
            bars.update(task, completed=done)
    return done, rows


def _first_rows(batch: Batch | BatchTuple, step: int, most: int) -> list[_Row]:
    """At most `most` rows of the batch, copied."""
    assert batch.segment_ids is not None, "streams have them"
    arrays = (batch.input_ids, batch.labels, batch.segment_ids)
    flat = [array.reshape(-1, array.shape[-1])[:most].copy() for array in arrays]
    return [_Row(step, row, *parts) for row, parts in enumerate(zip(*flat, strict=True))]


def _receipt(facts: dict[str, Any], settings: StreamConfig, counts: Counts) -> str:
    train, state = settings.train, f"; state: {facts['state']}" if facts["state"] else ""
    return (
        f"{facts['config']}: {facts['steps']:,} steps of [{train.grad_accum}, {train.batch_size}, "
        f"{train.seq_len}]{', the end of the stream' if facts['ended'] else ''}; "
        f"{counts.tokens:,} tokens, {facts['tokens_per_second']:,.0f} tokens/s; "
        f"{counts.documents:,} documents, padding {100 * counts.padding_share:.2f} %; truncated: "
        f"{counts.truncated_documents:,} documents, {counts.truncated_tokens:,} tokens; dropped: "
        f"{counts.input_dropped:,} rows{state}"
    )


def _row_pieces(row: _Row, decode: Decode, markers: IntArray) -> Iterator[Heading | Span]:
    """The row document by document; what is a label counts as trained."""
    trained = np.append(False, row.labels != IGNORE_INDEX)  # the first token is not a label
    ids, segments = row.window()
    shown = ShownTokens(ids, trained, np.ones(len(ids), bool), markers, decode)
    parts = [(f"step {row.step:,}, row {row.row:,}", 0, 0)]
    for start, stop in pairwise([0, *(np.flatnonzero(np.diff(segments)) + 1), len(segments)]):
        tokens, count = f"tokens {start:,}..{stop:,}", shown.num_trained(start, stop)
        if segments[start]:
            parts.append(
                (f"document {segments[start]:,}, {tokens}, {count:,} trained", start, stop)
            )
        else:
            parts.append((f"padding, {tokens}", 0, 0))
    return shown.sections(parts)


def _row_facts(row: _Row, decode: Decode) -> dict[str, JSON]:
    ids, segments = row.window()
    documents: list[JSON] = [
        decode(ids[segments == number]) for number in range(1, int(segments.max(initial=0)) + 1)
    ]
    return {
        "step": row.step,
        "row": row.row,
        "input_ids": row.input_ids.tolist(),
        "labels": row.labels.tolist(),
        "segment_ids": row.segment_ids.tolist(),
        "documents": documents,
    }


def _decoder(tokenizer: StreamTokenizer) -> tuple[Decode, IntArray]:
    """Ids to text, and the ids that are structure; those without a string are shown as <eos>."""
    base = tokenizer.tokenizer
    nameless: dict[int, str] = {}
    for name, number in (("bos", tokenizer.ids.bos_id), ("eos", tokenizer.ids.eos_id)):
        if number is not None:
            try:
                base.decode(np.array([number]))
            except TokenizerError:
                nameless[number] = f"<{name}>"

    def decode(ids: IntArray) -> str:
        found = np.flatnonzero(np.isin(ids, list(nameless))).tolist()
        edges = [0, *(edge for at in found for edge in (at, at + 1)), len(ids)]
        parts = [ids[start:stop] for start, stop in pairwise(edges) if stop > start]
        return "".join(nameless.get(int(part[0])) or base.decode(part) for part in parts)

    structure = {*base.special_token_ids().values(), tokenizer.ids.bos_id, tokenizer.ids.eos_id}
    return decode, np.array(sorted(one for one in structure if one is not None), np.int64)
