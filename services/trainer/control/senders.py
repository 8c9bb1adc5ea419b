"""One rank's part in giving weights to the engines: it broadcasts them, or writes them into files.

While a bucket is broadcast, the next one is gathered and laid flat, and those before it are hashed. The ranks with
tensor rank 0 and data rank 0 are senders, one for each pipeline stage; all others take part in gathering the shards.
If a publication is given up in the middle, senders stop broadcasting but gather to the end, so that no rank is left
waiting in a collective.

With LoRA the adapters alone may be written, for engines that load them beside the weights that they have.

On a disk or in the machine's shared memory a publication's folder is a whole Hugging Face folder, written as an export
is: every stage's sender writes its own files at the same time, a failure on one rank is every rank's, and the folder
gets its name once it is durable.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_group

from headrace.delta import PREFIX, Change, pack
from headrace.errors import HeadraceError, InvalidArgument, PublicationAborted
from headrace.models.folders import QuantizedForm
from headrace.publication import TensorSpec
from headrace.rpc.log import log
from services.trainer.collective_io import CollectiveIO
from services.trainer.durable import make_folder, put_in_place, remove, sync_files
from services.trainer.hugging_face.hf_folder import INDEX
from services.trainer.megatron.parallel import Layout
from services.trainer.model.policy import Policy
from services.trainer.weights.buckets import (
    FlatBuckets,
    MemoryFiles,
    RollbackCopy,
    filling_bytes,
    make_private,
    split_into_buckets,
)
from services.trainer.weights.engine_layout import EngineChecksums, Hashing
from services.trainer.weights.quantization import quantized, quantized_specs
from services.trainer.weights.weight_group import Broadcasts, WeightGroup


class _Result(msgspec.Struct, frozen=True, array_like=True):
    pass


class StageWeights(_Result, frozen=True):
    """One stage's tensors, in the order in which they travel."""

    stage: int
    buckets: list[list[TensorSpec]]


class StageGroup(_Result, frozen=True):
    """The group of engines of one stage: its name, and the address at which its sender listens."""

    stage: int
    name: str
    host: str
    port: int
    joined: bool


class Probed(_Result, frozen=True):
    """The probe as the last stage computed it."""

    tokens: list[int]
    log_probs: list[float]


class Sent(_Result, frozen=True):
    """One stage's share of a publication: what engines must hold now, or why it failed."""

    stage: int
    checksums: dict[str, str]
    error: str | None = None
    left: dict[int, str] = {}  # msgspec copies it
    """Rollout services that could not be sent all of it while others could, and why"""


class Compared(_Result, frozen=True):
    """What changed of one stage's weights since those that it kept, ready to be sent."""

    stage: int
    whole_bytes: int
    delta_bytes: int | None
    """None where the whole is to be sent."""


SMALLER = 0.5
"""A delta that is not smaller than this share of the whole is not worth it."""


def part_of(publication_id: str, service: int) -> str:
    """The name under which a publication is given up for one of its rollout services alone."""
    return f"{publication_id}/{service}"


