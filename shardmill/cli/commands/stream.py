"""`shardmill stream`: run a stream for a few steps, look at it, save and resume its state.

The rows of a stream's batch as something to look at.

In: a batch and the tokenizer of its stream.  Out: headings and spans, or facts for JSON.
Promise: every token of a row is shown, padding is counted; each document begins with a heading, and
what no label trains is told apart from what is trained.
Not here: printing (show_print).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from shardmill.arguments import whole_number
from shardmill.cli.printing import Decode, Heading, Span, print_pieces, spans
from shardmill.cli.terminal import check_file, safe_bars
from shardmill.errors import OptionError, StateMismatchError, TokenizerError
from shardmill.records import IGNORE_INDEX, JSON, IntArray
from shardmill.storage.atomic import atomic_write

if TYPE_CHECKING:
    from shardmill.compat.chomp import StreamConfig
    from shardmill.compat.chomp.grain_iterator import StreamIterator
    from shardmill.loading.streaming import Counts, StreamTokenizer, TextStream
    from shardmill.records import Batch
    from shardmill.trainers.grain import BatchTuple

    Stream = TextStream | StreamIterator


@dataclass(frozen=True, slots=True, eq=False)
class StreamRow:
    """One row of a batch."""

    step: int  # of this call, from 0
    row: int  # of the batch, from 0, micro-batch after micro-batch
    input_ids: IntArray  # (seq_len,)
    labels: IntArray  # (seq_len,)
    segment_ids: IntArray  # (seq_len,)


def batch_rows(batch: Batch | BatchTuple, step: int, most: int) -> list[StreamRow]:
    """Its first rows, at most `most`, copied."""
    assert batch.segment_ids is not None, "streams have them"
    arrays = (batch.input_ids, batch.labels, batch.segment_ids)
    flat = [array.reshape(-1, array.shape[-1])[:most].copy() for array in arrays]
    return [StreamRow(step, row, *parts) for row, parts in enumerate(zip(*flat, strict=True))]


def row_pieces(row: StreamRow, decode: Decode, markers: IntArray) -> Iterator[Heading | Span]:
    """The row document by document; what is a label counts as trained."""
    yield Heading(f"step {row.step:,}, row {row.row:,}")
    trained = np.append(False, row.labels != IGNORE_INDEX)  # the first token is nobody's label
    ids, segments = _window(row)
    edges = [0, *(np.flatnonzero(np.diff(segments)) + 1).tolist(), len(segments)]
    for start, stop in pairwise(edges):
        if not segments[start]:
            yield Heading(f"padding, tokens {start:,}..{stop:,}")
            continue
        part = slice(start, stop)
        yield Heading(
            f"document {segments[start]:,}, tokens {start:,}..{stop:,}, "
            f"{int(trained[part].sum()):,} trained"
        )
        everything = np.ones(stop - start, bool)
        yield from spans(ids[part], trained[part], everything, markers, decode)


def row_facts(row: StreamRow, decode: Decode) -> dict[str, JSON]:
    """All numbers, and the text of each document."""
    ids, segments = _window(row)
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


def stream_decoder(tokenizer: StreamTokenizer) -> tuple[Decode, IntArray]:
    """Ids to text, and the ids that are structure; those without a string are shown as <eos>."""
    base = tokenizer.tokenizer
    names = {
        number: f"<{name}>"
        for name, number in (("bos", tokenizer.bos_id), ("eos", tokenizer.eos_id))
        if number is not None and not _has_string(base, number)
    }
    structure = {*base.special_token_ids().values(), tokenizer.bos_id, tokenizer.eos_id} - {None}

    def decode(ids: IntArray) -> str:
        places = np.flatnonzero(np.isin(ids, list(names))).tolist()
        edges = [0, *(edge for place in places for edge in (place, place + 1)), len(ids)]
        parts = [ids[start:stop] for start, stop in pairwise(edges) if stop > start]
        return "".join(names.get(int(part[0])) or base.decode(part) for part in parts)

    return decode, np.array(sorted(number for number in structure if number is not None), np.int64)


def _has_string(tokenizer: object, number: int) -> bool:
    try:
        tokenizer.decode([number])  # type: ignore[attr-defined]  # every Tokenizer has it
    except TokenizerError:
        return False
    return True


def _window(row: StreamRow) -> tuple[IntArray, IntArray]:
    """The inputs, and the last label behind them if it is one; with their segments."""
    ids, segments, last = row.input_ids, row.segment_ids, int(row.labels[-1])
    if last == IGNORE_INDEX:
        return ids, segments
    # a label that is trained on belongs to the document before it, or begins the next one where
    # borders are trained across: the batch does not say which
    return np.append(ids, last), np.append(segments, segments[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What the steps gave."""

    steps: int
    seconds: float
    counts: Counts  # of these steps alone
    ended: bool  # the stream had no more
    rows: list[StreamRow]  # the first ones, to be shown


