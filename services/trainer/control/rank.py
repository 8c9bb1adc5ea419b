"""Starts one rank: it joins the others, and watches over them from then on.

The event loop is the main thread's; whatever may wait for other ranks happens in the compute thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from headrace.rpc.log import log
from services.trainer.control.bootstrap import open_channel
from services.trainer.control.channel import Channel
from services.trainer.megatron.parallel import Layout


@dataclass(frozen=True, slots=True)
class Met:
    """A rank's layout and its channel, once it has joined the others."""

    layout: Layout
    channel: Channel


async def meet(join: Callable[[], Layout], compute: ThreadPoolExecutor) -> Met:
    """Joins the other ranks, in the compute thread, and watches over them from here on."""
    log.info("joining")
    layout = await asyncio.get_running_loop().run_in_executor(compute, join)
    channel = await open_channel(layout.rank, layout.world_size, layout.device, compute)
    log.info("ranks_met", rank=layout.rank, world_size=layout.world_size)
    return Met(layout, channel)
