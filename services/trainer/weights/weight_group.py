"""The collective groups between a sending rank and all engines, and the broadcasts of one publication in them.

The sender is always rank 0 of a group: SGLang hardcodes it. A bucket goes to the groups of all rollout services side
by side. A group that fails is left, and the others go on; its engines get an error, because its connections are
closed.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    Backend,
    GroupName,
    _abort_process_group,
    _new_process_group_helper,
    _world,
)

from headrace.errors import DeadlineExceeded, HeadraceError, PublicationAborted
from headrace.rpc.log import log
from headrace.rpc.net import Address
from services.trainer.megatron.rendezvous import listening_store

T = TypeVar("T")
_POLL_SECONDS = 0.05


class WeightGroup:
    """States: listening (its store is up) → joined → broken or dropped. A broken group is never used again."""

    def __init__(self, name: str, host: str, backend: str, timeout_seconds: float) -> None:
        self.name = name
        self.joined = False
        self._is_dropped = False
        self._host = host
        self._backend = backend
        self._timeout_seconds = timeout_seconds
        self._timeout = datetime.timedelta(seconds=timeout_seconds)
        self._store = listening_store(host, self._timeout)
        self._group: dist.ProcessGroup | None = None

    @property
    def port(self) -> int:
        """The port at which the store listens."""
        return int(self._store.port)

    def join(self, world_size: int, aborted: Callable[[], bool]) -> None:
        """Waits for all engines."""
        self._finished(self._started(lambda: self._build(world_size)), aborted)

    def start_broadcast(self, flat: torch.Tensor, world_size: int | None = None) -> Future[None]:
        """Begins to send one bucket: uint8, shape [bytes], which must stay as it is until `finish` returns.

        With `world_size` it waits for all engines first, unless they have joined.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0

        def send() -> None:
            if world_size is not None and not self.joined:
                self._build(world_size)
            self._joined_group().broadcast([flat], options).wait(self._timeout)

        return self._started(send)

    def finish(self, sending: Future[None], aborted: Callable[[], bool]) -> None:
        """Returns when a broadcast that was started is on its way to every engine."""
        self._finished(sending, aborted)

    def broadcast(self, flat: torch.Tensor, aborted: Callable[[], bool]) -> None:
        """Sends one bucket: uint8, shape [bytes]. Returns when it is on its way to every engine."""
        self.finish(self.start_broadcast(flat), aborted)

    def drop(self) -> None:
        """Closes the connections; engines that still wait on them get an error instead of waiting on."""
        self.joined, self._is_dropped = False, True
        if self._group is not None:
            last, self._group = [self._group], None
            threading.Thread(target=_close, args=(last,), name=f"close-{self.name}", daemon=True).start()

    def _build(self, world_size: int) -> None:
        """Builds the group as SGLang builds its side (sglang/srt/utils: init_custom_process_group)."""
        store = dist.PrefixStore(self.name, self._store)
        if self._backend == "gloo":
            try:
                self._group = _gloo_group(self.name, self._host, store, world_size, self._timeout)
            except RuntimeError as error:
                raise unreached(self.name, self._host, error) from error
        else:
            self._group = self._nccl_group(store, world_size)
        self.joined = True
        if self._is_dropped:
            self.drop()
            raise PublicationAborted(f"group {self.name}: it was dropped before all engines had joined")

    def _nccl_group(self, store: dist.Store, world_size: int) -> dist.ProcessGroup:
        group, _ = _new_process_group_helper(
            world_size,
            0,
            [],
            Backend(self._backend),
            store,
            group_name=GroupName(self.name),
            backend_options=None,
            timeout=self._timeout,
        )
        assert isinstance(group, dist.ProcessGroup)
        _world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}  # the helper leaves it out
        return group

    def _joined_group(self) -> dist.ProcessGroup:
        """Never keep it in a variable: an error's traceback would hold it open."""
        assert self._group is not None, "join() comes first"
        return self._group

    def _started(self, work: Callable[[], T]) -> Future[T]:
        """Collectives cannot be cancelled from outside, so the work has a thread that may be left behind."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:  # noqa: BLE001  # handed to the waiting thread as it is
                done.set_exception(error)

        threading.Thread(target=run, name=f"weights-{self.name}", daemon=True).start()
        return done

    def _finished(self, running: Future[T], aborted: Callable[[], bool]) -> T:
        waited = 0.0
        while not wait((running,), timeout=_POLL_SECONDS).done:
            waited += _POLL_SECONDS
            if aborted():
                self.drop()
                raise PublicationAborted(f"group {self.name}: the publication was given up while sending")
            if waited > self._timeout_seconds:
                self.drop()
                raise DeadlineExceeded(
                    f"group {self.name}: engines did not answer within {self._timeout_seconds:g} s: see their logs, or "
                    "raise --update-weight-timeout-seconds"
                )
        if running.exception() is not None:
            self.drop()
        return running.result()


def unreached(name: str, host: str, error: RuntimeError) -> Exception:
    """Returns the way out where an engine elsewhere says that it is at loopback; otherwise the error as it is."""
    if "remote=[127." not in str(error) or Address(host, 0).is_loopback:
        return error
    return PublicationAborted(
        f"group {name}: an engine listens for weights on loopback, where {host} does not reach it, because its "
        f"machine's name points there: start it with GLOO_SOCKET_IFNAME=INTERFACE, e.g. eth0 ({error})"
    )


def _gloo_group(
    name: str, host: str, store: dist.Store, world_size: int, timeout: datetime.timedelta
) -> dist.ProcessGroup:
    """Builds what torch's helper would, but listening on `host`.

    The helper's would listen where the machine's own name points: on many that is loopback, which no other reaches.
    """
    gloo: Any = dist.ProcessGroupGloo  # the stubs have other names than the module
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timeout
    named = dist.PrefixStore(f"{name}/", store)
    backend = gloo(dist.PrefixStore("cpu/", named), 0, world_size, options)
    group = dist.ProcessGroup(named, 0, world_size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def _close(last: list[dist.ProcessGroup]) -> None:
    """Lets go of a group, which closes its connections: gloo's abort leaves them open, and torch registers NCCL's.

    `last` holds the last reference. This may last as long as the group's own time limit: the end of a group waits for
    a collective that still runs in it.
    """
    if last[0] in _world.pg_map:
        _abort_process_group(last.pop())
    else:
        last.pop().abort()


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
