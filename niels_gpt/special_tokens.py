"""The four strings of the recipe's chat format. Their ids are consecutive, in this order."""

from __future__ import annotations

SYS = "<|ngpt_sys_84a5023f67d74cf29cc4001becde983c|>"
USR = "<|ngpt_usr_84a5023f67d74cf29cc4001becde983c|>"
ASST = "<|ngpt_asst_84a5023f67d74cf29cc4001becde983c|>"
EOT = "<|ngpt_eot_84a5023f67d74cf29cc4001becde983c|>"

SPECIAL_TOKENS: dict[str, str] = {"sys": SYS, "usr": USR, "asst": ASST, "eot": EOT}
"""Name to string, in the order of the ids."""

ROLE_NAMES = {"system": "sys", "user": "usr", "assistant": "asst"}
"""Role of a message to the name of the token that opens it."""

__all__ = ["ASST", "EOT", "ROLE_NAMES", "SPECIAL_TOKENS", "SYS", "USR"]
