"""Starts one rank: it joins the others, and watches over them from then on.

The event loop is the main thread's; whatever may wait for other ranks happens in the compute thread.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist

from headrace.rpc.log import log
from headrace.rpc.tls import tls_of
from services.trainer.control.channel import Channel
from services.trainer.megatron.parallel import Layout
from services.trainer.megatron.rendezvous import listener, on_one_machine, own_host


async def open_channel(rank: int, world_size: int, device: torch.device, compute: ThreadPoolExecutor) -> Channel:
    """Called on all ranks at once, after torch.distributed is up; returns when all are connected."""
    loop = asyncio.get_running_loop()
    if world_size == 1:
        return Channel(rank, world_size, b"")
    tls = None if on_one_machine() else tls_of()
    if rank == 0:
        host, secret = own_host(), secrets.token_bytes(32)
        channel = Channel(rank, world_size, secret, tls)
        port = await channel.listen(listener(host))
        await loop.run_in_executor(compute, _tell_all, f"{host} {port} {secret.hex()}", device)
        await channel.until_complete()
    else:
        host, found, text = (await loop.run_in_executor(compute, _tell_all, "", device)).split()
        channel = Channel(rank, world_size, bytes.fromhex(text), tls)
        await channel.connect(host, int(found))
    return channel


def _tell_all(text: str, device: torch.device) -> str:
    """Rank 0's text, on every rank; up to 256 bytes."""
    data = torch.zeros(256, dtype=torch.uint8, device=device)
    encoded = text.encode()
    data[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8, device=device)
    dist.broadcast(data, src=0)
    return bytes(data.tolist()).rstrip(b"\0").decode()


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
