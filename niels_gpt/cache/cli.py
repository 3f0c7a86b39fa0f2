"""`python -m niels_gpt.cache.cli build-all`: every source of the cache, one after the other.

Files are read and encoded by all cores. A stream is read, encoded and written at the same time, in
threads, with one tokenizer thread per core; with --workers its texts go to that many processes. A
source that fails does not stop the others: the table says which failed, why, and how to resume.
Exit code 0 when all is built, 1 when a source failed, 2 for a mistake in the call, 130 after
Ctrl-C. The table is written to stdout, bars and messages to stderr.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from niels_gpt.cache_tokenizer import CacheTokenizer
from niels_gpt.installed import install_tokenizer
from niels_gpt.recipes import RECIPES, Outcome, Recipe, build_sources
from niels_gpt.settings import Settings
from niels_gpt.work import Run, Stub
from shardmill.cli.app import as_flag
from shardmill.cli.terminal import SafeConsole, build_progress, messages
from shardmill.errors import OptionError, ShardmillError, as_keyword
from shardmill.machine import num_cores

PROGRAM = "python -m niels_gpt.cache.cli"


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, build, print the table."""
    words = list(sys.argv[1:] if argv is None else argv)
    with messages("shardmill", "niels_gpt"):
        return _answered(words)


def _answered(words: Sequence[str]) -> int:
    args = _parser().parse_args(words)
    try:
        return build_all(args, words)
    except ShardmillError as error:
        print(f"{PROGRAM}: {_worded(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"stopped; resume with:\n  {_resume_command(words)}", file=sys.stderr)
        return 130


def build_all(args: argparse.Namespace, words: Sequence[str]) -> int:
    settings = Settings(
        **{field.name: getattr(args, field.name) for field in dataclasses.fields(Settings)}
    )
    if settings.workers is not None and settings.workers < 1:
        raise OptionError(f"--workers {settings.workers}: wanted 1 or more")
    recipes = choose(args.only, args.skip)
    folders = [recipe.folder(settings.cache_dir) for recipe in recipes]
    tokenizer = install_tokenizer(
        settings.cache_dir,
        settings.tokenizer,
        overwrite=args.overwrite,
        rebuilt=folders if args.overwrite else (),
        num_threads=settings.workers or num_cores(),
    )
    with build_progress() as progress:
        run = Run(
            settings=settings,
            tokenizer=CacheTokenizer(tokenizer),
            resume=args.resume,
            overwrite=args.overwrite,
            on_progress=progress.show,
        )
        outcomes = build_sources(run, recipes)
    SafeConsole().print(_table(outcomes))
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    for outcome in failed:
        print(f"\n{outcome.recipe.name} failed: {_worded(outcome.error)}", file=sys.stderr)
    if failed:
        print(f"\ngo on with:\n  {_resume_command(words)}", file=sys.stderr)
    return 1 if failed else 0


def choose(only: Sequence[str], skip: Sequence[str]) -> list[Recipe]:
    """The recipes to build, in their order."""
    known = {recipe.name: recipe for recipe in RECIPES}
    wanted, unwanted = (
        [word.replace("-", "_") for item in items for word in item.split(",") if word]
        for items in (only, skip)
    )
    for name in [*wanted, *unwanted]:
        if name not in known:
            raise OptionError(f"no source {name!r}; there are {', '.join(known)}")
    chosen = [known[name] for name in known if name not in unwanted]
    chosen = [recipe for recipe in chosen if not wanted or recipe.name in wanted]
    if not chosen:
        raise OptionError("--only and --skip leave nothing to build")
    return chosen


def _table(outcomes: Sequence[Outcome]) -> Table:
    table = Table(title="niels_gpt cache")
    for column in ("source", "result", "train", "val", "dropped", "seconds"):
        left = column in ("source", "result")
        table.add_column(column, justify="left" if left else "right", overflow="fold")
    for outcome in outcomes:
        result, *counts = _row(outcome)
        style = "red" if outcome.error else "green"
        seconds = f"{outcome.seconds:.1f}"
        table.add_row(outcome.recipe.name, Text(result, style=style), *counts, seconds)
    return table


def _row(outcome: Outcome) -> tuple[str, str, str, str]:
    """Result, train, val, dropped."""
    built = outcome.built
    if built is None:
        kind = type(outcome.error).__name__
        return f"failed: {kind}: {str(outcome.error).splitlines()[0]}", "-", "-", "-"
    if isinstance(built, Stub):
        return built.words, "-", "-", "-"
    manifest = built.manifest
    sizes = [_size(manifest.unit, manifest.splits.get(split)) for split in ("train", "val")]
    result = "finished before" if built.resumed and not built.seconds else "built"
    dropped = sum(manifest.ledger.documents.dropped.values())
    return result, sizes[0], sizes[1], f"{dropped:,}"


def _size(unit: str, split: object) -> str:
    if split is None:
        return "-"
    return f"{split.documents:,} {unit}s\n{split.tokens:,} tokens"  # type: ignore[attr-defined]


def _worded(error: BaseException | None) -> str:
    """The message of an error, with the options that this command has as flags."""
    if not isinstance(error, ShardmillError):
        return str(error)
    names = {"resume", "overwrite", *(field.name for field in dataclasses.fields(Settings))}
    return error.worded(lambda name, value: (as_flag if name in names else as_keyword)(name, value))


def _resume_command(words: Sequence[str]) -> str:
    kept = [word for word in words if word not in ("--resume", "--overwrite")]
    return f"{PROGRAM} {shlex.join([*kept, '--resume'])}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Build the niels_gpt token cache.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    build = commands.add_parser("build-all", help="build every source of the cache")
    names = ", ".join(recipe.name for recipe in RECIPES)
    for name, words in (("--only", "build only these"), ("--skip", "leave these out")):
        build.add_argument(
            name, action="append", default=[], metavar="NAMES", help=f"{words}: {names}"
        )
    build.add_argument(
        "--resume", action="store_true", help="continue an earlier build; keep what is finished"
    )
    build.add_argument("--overwrite", action="store_true", help="replace finished stores")
    for field in dataclasses.fields(Settings):
        flag = "--" + field.name.replace("_", "-")
        words = field.metadata["help"]
        shown = "" if field.default is None else f" (default: {field.default})"
        if isinstance(field.default, bool):
            action = argparse.BooleanOptionalAction
            build.add_argument(flag, action=action, default=field.default, help=words + shown)
        else:
            build.add_argument(
                flag,
                type=field.metadata["parse"],
                choices=field.metadata["choices"],
                default=field.default,
                help=words + shown,
                metavar=None if field.metadata["choices"] else field.name.split("_")[-1].upper(),
            )
    return parser


if __name__ == "__main__":
    sys.exit(main())
