"""`--engine`: two questions under one name, which engine encodes and where the work is done.

In: the values that were given.  Out: one answer to each question.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import cast, get_args

from shardmill.build.hands import RunOn
from shardmill.errors import OptionError
from shardmill.tokenizer import EngineChoice


class EngineName(StrEnum):
    """What `--engine` takes."""

    auto = "auto"
    fast = "fast"
    reference = "reference"
    local = "local"
    ray = "ray"


HELP = (
    "Which tokenizer engine encodes (auto, fast, reference), and where the work is done (local, "
    "ray); one of each at most, e.g. --engine ray --engine fast."
)


def parse_engines(
    names: Sequence[EngineName], ray_address: str | None = None
) -> tuple[EngineChoice, RunOn]:
    """The engine that encodes (auto unless said) and where the work is done (local unless said)."""
    encodes = [name.value for name in names if name in get_args(EngineChoice)]
    places = [name.value for name in names if name in get_args(RunOn)]
    for given in (encodes, places):
        if len(given) > 1:
            raise OptionError(
                f"--engine {' --engine '.join(given)}: wanted one of them; another may only say "
                "the other thing: auto, fast or reference how to encode, local or ray where"
            )
    run_on = cast(RunOn, places[0] if places else "local")
    if ray_address is not None and run_on != "ray":
        raise OptionError(f"--ray-address {ray_address}: only with --engine ray")
    return cast(EngineChoice, encodes[0] if encodes else "auto"), run_on
