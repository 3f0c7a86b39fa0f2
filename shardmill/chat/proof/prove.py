"""The mask proof: a template trains what the assistant says and its end, or it is refused.

Proved on each conversation of the battery that the template keeps:
- A trained assistant turn is opening + words + end + tail. Opening and tail are untrained and
  always the same ids; the words are the message's text, as it is or trimmed (one way for the whole
  template); the end is always the same, and trained or not as the policy says. Where reasoning or
  calls follow, the opening may be shorter (a template may open a turn without reasoning with an
  empty one): then always equally short, unlike the opening of any other role, and only where the
  rest of it is not written.
- Nothing is trained in any other turn, or before the first.
- Every turn holds the text of its own messages, and of no other.
- There is no marker among the words.
- The first k messages alone give the first turns: the same ids, mask, starts and roles.
Not proved: that a model was trained with this template; conversations unlike all in the battery (a
Jinja template is checked again on each of them when it renders); how calls and reasoning are
written, beyond that they are in the trained part, in order.

Equal template, tokenizer, policy and versions give an equal certificate. The cost is a few hundred
small renderings, about a second.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from shardmill.chat.policy import (
    ASSISTANT,
    REASONS,
    TOOL,
    TRAIN_ON,
    USER,
    ChatTemplate,
    CheckedMessage,
    TrainPolicy,
)
from shardmill.chat.proof.examples import (
    BATTERY_VERSION,
    Failure,
    ProofExample,
    TokenReader,
    battery,
    battery_sha256,
    refusal,
    render_one,
    stored,
)
from shardmill.errors import MaskProofError
from shardmill.records import JSON, ROLES, ChatExamples, Conversation, IntArray

PROOF_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What was proved about a template; stored in the manifest of what it made."""

    template: dict[str, JSON]  # as it describes itself
    tokenizer: str  # fingerprint
    policy: dict[str, JSON]
    versions: dict[str, JSON]
    battery: dict[str, JSON]  # version, sha256, number of conversations
    checks: dict[str, dict[str, int]]  # policy -> what was checked, and how often
    declined: dict[str, dict[str, list[str]]]  # policy -> reason -> battery items it dropped
    trim: str  # which side of a text the template cuts blanks from: one of TRIMS
    lead: str  # what is trained before the assistant's words: blanks, or a template's own text
    end: str  # what is trained after the assistant's words

    def to_json(self) -> dict[str, JSON]:
        found = {"proof_version": PROOF_VERSION, **asdict(self)}
        return found if self.lead else {key: found[key] for key in found if key != "lead"}


def prove_mask(
    template: ChatTemplate, tokenizer: Any, policy: TrainPolicy | None = None
) -> Certificate:
    """Prove a template's loss mask on the battery; MaskProofError if it is wrong.

    tokenizer: the one the template is bound to, ours or of transformers; used only to decode.
    Other values of `train_on` are proved too, and train_on_eot=False if True was asked for; a
    template may decline those.
    """
    policy = policy or TrainPolicy()
    reader = TokenReader(tokenizer)
    items = battery([reader.text([number]) for number in sorted(template.marker_ids)])
    judges = [Judge(template, reader, policy)]
    judges[0].prove(items)
    judges[0].compare_batch(list(items.values()))
    ends = (True, False) if policy.train_on_eot else (False,)
    for end, train_on in itertools.product(ends, TRAIN_ON):
        other = TrainPolicy(train_on=train_on, train_on_eot=end)
        if other != policy:
            judges.append(Judge(template, reader, other))
            judges[-1].prove(stored("needed"), may_decline=True)
    shape = judges[0].shape
    assert shape is not None
    return Certificate(
        template=template.describe(),
        tokenizer=reader.fingerprint,
        policy={"train_on": policy.train_on, "train_on_eot": policy.train_on_eot},
        versions=_versions(),
        battery={
            "version": BATTERY_VERSION,
            "sha256": battery_sha256(items),
            "conversations": len(items),
        },
        checks={str(one.policy): dict(sorted(one.counts.items())) for one in judges if one.counts},
        declined={str(judge.policy): judge.declined for judge in judges},
        trim=judges[0].trims[0],
        lead=next(lead for lead in shape.leads if lead is not None),
        end=shape.end,
    )


DROPPED = "dropped: "
"""The name of the check that a needed conversation is kept, before the reason it was dropped."""

