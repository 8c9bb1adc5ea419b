"""Rollout steps as files: what the trainer was given for each, bit for bit.

A file begins with 15 bytes that name the format. Then come protobuf messages, each behind its length (8 bytes,
little-endian) and its BLAKE3 multihash (34 bytes): the batch (LeaseBatchResponse, with the groups in training order and
the digest), then its samples (Sample: envelope and payload), in that order.

Files of headrace 0.1.0 have neither name nor hashes, and varints for lengths. They are read, and their payloads are
compared with the digests in their envelopes.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

from google.protobuf import proto
from google.protobuf.message import DecodeError, Message

from headrace.api.buffer.v1 import buffer_pb2
from headrace.api.sample.v1 import sample_pb2
from headrace.digest import digest_of, matches
from headrace.disk import durable_write
from headrace.errors import DataLoss, NotFound

M = TypeVar("M", bound=Message)

_NUMBER = "{rollout_id}"
_FORMAT = b"\xff\x00headrace step"
_LENGTH = struct.Struct("<Q")
_HASH_BYTES = 34
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
        with durable_write(path) as draft, draft.open("wb") as file:
            file.write(_FORMAT)
            for message in (recorded.batch, *recorded.samples):
                data = message.SerializeToString()
                file.writelines((_LENGTH.pack(len(data)), digest_of(data), data))

    def read(self, step: int) -> RecordedStep:
        """Raises NotFound for a step that is not there, DataLoss for a file that is not one of a step."""
        path = self._existing(step)
        samples = []
        with path.open("rb") as file:
            has_hashes = _has_hashes(file)
            batch = self._next(buffer_pb2.LeaseBatchResponse, file, path, has_hashes)
            while (sample := self._next(sample_pb2.Sample, file, path, has_hashes)) is not None:
                if not (has_hashes or matches(sample.envelope.digest, sample.payload)):
                    why = f"the payload of sample {sample.envelope.sample_id} does not match its digest"
                    raise self._damaged(path, why)
                samples.append(sample)
        expected = [] if batch is None else sample_ids_of(batch)
        if batch is None or [sample.envelope.sample_id for sample in samples] != expected:
            raise self._damaged(path, f"it has {len(samples)} of the {len(expected)} samples that it names")
        return RecordedStep(batch, samples)

    def read_ids(self, step: int) -> list[str]:
        """The ids of a step's samples, without reading them. Raises as `read` does."""
        path = self._existing(step)
        with path.open("rb") as file:
            batch = self._next(buffer_pb2.LeaseBatchResponse, file, path, _has_hashes(file))
        return [] if batch is None else sample_ids_of(batch)

    def _existing(self, step: int) -> Path:
        path = self.path_of(step)
        if not path.is_file():
            raise NotFound(f"there is no rollout step {step}: {path} is not a file; {self._there()}")
        return path

    def _next(self, kind: type[M], file: BinaryIO, path: Path, has_hashes: bool) -> M | None:
        """None at the end of the file."""
        try:
            if not has_hashes:
                return cast(M | None, proto.parse_length_prefixed(kind, cast(BytesIO, file)))
            if not (head := file.read(_LENGTH.size + _HASH_BYTES)):
                return None
            (num_bytes,) = _LENGTH.unpack_from(head)
            data = file.read(min(num_bytes, path.stat().st_size))
            if len(data) != num_bytes or digest_of(data) != head[_LENGTH.size :]:
                raise self._damaged(path, "its bytes do not match their checksum")
            return kind.FromString(data)
        except (DecodeError, ValueError, EOFError, struct.error) as error:
            raise self._damaged(path, str(error)) from error

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


def _has_hashes(file: BinaryIO) -> bool:
    """False for a file of headrace 0.1.0, which is left at its beginning."""
    if file.read(len(_FORMAT)) == _FORMAT:
        return True
    file.seek(0)
    return False


def sample_ids_of(batch: buffer_pb2.LeaseBatchResponse) -> list[str]:
    """The ids of a batch's samples in training order."""
    return [sample.sample_id for group in batch.groups for sample in group.samples]