class Sender:
    """One rank's part, in its compute thread. Engines are given the policy's weights, or with `form` quantized."""

    def __init__(
        self,
        policy: Policy,
        layout: Layout,
        is_aborted: Callable[[str], bool],
        *,
        bucket_bytes: int | None,
        form: QuantizedForm | None = None,
        hashes: bool = True,
    ) -> None:
        """`hashes`: what engines print can be computed here. Without `bucket_bytes` all tensors are in one bucket."""
        self._policy = policy
        self._form = form
        self._is_aborted = is_aborted
        self._stage = layout.pp_rank
        self._is_sender = layout.tp_rank == 0 and layout.dp_rank == 0
        self._hashes = hashes
        specs = policy.hf_tensor_specs() if form is None else quantized_specs(form, policy.hf_tensor_specs())
        whole = bucket_bytes is None
        self._buckets = [specs] if whole else split_into_buckets(specs, filling_bytes(specs, bucket_bytes or 0))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hashing")
        self._layout = layout
        self._kept = RollbackCopy(layout.device)
        self._changes: list[Change] = []
        self._delta: bytes | None = None
        self._hashing = Hashing(self._thread)
        """Of the weights that are sent."""
        self._sent_delta = False

    def describe(self) -> StageWeights | None:
        """This stage's weights, the same at every publication; None on ranks that send nothing."""
        return StageWeights(self._stage, self._buckets) if self._is_sender else None

    def probe(self) -> Probed | None:
        """Collective: what engines must compute; None except on the last stage's sender."""
        found = self._policy.probe()
        return Probed(*found) if found and self._is_sender else None

    def open(self, service: int) -> StageGroup | None:
        """The address at which this stage's group of a rollout service's engines listens; None where there is none."""
        return None

    def hashed(self) -> Sent | None:
        """Collective: what engines print over the current weights; None on ranks that send nothing.

        An error is in the answer.
        """
        checksums = EngineChecksums()
        failure: str | None = None
        try:
            for name, tensor in self._tensors():
                if self._is_sender:
                    checksums.update([(name, tensor)])
        except HeadraceError as error:
            failure = error.message
        if not self._is_sender:
            return None
        return Sent(self._stage, {} if failure else checksums.result(), failure)

    def keep(self) -> None:
        """Collective: copies the current weights into this sender's host memory, or what changed if that was sent."""
        if self._sent_delta:
            self._kept.change(self._changes)
        else:
            tensors = self._tensors()
            if self._is_sender:
                self._kept.keep(tensors)
            for _ in tensors:
                pass
        self._forget_delta()

    def compare(self) -> Compared | None:
        """Collective: finds what changed since the weights that were kept; None on ranks that send nothing."""
        self._forget_delta()
        self._hashing, tensors = Hashing(self._thread), self._tensors()
        most_bytes, delta_bytes = SMALLER * self._whole_bytes, 0
        if self._is_sender and not self._kept.is_empty:
            with suppress(HeadraceError):  # weights that cannot be sent: the whole's sending says so
                for name, tensor in tensors:
                    if self._hashes:
                        self._hashing.add([(name, tensor)])
                    self._changes.append(change := self._kept.changed(name, tensor))
                    delta_bytes += change.positions.size + change.bits.nbytes
                    if delta_bytes > most_bytes:
                        break
                else:
                    self._delta = pack(self._changes)
        with suppress(HeadraceError):
            for _ in tensors:
                pass
        if self._delta is None:
            self._changes = []
            self._hashing.cancel()
        if not self._is_sender:
            return None
        size = None if self._delta is None else len(self._delta)
        return Compared(self._stage, self._whole_bytes, size)

    def send_delta(self, publication_id: str, world_sizes: Mapping[int, int]) -> Sent | None:
        """Collective: sends what was compared last, as `send` would send all."""
        raise NotImplementedError

    @property
    def _whole_bytes(self) -> int:
        return sum(spec.num_bytes for bucket in self._buckets for spec in bucket)

    def _forget_delta(self) -> None:
        self._changes, self._delta, self._sent_delta = [], None, False

    @abstractmethod
    def send(self, publication_id: str, world_sizes: Mapping[int, int], *, kept: bool = False) -> Sent | None:
        """Collective: sends the current weights, or those that it `kept`. An error is in the answer.

        `world_sizes` are of the groups by rollout service, the sender included. None on ranks that send nothing.
        """

    def drop(self, services: Collection[int]) -> None:
        """Tears down what a failed publication to these rollout services left."""

    def _file_name(self, stem: str) -> str:
        """Of this stage's own file."""
        return f"{stem}.safetensors" if self._layout.pp_size == 1 else f"{stem}-{self._stage}.safetensors"

    def _written(
        self, folder: Path, write: Callable[[Path], None], finish: Callable[[Path], None], checksums: dict[str, str]
    ) -> Sent | None:
        """Collective: each sender writes its files into a draft of the publication's folder, and rank 0 `finish`es it.

        An error is in the answer.
        """
        draft = folder.parent / f".{folder.name}.draft"
        work = CollectiveIO(_get_default_group(), self._layout.device, InvalidArgument)
        is_first = self._layout.rank == 0
        try:
            work.do(lambda: _begin(draft) if is_first else None)
            if self._is_sender:
                work.attempt(lambda: write(draft))
            work.agree()
            work.do(lambda: finish(draft) if is_first else None)
            work.do(lambda: _publish(draft, folder) if is_first else None)
        except HeadraceError as error:
            log.warning("writing_weights_failed", publication_id=folder.name, error=error.message)
            return Sent(self._stage, {}, error.message) if self._is_sender else None
        return Sent(self._stage, checksums) if self._is_sender else None

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        tensors = self._policy.hf_tensors()
        return tensors if self._form is None else quantized(self._form, tensors)


