"""URLs, and texts that may hold one, printed without their secrets.

`Url` is the one type for a URL: its `str` and `repr` can be shown to anybody, and `reveal()` gives
the true text to a client. `scrub` does the same for the words of others, such as errors of clients.

A secret is hidden by its place in a URL (user and password, query, fragment), by its form (tokens,
keys and headers of known services) and, once a URL with it was seen in this process, by its own
characters. Where a URL can be read in two ways, more is hidden: a password may hold "/" and "@".
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any
from urllib.parse import unquote, unquote_plus

HIDDEN = "***"

# One "/" is enough: that is what a `Path` makes of a URL. One letter is a drive, no scheme.
_START = r"[A-Za-z][A-Za-z0-9+.-]{1,30}:/+"
_PARTS = re.compile(rf"({_START})(.*)", re.DOTALL)
_IN_TEXT = re.compile(rf"{_START}[^\s'\"<>`]+")
# A password in a text may hold a space or a quote, where a URL would seem to end.
_SPLIT = re.compile(rf"({_START})(?!arn:)[\w.%+~-]*:(?![0-9]*(?:[/?#\s]|$))[^/@\n]*@")
_CHAIN = re.compile(r"::(?=[A-Za-z][A-Za-z0-9+.-]{0,30}(?::/|::))")
_WEB = ("http:", "https:", "webdav:", "dav:", "davs:")
_NO_CREDENTIALS = {
    **dict.fromkeys(("s3", "s3a"), "the environment (AWS_ACCESS_KEY_ID, AWS_PROFILE)"),
    **dict.fromkeys(("gs", "gcs"), "the environment (GOOGLE_APPLICATION_CREDENTIALS)"),
    **dict.fromkeys(("az", "abfs", "abfss", "adl"), "the environment (AZURE_STORAGE_...)"),
    "hf": "the environment (HF_TOKEN), or `hf auth login`",
}
_NOBODY_ASKS = ("file", "local", "memory")
_CONTAINER = re.compile(r"(?:abfss?|wasbs?):/+[a-z0-9$-]{3,63}@[^/@]+(?:/.*)?", re.DOTALL)
_SHORTEST = 5
"""A shorter secret is hidden in its URL, but not wherever its characters occur."""
_MOST_KNOWN = 1_000
_MOST_NESTED = 8
"""URLs in a URL; of the others nothing is shown."""

_VALUE = r"[^\s'\"&,;<>(){}\[\]]+"
_STRONG = (
    r"secret|passw(?:or)?d|passphrase|pwd|signature|credential|authorization|access_?key|api_?key"
    r"|private_?key|account_?key|(?:access|auth|session|security|sas|refresh|id)[_-]?token"
    r"|connection_?string"
)
# Names are bounded, here and below: texts are also those of attackers, and are read in one pass.
_PAIR = re.compile(
    rf"(?<![\w/.-])([\w.-]{{1,80}})(\s?=\s?['\"]?|['\"]\s?:\s?b?['\"]|>)(?!['\"])({_VALUE})"
)
_STRONG_NAME = re.compile(rf"(?i){_STRONG}")
_WEAK_NAMES = ("key", "token", "sig", "auth")
_NAMED_SECRET = re.compile(rf"(?i)[?&#](?:[\w-]*(?:{_STRONG})\w*|key|token|sig)=")
_PLAIN_VALUE = re.compile(r"[0-9][0-9,._]*|None|True|False|VALUE|value|\*\*\*.*")
_HEADER = re.compile(r"(?i)\b((?:proxy-)?authorization['\"]?\s*[:=]\s*['\"]?)[^'\"\n]+")
_TOKENS = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{16,}|(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{12,}"
    r"|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,}"
    r"|eyJ[\w-]{10,400}\.[\w-]{10,4000}\.[\w-]*|(?<=Bearer )[\w.~+/=-]{8,})"
)

_known: dict[str, None] = {}  # secrets that this process has seen, the oldest first
_lock = threading.Lock()


class Url:
    """A URL whose `str`, `repr` and format hold no secret. Equal when the true texts are equal."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text
        remember(text)

    def reveal(self) -> str:
        """The true text, for the client that opens it and for nothing else."""
        return self._text

    @property
    def scheme(self) -> str:
        """In small letters; of "a::b://" the first; empty without one."""
        found = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)(?:::|:/)", self._text)
        return found[1].lower() if found else ""

    @property
    def is_web(self) -> bool:
        """There "?" begins a query; elsewhere it is a wildcard or part of a name."""
        return self._text.lower().startswith(_WEB)

    @property
    def names(self) -> list[str]:
        """The parts between "/", for names that are stored. Outside the web "?" and "#" belong to
        them."""
        start, _, rest, tail = _parts(self._text)
        keeps_tail = not (self.is_web or _NAMED_SECRET.search(tail))
        return f"{start}{rest}{tail if keeps_tail else ''}".split("/")

    @property
    def refusal(self) -> str | None:
        """Why no client may open this: it has credentials where none belong."""
        for part in _CHAIN.split(self._text):
            scheme, (_, userinfo, _, tail) = part.partition(":")[0].lower(), _parts(part)
            if scheme in _NOBODY_ASKS and ":" in userinfo:
                return (
                    f"{self}: has a password in its address, and {scheme}: takes none; leave it out"
                )
            place = _NO_CREDENTIALS.get(scheme)
            if place is not None and (userinfo or _NAMED_SECRET.search(tail)):
                return (
                    f"{self}: has credentials in its address; they would be stored and shown with "
                    f"it. Give them by {place}, or in Python as storage_options"
                )
        return None

    def __str__(self) -> str:
        return _printed(self._text)

    def __repr__(self) -> str:
        return f"Url({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Url) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __reduce__(self) -> tuple[type[Url], tuple[str]]:
        return Url, (self._text,)


