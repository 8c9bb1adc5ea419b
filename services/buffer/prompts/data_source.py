"""A user's data source class as a prompt source. The ledger stores only how many groups were taken from it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.api.sample.v1 import sample_pb2
from headrace.errors import ConfigError, FailedPrecondition, InvalidArgument
from headrace.hooks import HookArgs, Sample
from headrace.hooks.data_source.generated import Generated, ReusedGroup, ReuseRequest
from headrace.hooks.data_source.worker import (
    Given,
    SourceForm,
    choose_of_data_source,
    hand_to_data_source,
    load_data_source,
    read_data_source,
    wind_data_source,
)
from headrace.images import with_images
from headrace.limits import to_json
from headrace.process.workers import WorkerError, WorkerPool
from headrace.prompts import set_content, set_label
from headrace.rpc.log import log
from services.buffer.ledger.group import Prompt
from services.buffer.ledger.stream import Cursor
from services.buffer.prompts.reader import PromptEntry, Reading

KeptGroups = Callable[[], Awaitable[Sequence[Generated]]]
"""The generated groups that the ledger still has, for an object that was made again."""

_WIND_SHARE = 0.2
"""The share of a call's time limit for catching up: its last answer may take as long again, twice."""
_HANDED_AT_ONCE = 16
_AGAIN = "again/"
_KEPT_FIELDS = ("session_id", "generate_function_path", "custom_rm_path")
"""The fields of a prompt's sample that are given to functions, beside its content, label and metadata."""


def is_again(prompt: Prompt) -> bool:
    """True for the prompt of a group that is trained once more."""
    return prompt.prompt_id.startswith(_AGAIN)


def origin_group(prompt_id: str) -> str | None:
    """The group that a prompt's group repeats; None for all others."""
    return prompt_id.removeprefix(_AGAIN).rpartition("#")[0] if prompt_id.startswith(_AGAIN) else None