class WeightSender(Sender):
    """Opens, uses and drops this stage's groups of engines: one for each rollout service."""

    def __init__(
        self,
        policy: Policy,
        layout: Layout,
        is_aborted: Callable[[str], bool],
        *,
        host: str,
        timeout_seconds: float,
        bucket_bytes: int,
        form: QuantizedForm | None = None,
        hashes: bool = True,
    ) -> None:
        """`host` is where engines reach this rank."""
        super().__init__(policy, layout, is_aborted, bucket_bytes=bucket_bytes, form=form, hashes=hashes)
        self._host = host
        self._backend = "nccl" if layout.device.type == "cuda" else "gloo"
        self._timeout_seconds = timeout_seconds
        self._flat_buckets = FlatBuckets(layout.device)
        self._groups: dict[int, WeightGroup] = {}
        """The broadcast groups by rollout service."""

    def open(self, service: int) -> StageGroup | None:
        if not self._is_sender:
            return None
        if service not in self._groups:
            name = f"headrace-{uuid.uuid4().hex[:12]}-stage{self._stage}"
            self._groups[service] = WeightGroup(name, self._host, self._backend, self._timeout_seconds)
        group = self._groups[service]
        return StageGroup(self._stage, group.name, self._host, group.port, group.joined)

    def send(self, publication_id: str, world_sizes: Mapping[int, int], *, kept: bool = False) -> Sent | None:
        """Joins if need be and broadcasts every bucket."""
        self._sent_delta = False
        hashing = Hashing(self._thread)
        failure: HeadraceError | None = None
        broadcasts = self._broadcasts(publication_id, world_sizes)
        tensors = self._kept.tensors() if kept else self._tensors()
        try:
            try:
                self._send_all(tensors, broadcasts, hashing)
            finally:
                for _ in tensors:
                    pass
        except (HeadraceError, RuntimeError) as error:  # torch.distributed raises RuntimeErrors
            failure = error if isinstance(error, HeadraceError) else PublicationAborted(f"sending failed: {error}")
            log.warning("sending_failed", publication_id=publication_id, error=str(error))
        if not self._is_sender:
            return None
        if failure:
            return Sent(self._stage, {}, failure.message)
        return Sent(self._stage, hashing.result(), left=broadcasts.left)

    def send_delta(self, publication_id: str, world_sizes: Mapping[int, int]) -> Sent | None:
        self._sent_delta = True
        if not self._is_sender:
            return None
        assert self._delta is not None, "rank 0 asks for what was compared"
        broadcasts = self._broadcasts(publication_id, world_sizes)
        try:
            broadcasts.start(torch.frombuffer(bytearray(self._delta), dtype=torch.uint8).to(self._layout.device))
            broadcasts.finish()
        except (HeadraceError, RuntimeError) as error:  # torch.distributed raises RuntimeErrors
            log.warning("sending_failed", publication_id=publication_id, error=str(error))
            return Sent(self._stage, {}, error.message if isinstance(error, HeadraceError) else str(error))
        return Sent(self._stage, self._hashing.result(), left=broadcasts.left)

    def drop(self, services: Collection[int]) -> None:
        """Tears this stage's groups of the services down; the next publication opens others."""
        for service in services:
            if (group := self._groups.pop(service, None)) is not None:
                group.drop()

    def _broadcasts(self, publication_id: str, world_sizes: Mapping[int, int]) -> Broadcasts:
        def aborted(service: int) -> bool:
            return self._is_aborted(publication_id) or self._is_aborted(part_of(publication_id, service))

        groups = {service: group for service, group in self._groups.items() if service in world_sizes}
        return Broadcasts(groups, world_sizes, aborted)

    def _send_all(self, tensors: Iterator[tuple[str, torch.Tensor]], broadcasts: Broadcasts, hashing: Hashing) -> None:
        """Returns when every bucket is sent to every group that is left."""
        for bucket in self._buckets:
            gathered = list(islice(tensors, len(bucket)))
            if not self._is_sender:
                return
            flat = self._flat_buckets.pack([tensor for _, tensor in gathered])
            broadcasts.finish()
            broadcasts.start(flat)
            if self._hashes:
                hashing.add(gathered)
        broadcasts.finish()


