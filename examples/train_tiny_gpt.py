"""Train a small GPT on CPU: from two stores or your own tokens, checkpointed, resumed to the bit.

    python examples/train_tiny_gpt.py                        a few minutes, 1.8 million parameters
    python examples/train_tiny_gpt.py --resume               after a kill: on from the checkpoint
    python examples/train_tiny_gpt.py --quick --out quick    seconds
    python examples/train_tiny_gpt.py --config train.toml    the data of a [data] table
    python examples/train_tiny_gpt.py --data.dataset_path=tokens    as `shardmill check` prints it

1. data:        the stores of `make demo`; without them, small ones made of Python's own sources
2. mixture:     3/4 code and 1/4 prose; from the middle of the run on, the other way round
3. training:    every token sees its own document only (in a config: `pack_sequences = true`)
4. checkpoint:  model, optimizer, random numbers and the loader's position, in one file
5. look:        losses.csv, loss.svg, and a plot in the terminal

A run that was killed and resumed has the losses and the weights of one that was not, to the bit.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import pydoc_data.topics
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from loss_plot import svg_plot, text_plot
from rich.console import Console
from tiny_gpt import TinyGPT, mean_loss, next_token_loss

import shardmill
from shardmill.errors import ShardmillError
from shardmill.loading import Loader, RowSource, SampleStream, TokenSource
from shardmill.loading.config import (
    DataConfig,
    DatasetConfig,
    PhaseConfig,
    open_stream,
    read_config,
)
from shardmill.storage.atomic import atomic_write
from shardmill.trainers.torch import TokenLoader

DEMO = Path(__file__).parent.parent / "demo"
DEMO_STORES = {
    "code": DEMO / "cache/pretrain/fineweb_edu",
    "prose": DEMO / "cache/pretrain/wikitext",
}
console = Console(highlight=False, markup=False, soft_wrap=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What decides every number of a run, beside the data."""

    steps: int = 300
    batch_size: int = 16
    seq_len: int = 128
    width: int = 128
    layers: int = 4
    heads: int = 4
    drop: float = 0.1
    lr: float = 2e-3
    save_every: int = 50
    seed: int = 1234
    threads: int = 2  # another number adds up floats in another order

    @property
    def phase_step(self) -> int:
        """The first step with the other weights."""
        return self.steps // 2


QUICK = Settings(steps=40, batch_size=8, seq_len=64, width=32, layers=2, save_every=10, threads=1)
History = list[dict[str, float]]  # of each step: its loss, and the samples of each source so far


def find_stores(folder: Path | None, out: Path) -> dict[str, Path]:
    """Two stores of one tokenizer, by name; built if there are none."""
    if folder is None and all((path / "meta.json").exists() for path in DEMO_STORES.values()):
        return DEMO_STORES
    stores = {name: (folder or out / "data") / name for name in ("code", "prose")}
    texts = {"code": standard_library, "prose": pydoc_data.topics.topics.values}
    tokenizer = shardmill.open_tokenizer("byte:1", specials={"eot": "<|eot|>"})
    for name, path in stores.items():
        if not (path / "meta.json").exists():
            source = shardmill.MemorySource(texts[name], name=name)
            feed = shardmill.Feed(source=source, fill=(("val", 20_000), ("train", None)))
            spec = shardmill.BuildSpec(append_eot=True)
            shardmill.build_store([feed], path, tokenizer=tokenizer, spec=spec)
    return stores


