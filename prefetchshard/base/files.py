"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
import uuid


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file: beside it first, and then in its place. Where that fails, what was there before stays.

    Args:
        path: of the file.
        data: all that is to be in it.

    Raises:
        OSError: it cannot be written.
    """
    target = os.fspath(path)
    beside = f"{target}.{uuid.uuid4().hex}"
    try:
        with open(beside, "xb") as file:
            file.write(data)
        os.replace(beside, target)
    except BaseException:
        if os.path.exists(beside):
            os.remove(beside)
        raise
