"""Tinker's sessions, models and samplers, and the order in which their requests are carried out.

A client opens a session and keeps it alive. A model's requests have numbers, and are carried out in their order, one
model after the other. Whoever asks is told the request's id at once, and comes for the outcome later, which is why a
request is a "future" in Tinker's documents. A session that is silent for too long ends, with all that is its own but
the checkpoints that were given a name.
"""

from __future__ import annotations

import asyncio
import heapq
import secrets
import time
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from headrace.errors import FailedPrecondition, HeadraceError, NotFound, ResourceExhausted
from headrace.rpc.log import log
from services.trainer.tinker.checkpoints import About, Checkpoints
from services.trainer.tinker.journal import Journal, Model, Outcome, QueuedRequest, Sampler
from services.trainer.tinker.wire import TinkerWire
from services.trainer.tinker.work import (
    AdamParams,
    Completion,
    Create,
    ForwardBackward,
    Load,
    LoraSpec,
    Losses,
    Sample,
    Save,
    TinkerPath,
)

SESSION_SECONDS = 180.0
"""The client says every ten seconds that it is there."""
_STATE_SECONDS = 60.0
"""The time of a model's requests that a restart may have to carry out again."""
_RESULT_SECONDS = 3600.0
"""How long the outcome of a sampling request can be fetched."""
_SWEEP_SECONDS = 5.0


class Ranks(Protocol):
    async def create(self, model_id: str, spec: LoraSpec) -> None: ...
    async def load(self, model_id: str, spec: LoraSpec, file: Path, *, optimizer: bool) -> None:
        """Raises DataLoss for a file of another base."""

    async def drop(self, model_id: str) -> None: ...
    async def compute(self, model_id: str, work: ForwardBackward) -> Losses: ...
    async def step(self, model_id: str, params: AdamParams) -> float:
        """Returns the gradient's norm. Raises FailedPrecondition where it is not finite."""

    async def save(self, model_id: str, file: Path) -> None: ...
    async def save_adapter(self, model_id: str, folder: Path) -> None: ...


class Engines(Protocol):
    async def sample(self, adapter: Path | None, work: Sample) -> tuple[Sequence[Completion], Sequence[float] | None]:
        """Responses, and the log-probs of the prompt's tokens but the first where they are request for."""


@dataclass(slots=True)
class _ModelQueue:
    """A model, and its requests that wait for their turn."""

    model: Model
    next_seq: int
    queue: list[tuple[int, QueuedRequest]] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    exists: bool = False
    saved_at: float = field(default_factory=time.monotonic)
    running: asyncio.Task[None] | None = None

    def push(self, request: QueuedRequest) -> None:
        heapq.heappush(self.queue, (request.seq, request))
        self.arrived.set()

    async def next(self) -> QueuedRequest:
        while not self.queue or self.queue[0][0] > self.next_seq:
            self.arrived.clear()
            await self.arrived.wait()
        self.next_seq = max(self.next_seq, self.queue[0][0] + 1)
        return heapq.heappop(self.queue)[1]


