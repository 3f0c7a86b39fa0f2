"""What a person does with the page, and sees.

In: a driver, an address.  Out: texts, numbers.
Promise: waits until the page has what is asked for, however slow the machine.
"""

from __future__ import annotations

import json
from typing import Any

from selenium.webdriver import Keys
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.actions.action_builder import ActionBuilder
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

WAIT = 600
OPENED = "return Number(document.getElementById('view').dataset.opened)"
QUIET = """return document.querySelector('[aria-busy]') === null
    && document.querySelector('.waiting') === null && document.querySelector('#view h1') !== null"""


class Page:
    """The inspector in a browser."""

    def __init__(self, driver, url: str) -> None:
        self.driver, self.url = driver, url
        self.refused: list[str] = []  # parts of addresses that may answer with an error

    def open(self, route: str) -> None:
        """Go there, as a link does if the page is loaded."""
        self.rest()
        here = self.driver.current_url
        if not here.startswith(self.url) or here == self.url + route:
            self.load(route)
            return
        before = self.run(OPENED)
        self.run("location.hash = arguments[0]", route)
        self.until(f"{OPENED} > arguments[0]", before)
        self.settled()

    def rest(self) -> None:
        """Move the pointer off everything: what is under it is pointed at."""
        builder = ActionBuilder(self.driver, duration=0)
        builder.pointer_action.move_to_location(0, 0)
        builder.perform()

    def load(self, route: str) -> None:
        """Load the page at this address again."""
        self.driver.get("about:blank")
        self.driver.get(self.url + route)
        self.settled()

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def until(self, script: str, *arguments: Any) -> Any:
        """The first true value of the script."""
        wait = WebDriverWait(self.driver, WAIT, poll_frequency=0.05)
        return wait.until(lambda one: one.execute_script(script, *arguments), script)

    def settled(self) -> None:
        self.until(QUIET)

    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map(one => one.textContent)"
        return self.run(script, selector)

    def text(self, selector: str) -> str:
        """Of the one element, as soon as there is one."""
        self.until("return document.querySelectorAll(arguments[0]).length === 1", selector)
        return self.texts(selector)[0]

    def click(self, selector: str, text: str | None = None) -> None:
        """The one element, or the one with this text."""
        found = self.driver.find_elements(By.CSS_SELECTOR, selector)
        fitting = [one for one in found if text is None or one.text.strip() == text]
        assert len(fitting) == 1, f"{selector} {text!r}: {len(fitting)} of {len(found)}"
        self.run("arguments[0].scrollIntoView({block: 'center'})", fitting[0])
        fitting[0].click()
        # a click may change the address, and the page hears of that a little later
        self.driver.execute_async_script("setTimeout(arguments[0], 50)")
        self.settled()

    def hover(self, selector: str, number: int) -> None:
        found = self.driver.find_elements(By.CSS_SELECTOR, selector)[number]
        self.run("arguments[0].scrollIntoView({block: 'center'})", found)
        ActionChains(self.driver).move_to_element(found).perform()

    def write(self, selector: str, text: str) -> None:
        found = self.driver.find_element(By.CSS_SELECTOR, selector)
        found.clear()
        found.send_keys(text + Keys.ENTER)
        self.settled()

    def press(self, *keys: str) -> None:
        ActionChains(self.driver).send_keys(*keys).perform()

    def facts(self, selector: str = ".details .facts") -> dict[str, str]:
        names = self.texts(f"{selector} dt")
        return dict(zip(names, self.texts(f"{selector} dd"), strict=True))

    def table(self, caption: str) -> list[list[str]]:
        """Cells of the table with this caption, row by row."""
        return self.run(
            """const found = [...document.querySelectorAll('#view table')].filter(
                one => one.caption?.textContent === arguments[0]);
            return [...found[0].tBodies[0].rows].map(
                row => [...row.cells].map(cell => cell.textContent))""",
            caption,
        )

    def tokens(self, within: str = "#view") -> list[tuple[int, bool]]:
        """Id of every box, and whether it is marked as trained."""
        script = """return [...document.querySelectorAll(arguments[0] + ' .tokens .token')]
            .map(one => [Number(one.dataset.id), one.classList.contains('trained')])"""
        return [(number, trained) for number, trained in self.run(script, within)]

    def complaints(self) -> list[str]:
        """What the console complained of, but for refusals that were expected."""
        found = [entry["message"] for entry in self.driver.get_log("browser")]
        return [one for one in found if not any(part in one for part in self.refused)]

    def told(self, name: str, value: str) -> dict[str, str]:
        """The facts about a token, as soon as they are these."""
        self.until(
            """return [...document.querySelectorAll('.details dt')].some(one =>
            one.textContent === arguments[0] && one.nextSibling.textContent === arguments[1])""",
            *(name, value),
        )
        return self.facts()

    def asked(self) -> list[str]:
        """Every address that was asked for."""
        events = [
            json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")
        ]
        sent = [one for one in events if one["method"] == "Network.requestWillBeSent"]
        return [one["params"]["request"]["url"] for one in sent]