def scrub(text: str) -> str:
    """The text without secrets. What holds none comes back as it is; twice is as good as once."""
    for secret in _known_in(text):
        # a short one may be part of an ordinary word
        pattern = re.escape(secret) if len(secret) >= 8 else rf"\b{re.escape(secret)}\b"
        text = re.sub(pattern, HIDDEN, text)
    text = _SPLIT.sub(r"\1", text)
    text = _IN_TEXT.sub(lambda found: _printed_in_text(found[0]), text)
    text = _TOKENS.sub(HIDDEN, _HEADER.sub(rf"\1{HIDDEN}", text))
    return _PAIR.sub(_without_value, text)


def scrub_error(error: BaseException | None) -> None:
    """Scrub an error and those it came from, in place, as far as they say what they were given."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError):
            for name in ("filename", "filename2"):
                file = getattr(error, name)
                if isinstance(file, str | os.PathLike):
                    remember(str(file))
                    if scrub(str(file)) != str(file):
                        setattr(error, name, scrub(str(file)))
        args = tuple(scrub(arg) if isinstance(arg, str) else arg for arg in error.args)
        if args != error.args:
            error.args = args
        error = error.__cause__ or error.__context__


def safe_cause(error: BaseException) -> BaseException | None:
    """The error, to be raised `from`; None if a traceback of it would show a secret."""
    link: BaseException | None = error
    while link is not None:
        if any(scrub(text) != text for text in (str(link), repr(link))):
            return None
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return error


def remember(text: str) -> None:
    """Hide the secrets of every URL in this text from now on, wherever their characters occur."""
    starts = [found.start() for found in re.finditer(_START, text)]
    for start, stop in pairwise([*starts, len(text)]):
        _learn(_secrets(text[start:stop]))


def remember_options(options: Mapping[str, Any] | None) -> None:
    """The same for options of a client: keys, secrets, tokens, in tables of them too."""
    for name, value in (options or {}).items():
        if isinstance(value, Mapping):
            remember_options(value)
        elif isinstance(value, str):
            remember(value)
            if re.search(rf"(?i){_STRONG}|^key$|token|auth|sas|username", name):
                _learn([value])


def _learn(secrets: Iterable[str]) -> None:
    each = {form for secret in secrets for form in (secret, unquote(secret), unquote_plus(secret))}
    with _lock:
        for form in each:
            if len(form) >= _SHORTEST and not form.isspace():
                _known[form] = _known.pop(form, None)
        while len(_known) > _MOST_KNOWN:
            del _known[next(iter(_known))]


def _known_in(text: str) -> list[str]:
    """The longest first: one secret may be part of another."""
    if not _known:
        return []
    with _lock:
        known = list(_known)
    return sorted((secret for secret in known if secret in text), key=len, reverse=True)


def _printed(url: str) -> str:
    return "::".join(_printed_one(part) for part in _CHAIN.split(url))


def _printed_one(url: str) -> str:
    printed: list[str] = []
    for _ in range(_MOST_NESTED):
        start, _, rest, _ = _parts(url)
        inner = re.search(_START, rest)
        if inner is None:
            return "".join([*printed, start, rest])
        printed += [start, rest[: inner.start()]]
        url = rest[inner.start() :]
    return "".join([*printed, HIDDEN])


def _printed_in_text(url: str) -> str:
    """The URL with what belongs to the sentence around it. Its end is not certain: a password that
    holds a space is cut off from its "@", and then nothing of the URL is shown."""
    bare = url.rstrip(").,;:]}")
    start, _, rest, _ = _parts(bare)
    first = rest.partition("/")[0]
    has_port = re.fullmatch(r"[\w-]+:[0-9]*", first) or _is_host(start, first)
    if "@" not in bare and ":" in first and not has_port:
        return start + HIDDEN + url[len(bare) :]
    return _printed(bare) + url[len(bare) :]


def _parts(url: str) -> tuple[str, str, str, str]:
    """("https://", "user:password", "host/path", "?query#fragment"); together the whole URL, but
    for the "@". A text that is no URL is all path."""
    found = _PARTS.fullmatch(url)
    if found is None:
        return "", "", url, ""
    start, body = found.groups()
    end = 0 if _is_name_with_at(url) else _userinfo_end(start, body)
    rest = body[end:]
    tail = _tail_start(start, rest)
    return start, re.sub("(?:@|%40)$", "", body[:end]), rest[:tail], rest[tail:]


def _userinfo_end(start: str, body: str) -> int:
    """Where user and password end; in doubt, after the last "@".

    user:pass@host/x          an "@" before the first "/": up to the last one before the query
    user:pa/ss@host/x         what comes before the "/" is no host
    user:pa?ss@host/x         nor is what comes before the "?"
    bucket/me@home/x          a bucket, and an "@" in a name
    """
    before = body[: _tail_start(start, body)]
    first = before.partition("/")[0]
    if "@" not in first and "%40" in first:
        return first.rindex("%40") + 3
    if "@" in before and ("@" in first or not _is_host(start, first)):
        end = before.rindex("@") + 1
        host = before[end:].partition("/")[0]
        is_web = start.lower().startswith(_WEB)  # elsewhere any word can be a bucket
        is_certain = host and _is_host(start, host) and (is_web or "@" not in body[end:])
        return end if is_certain else body.rindex("@") + 1
    if "@" in body and ":" in first and not _is_host(start, first):
        return body.rindex("@") + 1
    return 0


def _is_host(start: str, first: str) -> bool:
    """Whether this can only be a host or a bucket, and not a user."""
    name, colon, port = first.partition(":")
    if first.startswith(("[", "arn:")):
        return True
    if not colon and not start.lower().startswith(_WEB):
        return True
    return (not port or port.isdecimal()) and ("." in name or name == "localhost")


def _is_name_with_at(url: str) -> bool:
    """abfss://container@account/x and hf://name@revision/x have no user."""
    first = url.partition(":")[2].lstrip("/").partition("/")[0]
    is_model = url.startswith("hf:") and not re.search(r":|%3A|%40|hf_|@.*@", first)
    return bool(_CONTAINER.fullmatch(url)) or is_model


