"""How blocks of pages are read and outputs compared: the rules that the other tests rest on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.docs_blocks import blocks_of, commands_in, console_parts, same_output, script_of

PAGE = """# A page

```toml title="train.toml"
a = 1
```

1. A list:

    ```sh
    echo 1
      echo 2
    ```

```output title="numbers differ"
1
```
"""


def test_blocks_come_in_order_with_title_line_and_without_their_indent(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    found = [(b.line, b.language, b.title, b.file, b.body) for b in blocks_of(page)]
    assert found == [
        (3, "toml", "train.toml", "train.toml", "a = 1\n"),
        (9, "sh", "", "", "echo 1\n  echo 2\n"),
        (14, "output", "numbers differ", "", "1\n"),
    ]


def test_a_page_is_a_script_of_its_files_commands_and_programs(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    stopped = '```sh title="until Ctrl-C"\nsleep 1000\n```\n'
    page.write_text(f"{PAGE}\n```python\nprint(open('train.toml').read())\n```\n{stopped}")
    done = subprocess.run(
        ["bash", "-c", f'set -e\npython() {{ {sys.executable} "$@"; }}\n{script_of(page)}'],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert done.stdout == "1\n2\na = 1\n\n"


def test_a_console_block_is_commands_each_with_what_it_prints() -> None:
    body = "$ echo 1\n1\n$ true\n$ seq 2\n1\n2\n"
    assert console_parts(body) == [("echo 1", "1"), ("true", ""), ("seq 2", "1\n2")]
    with pytest.raises(AssertionError, match="begins with"):
        console_parts("1\n$ echo 1\n")


@pytest.mark.parametrize(
    ("shown", "printed", "exact", "free"),
    [
        ("a\nb", "a\nb\n", True, True),
        ("a  \nb", "a\nb  ", True, True),
        ("a\nb", "a\nc", False, False),
        ("a\nb", "a\nb\nc", False, False),
        ("a\n...\nb", "a\nb", True, True),
        ("a\n...\nb", "a\n1\n2\nb", True, True),
        ("a\n...", "a\n1\n2", True, True),
        ("...\nb", "1\n2\nb", True, True),
        ("...\nb", "1\n2\nc", False, False),
        ("a ... b", "a 1 2 b", True, True),
        ("a ... b", "a 1\n2 b", False, False),
        ("12,345 tokens in 0.5 s", "7 tokens in 1,000 s", False, True),
        ("12 tokens", "12 documents", False, False),
        ("12 tokens", "no tokens", False, False),
        ("x |  12 |", "x | 1,234 |", False, True),
        ("sha256 0123456789abcdef", "sha256 fedcba9876543210", False, True),
        ("a.b", "axb", False, False),
    ],
)
def test_an_output_is_compared_as_it_says(shown: str, printed: str, exact: bool, free: bool):
    assert same_output(shown, printed) is exact
    assert same_output(shown, printed, numbers_differ=True) is free


@given(st.text(st.characters(codec="ascii", exclude_characters="\x0b\x0c\r\x1c\x1d\x1e.<>")))
def test_every_text_is_its_own_output(text: str) -> None:
    assert same_output(text, text)
    assert same_output(text, text, numbers_differ=True)
    assert not same_output(text, f"{text}\nx")


def test_commands_in_text_are_noticed() -> None:
    body = "$ shardmill info store\nshardmill/\n  cli/\npython x.py\nmake = 1\nit makes\n"
    assert commands_in(body) == ["shardmill info store", "python x.py"]
