"""Which turns are trained: the one place for this rule.

In: who speaks in each turn, where conversations begin, the messages' own flags, a policy.
Out: one bool per turn.
Promise: a message's own flag is stronger than the policy.
Not here: which tokens of a trained turn are trained (assemble.py, for templates made of tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import numpy as np

from shardmill.chat.contract import TrainOn, TrainPolicy
from shardmill.chat.roles import ASSISTANT
from shardmill.errors import OptionError
from shardmill.records import BoolArray, IntArray


def check_policy(policy: TrainPolicy) -> None:
    """OptionError for a policy that is none."""
    known = get_args(TrainOn)
    if policy.train_on not in known:
        raise OptionError(f"train_on={policy.train_on!r}: wanted one of {', '.join(known)}")
    if not isinstance(policy.train_on_eot, bool):
        raise OptionError(f"train_on_eot={policy.train_on_eot!r}: wanted True or False")


def trained_turns(
    roles: IntArray, bounds: IntArray, flags: Sequence[tuple[int, bool]], policy: TrainPolicy
) -> BoolArray:
    """True for each turn that is trained.

    roles: (turns,) places in ROLES.  bounds: (n + 1,) conversation c is turns
    bounds[c]..bounds[c + 1].  flags: (turn, its own "train") of those that have one.
    """
    check_policy(policy)
    trained: BoolArray
    if policy.train_on == "all":
        trained = np.ones(len(roles), np.bool_)
    else:
        trained = roles == ASSISTANT
    if policy.train_on == "last-assistant":
        turns = np.flatnonzero(trained)
        owner = np.searchsorted(bounds, turns, side="right")
        trained[turns[:-1][owner[:-1] == owner[1:]]] = False
    for turn, wanted in flags:
        trained[turn] = wanted
    return trained
