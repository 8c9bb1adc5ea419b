"""The clients for programs without asyncio: the same methods, which return when the call has ended.

All of a process work on one event loop in a thread of its own, so they may be used from any thread. A callback, as
`progress`, is called in that thread.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator
from functools import cache, wraps
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast

from headrace.client.open import Buffer, open_buffer, open_rollout
from headrace.client.reward import RewardClient
from headrace.client.rollout import Rollout, RolloutClients
from headrace.client.shards import ShardedBuffer
from headrace.client.trainer import TrainerClient
from headrace.errors import FailedPrecondition
from headrace.rpc.client import DEFAULT_DEADLINE_SECONDS, Closing

_CLOSE_SECONDS = 5.0
"""For the end of a stream that its reader has left."""
_END: Any = object()

C = TypeVar("C", bound=Closing)
P = ParamSpec("P")
T = TypeVar("T")


class _Sync(Generic[C]):
    """Close it, or use it as a context."""

    def __init__(self, make: Callable[[], C]) -> None:
        async def made() -> C:
            return make()  # its channel belongs to the loop that it is made in

        self._client = _wait(made())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends its connections."""
        _wait(self._client.close())


def _call(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[_Sync[Any], P], T]:
    """The method of the client that is there, with this one's name, arguments and docstring."""

    @wraps(method)
    def call(self: _Sync[Any], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return _wait(cast("Coroutine[Any, Any, T]", getattr(self._client, method.__name__)(*args, **kwargs)))

    return call


def _stream(
    method: Callable[Concatenate[Any, P], AsyncIterator[T]],
) -> Callable[Concatenate[_Sync[Any], P], Generator[T]]:
    """The same for a stream, which ends when its reader leaves it."""

    @wraps(method)
    def stream(self: _Sync[Any], /, *args: P.args, **kwargs: P.kwargs) -> Generator[T]:
        messages = cast("AsyncGenerator[T]", getattr(self._client, method.__name__)(*args, **kwargs))

        async def following() -> T:
            return await anext(messages, _END)

        try:
            while (message := _wait(following())) is not _END:
                yield message
        finally:
            _wait(messages.aclose(), _CLOSE_SECONDS)

    return stream


def _wait(work: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
    """Runs it in the background loop; every call in there has its own deadline."""
    loop = _background(os.getpid())
    if _is_running(loop):
        work.close()
        raise FailedPrecondition("a client of headrace.client.sync was used in its own callback: use another thread")
    result = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return result.result(seconds)
    except BaseException:
        result.cancel()  # Ctrl-C ends the call too
        raise


def _is_running(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


@cache
def _background(process: int) -> asyncio.AbstractEventLoop:
    """One for each process: a thread does not come with a fork."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=f"headrace-{process}", daemon=True).start()
    return loop


class SyncBuffer(_Sync[Buffer]):
    """The ledger at one address, or at those of its shards with commas between them: see `BufferClient`."""

    def __init__(self, address: str, *, deadline_seconds: float = DEFAULT_DEADLINE_SECONDS) -> None:
        super().__init__(lambda: open_buffer(address, deadline_seconds=deadline_seconds))

    create_stream = _call(ShardedBuffer.create_stream)
    delete_stream = _call(ShardedBuffer.delete_stream)
    list_streams = _call(ShardedBuffer.list_streams)
    submit_prompts = _call(ShardedBuffer.submit_prompts)
    lease_groups = _call(ShardedBuffer.lease_groups)
    renew_leases = _call(ShardedBuffer.renew_leases)
    release_leases = _call(ShardedBuffer.release_leases)
    put_groups = _call(ShardedBuffer.put_groups)
    retry_groups = _call(ShardedBuffer.retry_groups)
    drop_groups = _call(ShardedBuffer.drop_groups)
    rewind = _call(ShardedBuffer.rewind)
    try_lease_batch = _call(ShardedBuffer.try_lease_batch)
    lease_batch = _call(ShardedBuffer.lease_batch)
    fetch_samples = _call(ShardedBuffer.fetch_samples)
    consume = _call(ShardedBuffer.consume)
    commit = _call(ShardedBuffer.commit)
    set_policy_version = _call(ShardedBuffer.set_policy_version)
    list_groups = _call(ShardedBuffer.list_groups)
    stats = _call(ShardedBuffer.stats)
    damage = _call(ShardedBuffer.damage)
    watch = _stream(ShardedBuffer.watch)


class SyncRollout(_Sync[Rollout]):
    """The rollout service at one address, or several with commas between their addresses."""

    def __init__(self, address: str, *, deadline_seconds: float = DEFAULT_DEADLINE_SECONDS, run: str = "") -> None:
        """`run`: the one that asks, where several share the service."""
        super().__init__(lambda: open_rollout(address, deadline_seconds=deadline_seconds, run=run))

    generate = _stream(RolloutClients.generate)
    evaluate = _call(RolloutClients.evaluate)
    watch_evaluation = _stream(RolloutClients.watch_evaluation)
    get_fleet = _call(RolloutClients.get_fleet)
    pause_production = _call(RolloutClients.pause_production)
    resume_production = _call(RolloutClients.resume_production)
    set_reward = _call(RolloutClients.set_reward)


class SyncReward(_Sync[RewardClient]):
    def __init__(self, address: str) -> None:
        super().__init__(lambda: RewardClient(address))

    score = _call(RewardClient.score)
    ask = _call(RewardClient.ask)
    list_scorers = _call(RewardClient.list_scorers)
    change_scorer = _call(RewardClient.change_scorer)
    scorer_state = _call(RewardClient.scorer_state)


class SyncTrainer(_Sync[TrainerClient]):
    def __init__(self, address: str, *, deadline_seconds: float = DEFAULT_DEADLINE_SECONDS) -> None:
        super().__init__(lambda: TrainerClient(address, deadline_seconds=deadline_seconds))

    status = _call(TrainerClient.status)
    watch_progress = _stream(TrainerClient.watch_progress)
    pause = _call(TrainerClient.pause)
    resume = _call(TrainerClient.resume)
    save_checkpoint = _call(TrainerClient.save_checkpoint)
    export_model = _call(TrainerClient.export_model)
    stop = _call(TrainerClient.stop)
