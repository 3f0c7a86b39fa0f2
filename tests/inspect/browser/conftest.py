"""One server over a made-up world, and one browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.inspect.browser.corpus import World, build_world
from tests.inspect.browser.session import (
    running_browser,
    running_view,
    set_size,
    set_theme,
    skip_without_browser,
)


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> World:
    """Stores 0 harbour, 1 recipes, 2 chats; and 3 worn, a copy of recipes with a changed byte."""
    skip_without_browser()
    made = build_world(tmp_path_factory.mktemp("world"))
    worn = made.folder / "worn"
    shutil.copytree(made.folder / "recipes", worn)
    shard = worn / "train" / "shard_00000_001.bin"
    changed = bytearray(shard.read_bytes())
    changed[100] ^= 1
    shard.write_bytes(changed)
    return made


@pytest.fixture(scope="session")
def url(world) -> Iterator[str]:
    with running_view([*world.arguments(), str(world.folder / "worn")]) as found:
        yield found


@pytest.fixture(scope="session")
def driver(tmp_path_factory) -> Iterator[object]:
    skip_without_browser()
    with running_browser(Path(tmp_path_factory.mktemp("profile"))) as found:
        yield found


@pytest.fixture
def on(driver):
    """The page of any server. When a test ends nothing may have complained, or asked elsewhere."""
    from tests.inspect.browser.page import Page

    opened: list[Page] = []

    def of(address: str) -> Page:
        opened.append(Page(driver, address))
        return opened[-1]

    driver.get("about:blank")  # what the page of the test before still asked for is not ours
    for log in ("browser", "performance"):
        driver.get_log(log)
    set_size(driver, 1280, 800)
    set_theme(driver, "light")
    yield of
    for page in opened:
        assert page.complaints() == []
        far = [one for one in page.asked() if one.startswith(("http", "ws", "ftp"))]
        assert [one for one in far if not one.startswith(page.url)] == []
        assert far != []


@pytest.fixture
def page(on, url):
    return on(url)
