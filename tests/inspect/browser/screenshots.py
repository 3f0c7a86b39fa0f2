"""`make screenshots`: the pictures of the docs, from a made-up corpus.

In: nothing.  Out: docs/images/*.png, of fixed sizes.
Promise: no picture holds anything but what corpus.py made.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.inspect.browser.corpus import build_world
from tests.inspect.browser.session import running_browser, running_view, set_size, set_theme

IMAGES = Path(__file__).resolve().parents[3] / "docs" / "images"
WIDE, PHONE = (1280, 800), (390, 844)
MOST_BYTES = 250_000
READY = """return document.querySelector('[aria-busy]') === null
    && document.querySelector('.waiting') === null && document.querySelector('#view h1') !== null"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shot:
    """One picture."""

    name: str
    route: str
    size: tuple[int, int] = WIDE
    theme: str = "light"
    then: str = ""  # a script that runs before it is taken


CHOOSE = "document.querySelectorAll('.tokens .trained')[5].click(); scrollTo(0, 0)"
SHOTS = [
    Shot(name="overview", route="#/0/overview"),
    Shot(name="documents", route="#/0/documents?split=train"),
    Shot(name="tokens", route="#/2/document/3?split=train", then=CHOOSE),
    Shot(name="chat", route="#/2/document/5?split=train&look=chat"),
    Shot(name="plan", route="#/2/plan/train-first-fit?sort=waste"),
    Shot(name="mixture", route="#/mixture?samples=1000&points=100"),
    Shot(
        name="step",
        route="#/0/step?split=train&step=31&rank=1&world=2&batch_size=4&seq_len=128&seed=7"
        "&shuffle=global&documents=1",
        then=CHOOSE,
    ),
    Shot(name="tokens-dark", route="#/2/document/5?split=train", theme="dark", then=CHOOSE),
    Shot(name="phone", route="#/2/document/3?split=train", size=PHONE, then=CHOOSE),
]


def take(driver, url: str, shot: Shot, out: Path) -> int:
    from selenium.webdriver.support.ui import WebDriverWait

    set_size(driver, *shot.size)
    set_theme(driver, shot.theme)
    driver.get("about:blank")
    driver.get(url + shot.route)
    WebDriverWait(driver, 600).until(lambda one: one.execute_script(READY))
    driver.execute_script(shot.then)
    path = out / f"{shot.name}.png"
    path.write_bytes(driver.get_screenshot_as_png())
    return path.stat().st_size


def main(out: Path = IMAGES) -> int:
    out.mkdir(parents=True, exist_ok=True)
    # the folder is part of the pictures, so it has one name
    folder = Path(tempfile.gettempdir()) / "shardmill-world"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        world = build_world(folder)
        profile = tempfile.mkdtemp(dir=folder)
        with running_view(world.arguments()) as url, running_browser(Path(profile)) as driver:
            sizes = {shot.name: take(driver, url, shot, out) for shot in SHOTS}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for name, size in sizes.items():
        print(f"{out / name}.png: {size:,} bytes")
    large = [name for name, size in sizes.items() if size > MOST_BYTES]
    if large:
        print(f"too large: {', '.join(large)}; wanted at most {MOST_BYTES:,} bytes each")
    return 1 if large else 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
