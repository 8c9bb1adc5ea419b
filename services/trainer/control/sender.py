"""One rank's part in giving weights to the engines.

While a bucket is on its way, the next one is gathered and laid flat, and those before it are hashed.
The ranks with tensor rank 0 and data rank 0 are senders, one for each pipeline stage; all others take part in
gathering the shards. If a publication is given up in the middle, senders stop broadcasting but gather to the end, so
that no rank is left waiting in a collective.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import torch

from headrace.errors import HeadraceError, PublicationAborted
from headrace.rpc.log import log
from headrace.wire.tensor_spec import TensorSpec
from services.trainer.control.messages import Probed, Sent, StageGroup, StageWeights, part_of
from services.trainer.control.transport.source import WeightSource
from services.trainer.megatron.parallel import Layout
from services.trainer.weights.broadcasts import Broadcasts
from services.trainer.weights.buckets import cut, filling_bytes
from services.trainer.weights.engine_layout import EngineChecksums
from services.trainer.weights.flat_buckets import FlatBuckets
from services.trainer.weights.hashing import Hashing
from services.trainer.weights.kept_weights import KeptWeights
from services.trainer.weights.weight_group import WeightGroup

Gathered = Sequence[tuple[str, torch.Tensor]]


class WeightSender:
    """Opens, uses and drops this stage's groups of engines: one for each rollout service."""

    def __init__(
        self,
        policy: WeightSource,
        layout: Layout,
        is_aborted: Callable[[str], bool],
        *,
        host: str,
        bucket_bytes: int,
        timeout_seconds: float,
        hashes: bool = True,
    ) -> None:
        """`hashes`: what engines print can be computed here."""
        self._policy = policy
        self._is_aborted = is_aborted
        self._host = host
        self._backend = "nccl" if layout.device.type == "cuda" else "gloo"
        self._stage = layout.pp_rank
        self._is_sender = layout.tp_rank == 0 and layout.dp_rank == 0
        self._timeout_seconds = timeout_seconds
        self._hashes = hashes
        specs = policy.hf_tensor_specs()
        self._buckets = cut(specs, filling_bytes(specs, bucket_bytes))
        self._flat_buckets = FlatBuckets(layout.device)
        self._kept = KeptWeights(layout.device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hashing")
        self._groups: dict[int, WeightGroup] = {}
        """The broadcast groups by rollout service."""

    def describe(self) -> StageWeights | None:
        """This stage's weights, the same at every publication; None on ranks that send nothing."""
        return StageWeights(self._stage, self._buckets) if self._is_sender else None

    def probe(self) -> Probed | None:
        """Collective: what engines must compute; None except on the last stage's sender."""
        found = self._policy.probe()
        return Probed(*found) if found and self._is_sender else None

    def open(self, service: int) -> StageGroup | None:
        """The address at which this stage's group of the service listens; None on ranks that send nothing."""
        if not self._is_sender:
            return None
        if service not in self._groups:
            name = f"headrace-{uuid.uuid4().hex[:12]}-stage{self._stage}"
            self._groups[service] = WeightGroup(name, self._host, self._backend, self._timeout_seconds)
        group = self._groups[service]
        return StageGroup(self._stage, group.name, self._host, group.port, group.joined)

    def hashed(self) -> Sent | None:
        """Collective: what engines print over the current weights; None on ranks that send nothing.

        An error is in the answer.
        """
        checksums = EngineChecksums()
        failure: str | None = None
        try:
            for name, tensor in self._policy.hf_tensors():
                if self._is_sender:
                    checksums.update([(name, tensor)])
        except HeadraceError as error:
            failure = error.message
        if not self._is_sender:
            return None
        return Sent(self._stage, {} if failure else checksums.result(), failure)

    def keep(self) -> None:
        """Collective: copies the current weights into this sender's host memory."""
        tensors = self._policy.hf_tensors()
        if self._is_sender:
            self._kept.keep(tensors)
        for _ in tensors:
            pass

    def send(self, publication_id: str, world_sizes: Mapping[int, int], *, kept: bool = False) -> Sent | None:
        """Joins if need be and broadcasts every bucket, of the current weights or of those that it `kept`.

        `world_sizes` are of the groups by service. An error is in the answer; None on ranks that send nothing.
        """
        hashing = Hashing(self._thread)
        failure: HeadraceError | None = None
        broadcasts = self._broadcasts(publication_id, world_sizes)
        tensors = self._kept.tensors() if kept else self._policy.hf_tensors()
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
            gathered = self._gather(bucket, tensors)
            if not self._is_sender:
                return
            flat = self._flat_buckets.pack([tensor for _, tensor in gathered])
            broadcasts.finish()
            broadcasts.start(flat)
            if self._hashes:
                hashing.add(gathered)
        broadcasts.finish()

    def _gather(self, bucket: Sequence[TensorSpec], tensors: Iterator[tuple[str, torch.Tensor]]) -> Gathered:
        gathered = list(islice(tensors, len(bucket)))
        if self._is_sender and [name for name, _ in gathered] != [spec.name for spec in bucket]:
            raise PublicationAborted(
                f"tensor {gathered[0][0]} was gathered where {bucket[0].name} was announced: this is a bug of headrace"
            )
        return gathered
