"""`shardmill show`: an example of a store, a row of a pack plan, or the batch of a training step;
`shardmill view`: all of them on a page.

Every token is shown or counted as left out. Text is shown only with the store's own tokenizer.
"""

from __future__ import annotations

import sys
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np

from shardmill.arguments import whole_number
from shardmill.chat.fit import FIT_REASONS, FIT_SENTENCES, Fit, FitPlan, plan_fit
from shardmill.cli.options import DataConfigFile, Special, parse_special
from shardmill.cli.printing import Answer, Decode, Heading, ShownTokens, Span
from shardmill.cli.steps import Rank, SourceName, TrainingOrder, find_moment, meant_sources
from shardmill.cli.terminal import visible
from shardmill.errors import MissingExtraError, OptionError, TokenizerError
from shardmill.inspect.blame import blame_document
from shardmill.inspect.rows import Row, pack_columns, read_row
from shardmill.inspect.stores import Shelf, Tokenizers, find_stores, marker_ids, open_named
from shardmill.loading import PackSource
from shardmill.loading.config import DataConfig, meant_split, read_config
from shardmill.loading.rows import Documents
from shardmill.records import JSON, ROLES, ChatExamples, IntArray, Ragged
from shardmill.store import Store, open_store
from shardmill.store.branches import refuse_preferences
from shardmill.store.readers import ChatSpace, open_tokens

Opened = TypeVar("Opened")
_FITS = "; ".join(f"{fit.value}: {sentence}" for fit, sentence in FIT_SENTENCES.items())


@dataclass(frozen=True, kw_only=True)
class ShowCommand(TrainingOrder):
    """Prints text, or ids when there is no --tokenizer; structure is bold. Without colours what is
    trained is in [[ ]]. Invisible characters are escaped.

    Example: shardmill show store --example 7 --tokenizer spm.model

    Example: shardmill show chats --plan train-4095 --row 0 --tokenizer spm.model

    Example: shardmill show store --step 31 --rank 3 --world 8 --batch-size 4 --seq-len 64

    Exit 0: shown. Exit 2: a mistake in the call, no such store or example, another tokenizer.
    """

    folder: Annotated[Path | None, "FOLDER", "The store to look into, or a folder of tokens."] = (
        None
    )
    example: Annotated[int | None, "Which example or document, from 0."] = None
    plan: Annotated[
        str | None, "Rows of this pack plan: its name, or its length if only one has it."
    ] = None
    row: Annotated[int | None, "Which row of --plan. Default: 0."] = None
    tokenizer: Annotated[str | None, "The store's tokenizer; without it ids are shown."] = None
    special: Special = None
    seq_len: Annotated[int | None, "Show the row that training gets at this length."] = None
    fit: Annotated[Fit, _FITS] = Fit.DROP_OLDEST_TURNS
    max_tokens: Annotated[int, "The most tokens to show."] = 20_000
    step: Annotated[int | None, "Show the batch of this step, from 0, instead of --example."] = None
    samples: Annotated[int | None, "The batch after this many samples of all ranks."] = None
    state: Annotated[Path | None, "The batch after this state of a Loader, a JSON file."] = None
    rank: Rank = None
    config: DataConfigFile = None
    name: SourceName = None
    documents: Annotated[
        bool | None, "--documents/--no-documents", "Ignore labels at document boundaries."
    ] = None
    fim: Annotated[float | None, "As the training had it: the share of rows filled in."] = None
    as_json: Annotated[bool, "--json", "Print ids, mask and turns."] = False

    def run(self) -> Answer:
        whole_number(self.max_tokens, "max_tokens", least=0)
        given = self.given()
        if self.row is not None and given != ["--plan"]:
            raise OptionError(
                f"--row {self.row}: that is a row of --plan alone, without --step or --config"
            )
        if self.example is not None:
            if given:
                raise OptionError(f"{given[0]} is for --step, --samples or --state, not --example")
            return _show_example(self, self.example)
        if self.plan is not None and given == ["--plan"]:
            return _show_plan_row(self, self.plan)
        return _show_step(self)


