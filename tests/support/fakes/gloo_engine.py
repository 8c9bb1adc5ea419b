"""A fake engine that takes part in real weight broadcasts: it joins the trainer's group and keeps what it receives.

`python -m tests.support.fakes.gloo_engine PORT [FAILPOINT [SECONDS]]` is one in a process of its own, whose tokens take
so many seconds each. Its failpoints: the name of
a call, passed before it is answered, and two in every broadcast: `bucket` before anything is received, so that the
sender waits, `bytes` when the first have come.
"""

from __future__ import annotations

import asyncio
import datetime
import math
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from aiohttp import web
from safetensors.torch import load_file

from headrace.rpc.net import free_port
from services.rollout.engine.process import ServerProcess
from tests.support.fakes.engine_checksums import engine_checksums, stood_for
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.faults.failpoint import Failpoint
from tests.support.processes.training_run import ROOT

_MOST_KEPT = 1000
"""Requests that a test may look at: in a soak there are millions."""
_TIMEOUT = datetime.timedelta(seconds=60)


class GlooEngine(FakeEngine):
    """Answers /weights_checker as SGLang does, from the tensors that came over the wire."""

    def __init__(
        self,
        port: int | None = None,
        failpoint: Failpoint | None = None,
        *,
        token_seconds: float = 0.0,
        num_ranks: int = 1,
    ) -> None:
        super().__init__(port=port, token_seconds=token_seconds)
        self._failpoint = failpoint
        self.of_ranks: Sequence[dict[str, torch.Tensor]] = [{} for _ in range(num_ranks)]
        """Each rank receives and keeps all tensors: what a real one cuts, it cuts later."""
        self._joined: dict[str, list[Any]] = {}

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Those of the first rank."""
        return self.of_ranks[0]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        for kept in (self.calls, self.bodies, self.cache_keys):
            del kept[:-_MOST_KEPT]  # type: ignore[attr-defined]
        if self._failpoint:
            self._failpoint.passes(request.path.strip("/"))
        work = {
            "/init_weights_update_group": self._join,
            "/update_weights_from_distributed": self._receive,
            "/update_weights_from_disk": self._load_tensors,
            "/weights_checker": self._checksums,
        }.get(request.path)
        if work is None:
            return await super()._answer(request)
        try:
            return web.json_response(await asyncio.to_thread(work, await request.json()))
        except RuntimeError as error:  # the trainer died in the middle
            return web.json_response({"success": False, "message": str(error)}, status=400)

    def _join(self, body: dict[str, Any]) -> dict[str, Any]:
        name = body["group_name"]
        with ThreadPoolExecutor(len(self.of_ranks)) as ranks:
            joins = [ranks.submit(_member, body, number) for number in range(len(self.of_ranks))]
            self._joined[name] = [join.result() for join in joins]
        self.groups.add(name)
        return {"success": True}

    def _receive(self, body: dict[str, Any]) -> dict[str, Any]:
        dtypes = [getattr(torch, name.removeprefix("torch.")) for name in body["dtypes"]]
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(body["shapes"], dtypes, strict=True)]
        groups = self._joined[body["group_name"]]
        flats = [torch.zeros(sum(sizes), dtype=torch.uint8) for _ in groups]
        options = dist.BroadcastOptions()
        options.rootRank = 0
        if self._failpoint:
            self._failpoint.passes("bucket")
        works = [group.broadcast([flat], options) for group, flat in zip(groups, flats, strict=True)]
        if self._failpoint:
            while not flats[0][:64].any() and not works[0].is_completed():
                pass  # what comes are weights: never zeros alone
            self._failpoint.passes("bytes")
        for work, flat, tensors in zip(works, flats, self.of_ranks, strict=True):
            work.wait(_TIMEOUT)
            for name, part, dtype, shape in zip(body["names"], flat.split(sizes), dtypes, body["shapes"], strict=True):
                tensors[name] = part.clone().view(dtype).view(shape)
        return {"success": True}

    def _load_tensors(self, body: dict[str, Any]) -> dict[str, Any]:
        files = sorted(Path(body["model_path"]).glob("*.safetensors"))
        loaded = {name: tensor for file in files for name, tensor in load_file(file).items()}
        self.of_ranks = [dict(loaded) for _ in self.of_ranks]
        return {"success": bool(files)}

    def _checksums(self, body: dict[str, Any]) -> dict[str, Any]:
        ranks = [
            {"checksums": engine_checksums(stood_for(tensors)) or {"what it would have loaded": "0" * 16}}
            for tensors in self.of_ranks
        ]
        return {"success": True, "ranks": ranks}


def _member(body: dict[str, Any], number: int) -> dist.ProcessGroupGloo:
    """A rank as SGLang joins with it: each has the engine's offset and its own number."""
    name = body["group_name"]
    store = dist.TCPStore(body["master_address"], body["master_port"], is_master=False, timeout=_TIMEOUT)
    prefixed = dist.PrefixStore("cpu/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
    return dist.ProcessGroupGloo(prefixed, body["rank_offset"] + number, body["world_size"], _TIMEOUT)


class GlooEngineProcess(ServerProcess):
    """In a process of its own, which can be killed as a real one can. It starts once `may_start` is set."""

    def __init__(self, log_path: Path, failpoint: str = "", may_start: asyncio.Event | None = None) -> None:
        port = free_port()
        words = [failpoint] if failpoint else []
        command = [sys.executable, "-m", "tests.support.fakes.gloo_engine", str(port), *words]
        environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        super().__init__(f"http://127.0.0.1:{port}", command, log_path, environment)
        self._may_start = may_start

    async def start(self, *, seconds: float) -> None:
        if self._may_start:
            await self._may_start.wait()
        await super().start(seconds=seconds)


async def main(port: str, failpoint: str = "", seconds: str = "0") -> None:
    point = Failpoint(failpoint) if failpoint else None
    await GlooEngine(int(port), point, token_seconds=float(seconds)).start(seconds=60)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