class DataSourceReader:
    """Runs the object in one worker process."""

    digest = ""
    bad_lines = 0

    def __init__(self, path: str, args: HookArgs, *, seconds: float) -> None:
        self._path = path
        self._args = args
        self._seconds = seconds
        self._name = path.rpartition("/")[2]
        self._pool = WorkerPool(1, calls_per_worker=1)
        self._form = SourceForm(keeps_state=False, takes_samples=False, chooses=False)
        self._handed = -1  # it is given first what the ledger has

    async def start(self) -> None:
        """Raises ConfigError when the object is not a data source."""
        try:
            self._form = await self._run(load_data_source, self._path)
        except WorkerError as error:
            raise ConfigError(error.message, field="data.data_source_path") from error

    @property
    def takes_samples(self) -> bool:
        """True when it wants to see what was generated."""
        return self._form.takes_samples

    @property
    def chooses(self) -> bool:
        """True when it may choose some of that to be trained once more."""
        return self._form.chooses

    async def read(self, cursor: Cursor, count: int) -> Reading:
        """Raises FailedPrecondition when the user's code fails or takes too long."""
        try:
            await self._wind(cursor.prompts_read)
            work = (self._path, self._args, cursor.prompts_read, count)
            groups: Sequence[Given] = await self._run(read_data_source, *work)
        except WorkerError as error:
            raise FailedPrecondition(f"no prompts: {error.message}", reason="DATA_SOURCE_FAILED") from error
        entries: list[PromptEntry] = []
        for group in groups:
            cursor = replace(cursor, prompts_read=cursor.prompts_read + 1, row=cursor.row + 1)
            number, finished = cursor.prompts_read, group.finished
            prompt = self._prompt(group.prompt, number) if finished is None else self._prompt_again(finished, number)
            entries.append(PromptEntry(prompt, cursor, tuple(finished.samples) if finished else ()))
        if len(entries) < count:
            cursor = replace(cursor, epoch=1)
        return Reading(entries, cursor)

    async def hand_over(self, cursor: Cursor, groups: Sequence[Generated], kept: KeptGroups) -> None:
        """Gives what was generated to `add_samples`. A failure is logged: it must not fail the put."""
        try:
            await self._wind(cursor.prompts_read)
            if not await self._handed_over(cursor, groups):
                await self._hand_again(cursor, kept)
        except WorkerError as error:
            log.error("samples_not_added", groups=[group.group_id for group in groups], message=error.message)

    async def choose(self, cursor: Cursor, asked: ReuseRequest, kept: KeptGroups) -> list[PromptEntry]:
        """Returns at most `asked.count` groups. Raises FailedPrecondition when the user's code fails or is too slow."""
        try:
            await self._wind(cursor.prompts_read)
            groups = await self._chosen(cursor, asked)
            if groups is None:
                await self._hand_again(cursor, kept)
                groups = await self._chosen(cursor, asked)
        except WorkerError as error:
            raise FailedPrecondition(f"no samples: {error.message}", reason="DATA_SOURCE_FAILED") from error
        # One without a group of its own was loaded by the class from where it had saved it: it is numbered by the step.
        return [
            PromptEntry(self._prompt_again(group, f"{asked.step}.{place}"), cursor, tuple(group.samples))
            for place, group in enumerate(groups or ())
        ]

    async def _chosen(self, cursor: Cursor, asked: ReuseRequest) -> list[ReusedGroup] | None:
        work = (self._path, self._args, cursor.prompts_read, self._handed, asked)
        found: list[ReusedGroup] | None = await self._run(choose_of_data_source, *work)
        return found

    async def _handed_over(self, cursor: Cursor, groups: Sequence[Generated]) -> bool:
        for first in range(0, len(groups), _HANDED_AT_ONCE):
            some = groups[first : first + _HANDED_AT_ONCE]
            work = (self._path, self._args, cursor.prompts_read, self._handed, some)
            if not await self._run(hand_to_data_source, *work):
                return False
            self._handed += len(some)
        return True

    async def _hand_again(self, cursor: Cursor, kept: KeptGroups) -> None:
        """Hands the groups to an object that was made again, because its process ended or the buffer restarted."""
        self._handed = 0
        groups = await kept()
        await self._wind(cursor.prompts_read)
        if not await self._handed_over(cursor, groups):
            raise WorkerError("its process ended again while it was given what it had")
        log.info("samples_handed_again", hook=self._path, groups=len(groups))

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

    async def close(self) -> None:
        await self._pool.close()

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        return await self._pool.run(function, *args, timeout_seconds=self._seconds, name=f"hook {self._path}")

    def _prompt_again(self, group: ReusedGroup, number: int | str) -> Prompt:
        if not group.group_id:
            return self._prompt(group.first, number)
        message = sample_pb2.Prompt.FromString(group.prompt)
        message.prompt_id = f"{_AGAIN}{group.group_id}#{group.times}"
        return Prompt(message.prompt_id, message.SerializeToString(deterministic=True))

    def _prompt(self, sample: Sample, number: int | str) -> Prompt:
        message = prompt_of_sample(self._path, sample)
        message.prompt_id = f"{self._name}#{number}"
        return Prompt(message.prompt_id, message.SerializeToString(deterministic=True))


def prompt_of_sample(path: str, sample: Sample) -> sample_pb2.Prompt:
    """A sample of the class at `path` as a prompt without its id. Raises InvalidArgument for what it cannot hold.

    Its images become parts of its messages.
    """
    metadata = dict(sample.metadata)
    tools = metadata.pop("tools", None)
    fields = {name: value for name in _KEPT_FIELDS if (value := getattr(sample, name)) is not None}
    message = sample_pb2.Prompt(metadata_json=to_json(metadata), hook_json=to_json(fields) if fields else "")
    if tools:
        message.tools_json = to_json(tools)
    set_label(message, sample.label)
    content, images = sample.prompt, (sample.multimodal_inputs or {}).get("images")
    if images and not _has_images(content):
        content = with_images(content, {"multimodal_inputs": images}, "multimodal_inputs", Path())
    for turn in [] if isinstance(content, str) else content:
        if not isinstance(turn.get("role"), str):
            raise InvalidArgument(f"hook {path} gave a chat message without a role: {turn!r:.80}")
    set_content(message, content)
    return message


def _has_images(content: str | list[dict[str, Any]]) -> bool:
    """True for messages whose images are in their parts already."""
    parts = [part for turn in content if isinstance(turn, dict) for part in _parts(turn.get("content"))]
    return any(part.get("image") or part.get("path") or part.get("url") for part in parts)


def _parts(content: object) -> list[dict[str, Any]]:
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
