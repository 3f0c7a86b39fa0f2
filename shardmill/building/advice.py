"""What to do about a Jinja template that is refused: options it is accepted with, found by trying.

Many published templates write an answer otherwise once a turn follows it, or prompt for reasoning
that they never write. The refusal then names each option that helps, and what it costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

from shardmill.chat.policy import ChatTemplate, TrainPolicy
from shardmill.chat.proof.prove import prove_mask
from shardmill.chat.template_spec import KNOWN_TEMPLATES, known_template
from shardmill.chat.token_template import bind_template
from shardmill.errors import MaskProofError, ShardmillError, TemplateError
from shardmill.protocols import ConversationSource, Tokenizer
from shardmill.records import Conversation
from shardmill.sources.fan_out import times_as_long

Reopen: TypeAlias = Callable[..., ChatTemplate]

_NO_THINKING = {"template_vars": {"enable_thinking": False}}
_ATTEMPTS: tuple[dict[str, Any], ...] = (
    {"fan_out": True},
    _NO_THINKING,
    {"any_prompt": True},
    {**_NO_THINKING, "fan_out": True},
    {"any_prompt": True, "fan_out": True},
    {"train_on_eot": False},
)
_WHY = {
    "fan_out": "each answer is an example, with everything before it",
    "template_vars": "what is said without reasoning is prompted so",
    "any_prompt": "answers may follow another text than the generation prompt",
    "train_on_eot": "no end of a turn is trained",
}
_MOST = 1000
"""How many conversations of the input are looked at."""


@contextmanager
def advised(
    reopen: Reopen,
    options: Mapping[str, Any],
    tokenizer: Tokenizer,
    source: ConversationSource,
    policy: TrainPolicy,
) -> Iterator[None]:
    """A refusal of the template inside says which other options it would be accepted with.

    reopen: opens the template with other options of Jinja templates than `options`.
    """
    try:
        yield
    except TemplateError as error:
        # Other errors, such as those of its syntax, are the same with any option.
        if not (isinstance(error, MaskProofError) or "any_prompt" in str(error)):
            raise
        lines, named = _advice(
            partial(_accepted, reopen, options, tokenizer, policy), tokenizer, source
        )
        if not lines:
            raise
        text = "\n".join(["{error}", "it is accepted with one of these instead:", *lines])
        raise type(error)(text, error=error, **named) from error


def _advice(
    accepted: Callable[[Mapping[str, Any]], ChatTemplate | None],
    tokenizer: Tokenizer,
    source: ConversationSource,
) -> tuple[list[str], dict[str, Any]]:
    """A line for each attempt that needs no more than what helps, and the options they name."""
    lines: list[str] = []
    named: dict[str, Any] = {}
    helped: list[set[str]] = []
    bundled: str | None = None
    for attempt in _ATTEMPTS:
        if any(one <= attempt.keys() for one in helped) or (helped and "train_on_eot" in attempt):
            continue
        found = accepted(attempt)
        if found is None:
            continue
        bundled = bundled or _of_the_family(tokenizer, found)
        helped.append(set(attempt))
        named |= attempt
        why = "; ".join(_WHY[name] for name in attempt)
        if "fan_out" in attempt:
            why += _cost(source)
        lines.append(f"  {' '.join(f'{{{name}}}' for name in attempt)}: {why}")
        if attempt == {"fan_out": True}:
            named["train_on"] = "last-assistant"
            lines.append("  {train_on}: only the last answer of each conversation is trained")
    if bundled is not None:
        named["template"] = bundled
        lines.append("  {template}: ours, made of tokens; trains every turn of a conversation")
    return lines, named


def _accepted(
    reopen: Reopen,
    options: Mapping[str, Any],
    tokenizer: Tokenizer,
    policy: TrainPolicy,
    attempt: Mapping[str, Any],
) -> ChatTemplate | None:
    """The template with other options, if its mask is proved with them."""
    more = dict(attempt)
    if more.pop("fan_out", False):
        policy = replace(policy, train_on="last-assistant")
    policy = replace(policy, train_on_eot=more.pop("train_on_eot", policy.train_on_eot))
    if "template_vars" in more:
        more["template_vars"] = {**options.get("template_vars", {}), **more["template_vars"]}
    try:
        template = reopen(**{**options, **more})
        prove_mask(template, tokenizer, policy)
    except TemplateError:
        return None
    return template


def _cost(source: ConversationSource) -> str:
    """How many times the tokens, by the characters of the first conversations."""
    batches = source.batches()
    try:
        first = list(islice((one for batch in batches for one in batch.conversations), _MOST))
    except ShardmillError:  # the build says what is wrong with the input
        return ""
    if not first:
        return ""
    return (
        f" ({times_as_long(first):.1f} times the tokens of the first {len(first):,} conversations)"
    )


_TALK = Conversation(
    messages=[
        {"role": "user", "content": "asked"},
        {"role": "assistant", "content": "answered"},
    ]
)


def _of_the_family(tokenizer: Tokenizer, template: ChatTemplate) -> str | None:
    """A known template that writes a question and its answer as this one does."""
    policy = TrainPolicy(train_on="last-assistant", train_on_eot=False)
    own = template.render([_TALK], policy).examples.ids.values.tolist()
    for name in KNOWN_TEMPLATES:
        try:
            found = bind_template(known_template(name), tokenizer).render([_TALK], policy).examples
        except ShardmillError:  # the tokenizer lacks its markers
            continue
        if not found.mask.any():
            continue
        asked, stop = int(found.turn_starts[-2]), int(found.mask.nonzero()[0][-1]) + 1
        wanted = found.ids.values[asked:stop].tolist()
        if any(own[at : at + len(wanted)] == wanted for at in range(len(own))):
            return name
    return None
