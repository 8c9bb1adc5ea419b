"""Samples in a run's folder: as text with reward, scorer, versions and lengths, and some of them token by token.

The trainer writes the samples of a step when the step is trained, one file for each data rank, and those of an
evaluation, one file for each; the rollout service writes samples that failed or were filtered, as that happens. Files
are gzip of JSON lines, so `zcat` reads them too. Payloads in the ledger are deleted by a commit; these files stay until
the folder exceeds `sample_log_bytes`, and then the oldest file is deleted first.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from pydantic import TypeAdapter, ValidationError

from headrace.disk import atomic_write
from headrace.limits import to_json
from headrace.trajectory import Sample, Turn, turns_in

_STEP = re.compile(r"step-(?P<step>\d{7,})-rank-\d+\.jsonl\.gz")
_TOKENS = re.compile(r"tokens-(?P<step>\d{7,})-rank-\d+\.jsonl\.gz")
_UNTRAINED = re.compile(r"failed-(?P<number>\d{6,})(-\d+)?\.jsonl\.gz")
_EVALUATED = re.compile(r"eval-(?P<step>\d{7,})\.jsonl\.gz")
_LEVEL = 3
_UNTRAINED_SHARE, _UNTRAINED_FILES = 10, 4
"""Failed and filtered samples have a tenth of the bytes, in four files."""
_EVALUATED_SHARE = 10
"""Evaluated samples have another tenth."""
_TOKENS_SHARE, _TOKENS_BYTES = 4, 512 << 20
"""Tokens have a quarter, and 512 MiB at most."""
ASKED = "asked"
"""The key in `hook_fields` of the text that the model was asked, where a user's function made another of the prompt."""


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
    advantage: float | None = None
    """Mean over the trained tokens; None where no policy loss has trained it."""
    log_prob_gap: float | None = None
    """Mean of |log π_trainer − log π_rollout| over the trained tokens; None likewise."""
    dropped_reason: str | None = None
    """What the job's filter said of its group, where it dropped the group."""

    @classmethod
    def of(cls, sample: Sample, step: int | None = None, *, dropped_reason: str | None = None) -> Answer:
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
            dropped_reason=dropped_reason,
        )


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """A trained sample token by token: T tokens, of which the last R are the response. Log-probs are in nats."""

    sample_id: str
    tokens: Sequence[int]
    """[T]"""
    loss_mask: Sequence[int]
    """[R], 1 where the token is trained"""
    engine_log_probs: Sequence[float | None]
    """[R], of the engine that sampled; [] of a sample that none sampled (SFT). None: not a finite number."""
    trainer_log_probs: Sequence[float | None]
    """[R], of the weights that the step began with"""
    advantages: Sequence[float | None]
    """[R]; [] without a policy loss"""


