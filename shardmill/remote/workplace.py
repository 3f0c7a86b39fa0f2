"""A build whose store is at a URL: every worker sends its shards there itself.

Only the shards at work are on a local disk. The plan, notes and receipts are at the URL too, below
`.shardmill-build/`, so any machine can continue a build. They are removed when the store is
finished. The manifest is created last. Claims (`remote.claims`) keep two builds apart, and builds
and pushes.

A receipt is stored with what the storage calls the content of each shard, such as its ETag. So one
listing shows whether every shard is still the one that its worker sent.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
import tempfile
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from pickle import PicklingError
from typing import Any, cast

import msgspec

from shardmill.errors import (
    BuildError,
    BuildLockedError,
    DamagedStoreError,
    StoreError,
    StoreExistsError,
    StoreNotFoundError,
    UnfinishedBuildError,
)
from shardmill.records import JSON
from shardmill.remote.claims import CLAIM, ClaimedError, PushClaim, claim_folder
from shardmill.remote.contents import (
    BUILD,
    LARGEST,
    MARKER,
    FileFact,
    in_parallel,
    is_same,
    local_contents,
    read_manifests,
    remote_contents,
)
from shardmill.remote.folder import Listing, RemoteFolder, open_destination
from shardmill.remote.push import clean_up, listed_names
from shardmill.storage.atomic import HashedFile, LockedFile, cannot_write
from shardmill.storage.object_store import identify
from shardmill.store import WrittenShard
from shardmill.store.layout import EXCLUDE, META, is_own_name, looks_like_data
from shardmill.store.manifest import Manifest

log = logging.getLogger(__name__)

_RECEIPT = ".receipt"
_PLAN, _RUN = f"{BUILD}plan.json", f"{BUILD}run.json"
_SCRATCH = re.compile(r"\.shardmill-build-[0-9a-f]{16}")
"""Names of local files at work. Those whose process died are removed, and nothing else ever is."""
_REQUESTS = 8  # small ones at the same time


class ScratchFile(HashedFile):
    """A local file until it is sent, locked so that it is known when its process died."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.lock = LockedFile(path)
        self.lock.lock()
        os.fchmod(self.lock.fileno(), 0o600)

    def abort(self) -> None:
        super().abort()
        self.lock.close()