# an example


def _show_example(options: ShowCommand, number: int) -> Answer:
    folder, split, seq_len = options.folder, options.split or "train", options.seq_len
    if folder is None:
        raise OptionError(f"--example {number}: name the store to look into")
    store = open_store(folder)
    found = _read_example(store, split, number)
    decode = _decoder(options.tokenizer, options.special, store)
    ids, trained = found.ids.values, found.mask.copy()
    edges = [*found.turn_starts.tolist(), len(ids)]
    roles = [ROLES[role] for role in found.turn_roles.tolist()]
    turns = [(role, *edge) for role, edge in zip(roles, pairwise(edges), strict=True)]
    kept, row, tail = np.ones(len(ids), np.bool_), {}, []
    if seq_len is not None:
        if not store.is_chat:
            raise OptionError(
                f"--seq-len {seq_len}: {folder} holds documents, which are not fitted"
            )
        refuse_preferences(store, "one of them alone is not fitted to a length")
        fit = plan_fit(found, seq_len, options.fit)
        kept[fit.head[0] : fit.start[0]] = kept[fit.stop[0] :] = False
        trained[np.flatnonzero(kept)[:1]] = False  # the first token of a row is not a label
        row = {"row": {"kept": np.flatnonzero(kept).tolist(), "dropped": list(fit.dropped)}}
        tail = [Heading(_fit_words(fit, seq_len))]

    def facts() -> dict[str, Any]:
        whole = {"store": str(store.folder), "split": split, "example": number}
        whole |= {"ids": ids.tolist(), "text": decode(ids)}
        if store.is_chat:
            whole["mask"] = found.mask.astype(int).tolist()
            whole["turns"] = [
                {
                    "role": role,
                    "start": start,
                    "stop": stop,
                    "trained": int(found.mask[start:stop].sum()),
                    "text": decode(ids[start:stop]),
                }
                for role, start, stop in turns
            ]
        return whole | row

    def parts() -> Iterator[tuple[str, int, int]]:
        named = [(f"turn {at}: {role}", *edge) for at, (role, *edge) in enumerate(turns)]
        for name, start, stop in [("before the first turn", 0, edges[0]), *named]:
            if start < stop:
                count = shown.num_trained(start, stop)
                yield f"{name}, tokens {start:,}..{stop:,}, {count:,} trained", start, stop

    counts = f"{len(ids):,} tokens"
    if store.is_chat:
        counts = f"{len(turns):,} turns, {counts}, {int(found.mask.sum()):,} trained"
    head = f"{folder}, split {split!r}, {store.manifest.unit} {number:,}: {counts}"
    if store.preference is not None:
        head += f"; {_branch_words(store, split, number)}"
    kept[np.flatnonzero(kept)[options.max_tokens :]] = False
    shown = ShownTokens(ids, trained & kept, kept, marker_ids(store), decode)
    pieces = shown.sections(parts()) if store.is_chat else shown.spans(0, len(ids))
    return Answer(facts, chain([Heading(head)], pieces, tail))


def _branch_words(store: Store, split: str, number: int) -> str:
    """What an example of preferences is."""
    links = store.branches(split)
    own = links[links[:, 0] == number]
    if not len(own):
        after = links[links[:, 1] == number]
        return f"a prompt, of examples {after[0, 0]:,} to {after[-1, 0]:,}"
    (_, prefix, record, value) = own[0].tolist()
    is_ranked = store.preference == "ranks"
    what = f"rank {value}" if is_ranked else ("good", "not good")[value == 0]
    return f"an answer to the prompt of example {prefix:,}, record {record:,}, {what}"


