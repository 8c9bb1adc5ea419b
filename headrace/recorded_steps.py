"""Rollout steps as files: what the trainer was given for each, bit for bit.

A file is a sequence of protobuf messages, each behind its length (a varint): the batch (LeaseBatchResponse, with the
groups in training order and the digest), then its samples (Sample: envelope and payload), in that order.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

from google.protobuf import proto
from google.protobuf.message import DecodeError, Message

from headrace.api.buffer.v1 import buffer_pb2
from headrace.api.sample.v1 import sample_pb2
from headrace.disk.whole_file import replacing
from headrace.errors import DataLoss, NotFound

M = TypeVar("M", bound=Message)

_NUMBER = "{rollout_id}"
_ZIP = b"PK"
_PICKLE = b"\x80"


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One rollout step. `batch` has the groups in training order, `samples` the payload of each of their samples."""

    batch: buffer_pb2.LeaseBatchResponse
    samples: Sequence[sample_pb2.Sample]


class RecordedSteps:
    """The files that `pattern` names: `{rollout_id}` in it is the step's number, from 0."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern

    def path_of(self, step: int) -> Path:
        """The file of a step, whether or not it is there."""
        return Path(self.pattern.replace(_NUMBER, str(step)))

    def steps(self) -> list[int]:
        """The steps that there are, in order."""
        template = Path(self.pattern)
        if _NUMBER in str(template.parent):
            return self._counted()
        before, _, after = template.name.partition(_NUMBER)
        named = re.compile(f"{re.escape(before)}([0-9]+){re.escape(after)}")
        names = os.listdir(template.parent) if template.parent.is_dir() else []
        return sorted(int(found[1]) for name in names if (found := named.fullmatch(name)))

    def write(self, step: int, recorded: RecordedStep) -> None:
        """Durable when it returns. A step that is recorded again takes the place of its file."""
        path = self.path_of(step)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as draft, draft.open("wb") as file:
            for message in (recorded.batch, *recorded.samples):
                proto.serialize_length_prefixed(message, cast(BytesIO, file))
            file.flush()
            os.fsync(file.fileno())

    def read(self, step: int) -> RecordedStep:
        """Raises NotFound for a step that is not there, DataLoss for a file that is not one of a step."""
        path = self._existing(step)
        samples = []
        with path.open("rb") as file:
            batch = self._next(buffer_pb2.LeaseBatchResponse, file, path)
            while (sample := self._next(sample_pb2.Sample, file, path)) is not None:
                samples.append(sample)
        expected = [] if batch is None else sample_ids_of(batch)
        if batch is None or [sample.envelope.sample_id for sample in samples] != expected:
            raise self._damaged(path, f"it has {len(samples)} of the {len(expected)} samples that it names")
        return RecordedStep(batch, samples)

    def read_ids(self, step: int) -> list[str]:
        """The ids of a step's samples, without reading them. Raises as `read` does."""
        path = self._existing(step)
        with path.open("rb") as file:
            batch = self._next(buffer_pb2.LeaseBatchResponse, file, path)
        return [] if batch is None else sample_ids_of(batch)

    def _existing(self, step: int) -> Path:
        path = self.path_of(step)
        if not path.is_file():
            raise NotFound(f"there is no rollout step {step}: {path} is not a file; {self._there()}")
        return path

    def _next(self, kind: type[M], file: BinaryIO, path: Path) -> M | None:
        """None at the end of the file."""
        try:
            found: M | None = proto.parse_length_prefixed(kind, cast(BytesIO, file))
        except (DecodeError, ValueError, EOFError) as error:
            raise self._damaged(path, str(error)) from error
        return found

    def _counted(self) -> list[int]:
        found = 0
        while self.path_of(found).is_file():
            found += 1
        return list(range(found))

    def _there(self) -> str:
        steps = self.steps()
        return f"steps {steps[0]} to {steps[-1]} are there" if steps else "no step is there"

    def _damaged(self, path: Path, why: str) -> DataLoss:
        with path.open("rb") as file:
            begins = file.read(2)
        if begins == _ZIP or begins[:1] == _PICKLE:
            return DataLoss(
                f"{path} is a file of PyTorch, which is not opened, as it may run code of its author's: record the "
                "steps again with --save-debug-rollout-data"
            )
        return DataLoss(f"{path} is damaged, or is no rollout step of headrace: {why}")


def sample_ids_of(batch: buffer_pb2.LeaseBatchResponse) -> list[str]:
    """The ids of a batch's samples in training order."""
    return [sample.sample_id for group in batch.groups for sample in group.samples]
