"""One rank's part in giving weights to the engines.

The ranks with tensor rank 0 and data rank 0 are senders, one for each pipeline stage; all others take part in
gathering the shards. If a publication is given up in the middle, senders stop broadcasting but gather to the end, so
that no rank is left waiting in a collective.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice

import torch

from headrace.errors import HeadraceError, PublicationAborted
from headrace.rpc.log import log
from services.trainer.control.channel import Control
from services.trainer.control.commands import SendWeights
from services.trainer.megatron.parallel import Layout
from services.trainer.model.policy import Policy
from services.trainer.weights.buckets import TensorSpec, cut
from services.trainer.weights.engine_layout import EngineChecksums, flat_bytes
from services.trainer.weights.weight_group import WeightGroup


class WeightSender:
    """Opens, uses and drops this stage's group of engines."""

    def __init__(
        self, policy: Policy, layout: Layout, control: Control, *, host: str, bucket_bytes: int, timeout_seconds: float
    ) -> None:
        self._policy = policy
        self._control = control
        self._host = host
        self._backend = "nccl" if layout.device.type == "cuda" else "gloo"
        self._stage = layout.pp_rank
        self._is_sender = layout.tp_rank == 0 and layout.dp_rank == 0
        self._timeout_seconds = timeout_seconds
        self._buckets = cut(policy.hf_tensor_specs(), bucket_bytes)
        self._group: WeightGroup | None = None

    def open(self, publication_id: str) -> None:
        """Tells rank 0 where this stage's group listens, what it will send, and what engines must then compute."""
        canary = self._policy.canary()
        if not self._is_sender:
            return
        if canary:
            self._control.put(f"{publication_id}/canary", json.dumps(asdict(canary)))
        if self._group is None:
            name = f"headrace-{uuid.uuid4().hex[:12]}-stage{self._stage}"
            self._group = WeightGroup(name, self._host, self._backend, self._timeout_seconds)
        buckets = [[(spec.name, list(spec.shape), spec.dtype) for spec in bucket] for bucket in self._buckets]
        fact = {
            "name": self._group.name,
            "host": self._host,
            "port": self._group.port,
            "joined": self._group.joined,
            "buckets": buckets,
        }
        self._control.put(f"{publication_id}/stage/{self._stage}", json.dumps(fact))

    def send(self, command: SendWeights) -> None:
        """Joins if need be, broadcasts every bucket, and puts the engines' checksums where rank 0 finds them."""
        checksums = EngineChecksums()
        failure: HeadraceError | None = None
        tensors = self._policy.hf_tensors()
        try:
            self._join(command)
            for bucket in self._buckets:
                self._send_bucket(bucket, tensors, command.publication_id, checksums)
        except (HeadraceError, RuntimeError) as error:  # torch.distributed raises RuntimeErrors
            failure = error if isinstance(error, HeadraceError) else PublicationAborted(f"sending failed: {error}")
            log.warning("sending_failed", publication_id=command.publication_id, error=str(error))
        for _ in tensors:
            pass
        if self._is_sender:
            answer = {"error": failure.message} if failure else {"checksums": checksums.result()}
            self._control.put(f"{command.publication_id}/sent/{self._stage}", json.dumps(answer))

    def drop(self) -> None:
        """Tears this stage's group down; the next publication opens another."""
        if self._group is not None:
            self._group.drop()
            self._group = None

    def _join(self, command: SendWeights) -> None:
        if self._group is None or self._group.joined:
            return
        self._group.join(command.world_size, lambda: self._aborted(command.publication_id))

    def _send_bucket(
        self,
        bucket: list[TensorSpec],
        tensors: Iterator[tuple[str, torch.Tensor]],
        publication_id: str,
        checksums: EngineChecksums,
    ) -> None:
        gathered = list(islice(tensors, len(bucket)))
        if self._group is None:
            return
        if [name for name, _ in gathered] != [spec.name for spec in bucket]:
            raise PublicationAborted(
                f"tensors came in another order than announced: {gathered[0][0]}, {bucket[0].name}"
            )
        if self._backend == "gloo":
            checksums.update(gathered)
        flat = torch.cat([flat_bytes(tensor) for _, tensor in gathered])
        self._group.broadcast(flat, lambda: self._aborted(publication_id))

    def _aborted(self, publication_id: str) -> bool:
        return self._control.has(f"{publication_id}/aborted")