class UrlOutput:
    """Objects at a URL that all workers reach. The `segments.Output` of object storage.

    A pickle of it holds the address and nothing else: each process takes the credentials from its
    own environment.
    """

    def __init__(
        self,
        url: str,
        run: str,
        scratch: Path | None,
        *,
        store: Path | None = None,
        found: Listing | None = None,
    ) -> None:
        """`scratch` None: the temporary folder of the machine. The coordinator alone has `store`,
        the folder for everything but shards, and what it `found` at the URL."""
        self._url, self.run, self._scratch = url, run, scratch
        self._store, self._found = store, found
        self.remote = open_destination(url)
        self._sent: dict[str, str] = {}  # shards of units at work, and their content
        self.contents: dict[str, str] = {}  # the same of all receipts that were read
        self._ahead = _ReadAhead(self.remote, filter(_is_receipt, found or ()))

    def __reduce__(self) -> tuple[type[UrlOutput], tuple[str, str, Path | None]]:
        if "memory" in self.remote.protocols:
            raise PicklingError(f"{self.remote.url}: is in the memory of this process")
        return UrlOutput, (self._url, self.run, self._scratch)

    @property
    def store(self) -> Path:
        assert self._store is not None, "only the coordinator asks"
        return self._store

    # of workers

    def create(self, name: str) -> ScratchFile:
        folder = scratch_folder(self._scratch)
        while True:
            try:
                file = ScratchFile(folder / _scratch_name())
            except FileNotFoundError:
                continue  # taken for left over before it was locked
            except OSError as error:
                raise cannot_write(folder / name, error) from error
            if file.lock.is_at(file.path):
                return file
            file.abort()

    def keep(self, file: HashedFile, name: str) -> str:
        sha256 = file.finish()
        fact = FileFact(name=name, size=file.path.stat().st_size, sha256=sha256)
        self._sent[name] = self.send(fact, file.path)
        file.path.unlink()
        file.abort()
        return sha256

    def send(self, fact: FileFact, path: Path) -> str:
        """Upload a file, and check that it arrived; what the storage calls its content.

        An equal object is left as it is. Another one, of a run that was given up, is replaced.
        """
        for is_last in (False, True):
            self.remote.put(path, fact.name, lambda _: None)
            info = self.remote.info(fact.name)
            if is_same(self.remote, fact, path, info):
                return str(identify(info))
            if is_last:
                break
            self._check_run()
            self.remote.remove(fact.name)
        raise DamagedStoreError(
            f"{self.remote.url}/{fact.name}: what arrived is not what was sent; does another "
            "process write there? Look, then pass {resume}",
            resume=True,
        )

    def _check_run(self) -> None:
        """A worker that was lost and returns must not touch what a later run wrote."""
        data = self.remote.read_if_there(_RUN)
        is_current = data is not None and json.loads(data).get("name") == self.run
        if not is_current or self.remote.read_if_there(META) is not None:
            raise BuildError(
                f"{self.remote.url}: another build took over, or this one has ended; nothing was "
                "changed there"
            )

    def has(self, name: str, num_bytes: int) -> bool:
        """Whether a shard is there with this size and the content that its receipt says, which was
        read before."""
        try:
            info = self._found.get(name) if self._found is not None else self.remote.info(name)
        except StoreNotFoundError:
            return False
        is_there = info is not None and info["size"] == num_bytes
        return is_there and str(identify(cast(dict[str, Any], info))) == self.contents.get(name)

    def holds(self, shard: WrittenShard, num_bytes: int) -> bool:
        return self.has(shard.file, num_bytes)

    def write_receipt(self, name: str, data: bytes, shards: Collection[str]) -> None:
        head = msgspec.json.encode({shard: self._sent.pop(shard) for shard in shards})
        self.remote.pipe(self._receipt(name), head + b"\n" + data)
        try:
            self._check_run()  # afterwards, so that either this or the coordinator removes it
        except BuildError:
            self.remove_receipt(name)
            raise

    def read_receipt(self, name: str) -> bytes | None:
        path = self._receipt(name)
        if self._found is None:
            stored = self.remote.read_if_there(path)
        else:
            stored = self._ahead.read(path) if path in self._found else None
        if stored is None:
            return None
        head, _, data = stored.partition(b"\n")
        try:
            self.contents |= msgspec.json.decode(head, type=dict[str, str])
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None  # damaged
        return data

    def _receipt(self, name: str) -> str:
        return f"{BUILD}{self.run}/{name}"

    # of the coordinator

    def remove_receipt(self, name: str) -> None:
        self.remote.remove(self._receipt(name))

    def keep_only(self, names: Collection[str]) -> None:
        found = self.remote.listing()
        left = [name for name in found if _is_shard(name) and name not in names]
        in_parallel(_REQUESTS, self.remote.remove, left)


class _ReadAhead:
    """Small files of a folder, which are asked for in the order of their names."""

    def __init__(self, remote: RemoteFolder, names: Iterable[str]) -> None:
        self._remote, self._names = remote, sorted(names)
        self._next = 0  # of the names, the first that is not fetched yet
        self._waiting: dict[str, Future[bytes | None]] = {}
        self._pool = ThreadPoolExecutor(_REQUESTS, thread_name_prefix="shardmill-remote")

    def read(self, name: str) -> bytes | None:
        if name not in self._waiting:
            self._waiting, self._next = {}, bisect_left(self._names, name)
        stop = self._next + 2 * _REQUESTS - len(self._waiting)
        for ahead in self._names[self._next : stop]:
            self._waiting[ahead] = self._pool.submit(self._remote.read_if_there, ahead)
        self._next = stop
        return self._waiting.pop(name).result()