def _read_example(store: Store, split: str, number: int) -> ChatExamples:
    """The example; a document is one without turns and mask."""
    total = store.num_documents(split)
    if not 0 <= number < total:
        wanted = f"0 to {total - 1:,}" if total else "none: the split is empty"
        raise OptionError(f"--example {number:,}: split {split!r} has {total:,}; wanted {wanted}")
    if store.is_chat:
        return ChatSpace(store, split).examples([number])
    tokens = blame_document(store, split, number)
    with open_tokens(store, split) as space:
        ids = space.read(tokens.start, tokens.stop)
    return ChatExamples(
        ids=Ragged.from_lengths(ids, [len(ids)]),
        mask=np.zeros(len(ids), np.bool_),
        turn_starts=np.empty(0, np.int64),
        turn_roles=np.empty(0, np.uint8),
    )


def _fit_words(fit: FitPlan, seq_len: int) -> str:
    for reason in fit.dropped:
        return f"no row at seq_len {seq_len:,}: {reason}: {FIT_REASONS[reason]}"
    length = int(fit.lengths[0])
    return (
        f"row of {seq_len + 1:,} tokens: {length:,} of the example, "
        f"{fit.counts.tokens_cut:,} left out, {seq_len + 1 - length:,} padding"
    )


# a row of a pack plan


def _show_plan_row(options: ShowCommand, plan: str) -> Answer:
    folder, number = options.folder, options.row or 0
    if folder is None:
        raise OptionError(f"--plan {plan}: name the store to look into")
    store = open_store(folder)
    decode = _decoder(options.tokenizer, options.special, store)
    with closing(PackSource(folder, plan)) as source:
        for flag, value, found in (
            ("--split", options.split, source.split),
            ("--seq-len", options.seq_len, source.seq_len),
        ):
            if value not in (None, found):
                raise OptionError(f"{flag} {value}: the plan {source.plan.stem!r} has {found}")
        if not 0 <= number < len(source):
            raise OptionError(f"--row {number}: the plan has {len(source):,} rows, from 0")
        rows, documents = source.rows([number]), source.span(number).documents or ()
    ids, trained, columns = rows.ids[0], rows.trained[0].copy(), pack_columns(rows, documents)
    trained[0] = False  # the first token of a row is not a label
    head = (
        f"{folder}, plan {source.plan.stem!r}, split {source.split!r}, row {number:,} of "
        f"{len(source):,}: {len(documents):,} examples, {len(ids):,} tokens, "
        f"{int(trained.sum()):,} trained"
    )
    kept = np.arange(len(ids)) < options.max_tokens
    shown = ShownTokens(ids, trained, kept, marker_ids(store), decode)
    facts = {
        "store": str(store.folder),
        "plan": source.plan.stem,
        "split": source.split,
        "row": number,
        "ids": ids.tolist(),
        "trained": trained.astype(int).tolist(),
        "examples": [
            {
                "example": example,
                "columns": [first, last],
                "tokens": [start, stop],
                "text": decode(ids[first:last]),
            }
            for (example, start, stop), (first, last) in zip(documents, columns, strict=True)
        ],
    }
    return Answer(facts, [Heading(head), *shown.sections(_packed_parts(shown, documents, columns))])


def _packed_parts(
    shown: ShownTokens, documents: Documents, columns: tuple[tuple[int, int], ...]
) -> Iterator[tuple[str, int, int]]:
    """The examples of a packed row one by one; padding is only counted."""
    following = [first for first, _ in columns[1:]] + [len(shown.ids)]
    for (number, start, stop), (first, last), end in zip(
        documents, columns, following, strict=True
    ):
        title = f"columns {first}..{last}: example {number}, tokens {start}..{stop}"
        yield f"{title}, {shown.num_trained(first, last):,} trained", first, last
        if last < end:
            yield f"columns {last}..{end}: padding", last, last


# the batch of a step


