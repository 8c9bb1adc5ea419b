"""Samples from a user's agent: it plays each prompt in a session of its own, whose record is what is trained."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from headrace.errors import HeadraceError, InvalidArgument
from headrace.hooks import HookArgs
from headrace.hooks import Sample as HookSample
from headrace.hooks.agent import Task, require_agent, run_agent
from headrace.hooks.failure import call_failure
from headrace.hooks.reward import Reward
from headrace.limits import MAX_ID_CHARACTERS
from headrace.process.workers import WorkerError
from headrace.prompts import label_for_hooks
from headrace.rpc import tracing
from headrace.rpc.log import log
from headrace.session import Branch
from headrace.trajectory import ROLE, TURNS, Failure, Sample, Status, bounded_turns
from services.rollout.agents.session import AgentSessions, Session, SessionLimits
from services.rollout.engine.replies import SamplingMask
from services.rollout.production.hooks import UserFunction
from services.rollout.production.sampling import SampleRequest, failed_sample, span_of

_WORKERS = 2


@dataclass(frozen=True, slots=True)
class Played:
    """`reward` is the one that the agent gives itself, if it does; `path` is the function that was called."""

    reward: Reward | None
    path: str


class Player(Protocol):
    """Plays tasks, all at the same time: worker processes of this service, or hosts anywhere (`hosts.py`)."""

    async def start(self) -> None:
        """Raises ConfigError when the agent cannot be loaded, or takes other arguments."""

    async def play(self, task: Task, session: Session, sample_id: str) -> Played:
        """Raises WorkerError or HeadraceError when the agent fails."""

    async def close(self) -> None: ...


class WorkerPlayer:
    """Plays in worker processes of this service, at most `calls_at_once` tasks."""

    def __init__(self, path: str, args: HookArgs, url: str, *, seconds: float, calls_at_once: int) -> None:
        self._path = path
        self._args = args
        self._url = url
        self._function = UserFunction(
            path,
            require_agent,
            "agent_function_path",
            seconds,
            workers=_WORKERS,
            calls_at_once=calls_at_once,
            kind="agent",
        )

    async def start(self) -> None:
        await self._function.start()

    async def play(self, task: Task, session: Session, sample_id: str) -> Played:
        url = f"{self._url}/sessions/{session.session_id}"
        return Played(await self._function.call(run_agent, self._args, task, url), self._path)

    async def close(self) -> None:
        await self._function.close()


class AgentSampler:
    """A `Sampler`. All agents run at the same time, at most `calls_at_once`."""

    def __init__(
        self,
        path: str,
        args: HookArgs,
        sessions: AgentSessions,
        player: Player,
        *,
        limits: SessionLimits,
        calls_at_once: int,
        evaluation_priority: int | None = None,
        mask_tokens: int | None = None,
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._path = path
        self._args = args
        self._sessions = sessions
        self.player = player
        self._limits = limits
        self._evaluation_priority = evaluation_priority
        self._mask_tokens = mask_tokens
        self._warn = warn
        self._warned = set[str]()
        self._places = asyncio.Semaphore(calls_at_once)
        self.in_flight = 0

    async def start(self) -> None:
        """Raises ConfigError when the agent cannot be loaded, or takes other arguments."""
        await self.player.start()

    async def close(self) -> None:
        await self.player.close()

    async def sample_all(
        self, requests: Sequence[SampleRequest], *, evaluation: bool, return_partial: asyncio.Event | None = None
    ) -> list[Sample]:
        """Returns at least one sample for each request; more where a session has several branches."""
        self.in_flight += len(requests)
        try:
            made = await asyncio.gather(*(self._play(request, evaluation=evaluation) for request in requests))
        finally:
            self.in_flight -= len(requests)
        return [sample for samples in made for sample in samples]

    async def _play(self, request: SampleRequest, *, evaluation: bool) -> list[Sample]:
        with span_of([request], evaluation=evaluation):
            return await self._played(request, evaluation=evaluation)

    async def _played(self, request: SampleRequest, *, evaluation: bool) -> list[Sample]:
        session = self._sessions.open(request.params, self._limits, self._warn_once)
        session.priority = self._evaluation_priority if evaluation else None
        session.mask_tokens = None if evaluation else self._mask_tokens
        try:
            async with self._places:
                session.spans = tracing.current()
                played = await self.player.play(_task(request, evaluation), session, request.sample_id)
            await self._sessions.close(session)
            return self._samples(request, session, played)
        except (WorkerError, HeadraceError) as error:
            await self._sessions.close(session)
            if any(each.is_cut for each in session.all()):
                return self._samples(request, session, Played(None, self._path))  # a limit of the session ended it
            return [self._failed(request, call_failure(error))]
        finally:
            await self._sessions.close(session)

    def _samples(self, request: SampleRequest, session: Session, played: Played) -> list[Sample]:
        every = session.all()
        if not every:
            message = f"agent {played.path} asked nothing of its base_url, so there is nothing to train"
            return [self._failed(request, Failure("HOOK_INCOMPLETE", message))]
        made = list[Sample]()
        for each in every:
            branches = each.record.branches()
            for number, branch in enumerate(branches):
                name = "/".join(filter(None, (each.role, str(number) if len(branches) > 1 else "")))
                sample = _sample(request, branch, name, each.role, is_cut=each.is_cut)
                made.append(sample if played.reward is None else self._with_reward(sample, played, each.role))
        return made

    def _with_reward(self, sample: Sample, played: Played, role: str) -> Sample:
        """The agent's own reward; no scorer is asked then.

        Raises InvalidArgument where a dict of rewards lacks the role, or --reward-key.
        """
        parts = played.reward if isinstance(played.reward, dict) else {}
        if role and parts and role not in parts:
            raise InvalidArgument(
                f"agent {played.path} returned rewards for {', '.join(sorted(parts))}, and none for its role {role}"
            )
        value = parts[role] if role in parts else self._value(sample, played.reward)
        return replace(sample, reward=value, reward_parts=parts, scorer=f"agent {played.path}"[-MAX_ID_CHARACTERS:])

    def _value(self, sample: Sample, reward: Reward | None) -> float:
        return HookSample(index=sample.index, reward=reward).get_reward_value(self._args)

    def _failed(self, request: SampleRequest, failure: Failure) -> Sample:
        log.warning("agent_failed", agent=self._path, sample_id=request.sample_id, message=failure.message)
        return failed_sample(request, failure)

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            self._warn(message)


def _task(request: SampleRequest, evaluation: bool) -> Task:
    prompt, metadata = request.prompt, dict(request.metadata)
    if prompt.tools:
        metadata.setdefault("tools", prompt.tools)
    messages = [dict(message) for message in prompt.messages or ()]
    label = label_for_hooks(request.label, request.hook_fields)
    return Task(messages or prompt.text, label, metadata, request.index, evaluation)


def _sample(request: SampleRequest, branch: Branch, name: str, role: str, *, is_cut: bool) -> Sample:
    """Returns a sample; samples of a fan-out have a `name`, and share the request's id as their rollout."""
    was_cut = is_cut or branch.last.status is Status.TRUNCATED
    return request.sample(
        branch.loss_mask,
        branch.log_probs,
        Status.TRUNCATED if was_cut else Status.COMPLETED,
        sample_id=f"{request.sample_id}/{name}" if name else request.sample_id,
        rollout_id=request.sample_id,
        prompt=branch.prompt_text,
        response=branch.last.plain,
        tokens=[*branch.prompt, *branch.response],
        policy_ranges=branch.policy_ranges,
        columns={} if branch.kept is None else SamplingMask.of(branch.kept).columns,
        hook_fields={**request.hook_fields, **_turns(branch)},
        tags={ROLE: role} if role else {},
    )


def _turns(branch: Branch) -> dict[str, object]:
    """The conversation, for people; a single response to a plain text has none."""
    if not branch.said:
        return {}
    return {TURNS: bounded_turns(branch.said)}
