"""The broadcasts of one publication: a bucket goes to the groups of all rollout services side by side.

A group that fails is left, and the others go on; its engines get an error, because its connections are closed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial

import torch

from headrace.errors import HeadraceError, PublicationAborted
from headrace.rpc.log import log
from services.trainer.weights.weight_group import WeightGroup


class Broadcasts:
    """`left` says of the services that were left why."""

    def __init__(
        self, groups: Mapping[int, WeightGroup], world_sizes: Mapping[int, int], aborted: Callable[[int], bool]
    ) -> None:
        """`aborted` is asked for a service, from this thread."""
        self.left: dict[int, str] = {}
        self._groups = dict(groups)
        self._world_sizes = world_sizes
        self._aborted = aborted
        self._sending: dict[int, Future[None]] = {}

    def start(self, flat: torch.Tensor) -> None:
        """Begins to send one bucket: uint8, shape [bytes], which must stay as it is until `finish` returns."""
        self._sending = {
            service: group.start_broadcast(flat, self._world_sizes[service]) for service, group in self._groups.items()
        }

    def finish(self) -> None:
        """Returns when the bucket is on its way to every engine of the groups that go on.

        Raises the error of the last group when none does.
        """
        for service, sending in self._sending.items():
            try:
                self._groups[service].finish(sending, partial(self._aborted, service))
            except (HeadraceError, RuntimeError) as error:  # torch.distributed raises RuntimeErrors
                del self._groups[service]
                if not self._groups:
                    raise
                log.warning("service_left", service=service, error=str(error))
                failure = error if isinstance(error, HeadraceError) else PublicationAborted(f"sending failed: {error}")
                self.left[service] = failure.message
        self._sending = {}
