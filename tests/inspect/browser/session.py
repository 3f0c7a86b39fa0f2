"""A real `shardmill view`, and a real browser in front of it.

In: stores.  Out: the address; a driver.
Promise: the server is its own process and ends with the block; the browser asks nobody else:
its host rules send every other name nowhere.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

CHROMIUM, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
    "--force-color-profile=srgb",
    "--font-render-hinting=none",
    "--lang=en-US",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
]
NEEDED = os.environ.get("SHARDMILL_NEEDS_BROWSER") == "1"


def skip_without_browser() -> None:
    """Skip the test, unless this machine said that it has a browser."""
    missing = [str(path) for path in (CHROMIUM, DRIVER) if not path.exists()]
    if missing and not NEEDED:
        pytest.skip(f"no {' and no '.join(missing)}; `make browser` installs them")
    if not NEEDED:
        pytest.importorskip("selenium", reason="selenium is of the extra dev")


@contextmanager
def running_view(arguments: Sequence[str]) -> Iterator[str]:
    """The address of a server over these stores."""
    command = [sys.executable, "-m", "shardmill", "view", *arguments, "--no-open"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:"), f"`shardmill view` printed {url!r}"
        yield url.rstrip("/") + "/"
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=600)
        finally:
            process.kill()
            process.stdout.close()


@contextmanager
def running_browser(profile: Path, size: tuple[int, int] = (1280, 800)):
    """A fresh headless Chromium whose console and network are recorded."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in [*FLAGS, f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # Crash reports are not part of the profile: they go to the user's configuration.
    environ = {**os.environ, "SE_AVOID_STATS": "true", "XDG_CONFIG_HOME": str(profile / "config")}
    service = Service(executable_path=str(DRIVER), env=environ)
    driver = webdriver.Chrome(options=options, service=service)
    try:
        driver.set_page_load_timeout(600)
        driver.set_script_timeout(600)
        yield driver
    finally:
        driver.quit()


def set_size(driver, width: int, height: int) -> None:
    """The size of the page itself, narrower than any window too."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def set_theme(driver, name: str) -> None:
    """What the system prefers; nothing moves, so that what is measured does not move."""
    wanted = {"prefers-color-scheme": name, "prefers-reduced-motion": "reduce"}
    features = [{"name": one, "value": value} for one, value in wanted.items()]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
