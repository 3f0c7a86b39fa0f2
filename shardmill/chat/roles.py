"""Who speaks: the one table of role names, used by everyone.

In: a role as some dataset writes it.  Out: one of `ROLES`, or None.
Promise: any case; a name that is not in the table is never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardmill.records import ROLES

ROLE_NAMES: Mapping[str, str] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "prompter": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
}
"""Every name in lower case to the role it means."""

SYSTEM, USER, ASSISTANT, TOOL = (
    ROLES.index(role) for role in ("system", "user", "assistant", "tool")
)


def normal_role(role: object) -> str | None:
    """The role a name means, in any case; None when it means none."""
    return ROLE_NAMES.get(role.lower()) if isinstance(role, str) else None
