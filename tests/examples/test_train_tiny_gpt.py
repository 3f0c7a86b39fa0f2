"""The training example: a killed and resumed run is the run that was not killed, to the bit."""

from __future__ import annotations

import csv
import importlib.util
import json
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.records import Ragged
from shardmill.testing.stores import build_small_store
from shardmill.tokenizers import TrainSpec, train_tokenizer
from tests.helpers import run_command

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
SCRIPT = EXAMPLES / "train_tiny_gpt.py"
LOSSES = st.floats(0, 1e9) | st.sampled_from([float("nan"), float("inf")])


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


tiny_gpt, loss_plot = module("tiny_gpt"), module("loss_plot")


def command(out: Path, data: Path, *more: str) -> list[str]:
    return [sys.executable, str(SCRIPT), "--quick", "--out", str(out), "--data", str(data), *more]


def run(out: Path, data: Path, *more: str) -> str:
    done = subprocess.run(
        command(out, data, *more), capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_until_killed(out: Path, data: Path, step: int, *more: str) -> str:
    """SIGKILL as soon as this step was told. Gives what was printed before."""
    with subprocess.Popen(command(out, data, *more), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = []
        for line in process.stdout:
            told.append(line)
            if line.startswith(f"step {step:4}"):
                break
        process.kill()
        assert process.wait(timeout=600) == -signal.SIGKILL
    return "".join(told)


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "losses.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def checkpoint(out: Path) -> dict:
    return torch.load(out / "checkpoint.pt", weights_only=True)


def assert_equal_to_the_bit(one: object, other: object, where: str = "") -> None:
    if isinstance(one, torch.Tensor):
        assert isinstance(other, torch.Tensor)
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert isinstance(other, dict)
        assert one.keys() == other.keys()
        for key in one:
            assert_equal_to_the_bit(one[key], other[key], f"{where}.{key}")
    else:
        assert one == other, where


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run from its start to its end; its stores are those of all other runs."""
    out = tmp_path_factory.mktemp("whole")
    run(out, out / "stores")
    return out


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Matrices this small only wait for a second one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_a_run_killed_twice_and_resumed_equals_the_whole_run_to_the_bit(whole, tmp_path):
    data = whole / "stores"
    run_until_killed(tmp_path, data, 13)
    assert len(checkpoint(tmp_path)["history"]) == 10  # steps 10 to 13 are lost, and come again
    again = run_until_killed(tmp_path, data, 34, "--resume")
    assert "resuming from step 10\n" in again
    assert not (tmp_path / "losses.csv").exists()
    assert "resuming from step 30\n" in run(tmp_path, data, "--resume")
    assert (tmp_path / "losses.csv").read_bytes() == (whole / "losses.csv").read_bytes()
    assert_equal_to_the_bit(checkpoint(tmp_path), checkpoint(whole))


@pytest.mark.slow
def test_the_shares_of_the_sources_change_exactly_at_the_step_of_the_phase(whole):
    counts = [(int(row["code"]), int(row["prose"])) for row in rows(whole)]
    each = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise([(0, 0), *counts])]
    assert each == [(6, 2)] * 20 + [(2, 6)] * 20


@pytest.mark.slow
def test_the_model_learns_and_the_loss_is_plotted(whole):
    losses = [float(row["loss"]) for row in rows(whole)]
    assert len(losses) == 40
    assert 5.3 < losses[0] < 5.8  # all 257 ids alike: log(257) = 5.55
    assert sum(losses[-5:]) / 5 < losses[0] - 1
    picture = ElementTree.parse(whole / "loss.svg").getroot()
    curve = picture.find("{http://www.w3.org/2000/svg}polyline")
    assert curve is not None
    assert len(curve.attrib["points"].split()) == 40


@pytest.mark.slow
def test_the_position_in_the_checkpoint_is_small_json_of_the_whole_job(whole):
    state = json.loads(checkpoint(whole)["loader"])
    assert state["samples"] == 320
    assert len(checkpoint(whole)["loader"]) < 1024


def refusal_here(monkeypatch, capsys, *words: str) -> str:
    """What the script says when it ends before it begins, in this process."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    code = end.value.code  # a text is printed by Python, which then ends with 1
    assert code == 2 or isinstance(code, str)
    return f"{capsys.readouterr().err}{code}"


def refusal(out: Path, data: Path, *more: str) -> str:
    done = subprocess.run(
        command(out, data, *more), capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 1
    return done.stderr


@pytest.mark.slow
def test_a_run_is_neither_overwritten_nor_resumed_from_nothing_nor_on_other_data(
    whole, tmp_path, monkeypatch, capsys
):
    data = whole / "stores"

    def refused(out: Path, *more: str) -> str:
        return refusal_here(monkeypatch, capsys, *command(out, data, *more)[2:])

    before = (whole / "checkpoint.pt").read_bytes()
    assert "add --resume" in refused(whole)
    assert "nothing to resume" in refused(tmp_path, "--resume")
    other = tmp_path / "stores"
    other.mkdir()
    (other / "code").symlink_to(data / "prose")
    (other / "prose").symlink_to(data / "code")
    told = refusal(whole, other, "--resume")
    assert "this state belongs to another run" in told
    assert "'code'" in told
    assert (whole / "checkpoint.pt").read_bytes() == before


@pytest.mark.usefixtures("one_thread")
@settings(deadline=None, max_examples=25)
@given(lengths=st.lists(st.integers(1, 12), min_size=2, max_size=6), seed=st.integers(0, 2**31))
def test_a_document_in_a_packed_row_gives_what_it_gives_alone(lengths, seed):
    torch.manual_seed(seed)
    size = sum(lengths)
    model = tiny_gpt.TinyGPT(50, size, width=16, layers=2, heads=2, drop=0.1).eval()
    ids = torch.randint(50, (1, size))
    doc_ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    position_ids = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = model(ids, doc_ids, position_ids)[0]
    for document, logits in zip(ids[0].split(lengths), packed.split(lengths), strict=True):
        length = len(document)
        zeros = torch.zeros(1, length, dtype=torch.int64)
        alone = model(document[None], zeros, torch.arange(length)[None])[0]
        torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-5)


def test_the_text_plot_puts_high_losses_on_top_and_marks_the_step():
    plot = loss_plot.text_plot([4.0, 3.0, float("nan"), 1.0], mark=1).splitlines()
    assert plot[0] == "    4.00 |*:  "
    assert plot[13] == "    1.00 | : *"
    assert [line[10:].find("*") for line in plot if "*" in line] == [0, 1, 3]
    assert plot[-1].strip() == "step 0 to 3"


@given(st.lists(LOSSES, min_size=1, max_size=300), st.integers(0, 299))
@settings(deadline=None, max_examples=50)
def test_any_losses_can_be_plotted(losses, mark):
    lines = loss_plot.text_plot(losses, mark=mark).splitlines()
    assert len(lines) == 16
    assert max(map(len, lines)) < 80
    ElementTree.fromstring(loss_plot.svg_plot(losses, mark=mark))


def write_folder(folder: Path, kind: str) -> None:
    """Tokens as another tool leaves them, or a store."""
    ids = np.random.default_rng(0).integers(3, 90, 4000).astype(np.uint16)
    ids[::50] = 2
    if kind == "store":
        pieces = Ragged.from_lengths(ids.astype(np.int64), [50] * 80)
        build_small_store(folder, {"train": pieces, "val": pieces})
        return
    folder.mkdir(parents=True)
    for number, part in enumerate(np.split(ids, 2)):
        if kind == "npy":
            np.save(folder / f"shard_{number}.npy", part)
        else:
            part.tofile(folder / f"shard_{number}.bin")
    if kind == "bin":
        (folder / "metadata.yaml").write_text("dtype: uint16\nvocab_size: 100\ntokenizer: gpt2\n")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bin", "store"])
def test_the_line_that_check_prints_can_be_pasted(tmp_path, kind):
    folder = tmp_path / "it's my data" / "tokens"
    write_folder(folder, kind)
    checked = run_command("check", str(folder))
    assert checked.exit_code == 0, checked.stderr
    (line,) = [line for line in checked.stdout.splitlines() if "--data." in line]
    start = f"{sys.executable} {SCRIPT} --quick --steps 3 --out {tmp_path / 'run'}"
    done = subprocess.run(
        ["bash", "-c", f"{start} {line}"], capture_output=True, text=True, timeout=240, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert str(folder) in done.stdout.replace("\n", "")  # what it reads
    assert [int(row["tokens"]) for row in rows(tmp_path / "run")] == [8, 16, 24]
    state = json.loads(checkpoint(tmp_path / "run")["loader"])
    assert [name for name, _ in state["sources"]] == ["tokens"]


@pytest.mark.slow
def test_a_config_with_flags_trains_a_packed_mixture_and_resumes(tmp_path):
    for name in ("one", "two"):
        write_folder(tmp_path / name, "npy")
    tokenizer = tmp_path / "spm"
    (tmp_path / "words.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 300)
    spec = TrainSpec(vocab_size=288, model_type="byte-bpe")
    train_tokenizer(tokenizer, files=[tmp_path / "words.txt"], spec=spec)
    (tmp_path / "train.toml").write_text(
        '[data]\npack_sequences = true\n[[data.datasets]]\nname = "one"\npath = "one"\n'
        '[[data.datasets]]\nname = "two"\npath = "two"\nweight = 3\n'
    )
    words = ["--quick", "--out", str(tmp_path / "run"), "--config", str(tmp_path / "train.toml")]
    call = [sys.executable, str(SCRIPT), *words]

    def run_in(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*call, *more], capture_output=True, text=True, timeout=240, cwd=tmp_path
        )

    refused = run_in("--steps", "4")
    assert refused.returncode == 1
    assert "data.tokenizer_path is not set" in refused.stderr
    path = f"--data.tokenizer_path={tokenizer / 'tokenizer.json'}"
    done = run_in("--steps", "4", path)
    assert done.returncode == 0, done.stderr
    assert [(row["one"], row["two"]) for row in rows(tmp_path / "run")][-1] == ("8", "24")
    again = run_in("--steps", "4", path, "--resume")
    assert again.returncode == 0, again.stderr
    other = run_in("--steps", "4", path, "--resume", "--data.seed=5")
    assert other.returncode == 1
    assert "this state belongs to another run" in other.stderr


def test_flags_that_nothing_takes_are_refused(tmp_path, monkeypatch, capsys):
    for words, message in (
        (["--data.dataset_pth=x"], "did you mean 'dataset_path'"),
        (["--data", "x", "--data.dataset_path=y"], "--data and --data.dataset_path"),
        (["--bogus"], "unrecognized arguments: --bogus"),
        (["--data.dataset_path=y", "--bogus"], "unrecognized arguments: --bogus"),
    ):
        said = refusal_here(monkeypatch, capsys, "--out", str(tmp_path / "run"), *words)
        assert message in said
        assert not (tmp_path / "run").exists()
