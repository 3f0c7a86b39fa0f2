"""Try again what may go well the next time; say plainly what will not.

In: an action that talks to a remote place.  Out: its result, or one of our errors.
Promise: lost connections, timeouts, 5xx and throttling are tried again with growing, jittered
pauses, a bounded number of times; every other error of a client comes out at once, in our words.
Not here: what is sent; a short answer must be raised as ConnectionError by the action itself.

Ask object storage again when that may help; say plainly when it will not.

In: a question to a store.  Out: its answer, or one of our errors.
Promise: lost connections, timeouts, short answers, throttling and 5xx are asked again, a bounded
number of times, after growing, jittered pauses; what no retry mends is an error at once. No error
tells a user, a password or the query of an address.
Not here: what is asked. A short answer must be raised as ConnectionError by whoever asked.
"""

from __future__ import annotations

import errno
import logging
import random
import socket
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from shardmill.errors import HubError, ShardmillError, SourceError, StoreError, StoreNotFoundError
from shardmill.threads import StoppedError, pause
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
        time.sleep(backoff_seconds(number))
    raise AssertionError("unreachable")


def client_errors() -> tuple[type[BaseException], ...]:
    """What the clients that are loaded raise."""
    return (OSError, *_classes(_CLIENTS))


def backoff_seconds(number: int) -> float:
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


Answer = TypeVar("Answer")

TRIES = 6
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 20.0
_WAIT_STATUS = (408, 425, 429)
_PASSING = {errno.EIO, errno.EREMOTEIO, errno.EBUSY, errno.EAGAIN, errno.ETIMEDOUT}
_PASSING |= {socket.EAI_AGAIN}  # a name that cannot be looked up now
_FINAL = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError)
# The clients below fsspec have errors of their own; those of a lost connection are so named.
_CLIENTS_farretry = (
    "aiohttp",
    "botocore",
    "httpx",
    "httpcore",
    "requests",
    "urllib3",
    "google",
    "azure",
)
_LOST_farretry = (
    "Connect",
    "Timeout",
    "Payload",
    "Incomplete",
    "Disconnected",
    "Protocol",
    "HTTPClient",
)


def asked(ask: Callable[[], Answer], where: str) -> Answer:
    """The answer, asked for up to `TRIES` times. `where` is for messages."""
    for number in range(1, TRIES + 1):
        try:
            return ask()
        except (ShardmillError, StoppedError):
            raise
        except Exception as error:  # noqa: BLE001 - clients raise what they like
            _bear(error, number, where)
    raise AssertionError("the last try raises")


def _bear(error: Exception, number: int, where: str) -> None:
    """Pause before the next try; or raise when there should be none."""
    said = f"{type(error).__name__}: {' '.join(str(error).split())}"
    found, cause = scrub(said)[:300], safe_cause(error)
    if not is_passing(error):
        if type(error).__module__ == "builtins" and not isinstance(error, OSError):
            raise error  # a fault of ours
        raise SourceError(f"{where}: {found}; {_remedy(error)}") from cause
    if number == TRIES:
        raise HubError(
            f"{where}: unreachable after {number} tries ({found}); when the store answers again, "
            "resume: nothing is lost"
        ) from cause
    seconds = min(FIRST_PAUSE * 2 ** (number - 1), LONGEST_PAUSE) * random.uniform(0.5, 1.5)
    logger.warning("%s: %s; try %d of %d in %.1f s", where, found, number + 1, TRIES, seconds)
    pause(seconds)


def is_passing(error: BaseException) -> bool:
    """May a later try succeed? Decided by what lies deepest under it and tells: a client may say of
    a lost connection that there is no such file."""
    causes = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    verdicts = (_verdict(link) for link in reversed(causes))
    return next((verdict for verdict in verdicts if verdict is not None), False)


def _verdict(error: BaseException) -> bool | None:
    """None: this one does not tell."""
    status = _status(error)
    if status is not None:
        return status >= 500 or status in _WAIT_STATUS
    if isinstance(error, _FINAL):
        return False
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _PASSING
    is_client = type(error).__module__.partition(".")[0] in _CLIENTS_farretry
    return (
        True if is_client and any(word in type(error).__name__ for word in _LOST_farretry) else None
    )


def _status(error: BaseException) -> int | None:
    """The HTTP status of an answer, wherever a client keeps it."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        response = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    for value in (getattr(response, "status_code", response), getattr(error, "status", None)):
        if isinstance(value, int):
            return value
    if type(error).__module__.startswith("aiohttp."):
        return None  # there a code is the parser's opinion of what it got
    code = getattr(error, "code", None)
    return code if isinstance(code, int) else None


def _remedy(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError):
        return "check the bucket and the path"
    if isinstance(error, PermissionError) or "Credentials" in type(error).__name__:
        return "check the credentials in the environment of the client, and what they allow"
    return "no retry would help: check the address, and whether the file changed"
