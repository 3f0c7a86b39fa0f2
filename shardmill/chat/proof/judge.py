"""Is this conversation masked right? The checks of a mask proof, for one template and one policy.

In: a template, a tokenizer's reader, a policy.  Out: a `Failure`, a reason code, or None.

What is proved, on each conversation of the battery that the template keeps:
- a trained assistant turn is opening + words + end + tail. Opening and tail are not trained and
  are always the same ids; the words are the message's text, as it is or trimmed (one way for the
  whole template); the end is always the same, and is or is not trained as the policy says
- nothing is trained in any other turn, or before the first
- every turn holds the text of its own messages, and of no other
- no marker stands among the words
- the first k messages alone give the first turns: the same ids, mask, starts and roles
What is not: that this template is the one a model was made with; conversations unlike all in the
battery (a Jinja template is checked again on each of them when it renders); how calls and reasoning
are written, beyond that they stand in the trained part, in order.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from shardmill.chat.jinja import JINJA_REASONS
from shardmill.chat.messages import REASONS
from shardmill.chat.policy import ChatTemplate, TrainPolicy
from shardmill.chat.proof.battery import padded_item
from shardmill.chat.proof.example import (
    DROPPED,
    TRIMS,
    Failure,
    ProofExample,
    Refuted,
    TokenReader,
    TurnShape,
    is_assistant,
    learn_shape,
    learn_trim,
    markers_in,
    render_one,
    span,
)
from shardmill.records import ROLES, Conversation

_NOTHING_TO_TRAIN = ("no_assistant", "nothing_trained")


class Judge:
    """Judges conversations; learns the shape of a turn from the plainest ones first."""

    def __init__(self, template: ChatTemplate, reader: TokenReader, policy: TrainPolicy) -> None:
        self._template = template
        self._reader = reader
        self.policy = policy
        self.counts: Counter[str] = Counter()
        self.shape: TurnShape | None = None

    def learn(self, conversation: Conversation) -> Failure | None:
        """Take opening, end and tail from a plain conversation."""
        try:
            self.shape = self._learn(conversation)
        except Refuted as refuted:
            return refuted.failure
        return None

    def judge(self, conversation: Conversation, *, needed: bool = False) -> Failure | str | None:
        """None when it is right, the reason when it was dropped, else what is wrong."""
        try:
            found = self._kept(conversation) if needed else self._rendered(conversation)
            if isinstance(found, str):
                return found
            self._check(found, needed)
        except Refuted as refuted:
            return refuted.failure
        return None

    def _check(self, example: ProofExample, needed: bool) -> None:
        self._check_untrained(example)
        self._check_openings(example)
        self._check_texts(example)
        for turn in range(len(example.roles)):
            if example.wanted[turn] and is_assistant(example, turn):
                self._check_answer(example, turn)
            elif example.wanted[turn] and example.groups[turn]:
                self._check_other(example, turn)
        self._check_prefixes(example, needed)
        self.counts["conversations"] += 1

    def _learn(self, conversation: Conversation) -> TurnShape:
        example = self._kept(conversation)
        self._check_untrained(example)
        turns = [turn for turn in range(len(example.roles)) if is_assistant(example, turn)]
        if not turns:
            raise example.refute("turns", "a conversation without an assistant was kept")
        self.shape = learn_shape(example, turns[-1], self._reader, self._template.marker_ids)
        padded = self._rendered(padded_item().conversation)
        if isinstance(padded, str):
            return self.shape
        return replace(self.shape, trim=learn_trim(padded, self.shape, self._reader))

    def _rendered(self, conversation: Conversation) -> ProofExample | str:
        return render_one(self._template, conversation, self.policy)

    def _kept(self, conversation: Conversation) -> ProofExample:
        found = self._rendered(conversation)
        if isinstance(found, ProofExample):
            return found
        why = {**REASONS, **JINJA_REASONS}.get(found, "its own reason")
        told = f"it was dropped ({found}: {why}), and every template must have a place for it"
        raise Refuted(
            Failure(check=DROPPED + found, told=told, conversation=conversation, policy=self.policy)
        )

    def _check_untrained(self, example: ProofExample) -> None:
        """Nothing is trained where nothing should be."""
        if example.mask[: example.bounds[0]].any():
            raise example.refute("untrained", "something is trained before the first turn")
        for turn, wanted in enumerate(example.wanted):
            start, stop = example.bounds[turn : turn + 2]
            self.counts["untrained turns"] += wanted is False
            if wanted is False and example.mask[start:stop].any():
                who = ROLES[example.roles[turn]]
                raise example.refute(
                    "untrained", f"turn {turn} is the {who}'s and must not be trained, but is"
                )

    def _check_openings(self, example: ProofExample) -> None:
        """No other turn opens as the assistant's do, or no model could tell who speaks."""
        assert self.shape is not None
        opening = self.shape.opening
        for turn, role in enumerate(example.roles):
            start = example.bounds[turn]
            same = np.array_equal(example.ids[start : start + len(opening)], opening)
            if len(opening) and same and not is_assistant(example, turn):
                who = ROLES[role]
                raise example.refute(
                    "opening", f"turn {turn} is the {who}'s, but opens as the assistant's do"
                )

    def _check_texts(self, example: ProofExample) -> None:
        """Each turn holds its own texts and no other's."""
        texts = [(message.text or "").strip() for message in example.checked]
        for turn, group in enumerate(example.groups):
            start, stop = example.bounds[turn : turn + 2]
            read = self._reader.readings(example.ids, start, stop)
            for place, text in enumerate(texts):
                there = any(s in r for s in self._reader.spellings(text) for r in read)
                if place in group and not there:
                    raise example.refute("texts", f"turn {turn} does not hold {text!r}")
                alien = (
                    place not in group and group and text not in "".join(texts[p] for p in group)
                )
                if alien and len(text) > 4 and there and not example.conversation.tools:
                    raise example.refute("texts", f"turn {turn} holds {text!r}, of another turn")
            self.counts["turns with their texts"] += bool(group)

    def _check_answer(self, example: ProofExample, turn: int) -> None:
        assert self.shape is not None
        first, last = span(example, turn)
        message = example.checked[example.groups[turn][-1]]
        nothing_said = not (message.calls or message.reasoning or (message.text or "").strip())
        if first == last and nothing_said and not self.shape.end:
            return  # and ends are not trained
        start, stop = example.bounds[turn : turn + 2]
        if first == last:
            raise example.refute("words", f"turn {turn} must be trained, and is not")
        if not np.array_equal(example.ids[start:first], self.shape.opening):
            told = self._reader.text(example.ids[start:first])
            wanted = self._reader.text(self.shape.opening)
            raise example.refute(
                "opening", f"turn {turn} is trained from behind {told!r}: wanted {wanted!r}"
            )
        self.counts["trained answers"] += 1
        if message.calls or message.reasoning:
            self._check_told(example, turn, first, last)
        else:
            self._check_words(example, turn, message.text or "", first, last)
            if not np.array_equal(example.ids[last:stop], self.shape.tail):
                told = self._reader.text(example.ids[last:stop])
                wanted = self._reader.text(self.shape.tail)
                raise example.refute(
                    "end", f"turn {turn} is trained up to {told!r}: wanted up to {wanted!r}"
                )

    def _check_words(
        self, example: ProofExample, turn: int, text: str, first: int, last: int
    ) -> None:
        assert self.shape is not None
        read = self._reader.readings(example.ids, first, last)
        said = self._reader.spellings(TRIMS[self.shape.trim](text))
        pairs = zip(self.shape.leads, read, strict=True)
        right = any(
            lead is not None and found == lead + words + self.shape.end
            for lead, found in pairs
            for words in said
        )
        if not right:
            wanted = f"{said[0] + self.shape.end!r}"
            raise example.refute("words", f"turn {turn} trains {read[0]!r}: wanted {wanted}")
        markers = markers_in(example.ids[first:last], self._template.marker_ids)
        if markers != self.shape.end_markers:
            raise example.refute(
                "markers", f"turn {turn} trains the markers {markers}: its words became structure"
            )
        self.counts["words"] += 1

    def _check_told(self, example: ProofExample, turn: int, first: int, last: int) -> None:
        """Reasoning, words and calls: all in the trained part, in this order."""
        assert self.shape is not None
        message = example.checked[example.groups[turn][-1]]
        read = self._reader.readings(example.ids, first, last)[-1]
        place = 0
        names = [text.split('"')[3] for text in message.calls]
        for part in (message.reasoning.strip(), (message.text or "").strip(), *names):
            found = read.find(part, place)
            if found < 0:
                raise example.refute("words", f"turn {turn} trains {read!r}, without {part!r}")
            place = found + len(part)
        if message.text is None and "None" in read:
            raise example.refute("words", f"turn {turn} has no text, but trains {read!r}")
        ends = example.ids[last - 1] in self._template.marker_ids or read.endswith(self.shape.end)
        if bool(self.shape.end_markers) and not ends:
            raise example.refute("end", f"turn {turn} trains {read!r}, without its end")
        self.counts["calls and reasoning"] += 1

    def _check_other(self, example: ProofExample, turn: int) -> None:
        """A trained turn that is not the assistant's: its words come first."""
        first, last = span(example, turn)
        text = example.checked[example.groups[turn][0]].text or ""
        read = self._reader.readings(example.ids, first, last)
        right = any(found.lstrip().startswith(text.strip()) for found in read)
        if not right or (first == last and text.strip()):
            raise example.refute("words", f"turn {turn} trains {read[0]!r}: wanted {text!r} first")
        self.counts["other trained turns"] += 1

    def _check_prefixes(self, example: ProofExample, needed: bool) -> None:
        """The first messages alone are rendered as they are in the whole."""
        inside = {place for group in example.groups for place in group[:-1]}
        for stop in range(1, len(example.checked)):
            part = replace(example.conversation, messages=example.conversation.messages[:stop])
            found = self._rendered(part) if stop - 1 not in inside else "shared turn"
            if isinstance(found, str):
                if needed and found not in _NOTHING_TO_TRAIN:
                    raise example.refute(
                        "prefix", f"the first {stop} messages alone are dropped ({found})"
                    )
                continue
            self.counts["prefixes"] += 1
            turns, size = len(found.roles), len(found.ids)
            same = (
                np.array_equal(found.ids, example.ids[:size])
                and found.bounds == example.bounds[: turns + 1]
                and found.roles == example.roles[:turns]
            )
            if self.policy.train_on != "last-assistant":
                same = same and np.array_equal(found.mask, example.mask[:size])
            if not same:
                raise example.refute(
                    "prefix", f"the first {stop} messages alone are rendered otherwise"
                )