class WeightWriter(Sender):
    """Writes below `root`, at most `file_bytes` to a file.

    With `memory` it lays files there and says their checksums when it is asked for them: engines load meanwhile, where
    the weights stay on their device.
    """

    def __init__(
        self,
        policy: Policy,
        layout: Layout,
        is_aborted: Callable[[str], bool],
        *,
        root: Path,
        file_bytes: int,
        memory: MemoryFiles | None = None,
        form: QuantizedForm | None = None,
        hashes: bool = True,
        leaves: bool = False,
    ) -> None:
        """`leaves`: weights leave their device once written."""
        super().__init__(policy, layout, is_aborted, bucket_bytes=None, form=form, hashes=hashes)
        self._root = root
        self._file_bytes = file_bytes
        self._memory = memory
        self._says_later = memory is not None and not leaves
        self._written_id: str | None = None

    def send(self, publication_id: str, world_sizes: Mapping[int, int], *, kept: bool = False) -> Sent | None:
        """Writes the current weights into the publication's folder; with `kept` says the checksums of those there."""
        if kept:
            assert publication_id == self._written_id, "only what was written last is hashed"
            return Sent(self._stage, self._hashing.result()) if self._is_sender else None
        self._sent_delta = False
        started = time.monotonic()
        try:
            num_bytes = self._write(publication_id)
        except HeadraceError as error:
            log.warning("writing_weights_failed", publication_id=publication_id, error=error.message)
            return Sent(self._stage, {}, error.message) if self._is_sender else None
        if not self._is_sender:
            return None
        seconds = round(time.monotonic() - started, 3)
        log.info("weights_written", publication_id=publication_id, num_bytes=num_bytes, seconds=seconds)
        return Sent(self._stage, {} if self._says_later else self._hashing.result())

    def send_delta(self, publication_id: str, world_sizes: Mapping[int, int]) -> Sent | None:
        """Writes a folder as engines load them, in which each stage's delta is a tensor. Says its checksums later."""
        self._sent_delta, self._written_id = True, publication_id

        def write(draft: Path) -> None:
            assert self._delta is not None, "rank 0 asks for what was compared"
            part = {f"{PREFIX}{self._stage}": torch.frombuffer(bytearray(self._delta), dtype=torch.uint8)}
            (draft / self._file_name("model")).write_bytes(save(part, {"format": "pt"}))

        def finish(draft: Path) -> None:
            (draft / "config.json").write_text("{}")
            if self._layout.pp_size > 1:
                files = {f"{PREFIX}{n}": f"model-{n}.safetensors" for n in range(self._layout.pp_size)}
                (draft / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))

        return self._written(self._root / publication_id, write, finish, {})

    def _write(self, publication_id: str) -> int:
        """Returns this sender's bytes, once its folder is whole; their hashing may go on."""
        num_bytes, hashing = 0, Hashing(self._thread)
        self._hashing, self._written_id = hashing, publication_id

        def look(content: Mapping[str, torch.Tensor]) -> None:
            nonlocal num_bytes
            if self._is_aborted(publication_id):
                raise PublicationAborted(f"{publication_id} was given up while it was written")
            num_bytes += sum(tensor.nbytes for tensor in content.values())
            if self._hashes:
                hashing.add(list(content.items()))

        if self._memory:
            make_private(self._root)  # with the same outcome on all ranks: they are on one machine
        write = self._memory.write if self._memory else None
        self._policy.export(self._root / publication_id, self._file_bytes, look, write, self._form)
        return num_bytes


class AdapterWriter(Sender):
    """Writes the adapters alone below `root`, as peft does: every stage's sender a file of its own layers."""

    def __init__(self, policy: Policy, layout: Layout, is_aborted: Callable[[str], bool], *, root: Path) -> None:
        super().__init__(policy, layout, is_aborted, bucket_bytes=None)
        assert policy.adapters is not None, "the job's rules ask for lora_rank"
        self._adapters = policy.adapters
        self._buckets = [self._adapters.whole_specs()]
        self._root = root

    def send(self, publication_id: str, world_sizes: Mapping[int, int], *, kept: bool = False) -> Sent | None:
        """Writes the publication's folder, and says the SHA-256 of its files."""
        checksums: dict[str, str] = {}
        matrices = self._adapters.wholes(self._layout) if self._layout.dp_rank == 0 else {}

        def write(draft: Path) -> None:
            checksums.update([self._write(draft, matrices)])

        def finish(draft: Path) -> None:
            (draft / "adapter_config.json").write_text(json.dumps(self._adapters.served))

        return self._written(self._root / publication_id, write, finish, checksums)

    def _write(self, draft: Path, matrices: Mapping[str, Tensor]) -> tuple[str, str]:
        """The file's name and its SHA-256."""
        content = save({name: matrix.cpu() for name, matrix in matrices.items()}, {"format": "pt"})
        name = self._file_name("adapter_model")
        (draft / name).write_bytes(content)
        return name, hashlib.sha256(content).hexdigest()


def _publish(draft: Path, folder: Path) -> None:
    sync_files(draft)
    put_in_place(draft, folder)


def _begin(draft: Path) -> None:
    remove(draft)
    make_folder(draft)
