"""Every exception shardmill raises on purpose.

A message says what, where, found, wanted, and what to do next. Each class is also a built-in, so
callers who do not know shardmill can still catch it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping

from shardmill.urls import scrub, scrub_error


class ShardmillError(Exception):
    """The root: `except ShardmillError` catches everything below. No message holds a secret.

    A message names options as `{name}` and gives their values as keywords, so that each caller
    reads their own words: `OptionError("{workers}: wanted at least 1", workers=0)` is
    `workers=0: wanted at least 1` in Python and `--workers 0: wanted at least 1` on the command
    line. An option without a value is given as `...`. A value that is one of our errors is shown
    as its message: `TemplateError("{template}: {error}", template=name, error=error)`.
    """

    def __init__(self, message: object = "", *args: object, **options: object) -> None:
        scrub_error(sys.exception())  # a traceback shows what was handled when this was raised
        self._message, *rest = (_clean(arg) for arg in (message, *args))
        self.options = {name: _clean(value) for name, value in options.items()}
        shown = self.worded(as_keyword) if isinstance(message, str) else message
        super().__init__(shown, *rest)

    def worded(self, write: Callable[[str, object], str]) -> str:
        """The message, with each option written by `write(name, value)`."""

        def written(found: re.Match[str]) -> str:
            name = found[1]
            if name not in self.options:
                return found[0]
            value = self.options[name]
            return value.worded(write) if isinstance(value, ShardmillError) else write(name, value)

        return scrub(re.sub(r"\{([^{}]+)\}", written, str(self._message)))

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


def _clean(value: object) -> object:
    return scrub(value) if isinstance(value, str) else value


def as_keyword(name: str, value: object) -> str:
    """An option as Python callers write it."""
    if value is ...:
        return name
    return f"{name}={value:,}" if type(value) is int else f"{name}={value!r}"


class MissingExtraError(ShardmillError, ImportError):
    """An optional dependency is not installed; the message holds the pip command."""


class OptionError(ShardmillError, ValueError):
    """An argument, flag or combination of them that makes no sense."""


class SourceError(ShardmillError, ValueError):
    """Input that cannot be read as documents: names the file and the row."""


class HubError(SourceError, ConnectionError):
    """A hub that stayed unreachable after all retries."""


class TokenizerError(ShardmillError, ValueError):
    """A tokenizer that cannot be opened, trained or trusted."""


class EngineMismatchError(TokenizerError):
    """A fast engine gave other ids than the reference engine."""


class TokenRangeError(ShardmillError, ValueError):
    """A token id that does not fit the dtype of the shards."""


class TemplateError(ShardmillError, ValueError):
    """A chat template that cannot be opened, bound to a tokenizer, or trusted."""


class MaskProofError(TemplateError):
    """A template whose loss mask is wrong; the message shows a smallest conversation."""


class StoreError(ShardmillError, ValueError):
    """A store that cannot be opened or written."""


class StoreNotFoundError(StoreError, FileNotFoundError):
    """No finished store here."""


class StoreExistsError(StoreError, FileExistsError):
    """There is a finished store already, and replacing it was not asked for."""


class ManifestError(StoreError):
    """meta.json is not a manifest of a known version with possible numbers."""


class DamagedStoreError(StoreError):
    """A shard or index that does not match its manifest."""


class StateMismatchError(ShardmillError, ValueError):
    """A saved position that belongs to other data, another seed or order, or a later version."""


class BuildError(ShardmillError, RuntimeError):
    """A build that cannot start or continue."""


class BuildLockedError(BuildError):
    """Another running process builds this store."""


class UnfinishedBuildError(BuildError):
    """An earlier build was not finished; it must be resumed or discarded explicitly."""


class LossError(BuildError, SourceError):
    """Nothing was kept of the input, or too little; nothing was published.

    `reasons` counts the rows by why they were left out; `num_kept` of `num_read` were kept.
    `examples` has a row of the commonest reasons: its id, and how it begins if that was found.
    """

    def __init__(
        self,
        message: object = "",
        *args: object,
        reasons: Mapping[str, int] | None = None,
        num_read: int = 0,
        num_kept: int = 0,
        examples: Mapping[str, tuple[str, str | None]] | None = None,
        **options: object,
    ) -> None:
        super().__init__(message, *args, **options)
        self.reasons = dict(reasons or {})
        self.num_read, self.num_kept = num_read, num_kept
        self.examples = dict(examples or {})


def missing_extra(what: str, extra: str) -> MissingExtraError:
    """The one wording for a missing optional dependency."""
    return MissingExtraError(f"{what} is not installed: pip install 'shardmill[{extra}]'")
