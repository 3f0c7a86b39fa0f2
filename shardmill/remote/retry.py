"""Try again what may go well the next time; say plainly what will not.

In: an action that talks to a remote place.  Out: its result, or one of our errors.
Promise: lost connections, timeouts, 5xx and throttling are tried again with growing, jittered
pauses, a bounded number of times; every other error of a client comes out at once, in our words.
Not here: what is sent; a short answer must be raised as ConnectionError by the action itself.
"""

from __future__ import annotations

import errno
import logging
import random
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from shardmill.errors import ShardmillError, StoreError, StoreNotFoundError
from shardmill.urls import safe_cause, scrub

T = TypeVar("T")
logger = logging.getLogger(__name__)

ATTEMPTS = 5
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 20.0
_TRANSIENT_ERRNO = {errno.EIO, errno.EREMOTEIO, errno.EBUSY, errno.EAGAIN, errno.ETIMEDOUT}
_TRANSIENT_CODES = {
    *("SlowDown", "Throttling", "RequestTimeout", "InternalError", "ServiceUnavailable"),
    *("IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch", "RequestTimeTooSkewed"),
}
# clients raise classes of their own; they are looked up only where they are already imported
_CLIENTS = {"botocore.exceptions": ("BotoCoreError", "ClientError"), "aiohttp": ("ClientError",)}
_LOST = {
    "botocore.exceptions": ("HTTPClientError", "IncompleteReadError", "ResponseStreamingError"),
    "aiohttp": ("ClientError",),
}


def attempt(what: str, action: Callable[[], T]) -> T:
    """The result of `action`, tried up to `ATTEMPTS` times. `what` is for messages."""
    for number in range(1, ATTEMPTS + 1):
        try:
            return action()
        except ShardmillError:
            raise
        except client_errors() as error:
            if not is_transient(error):
                raise explained(what, error) from safe_cause(error)
            if number == ATTEMPTS:
                raise StoreError(
                    f"{what}: gave up after {ATTEMPTS} tries: {_words(error)}; look at the "
                    "connection, then do the same again: what has arrived is kept"
                ) from safe_cause(error)
            logger.debug("%s: try %d failed: %s", what, number, _words(error))
        except (NotImplementedError, ValueError) as error:  # an archive, a web server
            raise StoreError(
                f"{what}: this kind of place cannot do that: {_words(error)}; take one that can be "
                "read, written and listed"
            ) from safe_cause(error)
        time.sleep(pause(number))
    raise AssertionError("unreachable")


def client_errors() -> tuple[type[BaseException], ...]:
    """What the clients that are loaded raise."""
    return (OSError, *_classes(_CLIENTS))


def pause(number: int) -> float:
    """Seconds before the try after try `number`: doubling, and never two machines in step."""
    longest = _FIRST_PAUSE * float(2 ** (number - 1))
    return min(longest, _LONGEST_PAUSE) * random.uniform(0.5, 1.5)


def is_transient(error: BaseException) -> bool:
    """Whether the same request may go well a moment later."""
    status = getattr(error, "status", None)  # of a web server; 0: it sent us in a circle
    if isinstance(status, int):
        return status >= 500 or status in (408, 425, 429)
    if isinstance(error, (ConnectionError, TimeoutError, *_classes(_LOST))):
        return True
    answer = getattr(error.__cause__ or error, "response", None)
    if isinstance(answer, dict):
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        code = answer.get("Error", {}).get("Code", "")
        return status >= 500 or status == 429 or code in _TRANSIENT_CODES
    return isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNO


def explained(what: str, error: BaseException) -> StoreError:
    """An error that no second try will mend."""
    if isinstance(error, FileNotFoundError):
        return StoreNotFoundError(f"{what}: not there: {_words(error)}; check bucket and path")
    if type(error).__name__ == "TooManyRedirects":
        return StoreError(f"{what}: the server redirects in a circle; check the URL")
    if isinstance(error, PermissionError) or getattr(error, "status", None) in (401, 403):
        return StoreError(f"{what}: not allowed: {_words(error)}; check the credentials")
    if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError"):
        return StoreError(
            f"{what}: no credentials: {_words(error)}; set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        )
    return StoreError(f"{what}: {_words(error)}")


def _words(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return scrub(" ".join(text.split()))[:300]


def _classes(table: dict[str, tuple[str, ...]]) -> tuple[type[BaseException], ...]:
    loaded = [(sys.modules.get(module), names) for module, names in table.items()]
    return tuple(getattr(module, name) for module, names in loaded if module for name in names)