class UrlWorkplace:
    """The `Workplace` of a store at a URL."""

    def __init__(self, url: str, scratch: str | Path | None = None) -> None:
        self.resumed = False
        self._address = url
        self._scratch = None if scratch is None else Path(scratch).absolute()
        self._remote = open_destination(url)
        self._claim: PushClaim | None = None
        self._lock: LockedFile | None = None
        self._store = Path()
        self._output: UrlOutput | None = None

    def __str__(self) -> str:
        return self._remote.url

    @property
    def url(self) -> str:
        return self._remote.url

    @property
    def folder(self) -> Path:
        return self._scratch or Path(tempfile.gettempdir())

    @property
    def lock(self) -> int:
        assert self._lock is not None, "it is locked"
        return self._lock.fileno()

    def manifest(self) -> Manifest | None:
        found = self._remote.listing()
        return remote_contents(found).store if META in found else None

    def has_unfinished_build(self) -> bool:
        found = self._remote.listing()
        is_left = _PLAN in found and not any(name in found for name in LARGEST)
        return is_left and not any(name.startswith(CLAIM) for name in found)

    def check(self, *, resume: bool, overwrite: bool) -> None:
        found = self._remote.listing()
        is_running = any(name.startswith(CLAIM) for name in found)
        self._refuse(found, resume=resume or is_running, overwrite=overwrite)

    def clean_up(self, plan: dict[str, JSON]) -> None:  # noqa: ARG002 - a manifest settles all
        scratch_folder(self._scratch)
        clean_up(self._remote.listing())

    @contextmanager
    def locked(self, *, resume: bool, overwrite: bool) -> Iterator[None]:
        remote, folder = self._remote, scratch_folder(self._scratch)
        with ExitStack() as stack:
            stack.callback(_remove_left_over, folder)
            self._store, self._lock = stack.enter_context(_locked_folder(folder))
            try:
                self._claim = stack.enter_context(claim_folder(remote, "build"))
            except ClaimedError as error:
                raise BuildLockedError(str(error)) from error
            self._refuse(self._claim.found, resume=resume, overwrite=overwrite)
            yield

    def _refuse(self, found: Listing, *, resume: bool, overwrite: bool) -> None:
        """Raise if something is there that may not be built over."""
        url, manifests = found.remote.url, [name for name in LARGEST if name in found]
        others = [name for name in found if name[-1:] != "/" and not name.startswith(".shardmill-")]
        if overwrite:
            if EXCLUDE in found:
                raise StoreExistsError(
                    f"{url}/{EXCLUDE}: lists what was excluded from training, by positions in "
                    "tokens that would be replaced; move it away first, and exclude again after "
                    "the build"
                )
            listed = {*manifests, *listed_names(read_manifests(found.read))}
            for name in sorted(others):
                is_known = name in listed or is_own_name(name)
                is_in_the_way = found.remote.is_local or looks_like_data(name.rpartition("/")[2])
                if is_in_the_way and not is_known:
                    raise StoreExistsError(
                        f"{url}/{name}: no build of ours makes such a file, so it will not be "
                        "removed; move it away first"
                    )
        elif manifests:
            raise StoreExistsError(
                f"{url}: a finished folder is there ({', '.join(manifests)}); nothing was built: "
                "pass {overwrite} to replace it, or build to another URL",
                overwrite=True,
            )
        elif MARKER in found:
            raise StoreExistsError(
                f"{url}: an unfinished push is there; nothing was built: finish it where it began, "
                "pass {overwrite} if it may go, or build to another URL",
                overwrite=True,
            )
        elif _PLAN in found:
            if not resume:
                raise UnfinishedBuildError(
                    f"{url}: an earlier build did not finish: continue it with {{resume}}, or "
                    "start again with {overwrite}",
                    resume=True,
                    overwrite=True,
                )
        elif others:
            raise StoreExistsError(
                f"{url}: holds {max(others)!r} and no {META}, so it is not a store; nothing was "
                "built: choose another URL, or pass {overwrite} to build over it",
                overwrite=True,
            )

    def check_lock(self) -> None:
        assert self._claim is not None, "it is locked"
        self._claim.check()

    def clear(self) -> None:
        assert self._claim is not None, "it is locked"
        if _PLAN in self._claim.found:
            log.warning("%s: discarding the unfinished work of an earlier build", self)
        self._remove_work(self._claim.found)

    def _remove_work(self, found: Listing, *, keep: Collection[str] = ()) -> None:
        work = [name for name in found if name.startswith(BUILD) and name not in keep]
        # The run goes first: a kill in between must not leave it in use.
        self._remove([name for name in work if name == _RUN])
        self._remove([name for name in work if name != _RUN])
        if self._remote.is_local and not keep:
            shutil.rmtree(self._remote.path(BUILD), ignore_errors=True)  # empty folders

    def _remove(self, names: Iterable[str]) -> None:
        def remove(name: str) -> None:
            self.check_lock()
            self._remote.remove(name)

        in_parallel(_REQUESTS, remove, names)

    def read_note(self, name: str) -> dict[str, JSON] | None:
        data = self._remote.read_if_there(f"{BUILD}{name}.json")
        if data is None:
            return None
        try:
            return msgspec.json.decode(data, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise BuildError(
                f"{self}/{BUILD}{name}.json: damaged ({error}), so this build cannot be resumed: "
                "start again with {overwrite}",
                overwrite=True,
            ) from error

    def write_note(self, name: str, value: Mapping[str, JSON]) -> None:
        self.check_lock()
        self._remote.pipe(f"{BUILD}{name}.json", json.dumps(value, indent=1).encode())

    def start_again(self, dropped_engine: dict[str, JSON]) -> None:
        self._remove_work(self._remote.listing(), keep=[_PLAN])
        self.write_note("dropped_engine", dropped_engine)

    def output(self) -> UrlOutput:
        found, run = self._remote.listing(), self.read_note("run")
        manifests = read_manifests(found.read) if self._output is None else {}
        # The manifest goes before any other file, so that at no moment a mixture can be read.
        self._remove(manifests)
        if run is None:
            self._make_room(found, manifests)
            run = {"name": f"run-{secrets.token_hex(8)}"}
            self.write_note("run", run)
        self._output = UrlOutput(
            self._address, str(run["name"]), self._scratch, store=self._store, found=found
        )
        return self._output

    def _make_room(self, found: Listing, manifests: Mapping[str, bytes]) -> None:
        """Remove the files of the store that is replaced, and of runs that were given up."""
        gone = {MARKER, *listed_names(manifests)}
        self._remove([name for name in found if name in gone or is_own_name(name)])

    def publish(self, staged: Path, *, overwrite: bool) -> tuple[int, int]:  # noqa: ARG002
        output, remote = self._output, self._remote
        assert output is not None, "it was written to"
        contents = local_contents(staged)
        small = [fact for fact in contents.files if (staged / fact.name).is_file()]

        def send(fact: FileFact) -> str:
            self.check_lock()
            return output.send(fact, staged / fact.name)

        sent = in_parallel(_REQUESTS, send, small)
        known = output.contents | {fact.name: one for fact, one in zip(small, sent, strict=True)}
        found, claim = remote.listing(), self._claim
        for fact in contents.files:
            info = found.get(fact.name)
            if info is None or str(identify(info)) != known.get(fact.name):
                raise DamagedStoreError(
                    f"{remote.url}/{fact.name}: was sent, and is gone or changed; does another "
                    "process write there? Look, then pass {resume}: it is made again",
                    resume=True,
                )
        is_ours = claim is not None and claim.name in found
        is_ours = is_ours and not any(name in found for name in LARGEST)
        self.check_lock()
        if not is_ours or not remote.create(META, contents.manifest):
            raise StoreError(f"{remote.url}: another build or push took over; look there")
        num_bytes = sum(found[fact.name]["size"] for fact in contents.files)
        return len(contents.files) + 1, num_bytes + len(contents.manifest)

    def remove(self, *, keep_receipts: bool) -> None:
        try:
            found = self._remote.listing()
            if keep_receipts and any(_is_receipt(name) for name in found):
                return
            if keep_receipts and _RUN in found:  # else they are not of this build
                self._remove([name for name in found if _is_shard(name)])
            self._remove_work(found)
        except StoreError as error:  # the next build finds out
            log.warning("%s; what is in %s/%s stays there", error, self, BUILD)


def scratch_folder(scratch: Path | None) -> Path:
    """Where this machine has its files at work, without those of processes that died."""
    folder = scratch or Path(tempfile.gettempdir())
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(
            f"{{scratch}}: cannot be the scratch folder: {error.strerror}; choose another one",
            scratch=str(folder),
        ) from error
    _remove_left_over(folder)
    return folder


def _scratch_name() -> str:
    return f".shardmill-build-{secrets.token_hex(8)}"


def _remove_left_over(folder: Path) -> None:
    for path in filter(lambda path: _SCRATCH.fullmatch(path.name), folder.iterdir()):
        with suppress(OSError), closing(LockedFile(path)) as lock:  # it may be somebody else's
            if lock.lock(wait=False):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextmanager
def _locked_folder(parent: Path) -> Iterator[tuple[Path, LockedFile]]:
    """A new folder, removed at the end, or by the next build if this process is killed."""
    while True:
        folder = parent / _scratch_name()
        folder.mkdir(mode=0o700)
        try:
            lock = LockedFile(folder)
        except FileNotFoundError:
            continue  # taken for left over before it was locked
        with closing(lock):
            lock.lock()
            if lock.is_at(folder):
                try:
                    yield folder, lock
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
                return


def _is_receipt(name: str) -> bool:
    return name.startswith(BUILD) and name.endswith(_RECEIPT)


def _is_shard(name: str) -> bool:
    return is_own_name(name) and "/shard_" in name
