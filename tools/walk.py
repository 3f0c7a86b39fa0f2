"""Which files and functions does one piece of data pass?

    python tools/walk.py [build|read|stream|chat ...]

Runs a script of `tools/walks/` with a profile hook on every thread and prints each file of the
package in the order of first use, with the functions that were called in it, then one line of
totals. Imports do not count. The way of one document should be short, one-way, and readable from
the file names alone: run this before and after code is moved.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = tuple(f"{ROOT / name}/" for name in ("shardmill", "niels_gpt"))
UNNAMED = {"<module>", "<lambda>", "<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>"}


def walk(script: Path) -> dict[str, list[str]]:
    """{file: functions}, both in the order of their first call, while `script` runs."""
    seen: dict[str, list[str]] = {}

    def hook(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or code.co_name in UNNAMED or not code.co_filename.startswith(PACKAGES):
            return
        caller = frame.f_back.f_code if frame.f_back is not None else None
        if caller and caller.co_name == "<module>" and caller.co_filename.startswith(PACKAGES):
            return  # runs while a module is imported
        functions = seen.setdefault(code.co_filename, [])
        if code.co_qualname not in functions:
            functions.append(code.co_qualname)

    names = {"hook": hook, "__name__": "__main__", "__file__": str(script)}
    source = compile(script.read_text(), str(script), "exec")
    threading.setprofile(hook)
    sys.setprofile(hook)
    try:
        exec(source, names)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return seen


def main() -> None:
    scripts = {path.stem: path for path in sorted((ROOT / "tools/walks").glob("*.py"))}
    if len(sys.argv) != 2:  # each in a separate process: a module is imported once
        for name in sys.argv[1:] or scripts:
            subprocess.run([sys.executable, __file__, name], check=True, cwd=ROOT)
        return
    sys.path.insert(0, str(ROOT))
    seen = walk(scripts[sys.argv[1]])
    files = [Path(name).relative_to(ROOT) for name in seen]
    for number, (file, functions) in enumerate(zip(files, seen.values(), strict=True), 1):
        more = " ..." if len(functions) > 8 else ""
        print(f"{number:3d} {file}: {', '.join(functions[:8])}{more}")
    total = sum(map(len, seen.values()))
    folders = len({file.parent for file in files})
    print(f"{sys.argv[1]}: {folders} folders, {len(files)} files, {total} functions")


if __name__ == "__main__":
    main()
