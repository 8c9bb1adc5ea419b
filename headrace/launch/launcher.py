"""A whole run: its folder, its services, and their supervision to the end."""

from __future__ import annotations

import asyncio
import fcntl
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from headrace.config.job import Job
from headrace.errors import FailedPrecondition
from headrace.launch.process import ServiceSpec
from headrace.launch.run_folder import RunFolder, ServiceEntry
from headrace.launch.specs import SERVICES, address_of, addressed, spec, started_here
from headrace.launch.supervisor import RestartPolicy, Supervisor


class Launcher:
    """Starts those of `services` that have no address in the job. `tell` gets lines for a person."""

    def __init__(
        self,
        job: Job,
        tell: Callable[[str], None],
        *,
        services: Sequence[str] = SERVICES,
        policy: RestartPolicy = RestartPolicy(),  # noqa: B008  # frozen
    ) -> None:
        own = [name for name in started_here(job) if name in services]
        self.job = addressed(job)
        self.folder = RunFolder(job.run.run_dir / job.run.run_name)
        self._specs: list[ServiceSpec] = [spec(self.job, name, self.folder) for name in own]
        self._tell = tell
        self._policy = policy

    async def run(self) -> None:
        """To the trainer's end, or for ever without one. Raises ServiceFailed; ends everything on the way out."""
        until = "trainer" if any(each.name == "trainer" for each in self._specs) else None
        with self._held():
            self.folder.create(self.job)
            self._write_services({})
            self._tell(f"run {self.folder.path}: starting {', '.join(each.name for each in self._specs)}")
            await Supervisor(self._specs, until, self._tell, self._policy, self._write_services).run()

    @contextmanager
    def _held(self) -> Iterator[None]:
        """One launcher a folder. The lock ends with the process, however it ends."""
        self.folder.path.mkdir(parents=True, exist_ok=True)
        with (self.folder.path / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise FailedPrecondition(
                    f"run {self.folder.path} is running: choose another --run-name, or end it first"
                ) from None
            yield

    def _write_services(self, pids: dict[str, int]) -> None:
        metrics = {each.name: each.metrics_address for each in self._specs}
        self.folder.write_services(
            {name: ServiceEntry(address_of(self.job, name), metrics.get(name), pids.get(name)) for name in SERVICES}
        )


async def until_signal(work: asyncio.Task[None]) -> bool:
    """Waits for `work`; SIGINT or SIGTERM cancels it. True when it came to its own end, False when it was cancelled."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, work.cancel)
    try:
        await work
    except asyncio.CancelledError:
        return False
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)
    return True