def _tail_start(start: str, body: str) -> int:
    """Where the query, the fragment or parameters begin. Outside the web "?" may be a wildcard, and
    "#" part of a name: there they count when a pair or a lone word at the end follows. On this
    machine all is part of names."""
    if start.lower().startswith(("file:", "local:")):
        return len(body)
    if start.lower().startswith(_WEB):
        found = re.search(r"[?#]|;\w+=", body)
        return found.start() if found else len(body)
    found = re.search(r"[?#][\w.~%+-]*=", body)
    places = [found.start()] if found else []
    # the last name of the path, when it has no ending: c#.jsonl is a file
    last = body.find("#", max(body.rfind("/"), body.rfind(".")) + 1)
    return min([*places, *([last] if last >= 0 else []), len(body)])


def _secrets(url: str) -> list[str]:
    """What must not be seen of one URL, whole and in the parts a client may take it for."""
    _, userinfo, _, tail = _parts(url)
    user, colon, password = re.sub("%3A", ":", userinfo, count=1).partition(":")
    found = [userinfo, password if colon else user]
    parts = [user, *re.split(r"[/@:?#\s'\"]+", password), *re.split(r"[/@:?#]", unquote(password))]
    for pair in re.split(r"[?&#;]", tail):
        name, equals, value = pair.partition("=")
        parts.append(value if equals else name)
    # a part that may be an ordinary word ("user", "train.jsonl") is hidden in the URL alone
    return [*found, *(part for part in parts if _looks_secret(part))]


def _looks_secret(part: str) -> bool:
    is_file = re.fullmatch(r"[\w-]+\.[a-z0-9]{1,8}", part)
    has_letter, is_mixed = re.search("[A-Za-z]", part), re.search("[0-9A-Z]", part)
    return bool(has_letter and is_mixed and not is_file)


def _without_value(found: re.Match[str]) -> str:
    name, between, value = found.groups()
    is_weak = name.lower().lstrip("-") in _WEAK_NAMES
    if not (is_weak or _STRONG_NAME.search(name)):
        return found[0]
    plain = _PLAIN_VALUE.fullmatch(value.rstrip(":."))
    if plain and (is_weak or not value[0].isdigit()):
        return found[0]
    return f"{name}{between}{HIDDEN}"