def stream(
    config: Annotated[Path, typer.Argument(help="A .toml, .yaml or .json file.")],
    override: Annotated[
        list[str] | None,
        typer.Option("--set", help="KEY=VALUE on top of the file, as often as you like."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Make so many batches.")] = 10,
    evaluate: Annotated[bool, typer.Option("--eval", help="Of the evaluation data.")] = False,
    process_index: Annotated[int | None, typer.Option(help="As this process, from 0.")] = None,
    process_count: Annotated[int | None, typer.Option(help="Of so many.")] = None,
    state: Annotated[Path | None, typer.Option(help="Go on behind this state.")] = None,
    save_state: Annotated[
        Path | None, typer.Option(help="Write the state behind the last step.")
    ] = None,
    show: Annotated[int, typer.Option(help="Print the first so many rows as text.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the receipt as JSON.")] = False,
) -> None:
    """Run a stream from text to batches for some steps.

    Prints the rows that --show asks for, then one line: steps, tokens, speed. Without colours what
    is trained stands in [[ ]]; each document of a row has its own heading.

    Example: shardmill stream stream.toml --set data.seed=7 --steps 100 --show 2

    Example: shardmill stream stream.toml --steps 20 --save-state state.json

    Example: shardmill stream stream.toml --state state.json

    Exit 0: made, or the data ended before. Exit 2: a mistake in the call, the config or its input.
    """
    from shardmill.compat.chomp import read_config

    whole_number(steps, "--steps", least=0)
    whole_number(show, "--show", least=0)
    if save_state is not None and not save_state.parent.is_dir():
        raise OptionError(f"--save-state {save_state}: there is no folder {save_state.parent}")
    if save_state is not None:
        check_file(save_state, "--save-state")
    settings = read_config(config, override or ())
    process = (process_index, process_count)
    opened, tokenizer = _open(settings, evaluate, process)
    with closing(opened):
        if state is not None:
            opened.set_state(_read_state(state))
        run = _run(opened, steps, show)
        if save_state is not None:
            with atomic_write(save_state) as file:
                file.write(json.dumps(opened.get_state()).encode() + b"\n")
    if as_json:
        print(json.dumps(_facts(config, settings, run, tokenizer, save_state)))
        return
    decode, markers = stream_decoder(tokenizer)
    print_pieces([piece for row in run.rows for piece in row_pieces(row, decode, markers)])
    print(receipt(config, settings, run, save_state))


def receipt(config: Path, settings: StreamConfig, run: Run, saved: Path | None) -> str:
    """One line that says what was made and what was left out."""
    counts, train = run.counts, settings.train
    line = (
        f"{config}: {run.steps:,} steps of [{train.grad_accum}, {train.batch_size}, "
        f"{train.seq_len}]{', the end of the stream' if run.ended else ''}; "
        f"{counts.tokens:,} tokens, {_speed(run):,.0f} tokens/s; {counts.documents:,} documents, "
        f"padding {100 * counts.padding_share:.2f} %; truncated: {counts.truncated_documents:,} "
        f"documents, {counts.truncated_tokens:,} tokens; dropped: {counts.input_dropped:,} rows"
    )
    return line if saved is None else f"{line}; state: {saved}"


def _open(
    settings: StreamConfig, evaluate: bool, process: tuple[int | None, int | None]
) -> tuple[Stream, StreamTokenizer]:
    """Through Grain where it is installed: the same batches, some of them made ahead."""
    from shardmill.compat.chomp import build_eval_iterator, build_train_iterator, open_stream

    index, count = process
    if importlib.util.find_spec("grain") is not None:
        _import_quietly("shardmill.trainers.grain")
        build = build_eval_iterator if evaluate else build_train_iterator
        opened = build(settings, process_index=index, process_count=count)
        return opened, opened.tokenizer
    from shardmill.compat.chomp.tokenizer import open_stream_tokenizer

    print("shardmill: grain is not installed: batches are not made ahead", file=sys.stderr)
    alone = open_stream(
        settings,
        purpose="eval" if evaluate else "train",
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


def _run(opened: Stream, steps: int, show: int) -> Run:
    before = opened.stats().total
    rows: list[StreamRow] = []
    done, ended = 0, False
    began = time.perf_counter()
    with safe_bars() as bars:
        task = bars.add_task("steps", total=steps)
        while done < steps and not ended:
            batch: Batch | BatchTuple | None = next(opened, None)  # type: ignore[assignment]
            if batch is None:
                ended = True
                break
            rows += batch_rows(batch, done, show - len(rows))
            done += 1
            bars.update(task, completed=done)
    seconds = time.perf_counter() - began
    counts = opened.stats().total - before
    return Run(steps=done, seconds=seconds, counts=counts, ended=ended, rows=rows)


def _speed(run: Run) -> float:
    return run.counts.tokens / run.seconds if run.seconds else 0.0


def _facts(
    config: Path,
    settings: StreamConfig,
    run: Run,
    tokenizer: StreamTokenizer,
    saved: Path | None,
) -> dict[str, Any]:
    from shardmill.compat.chomp import config_dict
    from shardmill.compat.chomp.tokenizer import effective_config

    decode, _ = stream_decoder(tokenizer)
    return {
        "config": str(config),
        "effective": config_dict(effective_config(settings, tokenizer)),
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.fingerprint,
        "steps": run.steps,
        "ended": run.ended,
        "seconds": round(run.seconds, 3),
        "tokens_per_second": round(_speed(run), 1),
        "counts": run.counts.to_dict(),
        "rows": [row_facts(row, decode) for row in run.rows],
        "state": None if saved is None else str(saved),
    }


def _read_state(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise OptionError(f"--state {path}: cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise StateMismatchError(
            f"--state {path}: a {type(found).__name__}, wanted what --save-state wrote"
        )
    return found
