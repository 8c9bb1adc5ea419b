"""A user's data source class as a prompt source. The ledger stores only how many groups were taken from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from headrace.api.sample.v1 import sample_pb2
from headrace.errors import ConfigError, FailedPrecondition, InvalidArgument
from headrace.hooks import HookArgs, Sample
from headrace.hooks.data_source import add_to_data_source, load_data_source, read_data_source, wind_data_source
from headrace.process.workers import WorkerError, WorkerPool
from headrace.rpc.log import log
from headrace.trajectory import from_json, to_json
from services.buffer.ledger.group import Prompt
from services.buffer.ledger.source import Cursor
from services.buffer.prompts.walk import Reading, Step

_WIND_SHARE = 0.2
"""The share of a call's time limit for catching up: its last answer may take as long again, twice."""


class DataSourceWalk:
    """Runs the object in one worker process."""

    digest = ""
    bad_lines = 0

    def __init__(self, path: str, args: HookArgs, *, seconds: float) -> None:
        self._path = path
        self._args = args
        self._seconds = seconds
        self._name = path.rpartition("/")[2]
        self._pool = WorkerPool(1, calls_per_worker=1)
        self._takes_back = False

    async def start(self) -> None:
        """Raises ConfigError when the object is not a data source."""
        try:
            keeps_state, takes_back = await self._run(load_data_source, self._path)
        except WorkerError as error:
            raise ConfigError(error.message, field="data.data_source_path") from error
        self._takes_back = keeps_state and takes_back

    async def read(self, cursor: Cursor, count: int) -> Reading:
        """Raises FailedPrecondition when the user's code fails or takes too long."""
        try:
            await self._wind(cursor.prompts_read)
            work = (self._path, self._args, cursor.prompts_read, count)
            samples: Sequence[Sample] = await self._run(read_data_source, *work)
        except WorkerError as error:
            raise FailedPrecondition(f"no prompts: {error.message}", reason="DATA_SOURCE_FAILED") from error
        steps: list[Step] = []
        for sample in samples:
            cursor = replace(cursor, prompts_read=cursor.prompts_read + 1, row=cursor.row + 1)
            steps.append(Step(self._prompt(sample, cursor.prompts_read), cursor))
        if len(steps) < count:
            cursor = replace(cursor, epoch=1)
        return Reading(steps, cursor)

    async def _wind(self, position: int) -> None:
        """Repeats the calls that a restarted data source had answered, however long all of them take together."""
        place = await self._wound(position)
        while place < position:
            log.info("data_source_wound", hook=self._path, groups=place, of=position)
            place = await self._wound(position)

    async def _wound(self, position: int) -> int:
        seconds = self._seconds * _WIND_SHARE
        return int(await self._run(wind_data_source, self._path, self._args, position, seconds))

    def is_end(self, cursor: Cursor) -> bool:
        """True when the source gave fewer prompts than it was asked for."""
        return cursor.epoch > 0

    async def give_back(self, cursor: Cursor, prompts: Sequence[Prompt], n_samples: int) -> None:
        """Passes groups dropped by age to `add_samples`, if the class keeps its own state. A failure is logged."""
        if not self._takes_back:
            return
        groups = [[_to_sample(prompt) for _ in range(n_samples)] for prompt in prompts]
        try:
            await self._run(add_to_data_source, self._path, self._args, cursor.prompts_read, groups)
        except WorkerError as error:
            log.error("groups_not_given_back", count=len(prompts), message=error.message)

    async def close(self) -> None:
        await self._pool.close()

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        return await self._pool.run(function, *args, timeout_seconds=self._seconds, name=f"hook {self._path}")

    def _prompt(self, sample: Sample, number: int) -> Prompt:
        message = sample_pb2.Prompt(prompt_id=f"{self._name}#{number}", metadata_json=to_json(sample.metadata))
        if sample.label is not None:
            message.label = sample.label
        if isinstance(sample.prompt, str):
            message.text = sample.prompt
        else:
            message.messages.messages.extend(_turn(self._path, turn) for turn in sample.prompt)
        return Prompt(message.prompt_id, message.SerializeToString(deterministic=True))


def _to_sample(prompt: Prompt) -> Sample:
    message = sample_pb2.Prompt.FromString(prompt.body)
    turns = [
        {"role": turn.role, "content": turn.content, **from_json(turn.extra_json)} for turn in message.messages.messages
    ]
    return Sample(
        prompt=turns or message.text,
        label=message.label if message.HasField("label") else None,
        metadata=from_json(message.metadata_json),
    )


def _turn(path: str, turn: dict[str, object]) -> sample_pb2.ChatMessage:
    if not isinstance(turn.get("role"), str):
        raise InvalidArgument(f"hook {path} gave a chat message without a role: {turn!r:.80}")
    extra = {key: value for key, value in turn.items() if key not in ("role", "content")}
    content = turn.get("content")
    if not isinstance(content, str | None):
        extra["content"] = content
    return sample_pb2.ChatMessage(
        role=str(turn["role"]),
        content=content if isinstance(content, str) else "",
        extra_json=json.dumps(extra) if extra else "",
    )