Row = TypeVar("Row", Answer, TokenColumns)
_LINE = TypeAdapter(Answer)
_COLUMNS = TypeAdapter(TokenColumns)
_SAMPLE_ID = re.compile(rb'\{"sample_id":("(?:[^"\\]|\\.)*")')
"""Every line begins so."""


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
        share = max_bytes - max_bytes // _UNTRAINED_SHARE - max_bytes // _EVALUATED_SHARE - _tokens_share(max_bytes)
        return self._replace(file, map(_LINE.dump_json, answers), _STEP, share)

    def write_tokens(self, step: int, rank: int, columns: Sequence[TokenColumns], max_bytes: int) -> int:
        """Returns how many of them fitted. Replaces the file of an earlier attempt at the step."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"tokens-{step:07}-rank-{rank}.jsonl.gz"
        return self._replace(file, map(_COLUMNS.dump_json, columns), _TOKENS, _tokens_share(max_bytes))

    def _replace(self, file: Path, lines: Iterable[bytes], pattern: re.Pattern[str], max_bytes: int) -> int:
        with atomic_write(file) as draft:
            with draft.open("wb") as raw:
                written = _write(raw, lines, max_bytes)
                size = raw.tell()
            self._prune(pattern, max_bytes - size)
        return written

    def write_untrained(self, file: Path, answers: Sequence[Answer], max_bytes: int) -> Path:
        """Appends to `file`, from `new_untrained_file` or an earlier call; returns the file for the next call."""
        share = max_bytes // _UNTRAINED_SHARE
        self.folder.mkdir(parents=True, exist_ok=True)
        with file.open("ab") as raw:
            _write(raw, map(_LINE.dump_json, answers), max(0, share - raw.tell()))
            is_full = raw.tell() > share // _UNTRAINED_FILES
        self._prune(_UNTRAINED, share)
        return self.new_untrained_file() if is_full else file

    def write_evaluated(self, step: int, answers: Sequence[Answer], max_bytes: int, *, is_new: bool) -> int:
        """Returns how many of them fitted. `is_new` replaces the file of an earlier evaluation of the step."""
        share = max_bytes // _EVALUATED_SHARE
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"eval-{step:07}.jsonl.gz").open("wb" if is_new else "ab") as raw:
            written = _write(raw, map(_LINE.dump_json, answers), max(0, share - raw.tell()))
        self._prune(_EVALUATED, share)
        return written

    def new_untrained_file(self) -> Path:
        """A file numbered after all others: the end of an earlier one may be torn."""
        numbers = [int(match["number"]) for _, match in self._files(_UNTRAINED)]
        return self.folder / f"failed-{max(numbers, default=0) + 1:06}{self._ending}.jsonl.gz"

    def is_empty(self) -> bool:
        return not (self._files(_STEP) or self._files(_UNTRAINED) or self._files(_EVALUATED))

    def steps(self) -> list[int]:
        """Steps that have a file, oldest first."""
        return sorted({int(match["step"]) for _, match in self._files(_STEP)})

    def steps_with_tokens(self) -> list[int]:
        """Steps of which some samples were written token by token, oldest first."""
        return sorted({int(match["step"]) for _, match in self._files(_TOKENS)})

    def of_step(self, step: int) -> Iterator[Answer]:
        """Yields each sample once: the file of an earlier layout of ranks may lie beside newer ones."""
        yield from self._each_once(_STEP, step, _LINE)

    def tokens_of(self, step: int) -> Iterator[TokenColumns]:
        """Yields the samples of a step that were written token by token: all of some steps, a few of the others."""
        yield from self._each_once(_TOKENS, step, _COLUMNS)

    def ids_with_tokens(self, step: int) -> set[str]:
        """The samples of `tokens_of`; reads no token."""
        files = (file for file, match in self._files(_TOKENS) if int(match["step"]) == step)
        begins = (_SAMPLE_ID.match(line) for file in files for line in _lines(file))
        return {json.loads(found[1]) for found in begins if found}

    def _each_once(self, pattern: re.Pattern[str], step: int, line: TypeAdapter[Row]) -> Iterator[Row]:
        files = [file for file, match in self._files(pattern) if int(match["step"]) == step]
        seen = set[str]()
        for file in sorted(files, key=lambda file: file.stat().st_mtime_ns, reverse=True):
            for row in _read(file, line):
                if row.sample_id not in seen:
                    seen.add(row.sample_id)
                    yield row

    def evaluations(self) -> list[int]:
        """Steps after which there was an evaluation whose samples are here, oldest first."""
        return sorted(int(match["step"]) for _, match in self._files(_EVALUATED))

    def of_evaluation(self, step: int) -> Iterator[Answer]:
        """Yields the samples in the order in which they finished; `group_id` is eval/NAME/ROW."""
        yield from _read(self.folder / f"eval-{step:07}.jsonl.gz", _LINE)

    def untrained(self) -> Iterator[Answer]:
        """Yields failed and filtered samples, newest file first, within a file in the order in which they ended."""
        for file, _ in sorted(self._files(_UNTRAINED), reverse=True):
            yield from _read(file, _LINE)

    def failed(self) -> Iterator[Answer]:
        """Yields those of `untrained` that failed."""
        return (answer for answer in self.untrained() if answer.failure_reason is not None)

    def untrained_files(self) -> Mapping[str, int]:
        """The files of `untrained` and their bytes: equal as long as it yields the same."""
        return {file.name: _size(file) for file, _ in self._files(_UNTRAINED)}

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


def _tokens_share(max_bytes: int) -> int:
    return min(max_bytes // _TOKENS_SHARE, _TOKENS_BYTES)


def _write(raw: BinaryIO, lines: Iterable[bytes], max_bytes: int) -> int:
    """Appends one gzip member with the lines that fit, and returns their number."""
    start, number = raw.tell(), 0
    with gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=_LEVEL, filename="", mtime=0) as packed:
        for line in lines:
            if raw.tell() - start > max_bytes:
                break
            packed.write(line + b"\n")
            number += 1
    return number


def _read(file: Path, kind: TypeAdapter[Row]) -> Iterator[Row]:
    """Skips lines that do not parse."""
    for line in _lines(file):
        try:
            yield kind.validate_json(line)
        except ValidationError:
            continue


def _lines(file: Path) -> Iterator[bytes]:
    """Reads up to the place where a kill tore the file."""
    try:
        with gzip.open(file, "rb") as lines:
            yield from lines
    except (EOFError, zlib.error, gzip.BadGzipFile, FileNotFoundError):
        return


def conversation(answer: Answer) -> Sequence[Turn]:
    """Returns its turns; those of a sample without any are its prompt and its response."""
    said = {"user": answer.prompt, "assistant": answer.response}
    return answer.turns or [{"role": role, "content": text} for role, text in said.items()]


def as_row(answer: Answer) -> dict[str, object]:
    return asdict(answer)