def _show_step(options: ShowCommand) -> Answer:
    chosen = [flag for flag in options.given() if flag in ("--step", "--samples", "--state")]
    if len(chosen) != 1:
        raise OptionError(
            f"found {' and '.join(chosen) or 'nothing to show'}; wanted one of --example, --step, "
            f"--samples and --state"
        )
    config, moment = find_moment(options.folder, options)
    with closing(moment.stream):
        planned = moment.plan()
        meant = meant_sources(options.folder, options, moment.stream)
        rows = [read_row(moment, plan) for plan in planned if plan.source in meant]
    stores = [open_store(one.path) for one in moment.stream.sources if one.split is not None]
    named = [] if options.tokenizer is None else [options.tokenizer]
    decode = _with_tokenizers(
        named, config, lambda names: _decoder(next(iter(names), None), options.special, *stores)
    )
    at = "" if options.step is None else f"step {options.step:,}, "
    hidden = len(planned) - len(rows)
    head = (
        f"{at}samples {moment.samples:,}..{moment.stop:,}; rank {moment.rank} of {moment.world} "
        f"has {planned[0].sample:,}..{planned[-1].sample + 1:,}"
    )
    head += f", {hidden} of other sources are not shown" if hidden else ""

    def facts() -> dict[str, JSON]:
        return {
            **moment.facts(),
            "fingerprint": moment.stream.fingerprint,
            "rows": [_row_facts(row, decode) for row in rows],
        }

    def lines() -> Iterator[Heading | Span]:
        yield Heading(head)
        left, markers = options.max_tokens, marker_ids(*stores)
        for row in rows:
            kept = np.arange(len(row.window)) < left
            shown = ShownTokens(row.window, row.trained, kept, markers, decode)
            yield from shown.sections(_row_parts(row, shown))
            left -= len(row.window)

    return Answer(facts, lines())


def _with_tokenizers(
    names: list[str], config: DataConfig | None, open_them: Callable[[list[str]], Opened]
) -> Opened:
    """With the tokenizers that were named, else with the config's if it can be opened."""
    if names or config is None or config.tokenizer_path is None:
        return open_them(names)
    try:
        return open_them([config.tokenizer_path])
    except (TokenizerError, MissingExtraError) as error:
        print(f"shardmill: tokenizer_path: {error}", file=sys.stderr)
        return open_them([])


def _decoder(name: str | None, special: list[str] | None, *stores: Store) -> Decode:
    """Ids to text with the very tokenizer of the stores; without one, the ids themselves.

    A store that records no tokenizer, such as an imported one, is read with the one that is named,
    with a note; an id beyond its vocabulary is refused.
    """
    if name is None:
        print("shardmill: no --tokenizer, so ids are shown", file=sys.stderr)
        return lambda ids: " ".join(map(str, ids.tolist())) + " "
    unknown = [store for store in stores if store.manifest.tokenizer_fingerprint is None]
    known = [store for store in stores if store not in unknown]
    opened = open_named(name, parse_special(special), *known)
    if not unknown:
        return opened.decode
    folder = unknown[0].folder
    print(
        f"shardmill: {folder} records no tokenizer, so nothing shows whether --tokenizer {name} "
        "made its tokens",
        file=sys.stderr,
    )

    def decode(ids: IntArray) -> str:
        largest = int(ids.max(initial=0))
        if largest >= opened.vocab_size:
            raise OptionError(
                f"--tokenizer {name}: has {opened.vocab_size:,} ids, but {folder} holds id "
                f"{largest:,}, so it did not make these tokens: name the one that did"
            )
        return opened.decode(ids)

    return decode


def _row_parts(row: Row, shown: ShownTokens) -> Iterator[tuple[str, int, int]]:
    """A row document by document; what is a label counts as trained."""
    plan, unit = row.plan, "row" if row.packed else "window"
    split = "" if plan.split is None else f", split {plan.split!r}"
    tokens = "" if row.packed else f", tokens {plan.start:,}..{plan.stop:,}"
    instead = "" if plan.instead_of is None else f"; {unit} {plan.instead_of:,} is excluded here"
    yield (
        f"sample {plan.sample:,}: {visible(plan.source)} ({visible(str(plan.path))}{split}), "
        f"epoch {plan.epoch:,}, {unit} {plan.window:,}{tokens}{instead}",
        0,
        0,
    )
    if plan.documents is None or row.columns is None:
        yield "it is not known where its documents begin", 0, len(shown.ids)
    elif row.packed:
        yield from _packed_parts(shown, plan.documents, row.columns)
    else:
        for (number, start, stop), (first, last) in zip(plan.documents, row.columns, strict=True):
            boundary = ""
            if first == last:
                boundary = "; cut off, since the documents before it grew"
            elif first and shown.trained[first]:
                boundary = "; its first token is the label of the document before"
            elif first:
                boundary = "; boundary: its first token is not a label"
            if first in row.rearranged:
                boundary += "; rearranged to fill in the middle"
            yield f"document {number:,}, tokens {start:,}..{stop:,}{boundary}", first, last