class Tinker:
    """States: built → started → stopped. Lives on the event loop; `ranks` carry out one request at a time."""

    def __init__(
        self,
        ranks: Ranks,
        engines: Engines,
        wire: TinkerWire,
        journal: Journal,
        checkpoints: Checkpoints,
        *,
        max_models: int,
    ) -> None:
        self._ranks = ranks
        self._engines = engines
        self._wire = wire
        self._journal = journal
        self.checkpoints = checkpoints
        self._max_models = max_models
        self._turn = asyncio.Lock()
        """Who waits longest is next, so that models take turns."""
        self._seen: dict[str, float] = {}
        self._models: dict[str, _ModelQueue] = {}
        self._samplers: dict[str, Sampler] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._answered: dict[str, asyncio.Event] = {}
        self._completed: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._sweeping: asyncio.Task[None] | None = None
        self._lets_wait = True
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def broken(self) -> None:
        """Raises what ended the work in the background: no client's request is to blame."""
        await asyncio.shield(self._broken)

    def start(self) -> None:
        """Goes on with what was there before a restart. Sessions have their whole time again."""
        for session in self._journal.sessions():
            self._seen[session] = time.monotonic()
        for model in self._journal.models():
            self._models[model.model_id] = queue = _ModelQueue(model, model.saved_seq + 1)
            for request, _ in self._journal.since(model.model_id, model.saved_seq):
                queue.push(request)
            queue.running = self._in_background(self._run(queue))
        for sampler in self._journal.samplers():
            self._samplers[sampler.sampler_id] = sampler
            for request, is_answered in self._journal.since(sampler.sampler_id, -1):
                if not is_answered:
                    self._begin_sampling(sampler, request)
        self._sweeping = self._in_background(self._sweep())

    def let_go(self) -> None:
        """Nobody waits any longer: clients ask again after the next start."""
        self._lets_wait = False
        for event in (*self._answered.values(), *self._completed.values()):
            event.set()

    async def stop(self) -> None:
        """What is not answered yet is carried out after the next start."""
        tasks = [queue.running for queue in self._models.values() if queue.running]
        tasks += [*self._tasks.values(), *([self._sweeping] if self._sweeping else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._journal.close()

    def open_session(self) -> str:
        session = str(uuid.uuid4())
        self._journal.add_session(session)
        self._seen[session] = time.monotonic()
        return session

    def heartbeat(self, session: str) -> None:
        """Raises NotFound for a session that has ended."""
        if session not in self._seen:
            raise NotFound(f"session {session} has ended or was never opened: open another one")
        self._seen[session] = time.monotonic()

    async def end_session(self, session: str) -> None:
        """Gives back its models and what only it can use."""
        self._seen.pop(session, None)
        for queue in [queue for queue in self._models.values() if queue.model.session == session]:
            del self._models[queue.model.model_id]
            if queue.running:
                queue.running.cancel()
                await asyncio.gather(queue.running, return_exceptions=True)
            async with self._turn:
                await self._ranks.drop(queue.model.model_id)
        for sampler in [each for each in self._samplers.values() if each.session == session]:
            del self._samplers[sampler.sampler_id]
        for request_id in [each for each in self._tasks if each.startswith(f"{session}:")]:
            self._tasks.pop(request_id).cancel()
        await asyncio.to_thread(self.checkpoints.end_session, session)
        self._journal.end_session(session)
        for request_id in [each for each in self._answered if each.startswith(f"{session}:")]:
            self._answered.pop(request_id).set()

    def model(self, model_id: str) -> Model:
        """Raises NotFound."""
        if model_id not in self._models:
            raise NotFound(f"model {model_id} does not exist, or its session has ended")
        return self._models[model_id].model

    def sampler(self, sampler_id: str) -> Sampler:
        """Raises NotFound."""
        if sampler_id not in self._samplers:
            raise NotFound(f"sampling session {sampler_id} does not exist, or its session has ended")
        return self._samplers[sampler_id]

    def create(self, session: str, model_seq: int, kind: str, body: bytes, spec: LoraSpec) -> QueuedRequest:
        """Takes a request that makes a new model: Create or Load. It has number 0 of the model's requests."""
        self.heartbeat(session)
        model_id = f"{session}:train:{model_seq}"
        request = QueuedRequest(f"{model_id}:0", session, model_id, 0, kind, body)
        if model_id in self._models:
            return request
        if len(self._models) >= self._max_models:
            raise ResourceExhausted(
                f"all {self._max_models} models are in use: end another session, or raise --tinker-models"
            )
        self._journal.add_model(Model(model_id, session, spec, -1))
        self._journal.add(request)
        self._models[model_id] = queue = _ModelQueue(Model(model_id, session, spec, -1), 0)
        queue.push(request)
        queue.running = self._in_background(self._run(queue))
        return request

    def ask(self, model_id: str, seq: int, kind: str, body: bytes) -> QueuedRequest:
        """Takes a request of a model; the same number twice is one request."""
        model = self.model(model_id)
        self.heartbeat(model.session)
        request = QueuedRequest(f"{model_id}:{seq}", model.session, model_id, seq, kind, body)
        if self._journal.add(request):
            self._models[model_id].push(request)
        return request

    def add_sampler(self, session: str, seq: int, path: str | None) -> Sampler:
        """Raises NotFound for a path without a checkpoint."""
        self.heartbeat(session)
        if path is not None:
            self.checkpoints.adapter(TinkerPath.parse(path))
        sampler = Sampler(f"{session}:sample:{seq}", session, path)
        self._journal.add_sampler(sampler)
        self._samplers[sampler.sampler_id] = sampler
        return sampler

    def ask_sample(self, sampler_id: str, seq: int, body: bytes) -> QueuedRequest:
        """Takes a request of a sampler: they are carried out side by side."""
        sampler = self.sampler(sampler_id)
        self.heartbeat(sampler.session)
        request = QueuedRequest(f"{sampler_id}:{seq}", sampler.session, sampler_id, seq, "sample", body)
        if self._journal.add(request):
            self._begin_sampling(sampler, request)
        return request

    def cancel(self, request_id: str) -> None:
        """Ends a sampling request that nobody waits for. Nothing happens where there is none."""
        if task := self._tasks.pop(request_id, None):
            task.cancel()

    async def outcome(self, request_id: str, seconds: float) -> Outcome | None:
        """The outcome, once there is one; None after so many seconds. Raises NotFound."""
        try:
            found = self._journal.outcome(request_id)
            if found is None and self._lets_wait:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._event(request_id).wait(), seconds)
                found = self._journal.outcome(request_id)
        except KeyError:
            raise NotFound(f"request {request_id} is not known here, or its session has ended") from None
        return found

    async def completions(self, sampler_id: str, since: int, seconds: float) -> Sequence[tuple[str, int]]:
        """(request, bytes of its outcome) of a sampler, without the first `since`; waits for one."""
        found = self._journal.answered(sampler_id)[since:]
        if not found and self._lets_wait:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._completed[sampler_id].wait(), seconds)
            found = self._journal.answered(sampler_id)[since:]
        return found

    def _in_background(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) and not self._broken.done():
                self._broken.set_exception(error)

        task = asyncio.create_task(work)
        task.add_done_callback(ended)
        return task

    def _event(self, request_id: str) -> asyncio.Event:
        return self._answered.setdefault(request_id, asyncio.Event())

    def _answer(self, request: QueuedRequest, outcome: Outcome) -> None:
        self._journal.answer(request.request_id, outcome, time.time())
        if event := self._answered.pop(request.request_id, None):
            event.set()
        if event := self._completed.pop(request.owner, None):
            event.set()

    async def _guarded(self, request: QueuedRequest, work: Callable[[], Awaitable[Outcome]]) -> Outcome:
        try:
            return await work()
        except HeadraceError as error:
            log.info("request_failed", request_id=request.request_id, reason=error.reason, error=error.message)
            return self._wire.failed(error)

    async def _run(self, queue: _ModelQueue) -> None:
        """The model's requests, from the first that its state on the disk does not cover."""
        model = queue.model
        if model.saved_seq >= 0:
            async with self._turn:
                file = self.checkpoints.state(model.model_id, model.saved_seq)
                await self._ranks.load(model.model_id, model.spec, file, optimizer=True)
            queue.exists = True
        while True:
            request = await queue.next()
            known = self._journal.outcome(request.request_id)
            if known is not None and request.kind in _LEAVE_FILES:
                continue  # a restart finds what it left
            async with self._turn:
                outcome = await self._guarded(request, lambda request=request: self._carry_out(queue, request))  # type: ignore[misc]  # mypy cannot infer a lambda with a default
            if known is None:
                self._answer(request, outcome)
            is_due = request.kind == "optim_step" and time.monotonic() - queue.saved_at > _STATE_SECONDS
            # What a model was loaded from may be deleted.
            if queue.exists and (is_due or request.kind == "load_weights"):
                await self._save_state(queue, request.seq)

    async def _save_state(self, queue: _ModelQueue, seq: int) -> None:
        model_id = queue.model.model_id
        try:
            async with self._turn:
                await self._ranks.save(model_id, self.checkpoints.state(model_id, seq))
        except HeadraceError as error:
            log.warning("tinker_state_not_saved", model_id=model_id, error=error.message)
            return
        self._journal.saved(model_id, seq)
        await asyncio.to_thread(self.checkpoints.remove_states, model_id, seq)
        queue.saved_at = time.monotonic()

    async def _carry_out(self, queue: _ModelQueue, request: QueuedRequest) -> Outcome:
        model_id, work = queue.model.model_id, self._wire.work(request.kind, request.body)
        if not queue.exists and not isinstance(work, Create | Load):
            raise FailedPrecondition(f"model {model_id} was not made: see the error of the request that should make it")
        match work:
            case Create():
                await self._ranks.create(model_id, queue.model.spec)
                queue.exists = True
                return self._wire.done(model_id=model_id, type="create_model")
            case Load(path, optimizer):
                spec, file = self.checkpoints.trained(path)
                await self._ranks.load(model_id, spec, file, optimizer=optimizer)
                queue.exists, queue.model = True, Model(model_id, queue.model.session, spec, queue.model.saved_seq)
                self._journal.add_model(queue.model)
                return self._wire.done(path=str(path), model_id=model_id, type="load_weights")
            case ForwardBackward():
                return self._wire.computed(await self._ranks.compute(model_id, work))
            case AdamParams():
                return self._wire.done(metrics={"grad_norm": await self._ranks.step(model_id, work)})
            case Save():
                return await self._save(queue.model, request.request_id, work)
            case _:
                raise FailedPrecondition(f"{request.kind} is no request of a model")

    async def _save(self, model: Model, request_id: str, work: Save) -> Outcome:
        name = work.name or f"unnamed-{secrets.token_hex(8)}"
        path = TinkerPath(model.model_id, "sampler_weights" if work.for_sampler else "weights", name)
        if not self.checkpoints.is_made_by(path, request_id):  # a restart may have come before the answer
            folder = self.checkpoints.room(path, overwrite=work.overwrite)
            if work.for_sampler:
                await self._ranks.save_adapter(model.model_id, folder)
            else:
                await self._ranks.save(model.model_id, folder / "state.safetensors")
            about = About(
                path=str(path),
                request_id=request_id,
                session=model.session,
                spec=model.spec,
                created=time.time(),
                is_kept=work.name is not None,
                expires=None if work.ttl_seconds is None else time.time() + work.ttl_seconds,
                user_metadata=None if work.user_metadata is None else dict(work.user_metadata),
            )
            self.checkpoints.describe(path, about)
        if work.for_sampler and work.name is None:
            assert work.sampler_seq is not None, "the wire asks for one of both"
            sampler = self.add_sampler(model.session, work.sampler_seq, str(path))
            return self._wire.done(sampling_session_id=sampler.sampler_id, type="save_weights_for_sampler")
        kind = "save_weights_for_sampler" if work.for_sampler else "save_weights"
        return self._wire.done(path=str(path), type=kind)

    def _begin_sampling(self, sampler: Sampler, request: QueuedRequest) -> None:
        self._tasks[request.request_id] = task = self._in_background(self._sample(sampler, request))
        task.add_done_callback(lambda _: self._tasks.pop(request.request_id, None))

    async def _sample(self, sampler: Sampler, request: QueuedRequest) -> None:
        async def work() -> Outcome:
            work = self._wire.work(request.kind, request.body)
            assert isinstance(work, Sample), "its kind is sample"
            adapter = None if sampler.path is None else self.checkpoints.adapter(TinkerPath.parse(sampler.path))
            return self._wire.sampled(*await self._engines.sample(adapter, work))

        self._answer(request, await self._guarded(request, work))

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            late = time.monotonic() - SESSION_SECONDS
            for session in [each for each, seen in self._seen.items() if seen < late]:
                log.warning("tinker_session_ended", session=session, silent_seconds=SESSION_SECONDS)
                await self.end_session(session)
            self._journal.forget_results("sample", time.time() - _RESULT_SECONDS)
            await asyncio.to_thread(self.checkpoints.remove_expired)


_LEAVE_FILES = ("save_weights", "save_weights_for_sampler")
