"""Which tokenizer engine a build uses, remembered so that a resumed build tells the same story.

A fast engine serves only while it equals the reference. When it does not, its work is thrown away
and the reference does it again; the manifest says so.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from shardmill.build.workplace import Workplace
from shardmill.errors import BuildError, EngineMismatchError, TokenizerError
from shardmill.protocols import Texts, Tokenizer
from shardmill.records import JSON
from shardmill.tokenizer import (
    ChosenEncoder,
    EngineCheck,
    EngineChoice,
    choose_encoder,
    reopen_encoder,
)
from shardmill.tokenizer.texts import as_list

log = logging.getLogger(__name__)


class EngineDesk:
    """Chooses the encoder at the first batch and keeps its proof in the workplace."""

    has_spare_cores = True  # the first process makes documents only when no worker does

    def __init__(
        self,
        work: Workplace,
        tokenizer: Tokenizer,
        *,
        engine: EngineChoice,
        check: EngineCheck,
        size_hint: int | None,
        goes_on: Mapping[str, JSON] | None = None,
    ) -> None:
        """`goes_on`: the record of the engine that made the tokens in front; no other serves."""
        self._goes_on = goes_on
        self._work, self._tokenizer = work, tokenizer
        self._engine, self._check, self._size_hint = engine, check, size_hint
        self._chosen: ChosenEncoder | None = None

    def encoder(self, first: Texts) -> ChosenEncoder:
        """The encoder of this build; `first` are the first texts of the first call."""
        if self._chosen is None and self._goes_on is not None:
            self._chosen = self._reopened(self._goes_on)
            self._remember(self._chosen.produced_by)
        if self._chosen is None:
            dropped = self._work.read_note("dropped_engine")
            try:
                self._chosen = choose_encoder(
                    self._tokenizer,
                    engine="reference" if dropped else self._engine,
                    check=self._check,
                    corpus=as_list(first),
                    size_hint=self._size_hint,
                )
            except EngineMismatchError as failed:  # no engine yet, so nothing to fall back from
                raise TokenizerError(str(failed)) from failed
            self._remember(self._chosen.produced_by)
        return self._chosen

    def settle(self) -> None:
        """Choose now, when nothing had to be encoded."""
        if self._work.read_note("produced_by") is None:
            self.encoder([])

    def drop(self, mismatch: EngineMismatchError) -> None:
        """The fast engine was caught out: from here on, also after a resume, the reference."""
        if self._goes_on is not None:
            raise BuildError(
                f"{mismatch}\nThat engine made the tokens in front too: build the whole store anew "
                "with overwrite=True and engine='reference'."
            ) from mismatch
        log.warning("%s\nstarting again with the reference engine", mismatch)
        self._work.remove_note("produced_by")
        note: dict[str, JSON] = {"asked_for": self._engine, "mismatch": str(mismatch)}
        self._work.write_note("dropped_engine", note)
        self._chosen = None

    def produced_by(self) -> dict[str, JSON]:
        """For the manifest: engine, versions and proof, as the first run of this build had them."""
        noted = self._work.read_note("produced_by")
        assert noted is not None, "an encoder was chosen before the journal was full"
        dropped = self._work.read_note("dropped_engine")
        return {**noted, "dropped_engine": dropped} if dropped else noted

    def _reopened(self, produced_by: Mapping[str, JSON]) -> ChosenEncoder:
        try:
            return reopen_encoder(self._tokenizer, produced_by, check=self._check)
        except TokenizerError as error:
            raise BuildError(
                f"the tokens in front were made by an engine that is not here now ({error}): "
                "install it, or build the whole store anew with overwrite=True"
            ) from error

    def _remember(self, produced_by: dict[str, JSON]) -> None:
        earlier = self._work.read_note("produced_by")
        if earlier is None:
            self._work.write_note("produced_by", produced_by)
            return
        for key in ("engine", "versions"):
            if earlier.get(key) != produced_by.get(key):
                raise BuildError(
                    f"the unfinished build used {key} {earlier.get(key)!r}, now it would be "
                    f"{produced_by.get(key)!r}: restore that, or start again with overwrite=True"
                )
