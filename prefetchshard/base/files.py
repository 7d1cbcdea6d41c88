"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
import uuid


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file: beside it first, and then in its place. Where that fails, what was there before stays.

    Args:
        path: of the file. A link leads to it; what is no file, such as /dev/stdout, is written to as it is.
        data: all that is to be in it.

    Raises:
        OSError: it cannot be written.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # no file must take the place of a device or a pipe
        with open(path, "wb") as file:
            file.write(data)
        return
    target = os.path.realpath(path)
    # Not a name that goes on from that of the file, which may be as long as names may be
    beside = os.path.join(os.path.dirname(target), f"{uuid.uuid4().hex}.part")
    try:
        with open(beside, "xb") as file:
            file.write(data)
        os.replace(beside, target)
    except BaseException:
        if os.path.exists(beside):
            os.remove(beside)
        raise
