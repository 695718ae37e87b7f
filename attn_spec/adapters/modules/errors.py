"""What a module's own exception means, where its line of source tells more than its text."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator


def told_more(error: Exception, *, unbatched: bool = False) -> Exception | None:
    """The exception with what its line tells: where it is, a `.T` on three axes or more; None where there is nothing.

    unbatched: whether the module runs on one sequence [S, D]. The kind of the exception stays what it is.
    """
    more = list(_reasons(error))
    if unbatched:
        more.append(
            "it runs on one sequence [S, D] and not on a batch [B, S, D]; if that is meant, declare `input: SD`"
        )
    if not more:
        return None
    text = f"{' '.join(str(error).split())} ({'; '.join(more)})"
    try:
        return type(error)(text)
    except Exception:  # an exception that is made in another way
        return RuntimeError(f"{type(error).__name__}: {text}")


def _reasons(error: Exception) -> Iterator[str]:
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "/torch/" not in frame.filename and "/attn_spec/" not in frame.filename.replace("/attn_spec/reference/", "/")
    ]
    if not frames or not frames[-1].line:
        return
    line = frames[-1].line
    if re.search(r"\.T\b", line) and "size" in str(error) + "mat":
        yield f"`{line.strip()}`: `.T` reverses all axes of a tensor of three or more; `.mT` swaps the last two"
    elif "baddbmm" in line or "bmm(" in line:
        yield f"`{line.strip()}`: bmm and baddbmm take three axes, [batch, n, m]; `@` takes any number"
