"""Samples as text in a run's folder, with reward, scorer, versions and lengths, and without tokens.

The trainer writes the samples of a step when the step is trained, one file for each data rank, and those of an
evaluation, one file for each; the rollout service writes samples that failed, as they fail. Files are gzip of JSON
lines, so `zcat` reads them too. Payloads in the ledger are deleted by a commit; these files stay until the folder
exceeds `sample_log_bytes`, and then the oldest file is deleted first.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from pydantic import TypeAdapter, ValidationError

from headrace.disk import atomic_write
from headrace.limits import to_json
from headrace.trajectory import Sample, Turn, turns_in

_STEP = re.compile(r"step-(?P<step>\d{7,})-rank-\d+\.jsonl\.gz")
_FAILED = re.compile(r"failed-(?P<number>\d{6,})(-\d+)?\.jsonl\.gz")
_EVALUATED = re.compile(r"eval-(?P<step>\d{7,})\.jsonl\.gz")
_LEVEL = 3
_FAILED_SHARE, _FAILED_FILES = 10, 4
"""Failed samples have a tenth of the bytes, in four files."""
_EVALUATED_SHARE = 10
ASKED = "asked"
"""The key in `hook_fields` of the text that the model was asked, where a user's function made another of the prompt."""
"""Evaluated samples have another tenth."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A sample for people to read. Lengths are in tokens; columns of the Parquet export have the same names."""

    sample_id: str
    group_id: str
    index: int
    rollout_id: str
    status: str
    prompt: str
    response: str
    label: str | None
    metadata: str
    """JSON"""
    reward: float | None
    reward_parts: Mapping[str, float]
    scorer: str
    scorer_version: str
    failure_reason: str | None
    failure_message: str | None
    prompt_tokens: int
    response_tokens: int
    trained_tokens: int
    policy_ranges: Sequence[tuple[int, int, int]]
    """(policy version, first response token, the one after the last)"""
    step: int | None
    """The step that trained it, counted from 1 as metrics.jsonl counts; None: none did."""
    turns: Sequence[Turn] = ()
    """The conversation of a sample of several turns, by role and content; none of others."""

    @classmethod
    def of(cls, sample: Sample, step: int | None = None) -> Answer:
        """Copies the fields that people read, without arrays."""
        return cls(
            sample_id=sample.sample_id,
            group_id=sample.group_id,
            index=sample.index,
            rollout_id=sample.rollout_id,
            status=sample.status.value,
            prompt=_asked(sample),
            response=sample.response,
            label=sample.label,
            metadata=to_json(sample.metadata),
            reward=sample.reward,
            reward_parts=dict(sample.reward_parts),
            scorer=sample.scorer,
            scorer_version=sample.scorer_version,
            failure_reason=sample.failure.reason if sample.failure else None,
            failure_message=sample.failure.message if sample.failure else None,
            prompt_tokens=sample.prompt_length,
            response_tokens=sample.response_length,
            trained_tokens=int(sample.loss_mask.sum()),
            policy_ranges=[(each.policy_version, each.start, each.end) for each in sample.policy_ranges],
            step=step,
            turns=turns_in(sample.hook_fields),
        )


_LINE = TypeAdapter(Answer)


def _asked(sample: Sample) -> str:
    asked = sample.hook_fields.get(ASKED)
    return asked if isinstance(asked, str) else sample.prompt


