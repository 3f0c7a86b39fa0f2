"""Train a small GPT on CPU from two stores: mixed, checkpointed, resumed to the bit.

    python examples/train_tiny_gpt.py                        a few minutes, 1.8 million parameters
    python examples/train_tiny_gpt.py --resume               after a kill: on from the checkpoint
    python examples/train_tiny_gpt.py --quick --out quick    seconds

1. data:        the stores of `make demo`; without them, small ones made of Python's own sources
2. mixture:     3/4 code and 1/4 prose; from the middle of the run on, the other way round
3. training:    every token sees its own document only
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
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from loss_plot import svg_plot, text_plot
from rich.console import Console
from tiny_gpt import TinyGPT, mean_loss, next_token_loss

import shardmill
from shardmill.atomic import atomic_write
from shardmill.errors import ShardmillError
from shardmill.loading import Loader, SampleStream, TokenSource
from shardmill.pytorch import TokenLoader

DEMO = Path(__file__).parent.parent / "demo"
DEMO_STORES = {
    "code": DEMO / "cache/pretrain/fineweb_edu",
    "prose": DEMO / "cache/pretrain/wikitext",
}
console = Console(highlight=False)


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


def vocab_size_of(stores: dict[str, Path]) -> int:
    manifests = [shardmill.open_store(path).manifest for path in stores.values()]
    if len({manifest.tokenizer_fingerprint for manifest in manifests}) > 1:
        sys.exit(f"{', '.join(map(str, stores.values()))}: built with different tokenizers")
    size = manifests[0].vocab_size
    return size or sys.exit("these stores do not tell the size of their vocabulary")


def open_loader(settings: Settings, stores: dict[str, Path]) -> Loader:
    sources = [
        TokenSource(path, seq_len=settings.seq_len, name=name) for name, path in stores.items()
    ]
    stream = SampleStream(
        sources,
        weights=[0.75, 0.25],
        phases=[(settings.phase_step * settings.batch_size, [0.25, 0.75])],
        seed=settings.seed,
    )
    num_samples = settings.steps * settings.batch_size
    return Loader(stream, batch_size=settings.batch_size, num_samples=num_samples, documents=True)


def learning_rate(step: int, settings: Settings) -> float:
    """Up for a tenth of the run, then down along a cosine to a tenth of the top."""
    rise = min(1.0, (step + 1) / (settings.steps / 10))
    return settings.lr * rise * (0.55 + 0.45 * math.cos(math.pi * step / settings.steps))


class Run:
    """A model in training, and everything that must be saved to go on with it."""

    def __init__(self, settings: Settings, stores: dict[str, Path], file: Path) -> None:
        torch.manual_seed(settings.seed)
        torch.set_num_threads(settings.threads)
        torch.use_deterministic_algorithms(True)
        self.settings, self.file = settings, file
        self.model = TinyGPT(
            vocab_size_of(stores),
            settings.seq_len,
            width=settings.width,
            layers=settings.layers,
            heads=settings.heads,
            drop=settings.drop,
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), weight_decay=0.1)
        self.loader = open_loader(settings, stores)
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
        """From where the run stands to its end."""
        for step, batch in enumerate(TokenLoader(self.loader), start=len(self.history)):
            self.optimizer.param_groups[0]["lr"] = learning_rate(step, self.settings)
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
    """Over the first windows of the split that nobody trains on."""
    source = TokenSource(store, seq_len=run.settings.seq_len, split="val")
    size = min(run.settings.batch_size, len(source))
    stream = SampleStream([source], shuffle="none")
    num_samples = min(len(source), 16 * size)
    with Loader(stream, batch_size=size, num_samples=num_samples, documents=True) as loader:
        return mean_loss(run.model, list(TokenLoader(loader)))


def report(run: Run, out: Path, stores: dict[str, Path]) -> None:
    losses, middle = [row["loss"] for row in run.history], run.settings.phase_step
    with (out / "losses.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, fieldnames=list(run.history[0]))
        table.writeheader()
        table.writerows(run.history)  # floats are written so that they read back equal
    (out / "loss.svg").write_text(svg_plot(losses, mark=middle))
    console.print(f"\n{text_plot(losses, mark=middle)}\n")
    for name, path in stores.items():
        console.print(f"validation loss, {name}: {validation_loss(run, path):.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT from two stores, on CPU.")
    parser.add_argument("--out", type=Path, default=DEMO / "train", help="where the run is kept")
    parser.add_argument("--data", type=Path, help="folder of the stores 'code' and 'prose'")
    parser.add_argument("--quick", action="store_true", help="a tiny model for a few steps")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    options = parser.parse_args()
    start = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    checkpoint = options.out / "checkpoint.pt"
    if checkpoint.exists() and not options.resume:
        sys.exit(f"{checkpoint}: there is a run already; add --resume, or choose another --out")
    if options.resume and not checkpoint.exists():
        sys.exit(f"{checkpoint}: nothing to resume; leave --resume away to begin")
    stores = find_stores(options.data, options.out)
    run = Run(QUICK if options.quick else Settings(), stores, checkpoint)
    if options.resume:
        run.load()
        console.print(f"going on from step {len(run.history)}")
    console.print(f"{run.model.num_parameters:,} parameters; stores: {', '.join(stores)}")
    with run.loader:
        run.train()
    report(run, options.out, stores)
    console.print(f"Done in {time.monotonic() - start:.0f} s: see {options.out}")


if __name__ == "__main__":
    try:
        main()
    except (ShardmillError, OSError) as error:
        sys.exit(f"{error}")
