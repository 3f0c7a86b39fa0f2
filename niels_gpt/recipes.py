"""The sources of the cache, one small record each.

Building one writes a finished store under pretrain/ or sft/ and returns its outcome. A source that
fails does not touch the others. When resuming, a finished store is kept if it was built from the
same input with the same options.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from niels_gpt.cache.build_cache import budget, stream_rule, whole_tokens
from niels_gpt.cache.formats import ROAM_DIR, TOKEN_DTYPE
from niels_gpt.cache_tokenizer import CacheTokenizer
from niels_gpt.data.files import SPLITS, split_folder
from niels_gpt.data.fineweb_edu import local_pages
from niels_gpt.data.wikitext import hub_articles, local_articles
from niels_gpt.sft_recipes import build_dolly, build_oasst1
from niels_gpt.work import Run, Stub
from shardmill.building import BuildReport, BuildSpec, Feed, build_store, has_unfinished_build
from shardmill.errors import ShardmillError, SourceError, StoreExistsError, UnfinishedBuildError
from shardmill.protocols import Source
from shardmill.sources import HubSource
from shardmill.store import StoreFacts, is_finished, kept_ledger, read_manifest, write_placeholder

log = logging.getLogger(__name__)

Built = BuildReport | Stub


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One source of the cache."""

    name: str
    kind: Literal["pretrain", "sft"]
    build: Callable[[Run, Path], Built]

    def folder(self, cache_dir: Path) -> Path:
        return cache_dir / self.kind / self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one source went: `built` or `error`, never both."""

    recipe: Recipe
    seconds: float
    built: Built | None = None
    error: Exception | None = None


def build_sources(run: Run, recipes: Iterable[Recipe]) -> list[Outcome]:
    """Build one source after the other. What goes wrong with one is its outcome."""
    outcomes = []
    for recipe in recipes:
        started = time.monotonic()
        folder = recipe.folder(run.settings.cache_dir)
        built: Built | None = None
        error: Exception | None = None
        try:
            _refuse_unfinished(run, folder)
            built = recipe.build(run, folder)
        except (ShardmillError, OSError) as problem:
            error = problem
        except Exception as problem:  # the next sources must still be built; the log has it all
            log.exception("%s failed", recipe.name)
            error = problem
        seconds = time.monotonic() - started
        outcomes.append(Outcome(recipe=recipe, seconds=seconds, built=built, error=error))
    return outcomes


def _refuse_unfinished(run: Run, folder: Path) -> None:
    if has_unfinished_build(folder) and not (run.resume or run.overwrite):
        raise UnfinishedBuildError(
            f"{folder}: an earlier build stopped half-way: continue with --resume, or start again "
            "with --overwrite"
        )


def build_fineweb(run: Run, folder: Path) -> BuildReport:
    settings = run.settings
    buffer = settings.shuffle_buffer or None
    limits = (settings.fineweb_train_tokens, settings.fineweb_val_tokens)
    if settings.fineweb_path is not None:
        source = local_pages(settings.fineweb_path, seed=settings.seed, shuffle_buffer=buffer)
        spec = _spec(run, "fineweb_edu", stream_rule(*limits), shuffle_buffer=buffer)
    else:
        source = hub = HubSource(
            settings.fineweb_dataset,
            config=settings.fineweb_config,
            revision=settings.fineweb_revision,
            shuffle=None if buffer is None else (settings.seed, buffer),
            max_retries=settings.hub_retries,
        )
        spec = _spec(
            run,
            settings.fineweb_dataset,
            stream_rule(*limits),
            config=settings.fineweb_config,
            revision=hub.revision,
            shuffle_buffer=buffer,
        )
    return _store(run, folder, [Feed(source=source, fill=budget(*limits))], spec)


def build_wikitext(run: Run, folder: Path) -> BuildReport:
    settings = run.settings
    rule = "as the dataset's own splits: train to train, validation to val; whole articles"
    path = settings.wikitext_path
    if path is not None:
        spec = _spec(run, "wikitext", rule)
        train, val = local_articles(path, "train"), local_articles(path, "val")
    else:
        name, config = settings.wikitext_dataset, settings.wikitext_config
        wanted, tries = settings.wikitext_revision, settings.hub_retries
        revision = HubSource(name, config=config, revision=wanted, max_retries=tries).revision
        spec = _spec(run, name, rule, config=config, revision=revision)
        train, val = (
            hub_articles(side, dataset=name, config=config, revision=revision, max_retries=tries)
            for side in SPLITS
        )
    return _store(run, folder, _whole(train, val), spec)


def build_roam(run: Run, folder: Path) -> Built:
    named = run.settings.roam_dir
    notes = Path(ROAM_DIR) if named is None else named
    if not notes.is_dir():
        if named is not None:
            raise SourceError(
                f"{notes}: no such folder: name your notes with --roam-dir, or --skip roam"
            )
        return _stub(run, folder, "roam", f"no {ROAM_DIR}: name a folder of notes with --roam-dir")
    return _by_file(run, folder, "roam", notes, run.settings.roam_val_frac)


def build_gutenberg(run: Run, folder: Path) -> Built:
    books = run.settings.gutenberg_path
    if books is not None:
        return _by_file(run, folder, "gutenberg", books, run.settings.gutenberg_val_frac)
    return _stub(run, folder, "gutenberg", "name a folder of books with --gutenberg-path")


RECIPES = (
    Recipe(name="fineweb_edu", kind="pretrain", build=build_fineweb),
    Recipe(name="roam", kind="pretrain", build=build_roam),
    Recipe(name="wikitext", kind="pretrain", build=build_wikitext),
    Recipe(name="gutenberg", kind="pretrain", build=build_gutenberg),
    Recipe(name="dolly15k", kind="sft", build=build_dolly),
    Recipe(name="oasst1", kind="sft", build=build_oasst1),
)
"""In the order in which they are built."""


def _stub(run: Run, folder: Path, name: str, advice: str) -> Stub:
    """Folders and a meta.json with `"built": false`; a store built before is kept."""
    if is_finished(folder):
        if read_manifest(folder).tokenizer_sha256 != run.tokenizer.model_sha256:
            raise StoreExistsError(
                f"{folder}: built before with another tokenizer, and this run has no input to "
                f"build it again: {advice}, or remove the folder"
            )
        return Stub(f"{folder}: built before; kept")
    write_placeholder(
        folder,
        _stub_facts(run, name),
        ("train", "val"),
        dtype=TOKEN_DTYPE,
        shard_bytes=whole_tokens(run.settings.shard_bytes),
    )
    return Stub(f"a stub: {advice}")


def _by_file(run: Run, folder: Path, name: str, where: Path, val_frac: float) -> BuildReport:
    seed = run.settings.seed
    sides = split_folder(where, name=name, val_frac=val_frac, seed=seed)
    rule = (
        f"by file: torch.randperm(n, seed {seed}) over the sorted names, the first "
        f"max(1, int(n * {val_frac})) to val (none when n < 2), the rest to train"
    )
    return _store(run, folder, _whole(sides["train"], sides["val"]), _spec(run, name, rule))


def _whole(train: Source, val: Source) -> list[Feed]:
    return [
        Feed(source=train, fill=(("train", None),)),
        Feed(source=val, fill=(("val", None),)),
    ]


def _store(run: Run, folder: Path, feeds: Sequence[Feed], spec: BuildSpec) -> BuildReport:
    return build_store(
        feeds,
        folder,
        tokenizer=run.tokenizer,
        spec=spec,
        engine=run.settings.engine,
        engine_check=run.settings.engine_check,
        resume=run.resume,
        overwrite=run.overwrite,
        max_loss=run.settings.max_loss,
        allow_empty=run.settings.allow_empty,
        workers=run.settings.workers,
        on_progress=run.on_progress,
    )


def _spec(
    run: Run,
    name: str,
    rule: str,
    *,
    config: str | None = None,
    revision: str | None = None,
    shuffle_buffer: int | None = None,
) -> BuildSpec:
    """A revision marks what was streamed from the hub."""
    return BuildSpec(
        dataset_name=name,
        dataset_config=config,
        dataset_revision=revision,
        streaming=revision is not None,
        split_rule=rule,
        seed=run.settings.seed,
        shuffle_buffer=shuffle_buffer,
        shard_bytes=whole_tokens(run.settings.shard_bytes),
        dtype=TOKEN_DTYPE,
        append_eot=run.settings.append_eot,
        exact_shards=True,
    )


def _stub_facts(run: Run, name: str) -> StoreFacts:
    tokenizer: CacheTokenizer = run.tokenizer
    return StoreFacts(
        dataset_name=name,
        dataset_config=None,
        dataset_revision=None,
        streaming=False,
        split_rule="not built",
        seed=run.settings.seed,
        shuffle_buffer=None,
        append_eot=run.settings.append_eot,
        unit="document",
        tokenizer_sha256=tokenizer.model_sha256,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.known_vocab_size,
        special_token_ids=tokenizer.special_token_ids(),
        sources=[],
        options={},
        ledger=kept_ledger(0, 0),
        produced_by={},
    )


__all__ = ["RECIPES", "Outcome", "Recipe", "build_sources"]