def _row_facts(row: Row, decode: Decode) -> dict[str, JSON]:
    plan, ids = row.plan, row.window
    documents: JSON = None
    if plan.documents is not None and row.columns is not None:
        documents = [
            {"document": number, "start": start, "stop": stop, "text": decode(ids[first:last])}
            for (number, start, stop), (first, last) in zip(
                plan.documents, row.columns, strict=True
            )
        ]
    return asdict(plan) | {
        "path": str(plan.path),
        "input_ids": row.window[:-1].tolist(),
        "labels": row.labels.tolist(),
        "text": decode(ids),
        "documents": documents,
        **({"rearranged": sorted(row.rearranged)} if row.rearranged else {}),
    }


# the page


@dataclass(frozen=True, kw_only=True)
class ViewCommand:
    """It reads, and writes nothing; on 127.0.0.1 only this machine reaches it.

    Prints the address, and answers until Ctrl-C.

    Example: shardmill view store chats --tokenizer spm.model

    Exit 0: stopped with Ctrl-C. Exit 2: a mistake in the call, or an address that is taken.
    """

    folders: Annotated[list[Path] | None, "FOLDERS", "Stores, or folders with stores in them."] = (
        None
    )
    config: DataConfigFile = None
    tokenizer: Annotated[
        list[str] | None, "A store's tokenizer, once for each; without one ids are shown."
    ] = None
    special: Special = None
    inputs: Annotated[
        list[str] | None,
        "--input",
        "What stores were built from, to show which file and row a token came from: a file, folder "
        "or glob, or STORE=FOLDER for one store.",
    ] = None
    host: Annotated[str, "The address to listen on."] = "127.0.0.1"
    port: Annotated[int, "0: any that is free."] = 0
    open_page: Annotated[bool, "--open/--no-open", "Open it in a browser."] = False

    def run(self) -> None:
        from shardmill.inspect.api import Desk
        from shardmill.inspect.server import is_loopback, open_server

        if not 0 <= self.port < 2**16:
            raise OptionError(f"--port {self.port}: wanted 0 to 65535")
        config = None if self.config is None else read_config(self.config)
        if not self.folders and config is None:
            raise OptionError("nothing to look at: name a store, a folder with stores, or --config")
        stores = find_stores([*(self.folders or []), *_stores_of(config)])
        special = parse_special(self.special)
        tokenizers = _with_tokenizers(
            self.tokenizer or [], config, lambda names: Tokenizers(names, special)
        )
        desk = Desk(Shelf(stores, tokenizers), config, self.inputs or ())
        with suppress(KeyboardInterrupt), open_server(desk, self.host, self.port) as server:
            if not is_loopback(self.host):
                print(
                    f"shardmill: --host {self.host}: everyone who reaches this address can read "
                    "the data; there is no password",
                    file=sys.stderr,
                )
            print(server.url, flush=True)
            if self.open_page:
                webbrowser.open(server.url)
            server.run()
        print("shardmill: stopped", file=sys.stderr)


def _stores_of(config: DataConfig | None) -> list[Path]:
    """The stores of a mixture; its folders of bare tokens are not shown."""
    if config is None:
        return []
    found = [meant_split(one.path, one.split or config.split) for one in config.sources]
    return [entry[0].folder for entry in found if entry is not None]
