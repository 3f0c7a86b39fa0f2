"""An error names options in the words of its reader, and survives the way between processes."""

from __future__ import annotations

import pickle

from shardmill.errors import OptionError, TemplateError


def as_flag(name: str, value: object) -> str:
    return f"--{name}" if value is ... else f"--{name} {value}"


def test_options_are_keywords_in_python_and_what_the_caller_writes_elsewhere() -> None:
    error = OptionError(
        "{workers}: more than {memory} or '{other}'; see {on_bad}",
        workers=12_000,
        memory="{workers}",
        on_bad=...,
    )
    assert str(error) == "workers=12,000: more than memory='{workers}' or '{other}'; see on_bad"
    assert error.worded(as_flag) == (
        "--workers 12000: more than --memory {workers} or '{other}'; see --on_bad"
    )


def test_an_error_in_an_error_is_written_in_the_same_words() -> None:
    error = TemplateError(
        "{template}: {error}", template="x.json", error=OptionError("{seed}: no", seed=1)
    )
    assert str(error) == "template='x.json': seed=1: no"
    assert error.worded(as_flag) == "--template x.json: --seed 1: no"


def test_a_pickled_error_keeps_its_options() -> None:
    error = pickle.loads(pickle.dumps(OptionError("{seed}: no", seed=1)))
    assert (str(error), error.worded(as_flag)) == ("seed=1: no", "--seed 1: no")
