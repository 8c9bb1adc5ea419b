"""Holds a process at a call of its own to another service, before the call leaves, until it is let go.

Python imports this at the start of every process that has its folder in PYTHONPATH. HELD_ORDERS names a folder. A file
in it, named after a method (`PutGroups`), is an order: the next process that calls the method renames it to
`PutGroups.held`, and waits until somebody deletes that. An order is carried out once, by one process.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

_LOOK_SECONDS = 0.005


def hold_calls(orders: Path) -> None:
    """Every call of grpc.aio asks for an order first."""
    import grpc.aio._channel as channel

    base: Any = channel.UnaryUnaryMultiCallable
    call = base.__call__

    class Held:
        """A call that waits before it leaves; all that its callers do with a call is to await it."""

        def __init__(self, multi_callable: Any, *args: Any, **kwargs: Any) -> None:
            self._made = (multi_callable, args, kwargs)

        def __await__(self) -> Any:
            return self._run().__await__()

        async def _run(self) -> Any:
            multi_callable, args, kwargs = self._made
            method = multi_callable._method.decode().rpartition("/")[2]
            held = orders / f"{method}.held"
            try:
                (orders / method).rename(held)
            except OSError:  # no order, or another call was faster
                return await call(multi_callable, *args, **kwargs)
            while held.exists():
                await asyncio.sleep(_LOOK_SECONDS)
            return await call(multi_callable, *args, **kwargs)

    def ordered(multi_callable: Any, *args: Any, **kwargs: Any) -> Any:
        return Held(multi_callable, *args, **kwargs)

    base.__call__ = ordered


if "HELD_ORDERS" in os.environ and any(word.startswith("services") for word in sys.orig_argv):
    hold_calls(Path(os.environ["HELD_ORDERS"]))