class SampleLog:
    """The files of one run. Everything here touches the disk: call it from a thread that may wait."""

    def __init__(self, folder: Path, writer: int | None = None) -> None:
        """`writer` tells several rollout services apart, which must not write into one file."""
        self.folder = folder
        self._ending = "" if writer is None else f"-{writer}"

    def write_step(self, step: int, rank: int, answers: Sequence[Answer], max_bytes: int) -> int:
        """Returns how many of them fitted. Replaces the file of an earlier attempt at the step."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"step-{step:07}-rank-{rank}.jsonl.gz"
        share = max_bytes - max_bytes // _FAILED_SHARE - max_bytes // _EVALUATED_SHARE
        with atomic_write(file) as draft:
            with draft.open("wb") as raw:
                written = _write(raw, answers, share)
                size = raw.tell()
            self._prune(_STEP, share - size)
        return written

    def write_failed(self, file: Path, answers: Sequence[Answer], max_bytes: int) -> Path:
        """Appends to `file`, from `new_failed_file` or an earlier call; returns the file for the next call."""
        share = max_bytes // _FAILED_SHARE
        self.folder.mkdir(parents=True, exist_ok=True)
        with file.open("ab") as raw:
            _write(raw, answers, max(0, share - raw.tell()))
            is_full = raw.tell() > share // _FAILED_FILES
        self._prune(_FAILED, share)
        return self.new_failed_file() if is_full else file

    def write_evaluated(self, step: int, answers: Sequence[Answer], max_bytes: int, *, is_new: bool) -> int:
        """Returns how many of them fitted. `is_new` replaces the file of an earlier evaluation of the step."""
        share = max_bytes // _EVALUATED_SHARE
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"eval-{step:07}.jsonl.gz").open("wb" if is_new else "ab") as raw:
            written = _write(raw, answers, max(0, share - raw.tell()))
        self._prune(_EVALUATED, share)
        return written

    def new_failed_file(self) -> Path:
        """A file numbered after all others: the end of an earlier one may be torn."""
        numbers = [int(match["number"]) for _, match in self._files(_FAILED)]
        return self.folder / f"failed-{max(numbers, default=0) + 1:06}{self._ending}.jsonl.gz"

    def is_empty(self) -> bool:
        return not (self._files(_STEP) or self._files(_FAILED) or self._files(_EVALUATED))

    def steps(self) -> list[int]:
        """Steps that have a file, oldest first."""
        return sorted({int(match["step"]) for _, match in self._files(_STEP)})

    def of_step(self, step: int) -> Iterator[Answer]:
        """Yields each sample once: the file of an earlier layout of ranks may lie beside newer ones."""
        files = [file for file, match in self._files(_STEP) if int(match["step"]) == step]
        seen = set[str]()
        for file in sorted(files, key=lambda file: file.stat().st_mtime_ns, reverse=True):
            for answer in _read(file):
                if answer.sample_id not in seen:
                    seen.add(answer.sample_id)
                    yield answer

    def evaluations(self) -> list[int]:
        """Steps after which there was an evaluation whose samples are here, oldest first."""
        return sorted(int(match["step"]) for _, match in self._files(_EVALUATED))

    def of_evaluation(self, step: int) -> Iterator[Answer]:
        """Yields the samples in the order in which they finished; `group_id` is eval/NAME/ROW."""
        yield from _read(self.folder / f"eval-{step:07}.jsonl.gz")

    def failed(self) -> Iterator[Answer]:
        """Yields failed samples, newest file first, and within a file in the order in which they failed."""
        for file, _ in sorted(self._files(_FAILED), reverse=True):
            yield from _read(file)

    def _files(self, pattern: re.Pattern[str]) -> list[tuple[Path, re.Match[str]]]:
        if not self.folder.is_dir():
            return []
        return [(file, match) for file in self.folder.iterdir() if (match := pattern.fullmatch(file.name))]

    def _prune(self, pattern: re.Pattern[str], max_bytes: int) -> None:
        """Names order files by age. Other ranks prune too: a file may be gone already."""
        files = sorted((match.group(1).zfill(20), file) for file, match in self._files(pattern))
        sizes = [_size(file) for _, file in files]
        total = sum(sizes)
        for (_, file), size in zip(files, sizes, strict=True):
            if total <= max_bytes:
                return
            file.unlink(missing_ok=True)
            total -= size


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def _write(raw: BinaryIO, answers: Sequence[Answer], max_bytes: int) -> int:
    """Appends one gzip member with the samples that fit."""
    start = raw.tell()
    with gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=_LEVEL, filename="", mtime=0) as packed:
        for number, answer in enumerate(answers):
            if raw.tell() - start > max_bytes:
                return number
            packed.write(_LINE.dump_json(answer) + b"\n")
    return len(answers)


def _read(file: Path) -> Iterator[Answer]:
    """Reads up to the place where a kill tore the file, and skips lines that do not parse."""
    try:
        with gzip.open(file, "rb") as lines:
            for line in lines:
                try:
                    yield _LINE.validate_json(line)
                except ValidationError:
                    continue
    except (EOFError, zlib.error, gzip.BadGzipFile, FileNotFoundError):
        return


def as_row(answer: Answer) -> dict[str, object]:
    return asdict(answer)
