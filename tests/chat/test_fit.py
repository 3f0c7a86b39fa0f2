"""Rows of one length: what is left out, what is trained, what is counted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.chat.fit import (
    FIT_REASONS,
    FIT_SENTENCES,
    Fit,
    FitCounts,
    FittedRows,
    fit_rows,
)
from shardmill.errors import OptionError
from shardmill.records import ROLES, ChatExamples, Ragged, next_token_pairs

PAD = 9


def examples_of(*chats: str) -> ChatExamples:
    """One token a letter; a turn is "role:words", its opening is the role's capital.

    Words in capitals are trained; letters before the first "|" are the prefix:
    "b|user:hi,|assistant:YO.|tool:x,", where "." is an end that is trained and "," one that is not.
    A role in capitals has a trained opening.
    """
    ids: list[list[int]] = []
    mask: list[bool] = []
    starts: list[int] = []
    roles: list[int] = []
    for chat in chats:
        prefix, *turns = chat.split("|")
        mine = [ord(letter) for letter in prefix]
        mask += [letter.isupper() for letter in prefix]
        for turn in turns:
            role, _, words = turn.partition(":")
            starts.append(sum(map(len, ids)) + len(mine))
            roles.append(ROLES.index(role.lower()))
            mine += [ord(letter) for letter in role[0].upper() + words]
            mask += [role.isupper(), *(letter.isupper() or letter == "." for letter in words)]
        ids.append(mine)
    return ChatExamples(
        ids=Ragged.from_sequences(ids, np.uint16),
        mask=np.array(mask, np.bool_),
        turn_starts=np.array(starts, np.int64),
        turn_roles=np.array(roles, np.uint8),
    )


def text_of(rows: FittedRows) -> list[str]:
    """The rows as letters, "_" for padding."""
    return ["".join("_" if i == PAD else chr(i) for i in row) for row in rows.ids.tolist()]


def trained_of(rows: FittedRows) -> list[str]:
    return [
        "".join(chr(i) for i, said in zip(row, mask, strict=True) if said)
        for row, mask in zip(rows.ids.tolist(), rows.mask.tolist(), strict=True)
    ]


def fitted(*chats: str, row_len: int, fit: Fit = Fit.DROP_OLDEST_TURNS) -> FittedRows:
    return fit_rows(examples_of(*chats), row_len - 1, fit=fit, pad_id=PAD)


CHAT = "b|system:s,|user:one,|assistant:ONE.|user:two,|assistant:TWO.|user:six,|assistant:SIX."
#       b  S s ,   U o n e , A O N E .    10 tokens an exchange, head 4: 34 in all


@pytest.mark.parametrize(
    ("row_len", "row"),
    [
        (34, "bSs,Uone,AONE.Utwo,ATWO.Usix,ASIX."),
        (33, "bSs,Utwo,ATWO.Usix,ASIX._________"),
        (24, "bSs,Utwo,ATWO.Usix,ASIX."),
        (23, "bSs,Usix,ASIX._________"),
        (14, "bSs,Usix,ASIX."),
        (13, "bUsix,ASIX.__"),  # the system turn goes, the prefix stays
        (11, "bUsix,ASIX."),
        (10, "bASIX.____"),  # the row begins at a turn, not inside the question
        (6, "bASIX."),
        (5, "bSIX."),
        (4, "bIX."),
        (3, "IX."),
        (2, "X."),
    ],
)
def test_oldest_exchanges_go_then_the_system_turn_then_the_question(row_len: int, row: str) -> None:
    assert text_of(fitted(CHAT, row_len=row_len)) == [row]


def test_the_mask_is_cut_with_the_ids() -> None:
    assert trained_of(fitted(CHAT, row_len=34)) == ["ONE.TWO.SIX."]
    assert trained_of(fitted(CHAT, row_len=33)) == ["TWO.SIX."]
    assert trained_of(fitted(CHAT, row_len=10)) == ["SIX."]
    assert trained_of(fitted(CHAT, row_len=4)) == ["IX."]


@pytest.mark.parametrize(
    ("chat", "row_len", "row"),
    [
        # two users in a row are one exchange with the answer after them
        ("|user:a,|assistant:B.|user:c,|user:d,|assistant:E.", 9, "Uc,Ud,AE."),
        # an assistant that speaks first is a separate exchange
        ("|assistant:A.|user:b,|assistant:C.", 8, "Ub,AC.__"),
        # a tool's answer stays with the question it was asked for
        ("|user:a,|assistant:B.|user:c,|assistant:D.|tool:e,|assistant:F.", 12, "Uc,AD.Te,AF."),
        # a system turn in the middle goes with the question after it
        ("|user:a,|assistant:B.|system:c,|user:d,|assistant:E.", 9, "Sc,Ud,AE."),
        # what follows the last trained turn goes first, and alone when that is enough
        ("|user:a,|assistant:B.|user:cccc,|assistant:dddd,", 6, "Ua,AB."),
        ("|user:a,|assistant:B.|user:c,|assistant:D.|user:eee,", 12, "Ua,AB.Uc,AD."),
        # a system turn that leaves no room for the question and its answer goes whole
        ("|system:ssssssss,|user:a,|assistant:B.|user:c,|assistant:D.", 10, "Uc,AD.____"),
        # a prefix over a quarter of the row goes when turns of the last exchange must
        ("bbb|user:aaaaaaaa,|assistant:BC.", 8, "ABC.____"),
        ("bb|user:aaaaaaaa,|assistant:BC.", 8, "bbABC.__"),
        # the untrained end of the last trained turn stays, unless it is long
        ("|user:aaa,|assistant:BC,,", 5, "ABC__"),
        ("|user:aaaaa,|assistant:BC,,", 8, "ABC,,___"),
        ("|assistant:BCDEF,,", 7, "ABCDEF_"),
        # a trained token must have one before it in the row
        ("|user:aaaa,|ASSISTANT:", 4, "aa,A"),
        ("|assistant:aaaa,|USER:", 4, "aa,U"),
        ("|system:s,|assistant:aaaa,|USER:", 4, "Ss,U"),
        # no turns at all: the last tokens
        ("abcDEF", 4, "cDEF"),
        # only the system turn is trained
        ("|system:ABCDE.|user:f,", 4, "CDE."),
    ],
)
def test_unusual_conversations_are_cut_by_the_same_rules(chat: str, row_len: int, row: str) -> None:
    assert text_of(fitted(chat, row_len=row_len)) == [row]


def test_truncate_left_keeps_the_last_tokens_up_to_the_last_trained_turn() -> None:
    chats = ("b|user:one,|assistant:ONE.|user:tail,", "b|user:x,|assistant:Y.")
    rows = fitted(*chats, row_len=8, fit=Fit.TRUNCATE_LEFT)
    assert text_of(rows) == ["ne,AONE.", "bUx,AY._"]
    assert rows.plan.counts == FitCounts(
        whole=1, truncated=1, dropped={}, tokens_kept=15, tokens_cut=9
    )


def test_truncate_right_keeps_the_start_and_drops_what_trains_nothing_there() -> None:
    chats = (
        "b|user:x,|assistant:Y.|user:z,",
        "b|user:longer,|assistant:Y.",
        "|user:x,|assistant:YYY.",
    )
    rows = fitted(*chats, row_len=7, fit=Fit.TRUNCATE_RIGHT)
    assert text_of(rows) == ["bUx,AY.", "Ux,AYYY"]
    assert trained_of(rows) == ["Y.", "YYY"]
    assert rows.plan.kept.tolist() == [0, 2]
    assert {reason: who.tolist() for reason, who in rows.plan.dropped.items()} == {
        "nothing_trained_in_row": [1]
    }
    assert rows.plan.counts == FitCounts(
        turns_dropped=1,
        truncated=1,
        dropped={"nothing_trained_in_row": 1},
        tokens_kept=14,
        tokens_cut=4,
        tokens_dropped=12,
    )


def test_drop_leaves_examples_out_and_error_raises() -> None:
    chats = ("|user:x,|assistant:Y.", "|user:longer,|assistant:Y.", "|user:long,|assistant:Y.")
    rows = fitted(*chats, row_len=7, fit=Fit.DROP)
    assert text_of(rows) == ["Ux,AY._"]
    assert rows.plan.dropped["too_long"].tolist() == [1, 2]
    assert rows.plan.counts.dropped == {"too_long": 2}
    with pytest.raises(OptionError, match=r"example 1 of this batch has 11 tokens.*7.*2 of 3"):
        fitted(*chats, row_len=7, fit=Fit.ERROR)
    assert text_of(fitted(chats[0], row_len=7, fit=Fit.ERROR)) == ["Ux,AY._"]


@pytest.mark.parametrize("fit", Fit)
def test_what_trains_nothing_is_dropped_with_a_reason(fit: Fit) -> None:
    rows = fitted("|user:x,", "A|user:b,", "", "|user:x,|assistant:Y.", row_len=6, fit=fit)
    assert rows.plan.kept.tolist() == [3]
    assert rows.plan.dropped["nothing_trained_in_row"].tolist() == [0, 1, 2]


def test_no_examples_give_no_rows() -> None:
    rows = fitted(row_len=6)
    assert rows.ids.shape == (0, 6)
    assert rows.mask.shape == (0, 6)
    assert rows.plan.counts == FitCounts(dropped={})


def test_every_policy_has_a_sentence() -> None:
    assert [str(fit) for fit in Fit] == [
        "drop-oldest-turns",
        "truncate-left",
        "truncate-right",
        "drop",
        "error",
    ]
    assert set(FIT_SENTENCES) == set(Fit)


def test_wrong_arguments_are_refused() -> None:
    examples = examples_of(CHAT)
    with pytest.raises(OptionError, match="seq_len=0"):
        fit_rows(examples, 0, pad_id=PAD)
    with pytest.raises(OptionError, match="seq_len=7"):
        fit_rows(examples, 7.0, pad_id=PAD)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="pad_id=-1"):
        fit_rows(examples, 7, pad_id=-1)
    with pytest.raises(OptionError, match="'shorten'"):
        fit_rows(examples, 7, fit="shorten", pad_id=0)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="one mask value per token"):
        fit_rows(replace(examples, mask=examples.mask[:-1]), 7, pad_id=PAD)
    with pytest.raises(OptionError, match="one role per turn"):
        fit_rows(replace(examples, turn_roles=examples.turn_roles[:-1]), 7, pad_id=PAD)


# Laws over random conversations.

words = st.text(alphabet="abXY.,", max_size=6)
roles = st.sampled_from([*ROLES, "USER", "ASSISTANT"])
turn = st.tuples(roles, words).map(":".join)
wild_chats = st.tuples(st.text(alphabet="bB", max_size=3), st.lists(turn, max_size=7)).map(
    lambda parts: "|".join([parts[0], *parts[1]])
)
batches = st.lists(wild_chats, max_size=6)
row_lens = st.integers(2, 30)


@dataclass(frozen=True)
class Chat:
    """One example apart, for the rule in plain loops."""

    ids: list[int]
    mask: list[bool]
    starts: list[int]
    roles: list[str]


def apart(examples: ChatExamples) -> list[Chat]:
    chats = []
    for begin, end in pairwise(examples.ids.offsets.tolist()):
        mine = (examples.turn_starts >= begin) & (examples.turn_starts < end)
        chats.append(
            Chat(
                ids=examples.ids.values[begin:end].tolist(),
                mask=examples.mask[begin:end].tolist(),
                starts=(examples.turn_starts[mine] - begin).tolist(),
                roles=[ROLES[role] for role in examples.turn_roles[mine].tolist()],
            )
        )
    return chats


def exchanges_of(chat: Chat) -> list[int]:
    """Where exchanges begin."""
    found = []
    before = "nobody"
    for start, role in zip(chat.starts, chat.roles, strict=True):
        first = role != "system" and not found
        again = role in ("user", "system") and before in ("assistant", "tool")
        if first or again:
            found.append(start)
        before = role
    return found


def places_by_the_rule(chat: Chat, row_len: int) -> list[int] | None:
    """Which tokens stay under drop-oldest-turns, one step after another."""
    trained = [place for place in range(1, len(chat.ids)) if chat.mask[place]]
    if not trained:
        return None
    if len(chat.ids) <= row_len:
        return list(range(len(chat.ids)))
    last = trained[-1]
    stop = min((start for start in chat.starts if start > last), default=len(chat.ids))
    if stop - last - 1 > row_len // 4:
        stop = last + 1
    before = [start for start in exchanges_of(chat) if start <= last]
    prefix = chat.starts[0] if chat.starts and chat.starts[0] <= last else 0
    if prefix > row_len // 4:
        prefix = 0
    head = before[0] if before else 0
    choices = [list(range(stop))]
    choices += [[*range(head), *range(start, stop)] for start in before]
    turns = [start for start in chat.starts if before[-1:] <= [start] and start <= last]
    choices += [[*range(prefix), *range(start, stop)] for start in turns if start >= prefix]
    choices.append([*range(prefix), *range(stop - row_len + prefix, stop)])
    for places in choices:
        if len(places) <= row_len and last in places[1:]:
            return places
    raise AssertionError("the last choice always fits")


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(batch=batches, row_len=row_lens)
def test_a_batch_follows_the_rule_step_by_step(batch: list[str], row_len: int) -> None:
    examples = examples_of(*batch)
    rows = fit_rows(examples, row_len - 1, pad_id=PAD)
    wanted = [(chat, places_by_the_rule(chat, row_len)) for chat in apart(examples)]
    good = [(chat, places) for chat, places in wanted if places is not None]
    padding = [row_len - len(places) for _, places in good]
    assert rows.plan.kept.tolist() == [
        n for n, (_, places) in enumerate(wanted) if places is not None
    ]
    assert rows.plan.lengths[rows.plan.kept].tolist() == [len(places) for _, places in good]
    assert rows.ids.tolist() == [
        [chat.ids[place] for place in places] + [PAD] * pad
        for (chat, places), pad in zip(good, padding, strict=True)
    ]
    assert rows.mask.tolist() == [
        [chat.mask[place] for place in places] + [False] * pad
        for (chat, places), pad in zip(good, padding, strict=True)
    ]


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(batch=batches, row_len=row_lens, fit=st.sampled_from(sorted(set(Fit) - {Fit.ERROR})))
def test_every_row_trains_a_label_and_every_token_is_in_one_bucket(
    batch: list[str], row_len: int, fit: Fit
) -> None:
    examples = examples_of(*batch)
    rows = fit_rows(examples, row_len - 1, fit=fit, pad_id=PAD)
    assert rows.ids.shape == rows.mask.shape == (len(rows.plan.kept), row_len)
    assert rows.ids.dtype == np.int64
    assert rows.mask[:, 1:].any(axis=1).all()
    assert not (
        rows.mask & (np.arange(row_len) >= rows.plan.lengths[rows.plan.kept][:, None])
    ).any()
    assert set(rows.plan.dropped) <= set(FIT_REASONS)
    everyone = [
        *rows.plan.kept.tolist(),
        *(n for who in rows.plan.dropped.values() for n in who.tolist()),
    ]
    assert sorted(everyone) == list(range(len(batch)))
    counts = rows.plan.counts
    assert counts.examples == len(batch)
    assert counts.dropped == {reason: len(who) for reason, who in rows.plan.dropped.items()}
    assert counts.tokens_kept == rows.plan.lengths[rows.plan.kept].sum()
    assert counts.tokens_kept + counts.tokens_cut + counts.tokens_dropped == len(
        examples.ids.values
    )
    whole = examples.ids.lengths[rows.plan.kept] == rows.plan.lengths[rows.plan.kept]
    assert counts.whole == whole.sum()


@settings(deadline=None, max_examples=80)
@given(batch=batches, row_len=row_lens, fit=st.sampled_from(sorted(set(Fit) - {Fit.ERROR})))
def test_a_batch_is_its_examples_one_by_one(batch: list[str], row_len: int, fit: Fit) -> None:
    together = fitted(*batch, row_len=row_len, fit=fit)
    alone = [fitted(chat, row_len=row_len, fit=fit) for chat in batch]
    assert together.ids.tolist() == [row for one in alone for row in one.ids.tolist()]
    assert together.mask.tolist() == [row for one in alone for row in one.mask.tolist()]
    assert together.plan.counts == sum((one.plan.counts for one in alone), FitCounts(dropped={}))


@pytest.mark.slow
@settings(deadline=None, max_examples=80)
@given(batch=batches, row_len=row_lens)
def test_the_last_trained_token_stays_under_both_policies_that_cut_on_the_left(
    batch: list[str], row_len: int
) -> None:
    examples = examples_of(*batch)
    ends = [chr(chat.ids[i]) for chat in apart(examples) for i in [_last(chat)] if i > 0]
    for fit in (Fit.DROP_OLDEST_TURNS, Fit.TRUNCATE_LEFT):
        rows = fit_rows(examples, row_len - 1, fit=fit, pad_id=PAD)
        assert [text[-1] for text in trained_of(rows)] == ends


def _last(chat: Chat) -> int:
    return max((place for place, said in enumerate(chat.mask) if said), default=-1)


@settings(deadline=None, max_examples=100)
@given(batch=batches, row_len=row_lens)
def test_labels_are_the_next_tokens_where_those_are_trained(batch: list[str], row_len: int) -> None:
    rows = fitted(*batch, row_len=row_len)
    x, y = next_token_pairs(rows.ids, rows.mask, ignore_index=-7)
    assert x.shape == y.shape == (len(rows.plan.kept), row_len - 1)
    everything = zip(rows.ids.tolist(), rows.mask.tolist(), x.tolist(), y.tolist(), strict=True)
    for row, mask, *found in everything:
        labels = [token if said else -7 for token, said in zip(row, mask, strict=True)]
        assert found == [row[:-1], labels[1:]]
    assert not any(np.shares_memory(part, rows.ids) for part in (x, y))
