"""The one retry policy for everything that goes over a network.

Lost connections, timeouts, short answers, throttling and 5xx are retried five times in a row, after
pauses of about 0.5, 1, 2, 4 and 8 seconds. Any other failure is raised at once as one of our
errors. No message shows a user, a password or the query of a URL.
"""

from __future__ import annotations

import errno
import logging
import random
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from shardmill.errors import HubError, ShardmillError, SourceError, StoreError, StoreNotFoundError
from shardmill.threads import StoppedError, pause
from shardmill.urls import safe_cause, scrub

T = TypeVar("T")
logger = logging.getLogger(__name__)

MAX_RETRIES = 5
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0  # seconds

_TRANSIENT_STATUS = (408, 425, 429)
_TRANSIENT_CODES = {  # of S3, which sends them with a status of 400 or 403
    *("Throttling", "RequestTimeout", "RequestTimeTooSkewed"),
    *("IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch"),
}
_TRANSIENT_ERRNO = {
    *(errno.EIO, errno.EREMOTEIO, errno.EBUSY, errno.EAGAIN, errno.ETIMEDOUT),
    socket.EAI_AGAIN,  # a name that cannot be looked up now
}
# Clients raise their own classes. Those of a lost connection have one of these words in their name.
_CLIENTS = {
    *("aiohttp", "botocore", "httpx", "httpx2", "httpcore", "requests", "urllib3"),
    *("google", "azure"),
}
_LOST = (
    *("Connect", "Timeout", "Transport", "Protocol", "Disconnected", "HTTPClient"),
    *("Payload", "Incomplete", "Chunked"),
)
# Of the built-in errors, clients raise these; any other is a mistake in our own code.
_OF_CLIENTS = (OSError, EOFError, ValueError, RuntimeError)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often to retry, and how long to wait: delay, 2 delay, 4 delay, ... up to a minute."""

    max_retries: int | None = None  # in a row; None: MAX_RETRIES
    delay: float | None = None  # seconds; None: FIRST_PAUSE

    def call(
        self,
        action: Callable[[], T],
        what: str,
        *,
        raises: type[SourceError] | type[StoreError] = SourceError,
    ) -> T:
        """The result of `action`. `what` names it in messages; a failure is raised as `raises`.

        A short answer must be raised by `action` as a ConnectionError.
        """
        failures = 0
        while True:
            try:
                return action()
            except Exception as error:  # noqa: BLE001 - clients raise what they like
                failures += 1
                self.wait_or_raise(error, failures, what, raises=raises)

    def wait_or_raise(
        self,
        error: Exception,
        failures: int,
        what: str,
        *,
        progress: str = "",
        raises: type[SourceError] | type[StoreError] = SourceError,
    ) -> None:
        """Pause before the next try, or raise if there should be none.

        `failures` counts this error and those directly before it; `progress` says what was done so
        far.
        """
        is_ours = isinstance(error, ShardmillError | StoppedError)
        is_builtin = type(error).__module__ == "builtins"
        if is_ours or (is_builtin and not isinstance(error, _OF_CLIENTS)):
            raise error
        text = " ".join(str(error).split())
        found = scrub(f"{type(error).__name__}: {text}")[:300]
        done = f"{progress}; " if progress else ""
        if not is_transient(error):
            kind: type[ShardmillError] = raises
            if raises is StoreError and isinstance(error, FileNotFoundError):
                kind = StoreNotFoundError
            raise kind(f"{what}: {found}; {done}{_remedy(error)}") from safe_cause(error)
        max_retries = MAX_RETRIES if self.max_retries is None else self.max_retries
        if failures > max_retries:
            kind = HubError if raises is SourceError else raises
            raise kind(
                f"{what}: unreachable after {failures} tries ({found}); {done}when it answers "
                "again, resume or do the same again: nothing is lost"
            ) from safe_cause(error)
        seconds = self.backoff_seconds(failures)
        logger.warning(
            "%s: %s; try %d of %d in %.1f s", what, found, failures + 1, max_retries + 1, seconds
        )
        pause(seconds)

    def backoff_seconds(self, failures: int) -> float:
        """The pause after a number of failures. Jittered, so that workers do not retry in step."""
        delay = FIRST_PAUSE if self.delay is None else self.delay
        return float(min(delay * 2 ** (failures - 1), LONGEST_PAUSE) * random.uniform(0.5, 1.5))


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed later.

    Decided by the first error in the chain of causes that has an HTTP status or is a lost
    connection: a client may report a lost connection as a missing file. The error number of the
    system decides only if there is none, since clients use EIO for whatever they do not know.
    """
    for link in _chain(error):
        status, code = _status_and_code(link)
        if status is not None:
            return status >= 500 or status in _TRANSIENT_STATUS or code in _TRANSIENT_CODES
        if type(link).__name__ == "OfflineModeIsEnabled":  # of the hub client: a ConnectionError
            return False
        if isinstance(link, ConnectionError | TimeoutError) or _is_lost_connection(link):
            return True
    return any(
        isinstance(link, OSError) and link.errno in _TRANSIENT_ERRNO for link in _chain(error)
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__


def _is_lost_connection(error: BaseException) -> bool:
    names = [
        kind.__name__
        for kind in type(error).__mro__
        if kind.__module__.partition(".")[0] in _CLIENTS
    ]
    return any(word in name for name in names for word in _LOST)


def _status_and_code(error: BaseException) -> tuple[int | None, str]:
    """The HTTP status of an answer and S3's own code, wherever a client keeps them."""
    response, code = getattr(error, "response", None), ""
    if isinstance(response, dict):  # botocore
        code = str(response.get("Error", {}).get("Code", ""))
        response = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    found = [getattr(response, "status_code", response), getattr(error, "status", None)]
    if not type(error).__module__.startswith("aiohttp."):  # there, what the parser made of it
        found.append(getattr(error, "code", None))
    return next((value for value in found if isinstance(value, int)), None), code


def _remedy(error: BaseException) -> str:
    name = type(error).__name__
    if isinstance(error, FileNotFoundError):
        return "check the bucket and the path, or the name and the revision"
    if isinstance(error, PermissionError) or getattr(error, "status", None) in (401, 403):
        return "check the credentials in the environment, and what they allow"
    if "Credentials" in name:
        return "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    if name == "TooManyRedirects":
        return "the server redirects in a circle: check the URL"
    if isinstance(error, NotImplementedError | ValueError):
        return "check the name and the options; this kind of storage may not support that"
    return "no retry would help: check the address, your access, and whether the file changed"
