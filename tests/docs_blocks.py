"""The fenced blocks of a page: found, taken apart, and their outputs compared.

In: a Markdown file.  Out: its blocks, in order; whether an output is the one a block shows.
Promise: every fence is found, whatever its language. A language that is not in `LANGUAGES` has no
meaning here, and a test refuses it.
Not here: running them (docs_run.py).

    python   run, one after the other, in one folder with the names of those before
    sh       run by bash, which stops at the first command that fails; it begins where the one
             before ended
    console  lines that begin with "$ " are run one by one; what follows is what they print
    output   what the block before printed to stdout: see `same_output`
    bash     a script for elsewhere: read by bash, not run
    toml, json, yaml, dockerfile   parsed
    text     not code; a line that is a command is refused

A block with a title that is a file name (```toml title="train.toml") is also written to that file.
`python tests/docs_blocks.py PAGE` prints a page as one shell script.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(
    r'^(?P<indent> *)```(?P<language>[^\n`"]*?)(?: title="(?P<title>[^"\n]*)")?\n'
    r"(?P<body>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
LANGUAGES = frozenset(
    ["python", "sh", "console", "output", "bash", "toml", "json", "yaml", "dockerfile", "text"]
)
NUMBERS_DIFFER = "numbers differ"
"""Title of an output whose numbers depend on the machine or on the version of something."""
UNTIL_STOPPED = "until Ctrl-C"
"""Title of a command that runs until it is stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int  # of its fence, from 1
    language: str
    title: str  # "" when there is none
    body: str

    @property
    def file(self) -> str:
        """The file it is written to; "" when its title is no file name."""
        return self.title if re.fullmatch(r"[\w/-]+\.\w+", self.title) else ""

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line} ({self.language})"


def blocks_of(page: Path) -> list[Block]:
    """All blocks of a page, in order."""
    text = page.read_text("utf-8")
    return [
        Block(
            page=page,
            line=text.count("\n", 0, found.start()) + 1,
            language=found["language"],
            title=found["title"] or "",
            body=re.sub(f"^{found['indent']}", "", found["body"], flags=re.MULTILINE),
        )
        for found in FENCE.finditer(text)
    ]


def console_parts(body: str) -> list[tuple[str, str]]:
    """(command, what it prints) of a console block; "" when nothing is shown."""
    parts: list[tuple[str, list[str]]] = []
    for line in body.splitlines():
        if line.startswith("$ "):
            parts.append((line.removeprefix("$ "), []))
        else:
            assert parts, f"a console block begins with {line!r}, not with a command"
            parts[-1][1].append(line)
    return [(command, "\n".join(lines)) for command, lines in parts]


def commands_in(body: str) -> list[str]:
    """Lines of a block that is no code which look like commands all the same."""
    found = re.findall(r"^(?:\$ )?((?:shardmill|python|pip|make|git) .*)$", body, re.MULTILINE)
    return [line for line in found if not line.startswith("make ") or "=" not in line]


def same_output(shown: str, printed: str, *, numbers_differ: bool = False) -> bool:
    """Whether this was printed. White space at the ends of lines does not count.

    A line of `...` stands for any lines, none included, and `...` in a line for any text of it.
    With `numbers_differ` a number stands for any other, and a hash for any other.
    """
    pattern = "\n".join(_pattern(line, numbers_differ) for line in _lines(shown))
    pattern = pattern.replace("\n<any lines>\n", "\n(?:.*\n)*").replace(
        "\n<any lines>", "(?:\n.*)*"
    )
    pattern = pattern.replace("<any lines>\n", "(?:.*\n)*")
    return re.fullmatch(pattern, "\n".join(_lines(printed))) is not None


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").splitlines()]


def _pattern(line: str, numbers_differ: bool) -> str:
    if line.strip() == "...":
        return "<any lines>"
    parts = [re.escape(part) for part in line.split("...")]
    if numbers_differ:
        parts = [_free(part) for part in parts]
    return ".*".join(parts)


def _free(part: str) -> str:
    """An escaped text in which hashes, numbers and the spaces that line them up are free."""
    part = re.sub(r"\b[0-9a-f]{16,64}\b", "<hash>", part)
    part = re.sub(r"-?\d[\d,]*(?:\\\.\d+)?", "<number>", part)
    part = re.sub(r"(?:\\ )+", r"\\ +", part)
    part = re.sub(r"(?:─|━)+", lambda rule: f"{rule.group()[0]}+", part)
    return part.replace("<hash>", "[0-9a-f]{16,64}").replace("<number>", r"-?\d[\d,]*(?:\.\d+)?")


def script_of(page: Path) -> str:
    """The page as one shell script: its commands, its files and its programs, in order. What runs
    until it is stopped is left out."""
    parts = []
    for block in blocks_of(page):
        if block.language == "sh" and block.title != UNTIL_STOPPED:
            parts.append(block.body)
        elif block.file:
            parts.append(f"cat > {block.file} <<'END_OF_BLOCK'\n{block.body}END_OF_BLOCK\n")
        elif block.language == "python":
            parts.append(f"python - <<'END_OF_BLOCK'\n{block.body}END_OF_BLOCK\n")
    return "".join(parts)


if __name__ == "__main__":
    print(script_of(Path(sys.argv[1])), end="")