def standard_library() -> Iterator[str]:
    """Some of the modules that come with Python."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return (path.read_text("utf-8") for path in sorted(root.glob("[a-d]*.py")))


def two_stores(stores: dict[str, Path], settings: Settings) -> DataConfig:
    """3/4 of the first and 1/4 of the second; from the middle of the run on the other way round."""
    first, second = stores
    return DataConfig(
        datasets=(
            DatasetConfig(name=first, path=str(stores[first]), weight=0.75),
            DatasetConfig(name=second, path=str(stores[second]), weight=0.25),
        ),
        phases=(
            PhaseConfig(
                start_step=settings.phase_step, dataset_weights={first: 0.25, second: 0.75}
            ),
        ),
        seed=settings.seed,
        pack_sequences=True,
    )


def vocab_size_of(stream: SampleStream) -> int:
    """As the manifests of stores say; token files say nothing, so their ids are looked at."""
    manifests = [
        shardmill.open_store(one.path).manifest for one in stream.sources if one.split is not None
    ]
    if len({manifest.tokenizer_fingerprint for manifest in manifests}) > 1:
        sys.exit(f"{', '.join(stream.names)}: built with different tokenizers")
    sizes = [manifest.vocab_size or 0 for manifest in manifests]
    if not all(sizes) or len(sizes) < len(stream.sources):
        sizes += [largest_id(source) + 1 for source in stream.sources]
    return max(sizes)


def largest_id(source: RowSource) -> int:
    rows = np.zeros((2, 256, source.seq_len), np.int64)
    largest = 0
    for start in range(0, len(source), 256):
        items = np.arange(start, min(start + 256, len(source)))
        source.fill(items, rows[0, : len(items)], rows[1, : len(items)])
        largest = max(largest, int(rows.max()))
    return largest


def open_loader(settings: Settings, config: DataConfig) -> Loader:
    size = settings.batch_size
    stream = open_stream(config, seq_len=settings.seq_len, global_batch_size=size)
    num_samples = settings.steps * size
    return Loader(stream, batch_size=size, num_samples=num_samples)


def learning_rate(step: int, settings: Settings) -> float:
    """Up for a tenth of the run, then down along a cosine to a tenth of the top."""
    rise = min(1.0, (step + 1) / (settings.steps / 10))
    return settings.lr * rise * (0.55 + 0.45 * math.cos(math.pi * step / settings.steps))


class Run:
    """A model in training, and everything that must be saved to resume it."""

    def __init__(self, settings: Settings, config: DataConfig, file: Path) -> None:
        torch.manual_seed(settings.seed)
        torch.set_num_threads(settings.threads)
        torch.use_deterministic_algorithms(True)
        self.settings, self.config, self.file = settings, config, file
        self.loader = open_loader(settings, config)
        self.model = TinyGPT(
            vocab_size_of(self.loader.stream),
            settings.seq_len,
            width=settings.width,
            layers=settings.layers,
            heads=settings.heads,
            drop=settings.drop,
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), weight_decay=0.1)
        self.history: History = []

    def save(self) -> None:
        """All of it or nothing: a kill while saving leaves the checkpoint before."""
        checkpoint = {
            "settings": asdict(self.settings),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "loader": json.dumps(self.loader.state_dict()),
            "history": self.history,
        }
        with atomic_write(self.file) as file:
            torch.save(checkpoint, file)

    def load(self) -> None:
        checkpoint = torch.load(self.file, weights_only=True)
        if checkpoint["settings"] != asdict(self.settings):
            sys.exit(f"{self.file}: of a run with other settings: {checkpoint['settings']}")
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        torch.set_rng_state(checkpoint["random"])
        self.loader.load_state_dict(json.loads(checkpoint["loader"]))  # refuses other data
        self.history = checkpoint["history"]

    def train(self) -> None:
        """From the current step to the end of the run."""
        for step, batch in enumerate(TokenLoader(self.loader), start=len(self.history)):
            rate = learning_rate(step, self.settings) * self.config.lr_scale(step)
            self.optimizer.param_groups[0]["lr"] = rate
            loss = next_token_loss(self.model, batch)
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            samples = {name: used.samples for name, used in self.loader.counters().items()}
            self.history.append({"step": step, "loss": loss.item(), **samples})
            last = step + 1 == self.settings.steps
            if last or (step + 1) % self.settings.save_every == 0:
                self.save()
            if last or step % (self.settings.save_every // 10) == 0:
                shares = ", ".join(f"{name} {count:,}" for name, count in samples.items())
                console.print(f"step {step:4}   loss {loss.item():.4f}   samples: {shares}")


def validation_loss(run: Run, store: Path) -> float:
    """Over the first windows of the split that is not trained on."""
    source = TokenSource(store, seq_len=run.settings.seq_len, split="val")
    size = min(run.settings.batch_size, len(source))
    stream = SampleStream([source], shuffle="none")
    num_samples = min(len(source), 16 * size)
    apart = run.config.pack_sequences
    with Loader(stream, batch_size=size, num_samples=num_samples, documents=apart) as loader:
        return mean_loss(run.model, list(TokenLoader(loader)))


def report(run: Run, out: Path) -> None:
    losses, phases = [row["loss"] for row in run.history], run.config.phases
    mark = phases[0].start_step if phases else run.settings.steps
    with (out / "losses.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, fieldnames=list(run.history[0]))
        table.writeheader()
        table.writerows(run.history)  # floats are written so that they read back equal
    (out / "loss.svg").write_text(svg_plot(losses, mark=mark))
    console.print(f"\n{text_plot(losses, mark=mark)}\n")
    for source in run.loader.stream.sources:
        if source.split is not None and "val" in shardmill.open_store(source.path).splits:
            loss = validation_loss(run, source.path)
            console.print(f"validation loss, {source.name}: {loss:.4f}")


def parse_options() -> tuple[argparse.Namespace, DataConfig | None]:
    """The options, and the config that --config and --data.KEY=VALUE say, if they do."""
    parser = argparse.ArgumentParser(
        description="Train a small GPT on CPU: from two stores, or from your own tokens.",
        epilog="--data.KEY=VALUE sets a key of the [data] table, as `shardmill check` prints it.",
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, default=DEMO / "train", help="where the run is kept")
    parser.add_argument("--data", type=Path, help="folder of the stores 'code' and 'prose'")
    parser.add_argument("--config", type=Path, help="a TOML file with a [data] table")
    parser.add_argument("--quick", action="store_true", help="a tiny model for a few steps")
    parser.add_argument("--steps", type=int, help="how many steps the run has")
    parser.add_argument("--resume", action="store_true", help="resume from the last checkpoint")
    options, rest = parser.parse_known_args()
    flags = [word for word in rest if word.startswith("--data.")]
    unknown = [word for word in rest if word not in flags]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps {options.steps}: wanted at least 1")
    own = ([f"--config {options.config}"] if options.config else []) + flags
    if options.data and own:
        parser.error(f"found --data and {own[0]}; wanted one of them")
    return options, read_config(options.config, flags) if own else None


def main() -> None:
    options, config = parse_options()
    start = time.monotonic()
    settings = QUICK if options.quick else Settings()
    settings = replace(settings, steps=options.steps or settings.steps)
    options.out.mkdir(parents=True, exist_ok=True)
    checkpoint = options.out / "checkpoint.pt"
    if checkpoint.exists() and not options.resume:
        sys.exit(f"{checkpoint}: there is a run already; add --resume, or choose another --out")
    if options.resume and not checkpoint.exists():
        sys.exit(f"{checkpoint}: nothing to resume; leave --resume away to begin")
    if config is None:
        config = two_stores(find_stores(options.data, options.out), settings)
    run = Run(settings, config, checkpoint)
    if options.resume:
        run.load()
        console.print(f"resuming from step {len(run.history)}")
    paths = [one.path for one in config.sources]
    data = ", ".join(map("{} ({})".format, run.loader.stream.names, paths))
    console.print(f"{run.model.num_parameters:,} parameters; data: {data}")
    with run.loader:
        run.train()
    report(run, options.out)
    console.print(f"Done in {time.monotonic() - start:.0f} s: see {options.out}")


if __name__ == "__main__":
    try:
        main()
    except (ShardmillError, OSError) as error:
        sys.exit(f"{error}")
