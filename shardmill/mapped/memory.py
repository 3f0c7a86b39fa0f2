"""One reserved range of addresses, over which files are laid. Linux only.

In: a size; then descriptors and places.  Out: one array of bytes over the whole range.
Promise: the range lives exactly as long as somebody holds that array or a view of it, and is given
back whole; a reserved place costs no memory and reading it is a fault, never wrong data.
Not here: which file lies where and when (ranged).

Python's own `mmap` object reserves the range and gives it back; what lies inside is replaced in
place with the C library's `mmap` (MAP_FIXED), which Python does not offer.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

import numpy as np

SUPPORTED = sys.platform == "linux" and sys.maxsize > 2**32
"""Whether `AddressRange` works here: 64-bit Linux."""

HUGE_PAGE = 2 * 2**20
"""A file laid on such a border is mapped in huge pages where the kernel holds it in such pieces
(recent kernels do, for files written in large pieces): random reads then wait less for address
translation. Nothing is asked of the kernel, and nothing is lost where it does not."""

_PROT_NONE = 0
_MAP_FIXED = 0x10
_MADV_WILLNEED = 3
_MAP_NORESERVE = 0x4000


class AddressRange:
    """`num_bytes` of addresses from a huge page on, at first all reserved. Places are in bytes."""

    def __init__(self, num_bytes: int) -> None:
        self._reserved = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        held = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=self._reserved, prot=_PROT_NONE)
        before = -np.frombuffer(held, np.uint8).ctypes.data % HUGE_PAGE
        self.bytes = np.frombuffer(held, np.uint8, count=num_bytes, offset=before)
        self._address: int = self.bytes.ctypes.data
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [
            *(ctypes.c_void_p, ctypes.c_size_t),
            *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64),
        ]
        self._libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def lay(self, descriptor: int, place: int, num_bytes: int, skip: int = 0) -> None:
        """Lay `num_bytes` of a file, those behind the first `skip`, at `place`, read-only.

        `place` and `skip` are on pages.
        """
        self._map(place, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, skip)

    def lift(self, place: int, num_bytes: int) -> None:
        """Only reserved again. No other thread may be reading there."""
        self._map(place, num_bytes, _PROT_NONE, self._reserved, -1)

    def will_need(self, place: int, num_bytes: int) -> None:
        """Ask the kernel to read these pages ahead; returns at once. A hint: it may be ignored."""
        before = place % mmap.PAGESIZE
        self._libc.madvise(self._address + place - before, num_bytes + before, _MADV_WILLNEED)

    def _map(
        self, place: int, num_bytes: int, access: int, flags: int, descriptor: int, skip: int = 0
    ) -> None:
        address = self._address + place
        found = self._libc.mmap(address, num_bytes, access, flags | _MAP_FIXED, descriptor, skip)
        if found != address:
            code = ctypes.get_errno()
            raise OSError(code, f"mmap of {num_bytes:,} bytes: {os.strerror(code)}")
