"""An engine that somebody else starts and ends: it is waited for, checked, watched, and left running."""

from __future__ import annotations

import asyncio
import time

from headrace.errors import FailedPrecondition, HeadraceError, Unavailable
from headrace.rpc.net import Address
from services.rollout.engine.answers.bad_answer import BadAnswer
from services.rollout.engine.client import EngineClient

_POLL_SECONDS = 0.5
_ANSWER_SECONDS = 5.0


class ExternalEngine:
    """SGLang's server at an address. Its weights are whatever it was given before."""

    def __init__(self, address: Address, tensor_parallel_size: int) -> None:
        self.url = f"http://{address}"
        self._tensor_parallel_size = tensor_parallel_size
        self._left = asyncio.Event()

    async def start(self, *, seconds: float) -> None:
        """Returns when it answers, which may be at once.

        Raises Unavailable (ENGINE_START_FAILED) when it does not in time, FailedPrecondition for another
        tensor-parallel size than the job's.
        """
        end, why = time.monotonic() + seconds, ""
        async with EngineClient(self.url) as client:
            while time.monotonic() < end:
                try:
                    self._require_size(await client.tensor_parallel_size(seconds=_ANSWER_SECONDS))
                    return await client.resume()  # a trainer that died in a publication may have left it paused
                except (Unavailable, BadAnswer, TimeoutError) as error:
                    why = str(error)
                await asyncio.sleep(_POLL_SECONDS)
        raise Unavailable(
            f"the engine at {self.url} did not answer within {seconds:g} s ({why}): start it with `python -m "
            "sglang.launch_server`, or take its address out of --rollout-external-engine-addrs",
            reason="ENGINE_START_FAILED",
        )

    @property
    def exit_code(self) -> int | None:
        """Unknown here: missed checks say that it is gone."""
        return None

    async def wait(self) -> int:
        """Returns 0 once it was left; its checks are what tells that it ended."""
        await self._left.wait()
        return 0

    async def stop(self, grace_seconds: float = 0.0) -> None:
        """Ends the requests that this service sent it, and leaves it running."""
        if self._left.is_set():
            return
        self._left.set()
        async with EngineClient(self.url) as client:
            try:
                await client.abort_all()
            except HeadraceError:
                return  # it is away, and its requests with it

    def memory_bytes(self) -> int | None:
        """Returns None: its processes are on another machine."""
        return None

    @property
    def resident_bytes(self) -> int | None:
        """Memory that it had when last looked at; None where nobody looks."""
        return None

    def last_lines(self) -> str:
        """Says where its log is not."""
        return f"{self.url} was started elsewhere, and its log is there"

    def _require_size(self, found: int) -> None:
        if found != self._tensor_parallel_size:
            raise FailedPrecondition(
                f"the engine at {self.url} has a tensor-parallel size of {found}, and rollout_num_gpus_per_engine is "
                f"{self._tensor_parallel_size}: start one of them with the other's number"
            )