TRIMS: dict[str, Callable[[str], str]] = {
    "none": lambda text: text,
    "both": str.strip,
    "left": str.lstrip,
    "right": str.rstrip,
    "newlines": lambda text: text.strip("\n"),
    "left newlines": lambda text: text.lstrip("\n"),
    "right newlines": lambda text: text.rstrip("\n"),
}


def _versions() -> dict[str, JSON]:
    return {
        "shardmill": importlib.metadata.version("shardmill"),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnShape:
    """How a template writes every trained assistant turn."""

    opening: IntArray  # ids before the words
    shortest: IntArray  # ids before reasoning or calls; the beginning of `opening`, or all of it
    tail: IntArray  # ids after the end
    leads: tuple[str | None, ...]  # blanks before the words, per reading; None: it does not fit
    end: str  # what is trained after the words
    markers: list[int]  # all of the trained part
    end_markers: list[int]  # and those after the words; others belong to what is written before

    def fits(self, read: Sequence[str], spellings: Sequence[str]) -> bool:
        """Whether a reading of the trained tokens is one of these words and the end. A template may
        leave out its own text before them, and blanks beside words that are blank themselves."""
        for words in spellings:
            for lead, found in zip(self.leads, read, strict=True):
                for wanted in () if lead is None else (lead + words + self.end, words + self.end):
                    blank = not words.strip() and _without_blanks(found) == _without_blanks(wanted)
                    if found == wanted or blank:
                        return True
        return False


def _shortened(conversation: Conversation, count: int) -> Conversation:
    return replace(conversation, messages=conversation.messages[:count])


def _without_blanks(text: str) -> str:
    return "".join(text.split())


@dataclass(eq=False)
class Judge:
    """Proves one policy; learns the shape of a turn from the plainest conversations first."""

    template: ChatTemplate
    reader: TokenReader
    policy: TrainPolicy
    shape: TurnShape | None = None  # of an answer at the end
    middle: TurnShape | None = None  # of one that a turn follows
    trims: list[str] = field(default_factory=lambda: list(TRIMS))  # that fit all answers so far
    declined: dict[str, list[str]] = field(default_factory=dict)  # reason -> items of the battery
    counts: Counter[str] = field(default_factory=Counter)  # what was checked, and how often
    learns: bool = True  # not while a smaller counterexample is looked for

    def prove(self, items: Mapping[str, Conversation], *, may_decline: bool = False) -> None:
        """Judge every item; MaskProofError if one is wrong."""
        attempt: Callable[[Conversation], object] = self.learn
        try:
            self.shape = self.middle = self.learn(stored("needed")["plain"])
            followed = stored("needed")["several turns"]
            if self.policy.train_on != "last-assistant":
                attempt = partial(self.learn, in_middle=True)
                self.middle = attempt(followed)
            elif not isinstance(self._render(_shortened(followed, 3)), str):
                self.middle = self.learn(_shortened(followed, 3), in_middle=True)
            for name, conversation in items.items():
                needed = name in stored("needed") and not may_decline
                attempt = partial(self.judge, needed=needed)
                found = attempt(conversation)
                if found == "trains_others":  # not a conversation it cannot write: a wrong mask
                    found = self.judge(conversation, needed=True)
                if found is not None:
                    self.declined.setdefault(str(found), []).append(name)
        except Failure as failure:
            if may_decline and failure.check.startswith(DROPPED):
                self.declined[failure.check.removeprefix(DROPPED)] = ["everything"]
                return
            self.learns = False
            raise refusal(self.template, self.reader, failure, attempt) from None

    def compare_batch(self, chats: Sequence[Conversation]) -> None:
        """Many conversations at once give what they give one by one."""
        whole = self.template.render(chats, self.policy)
        alone = [self.template.render([chat], self.policy) for chat in chats]
        found = whole.examples
        wanted = ChatExamples.concatenate([one.examples for one in alone if len(one.kept)])
        same = (
            whole.kept.tolist() == [at for at, one in enumerate(alone) if len(one.kept)]
            and [d.reason for d in whole.drops] == [d.reason for one in alone for d in one.drops]
            and found.ids == wanted.ids
            and np.array_equal(found.mask, wanted.mask)
            and np.array_equal(found.turn_starts, wanted.turn_starts)
            and np.array_equal(found.turn_roles, wanted.turn_roles)
        )
        if not same:
            raise MaskProofError(
                f"chat template {self.template.name!r}: {len(chats)} conversations of the battery "
                "rendered at once differ from the same rendered one by one; render() must treat "
                "each separately"
            )
        self.counts["batch is one by one"] = len(chats)

    def _fits(self, shape: TurnShape, read: Sequence[str], spellings: Sequence[str]) -> bool:
        if shape.fits(read, spellings):
            return True
        # What blocks mark before the words may depend on the turn before.
        return self.has_blocks and any(
            found.endswith(words + shape.end) for found in read for words in spellings if words
        )

    @property
    def has_blocks(self) -> bool:
        return bool(self.template.describe().get("generation_blocks"))

    @property
    def is_jinja(self) -> bool:
        return self.template.describe()["kind"] == "jinja"

    def learn(self, conversation: Conversation, *, in_middle: bool = False) -> TurnShape:
        """Take opening, end and tail from the last answer of a plain conversation, or its first."""
        example = self._kept(conversation)
        self._check_untrained(example)
        if ASSISTANT not in example.roles:
            raise example.failure("turns", "a conversation without an assistant was kept")
        answers = [turn for turn, role in enumerate(example.roles) if role == ASSISTANT]
        turn = answers[0 if in_middle else -1]
        return self._learn_shortest(self._learn_shape(example, turn, in_middle=in_middle))

    def judge(self, conversation: Conversation, *, needed: bool = False) -> str | None:
        """The reason if the conversation was dropped, else None; Failure if its mask is wrong."""
        assert self.shape is not None
        if needed:
            example: ProofExample | str = self._kept(conversation)
        else:
            example = render_one(self.template, conversation, self.policy)
        if isinstance(example, str):
            return example
        self._check_untrained(example)
        self._check_openings(example, self.shape)
        self._check_texts(example)
        for turn, wanted in enumerate(example.wanted):
            if wanted and example.roles[turn] == ASSISTANT:
                is_last = turn + 1 == len(example.roles)
                shape = self.shape if is_last or self.middle is None else self.middle
                self._check_answer(example, turn, shape)
            elif wanted and example.groups[turn]:
                self._check_other(example, turn)
        self._check_prefixes(example, needed)
        self.counts["conversations"] += 1
        return None

    def _render(self, conversation: Conversation) -> ProofExample | str:
        return render_one(self.template, conversation, self.policy)

    def _kept(self, conversation: Conversation) -> ProofExample:
        found = self._render(conversation)
        if isinstance(found, ProofExample):
            return found
        why = REASONS.get(found, "its own reason")
        message = f"it was dropped ({found}: {why}), and every template must be able to write it"
        raise Failure(DROPPED + found, message, conversation, self.policy)

    def _markers_in(self, ids: IntArray) -> list[int]:
        return [number for number in ids.tolist() if number in self.template.marker_ids]

    def _learn_shape(self, example: ProofExample, turn: int, *, in_middle: bool) -> TurnShape:
        start, stop = example.bounds[turn : turn + 2]
        first, last = example.trained_span(turn)
        if first == last:
            raise example.failure("words", f"turn {turn} must be trained, and is not")
        text = example.checked[example.groups[turn][-1]].text or ""
        read = self.reader.readings(example.ids, first, last)
        first_token = self.reader.text(example.ids[first : first + 1])
        leads: list[str | None] = []
        ends = []
        for found in read:
            # Blanks before the words are right if they belong to the token of the first word. A
            # template with a generation prompt or blocks of its own says what is generated first.
            lead = found[: len(found) - len(found.lstrip())]
            fits = found[len(lead) :].startswith(text) and (not lead or first_token.strip())
            if not fits and self.is_jinja:
                lead, fits = found.partition(text)[0], text in found
            leads.append(lead if fits else None)
            ends += [found[len(lead) + len(text) :]] if fits else []
        if not ends:
            raise example.failure(
                "words", f"turn {turn} trains {read[0]!r}: wanted {text!r} and its end"
            )
        before = next(lead for lead in leads if lead is not None)
        words = next(
            at
            for at in range(first, last)
            if self.reader.text(example.ids[first : at + 1]).startswith(before + text[:1])
        )
        end_markers = self._markers_in(example.ids[words:last])
        shape = TurnShape(
            opening=example.ids[start:first],
            shortest=example.ids[start:first],
            tail=example.ids[last:stop],
            leads=tuple(leads),
            end=ends[0],
            markers=self._markers_in(example.ids[first:last]),
            end_markers=end_markers,
        )
        if end_markers:
            closed = next(at for at in range(words, last) if int(example.ids[at]) == end_markers[0])
            rest = example.ids[closed:last]
            rest = rest[~np.isin(rest, sorted(self.template.marker_ids))]
            if self.reader.text(rest).strip():
                raise example.failure(
                    "end",
                    f"turn {turn} trains {self.reader.text(rest)!r} after its end",
                )
        if not self.policy.train_on_eot:
            if end_markers or shape.end.strip():
                raise example.failure(
                    "end",
                    f"turn {turn} trains {shape.end!r} after its words, with {{train_on_eot}}",
                )
        elif not end_markers:
            raise example.failure(
                "end", f"turn {turn} trains no special token after its words: nothing would stop"
            )
        elif in_middle and self._markers_in(shape.tail):
            # At the end of a conversation, a template may close it as well.
            raise example.failure("end", f"turn {turn} trains only a part of its end")
        return shape

    def _learn_shortest(self, shape: TurnShape) -> TurnShape:
        """The shape with the opening of turns that begin with reasoning or a call."""
        for name in ("reasoning", "tool call"):
            found = render_one(self.template, stored("optional")[name], self.policy)
            if isinstance(found, str):
                continue
            turn = len(found.roles) - 1
            opening = found.ids[found.bounds[turn] : found.trained_span(turn)[0]]
            beginning = shape.opening[: len(opening)]
            if 0 < len(opening) < len(shape.shortest) and np.array_equal(opening, beginning):
                shape = replace(shape, shortest=opening)
        return shape

    def _check_untrained(self, example: ProofExample) -> None:
        """Nothing is trained where nothing should be."""
        if example.mask[: example.bounds[0]].any():
            raise example.failure("untrained", "something is trained before the first turn")
        for turn, wanted in enumerate(example.wanted):
            start, stop = example.bounds[turn : turn + 2]
            self.counts["untrained turns"] += wanted is False
            if wanted is False and example.mask[start:stop].any():
                who = ROLES[example.roles[turn]]
                raise example.failure(
                    "untrained", f"turn {turn} is the {who}'s and must not be trained, but is"
                )

    def _check_openings(self, example: ProofExample, shape: TurnShape) -> None:
        """No other turn opens like the assistant's, or no model could tell who speaks."""
        size = len(shape.shortest)
        for turn, role in enumerate(example.roles):
            start = example.bounds[turn]
            same = np.array_equal(example.ids[start : start + size], shape.shortest)
            if size and same and role != ASSISTANT:
                raise example.failure(
                    "opening", f"turn {turn} is the {ROLES[role]}'s, but opens like the assistant's"
                )

    def _check_texts(self, example: ProofExample) -> None:
        """Each turn holds its own texts and no other's."""
        texts = [(message.text or "").strip() for message in example.checked]
        for turn, group in enumerate(example.groups):
            read = self.reader.readings(example.ids, *example.bounds[turn : turn + 2])
            own = "".join(texts[at] for at in group)
            for at, text in enumerate(texts):
                there = any(s in r for s in self.reader.spellings(text) for r in read)
                if at in group and not there:
                    raise example.failure("texts", f"turn {turn} does not hold {text!r}")
                foreign = at not in group and group and text not in own
                if foreign and len(text) > 4 and there and not example.conversation.tools:
                    raise example.failure("texts", f"turn {turn} holds {text!r} of another turn")
            self.counts["turns with their texts"] += bool(group)

    def _check_answer(self, example: ProofExample, turn: int, shape: TurnShape) -> None:
        first, last = example.trained_span(turn)
        message = example.checked[example.groups[turn][-1]]
        text = message.text or ""
        if first == last:
            if message.calls or message.reasoning or text.strip() or shape.end:
                raise example.failure("words", f"turn {turn} must be trained, and is not")
            return  # nothing was said, and ends are not trained
        start, stop = example.bounds[turn : turn + 2]
        follows_tool = turn > 0 and example.roles[turn - 1] == TOOL
        is_free = self.has_blocks or (self.is_jinja and follows_tool)  # by its prompt, and no other
        openings = [shape.opening]
        begins = np.array_equal(example.ids[start : start + len(shape.opening)], shape.opening)
        if (message.calls or message.reasoning) and not begins:
            openings.append(shape.shortest)
        fits = any(np.array_equal(example.ids[start:first], one) for one in openings)
        if not is_free and not fits:
            found, wanted = map(self.reader.text, (example.ids[start:first], shape.opening))
            raise example.failure(
                "opening", f"turn {turn} is trained after {found!r}: wanted {wanted!r}"
            )
        self.counts["trained answers"] += 1
        if message.calls or message.reasoning:
            self._check_parts(example, turn, message, shape)
            return
        read = self.reader.readings(example.ids, first, last)
        said = self.reader.spellings(text)
        trims = [
            name
            for name in self.trims
            if self._fits(shape, read, self.reader.spellings(TRIMS[name](text)))
        ]
        if self.learns and trims:
            self.trims = trims  # one way for the whole template
        if not trims:
            raise example.failure(
                "words", f"turn {turn} trains {read[0]!r}: wanted {said[0] + shape.end!r}"
            )
        markers = self._markers_in(example.ids[first:last])
        if markers not in (shape.markers, shape.end_markers) and not self.has_blocks:
            raise example.failure(
                "markers", f"turn {turn} trains the markers {markers}: its words became structure"
            )
        self.counts["words"] += 1
        if not np.array_equal(example.ids[last:stop], shape.tail):
            found, wanted = map(self.reader.text, (example.ids[last:stop], shape.tail))
            raise example.failure(
                "end", f"turn {turn} is trained up to {found!r}: wanted up to {wanted!r}"
            )

    def _check_parts(
        self, example: ProofExample, turn: int, message: CheckedMessage, shape: TurnShape
    ) -> None:
        """Reasoning, words and calls: all in the trained part, in this order."""
        first, last = example.trained_span(turn)
        read = self.reader.readings(example.ids, first, last)[-1]
        at = 0
        names = [text.split('"')[3] for text in message.calls]
        for part in (message.reasoning.strip(), (message.text or "").strip(), *names):
            found = read.find(part, at)
            if found < 0:
                raise example.failure("words", f"turn {turn} trains {read!r}, without {part!r}")
            at = found + len(part)
        if message.text is None and "None" in read:
            raise example.failure("words", f"turn {turn} has no text, but trains {read!r}")
        ends = example.ids[last - 1] in self.template.marker_ids or read.endswith(shape.end)
        if shape.markers and not ends:
            raise example.failure("end", f"turn {turn} trains {read!r}, without its end")
        self.counts["calls and reasoning"] += 1

    def _check_other(self, example: ProofExample, turn: int) -> None:
        """A trained turn that is not the assistant's: its words come first, those of the user; a
        template may frame what a tool or the system says, and trains the frame with it."""
        first, last = example.trained_span(turn)
        text = example.checked[example.groups[turn][0]].text or ""
        read = self.reader.readings(example.ids, first, last)
        if example.roles[turn] == USER:
            right = any(found.lstrip().startswith(text.strip()) for found in read)
        else:
            right = any(text.strip() in found for found in read)
        if not right or (first == last and text.strip()):
            raise example.failure("words", f"turn {turn} trains {read[0]!r}: wanted {text!r} first")
        self.counts["other trained turns"] += 1

    def _check_prefixes(self, example: ProofExample, needed: bool) -> None:
        """The first messages alone are rendered as they are in the whole. A policy that trains the
        last answer only does not need that; a Jinja template compares prompts when it renders."""
        if self.policy.train_on == "last-assistant" or self.is_jinja:
            return
        shared = {at for group in example.groups for at in group[:-1]}
        for stop in range(1, len(example.checked)):
            part = replace(example.conversation, messages=example.conversation.messages[:stop])
            found: ProofExample | str = "shared turn"
            if stop - 1 not in shared:
                found = render_one(self.template, part, self.policy)
            if isinstance(found, str):
                if needed and found not in ("no_assistant", "nothing_trained"):
                    raise example.failure(
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
            # A policy that looks at later turns may train other turns of the first messages alone.
            if found.wanted == example.wanted[:turns]:
                same = same and np.array_equal(found.mask, example.mask[:size])
            if not same:
                raise example.failure(
                    "prefix", f"the first {stop} messages alone are rendered differently"
                )
