"""Values on their way to another process.

In: a value.  Out: bytes, which `pickle.loads` of a fresh interpreter takes.
Promise: what a fresh interpreter could not import is refused here, where the caller can still act.
Not here: trust. These bytes go to processes that this one started, and come back from them.
"""

from __future__ import annotations

import io
import pickle
from typing import Any


class _Packer(pickle.Pickler):
    """Refuses what was defined in a script: a worker does not run the script again."""

    def reducer_override(self, value: Any) -> Any:
        if getattr(value, "__module__", None) == "__main__" and hasattr(value, "__qualname__"):
            raise pickle.PicklingError(
                f"{value.__qualname__} is defined in the script that was started, where no other "
                "process can find it"
            )
        return NotImplemented


def pack(value: Any) -> bytes:
    """The value as bytes; PicklingError, with the reason, when it cannot travel."""
    file = io.BytesIO()
    try:
        _Packer(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except pickle.PicklingError:
        raise
    except Exception as error:  # a class may refuse to be pickled in any words
        raise pickle.PicklingError(
            f"{type(value).__name__} cannot travel to another process: {error}"
        ) from error
    return file.getvalue()
