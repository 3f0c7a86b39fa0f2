"""Ask object storage again when that may help; say plainly when it will not.

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
from collections.abc import Callable
from typing import TypeVar

from shardmill.ahead import StoppedError, pause
from shardmill.errors import HubError, ShardmillError, SourceError
from shardmill.urls import safe_cause, scrub

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

TRIES = 6
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 20.0
_WAIT_STATUS = (408, 425, 429)
_PASSING = {errno.EIO, errno.EREMOTEIO, errno.EBUSY, errno.EAGAIN, errno.ETIMEDOUT}
_PASSING |= {socket.EAI_AGAIN}  # a name that cannot be looked up now
_FINAL = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError)
# The clients below fsspec have errors of their own; those of a lost connection are so named.
_CLIENTS = ("aiohttp", "botocore", "httpx", "httpcore", "requests", "urllib3", "google", "azure")
_LOST = ("Connect", "Timeout", "Payload", "Incomplete", "Disconnected", "Protocol", "HTTPClient")


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
    is_client = type(error).__module__.partition(".")[0] in _CLIENTS
    return True if is_client and any(word in type(error).__name__ for word in _LOST) else None


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
