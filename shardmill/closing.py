"""A `with` block for everything that can be closed.

In: a class with `close`.  Out: the same class as a context manager.
Promise: leaving the block closes, also after an error, which goes on its way.
Not here: what closing means.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Self


class Closing:
    """Inherit from it and have `close`."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything; may be called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
