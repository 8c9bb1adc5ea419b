"""Holds a process at a call of its own to another service.

Python imports this at the start of every process that has its folder in PYTHONPATH. HELD_ORDERS names a folder. A file
in it, named after a moment, is an order: the next process that comes there renames it to `MOMENT.held`, and waits until
somebody deletes that. An order is carried out once, by one process. Moments:
    METHOD.leaves, METHOD.answered: before the call leaves, and when its answer has come; an empty answer of LeaseGroups
        is none
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from pathlib import Path
from typing import Any

_LOOK_SECONDS = 0.005


def hold_calls(orders: Path) -> None:
    """Every call of grpc.aio asks for an order first."""
    channel = importlib.import_module("grpc.aio._channel")  # to import it would give mypy the whole of grpc's inside
    base: Any = channel.UnaryUnaryMultiCallable
    call = base.__call__

    class Held:
        """A call that may have to wait; all that its callers do with a call is to await it."""

        def __init__(self, multi_callable: Any, *args: Any, **kwargs: Any) -> None:
            self._method = multi_callable._method.decode().rpartition("/")[2]
            self._make = lambda: call(multi_callable, *args, **kwargs)

        def __await__(self) -> Any:
            return self._run().__await__()

        async def _run(self) -> Any:
            await self._waited("leaves")
            answer = await self._make()
            if self._method != "LeaseGroups" or answer.leases:
                await self._waited("answered")
            return answer

        async def _waited(self, moment: str) -> None:
            if held := taken(orders / f"{self._method}.{moment}"):
                while held.exists():
                    await asyncio.sleep(_LOOK_SECONDS)

    def ordered(multi_callable: Any, *args: Any, **kwargs: Any) -> Any:
        return Held(multi_callable, *args, **kwargs)

    base.__call__ = ordered


def taken(order: Path) -> Path | None:
    """The file to wait for; None where there is no such order, or another process was faster."""
    held = order.with_name(f"{order.name}.held")
    try:
        order.rename(held)
    except OSError:
        return None
    return held


if "HELD_ORDERS" in os.environ and any(word.startswith("services") for word in sys.orig_argv):
    hold_calls(Path(os.environ["HELD_ORDERS"]))
