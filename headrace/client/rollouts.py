"""Several rollout services on one ledger, asked as one.

What one of them can do (a response, an evaluation) is done by the first that answers. The fleet is that of all services
that answer; what changes production is done at all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.client.resumed.response import whole_response
from headrace.client.rollout import Rollout, RolloutClient
from headrace.errors import DeadlineExceeded, HeadraceError, InvalidArgument, Unavailable
from headrace.rpc.call import DEFAULT_DEADLINE_SECONDS
from headrace.rpc.log import log

_ANSWER_SECONDS = 5.0
"""A service that does not say how its engines are within it is not asked for anything else."""

_Reply = TypeVar("_Reply")


def service_name(number: int) -> str:
    """The name of one of several rollout services: of its process, its log, and before its engines' names."""
    return f"rollout-{number}"


class RolloutClients(Rollout):
    """`Rollout` over all services, in the order of their addresses."""

    def __init__(self, addresses: Sequence[str], *, deadline_seconds: float = DEFAULT_DEADLINE_SECONDS) -> None:
        if len(set(addresses)) != len(addresses):
            raise InvalidArgument(
                f"the rollout services {list(addresses)} have an address twice: give each service its own"
            )
        self.services = [RolloutClient(address, deadline_seconds=deadline_seconds) for address in addresses]
        self._deadline_seconds = deadline_seconds

    async def close(self) -> None:
        await asyncio.gather(*(service.close() for service in self.services))

    async def generate(
        self, request: pb.GenerateRequest, *, deadline_seconds: float = 600.0
    ) -> AsyncIterator[pb.GenerateResponse]:

        def ask(asked: pb.GenerateRequest, seconds: float) -> AsyncGenerator[pb.GenerateResponse]:
            return self._of_one(lambda service: service.begin_response(asked, seconds))

        replies = whole_response(request, ask, deadline_seconds=deadline_seconds)
        async with contextlib.aclosing(replies):
            async for reply in replies:
                yield reply

    async def watch_evaluation(
        self,
        evaluation_id: str,
        datasets: Sequence[pb.EvalDataset],
        *,
        return_samples: bool = False,
        deadline_seconds: float = 3600.0,
    ) -> AsyncIterator[pb.EvaluateResponse]:
        """One service evaluates. If it ends before its first message another does; later the caller asks again."""
        replies = self._of_one(
            lambda service: service.watch_evaluation(
                evaluation_id, datasets, return_samples=return_samples, deadline_seconds=deadline_seconds
            )
        )
        async with contextlib.aclosing(replies):
            async for reply in replies:
                yield reply

    async def get_fleet(self, *, deadline_seconds: float | None = None) -> pb.GetFleetResponse:
        """Merges the fleets of the services that answer; an engine's id has its service's name before it.

        The policy version is the newest: the services of an older one do not produce. Raises when none answers.
        """
        seconds = deadline_seconds or self._deadline_seconds
        asked = await self._tried(lambda service: service.get_fleet(deadline_seconds=seconds))
        fleets = {number: reply for number, reply in enumerate(asked) if isinstance(reply, pb.GetFleetResponse)}
        if not fleets:
            raise next(error for error in asked if isinstance(error, HeadraceError))
        return _merged(fleets, [number for number in range(len(asked)) if number not in fleets])

    async def pause_production(self) -> int:
        return sum(await self._all("production is paused", lambda service: service.pause_production()))

    async def resume_production(self) -> None:
        await self._all("production goes on", lambda service: service.resume_production())

    async def set_reward(self, *, address: str | None = None, scorer: str | None = None) -> pb.SetRewardResponse:
        """The answer is that of the service that changed last."""
        replies = await self._all("it is changed", lambda service: service.set_reward(address=address, scorer=scorer))
        return max(replies, key=lambda reply: reply.time.ToNanoseconds())

    async def _of_one(self, ask: Callable[[RolloutClient], AsyncIterator[_Reply]]) -> AsyncGenerator[_Reply]:
        """The messages of the first service that answers; a stream that has begun is not begun again elsewhere."""
        error: HeadraceError = Unavailable("no rollout service has a ready engine: see `headrace status`")
        for service in await self._ready():
            begun = False
            try:
                async for reply in ask(service):
                    begun = True
                    yield reply
            except (Unavailable, DeadlineExceeded) as failure:
                if begun:
                    raise
                log.warning("another_rollout_service_is_asked", instead_of=service.address, error=failure.message)
                error = failure
            else:
                return
        raise error

    async def _ready(self) -> Sequence[RolloutClient]:
        """Returns the services that answer, those of the newest version first, among them the least busy first."""
        asked = await self._tried(lambda service: service.get_fleet(deadline_seconds=_ANSWER_SECONDS))
        ready = [
            (-reply.policy_version, reply.samples_in_flight, number)
            for number, reply in enumerate(asked)
            if isinstance(reply, pb.GetFleetResponse) and any(_is_ready(engine) for engine in reply.engines)
        ]
        return [self.services[number] for _, _, number in sorted(ready)]

    async def _all(self, done: str, ask: Callable[[RolloutClient], Awaitable[_Reply]]) -> Sequence[_Reply]:
        """Raises the error of a service that refused or does not answer, once all were asked."""
        asked = await self._tried(ask)
        replies = [reply for reply in asked if not isinstance(reply, HeadraceError)]
        for reply in asked:
            if isinstance(reply, Unavailable | DeadlineExceeded):
                raise Unavailable(
                    f"{reply.message}; {done} at {len(replies)} of {len(asked)} rollout services: repeat it when this "
                    "one is back"
                ) from reply
            if isinstance(reply, HeadraceError):
                raise reply
        return replies

    async def _tried(self, ask: Callable[[RolloutClient], Awaitable[_Reply]]) -> Sequence[_Reply | HeadraceError]:
        async def tried(service: RolloutClient) -> _Reply | HeadraceError:
            try:
                return await ask(service)
            except HeadraceError as error:
                return error

        return await asyncio.gather(*map(tried, self.services))


def _is_ready(engine: pb.Engine) -> bool:
    return engine.state == pb.ENGINE_STATE_READY


def _merged(fleets: dict[int, pb.GetFleetResponse], silent: Sequence[int]) -> pb.GetFleetResponse:
    merged = pb.GetFleetResponse(
        policy_version=max(fleet.policy_version for fleet in fleets.values()),
        paused=all(fleet.paused for fleet in fleets.values()),
        samples_in_flight=sum(fleet.samples_in_flight for fleet in fleets.values()),
        samples_being_scored=sum(fleet.samples_being_scored for fleet in fleets.values()),
        groups_produced=sum(fleet.groups_produced for fleet in fleets.values()),
        tokens_produced=sum(fleet.tokens_produced for fleet in fleets.values()),
        publication_id=next((fleet.publication_id for fleet in fleets.values() if fleet.publication_id), ""),
        router_address=",".join(fleet.router_address for fleet in fleets.values()),
        reward_address=",".join(dict.fromkeys(fleet.reward_address for fleet in fleets.values())),
        scorer=",".join(dict.fromkeys(fleet.scorer for fleet in fleets.values())),
        warnings=dict.fromkeys(warning for fleet in fleets.values() for warning in fleet.warnings),
    )
    for number, fleet in fleets.items():
        for engine in fleet.engines:
            engine.engine_id = f"{service_name(number)}/{engine.engine_id}"
            merged.engines.append(engine)
    merged.warnings.extend(f"{service_name(number)} does not answer" for number in silent)
    return merged
