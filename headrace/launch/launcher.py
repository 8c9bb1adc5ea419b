"""Starts a run or a part of it: creates its folder, starts its services, and supervises them to the end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from headrace.disk import FULL_DISK, file_lock, lock
from headrace.errors import ConfigError, FailedPrecondition
from headrace.job.schema.job import Job
from headrace.job.schema.services import ServicesSection
from headrace.launch.previous_run import PreviousRun, differences, previous_run, require_shards
from headrace.launch.process import GRACE_SECONDS, ServiceSpec, grace_seconds
from headrace.launch.specs import SERVICES, address_in, address_of, addressed, folder_here, gpu_environments, specs
from headrace.launch.supervisor import RestartPolicy, ServiceFailed, Supervisor
from headrace.process.guard import orphaned_guards
from headrace.process.linux import identity_of, kill_descendants
from headrace.rpc.access import Role, Tokens
from headrace.rpc.client import token_of
from headrace.rpc.tls import use_tls
from headrace.run_folder import BUFFER, RunFolder, ServiceEntry, number_of, service_of

_AGAIN_SECONDS = 1.0
_LOCK_SECONDS = 1.0
"""Of waiting for another launcher of the folder; the run goes on all the same."""
_AT_ONCE_SECONDS = 0.1
_ORPHANS_SECONDS = 3 * GRACE_SECONDS
"""The guards' own patience, their sweep, and a busy machine."""
_POLL_SECONDS = 0.1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Launcher:
    """Starts `services`. The others are at the job's addresses, or were started by another launcher of the same folder.

    `tell` gets lines for a person.
    """

    def __init__(
        self,
        job: Job,
        services: Sequence[str],
        tell: Callable[[str], None],
        *,
        policy: RestartPolicy = RestartPolicy(),  # noqa: B008  # frozen
    ) -> None:
        use_tls(job.services.tls_dir)
        require_internal_token(job.services)
        self.folder = folder_here(job, services)
        self._services = [name for name in SERVICES if name in services]
        with _usable(self.folder.path):
            if BUFFER in services:
                require_shards(self.folder, job.buffer)
            self.job = addressed(job, services, self.folder)
        gpus = gpu_environments(self.job, self._services, os.environ)
        self._specs: list[ServiceSpec] = [
            each for name in self._services for each in specs(self.job, name, self.folder, gpus)
        ]
        self._tell = tell
        self._policy = policy
        self._again: asyncio.TimerHandle | None = None
        self._previous: PreviousRun | None = None
        """What the run had before this start, until its services have accepted the job of this one."""
        self._starting = {each.name for each in self._specs}

    async def run(self) -> None:
        """Returns when the trainer ends; without a trainer it runs until it is cancelled. Raises ServiceFailed.

        All services have ended when it returns.
        """
        names = ", ".join(each.name for each in self._specs)
        with ExitStack() as held:
            with _usable(self.folder.path):
                self.folder.path.mkdir(parents=True, exist_ok=True)
                for name in self._services:
                    held.enter_context(_alone(self.folder.path, name))
                self._previous = previous_run(self.folder)
                self.folder.prepare(self.job, self._services)
                if self._previous is None:
                    self.folder.create(self.job)
                for each in self._specs:  # all of them at once: their number is the ledger's number of shards
                    if service_of(each.name) == BUFFER and (shard := number_of(each.name)) is not None:
                        self.folder.ledger_of(shard).mkdir(exist_ok=True)
                self._write_services({})
            self._tell(f"run {self.folder.path}: starting {names}; their output is in its logs/")
            until = "trainer" if "trainer" in self._services else None
            supervisor = Supervisor(
                self._specs, until, self._tell, self._policy, self._write_services, self.grace_seconds, self._is_ready
            )
            try:
                await supervisor.run()
            except ServiceFailed as error:
                raise ServiceFailed(f"{error.message}{self._refused()}") from error
            self._accept()

    def _is_ready(self, process: str) -> None:
        self._starting.discard(process)
        if not self._starting:
            self._accept()

    def _accept(self) -> None:
        """Makes the job that was started the run's own: until here its services could refuse it.

        Only a trainer knows whether it can resume from the run's checkpoints.
        """
        previous, self._previous = self._previous, None
        if previous is not None and ("trainer" in self._services or not previous.saved_step):
            self.folder.create(self.job)

    def _refused(self) -> str:
        """Names what this start changed, where services have refused it."""
        changed = differences(self._previous.job, self.job) if self._previous else []
        if not changed:
            return ""
        return (
            f"\nthe services refused this start, and the run keeps the job that it had: {'; '.join(changed)}. Pass the "
            "values that are there to resume, or start a new run with another --run-name"
        )

    def grace_seconds(self) -> float:
        """Time in which services have to end, estimated from the last steps."""
        return grace_seconds(self.folder.metrics)

    def address_of(self, service: str) -> str:
        """Raises ConfigError when the job has no address of the service."""
        return address_of(self.job, service)

    def _write_services(self, pids: dict[str, int]) -> None:
        """Tries again, once a second, on a disk that is full: services go on meanwhile."""
        if self._again:
            self._again.cancel()
        try:
            with ExitStack() as held:
                with suppress(ConfigError):  # no room for the lock, or a launcher that was stopped while it held it
                    held.enter_context(file_lock(self.folder.services_file, _LOCK_SECONDS))
                self.folder.write_services(self._entries(pids))
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            if self._again is None:
                self._tell(f"{self.folder.services_file} cannot be written: the disk is full. Free some space there")
            self._again = asyncio.get_running_loop().call_later(_AGAIN_SECONDS, self._write_services, pids)
        else:
            self._again = None

    def _entries(self, pids: Mapping[str, int]) -> Mapping[str, ServiceEntry]:
        """Returns this launcher's services, and those that another launcher of the folder keeps alive."""
        entries = self.folder.running_services()
        for name in SERVICES:
            address = address_in(self.job, name)
            if address is not None and name not in entries:
                entries[name] = ServiceEntry(address, None, None)
        for each in self._specs:
            entries[each.name] = ServiceEntry(each.address, each.metrics_address, pids.get(each.name))
        return dict(sorted(entries.items(), key=lambda entry: _rank(entry[0])))


def _rank(process: str) -> tuple[int, int]:
    """Services in the order of starting, each before its processes; what this version does not know comes last."""
    service, number = service_of(process), number_of(process)
    return SERVICES.index(service) if service in SERVICES else len(SERVICES), -1 if number is None else number


@contextmanager
def _usable(folder: Path) -> Iterator[None]:
    """Raises FailedPrecondition, with the way out, for a folder that cannot be created or written."""
    try:
        yield
    except OSError as error:
        where = error.filename2 or error.filename or folder
        way = "free some space there" if error.errno in FULL_DISK else "make it a folder that you can write to"
        raise FailedPrecondition(
            f"run folder {folder} cannot be used: {where}: {error.strerror}: {way}, or choose another --run-dir or "
            "--run-name"
        ) from error


@contextmanager
def _alone(folder: Path, name: str) -> Iterator[None]:
    """Allows one of each service in a folder. The lock ends with the process, which the file names."""
    with _lock_file(folder, name).open("a+") as file:
        if not lock(file):
            raise FailedPrecondition(
                f"the {name} service of run {folder} is already running: choose another --run-name, or end it first"
            )
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "process": identity_of(os.getpid())}))
        file.flush()
        yield


def _lock_file(folder: Path, service: str) -> Path:
    return folder / f".{service}.lock"


def launchers(folder: RunFolder) -> list[int]:
    """The processes on this machine that keep services of the run alive: `headrace train`, `headrace up`."""
    found: set[int] = set()
    for service in SERVICES:
        with suppress(OSError, ValueError, TypeError, KeyError):  # never started here, or of a release before
            owner = json.loads(_lock_file(folder.path, service).read_text())
            if identity_of(owner["pid"]) == owner["process"]:
                found.add(owner["pid"])
    return sorted(found)


async def until_signal(work: asyncio.Task[None], tell: Callable[[str], None], grace: Callable[[], float]) -> bool:
    """Waits for `work`. True when it came to its own end, False when a signal cancelled it.

    The first signal lets it end in order; the second kills every process below this one, stopped ones too. `tell` gets
    what a signal does; `grace` says how many seconds services have to end.
    """
    loop = asyncio.get_running_loop()
    stopping = _Stopping(work, tell, grace)
    for number in _SIGNALS:
        loop.add_signal_handler(number, stopping.signalled)
    try:
        await work
    except asyncio.CancelledError:
        return False
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
    return not stopping.asked


class _Stopping:
    """Reacts to signals: the first asks services to end, a later one kills everything.

    Two at once are one: `timeout` sends its signal to a command and to the group that it is in, and so do schedulers.
    """

    def __init__(self, work: asyncio.Task[None], tell: Callable[[str], None], grace: Callable[[], float]) -> None:
        self._work = work
        self._grace = grace
        self._tell = tell
        self._asked_at: float | None = None

    @property
    def asked(self) -> bool:
        """True once a signal has come."""
        return self._asked_at is not None

    def signalled(self) -> None:
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
            self._tell(
                f"stopping after this step, {self._grace():.0f} s at most (a step that takes longer is trained "
                f"again by "
                "the next start); Ctrl-C again ends everything at once"
            )
            self._work.cancel()
        elif now - self._asked_at > _AT_ONCE_SECONDS:
            self._tell("ending everything now")
            kill_descendants()


def require_internal_token(services: ServicesSection) -> None:
    """The token with which services of a run without certificates show each other that they are its services.

    Raises ConfigError for a tokens file that cannot be used, and where services without certificates would start
    without a token: they could not call each other.
    """
    if services.tokens_file is None:
        return
    tokens = Tokens(services.tokens_file)
    if services.tls_dir is not None:
        return
    own = token_of()
    caller = tokens.caller_of(own()) if own else None
    if caller is None or caller.roles != (Role.SERVICE,):
        raise ConfigError(
            f"tokens_file {services.tokens_file}: without tls_dir the services call each other with a token, and "
            f"{f'{caller.name} has the role {caller.role}' if caller else 'the environment has none of the file'}: "
            f"`headrace tokens add {services.tokens_file} services --role service` prints one; write it to a file, and "
            "start with HEADRACE_TOKEN_FILE=that file"
        )


def wait_for_orphans(
    folder: RunFolder, services: Sequence[str], tell: Callable[[str], None], patience_seconds: float = _ORPHANS_SECONDS
) -> None:
    """Returns when no launcher that was killed has left any of these services of the run on this machine.

    Guards end them in order, which takes a step at most; a start beside them would find the ledger, the ports and the
    devices taken. Raises FailedPrecondition when they stay.
    """
    end, told = time.monotonic() + patience_seconds, False
    while left := orphans(folder, services):
        pids = " ".join(map(str, left))
        if time.monotonic() > end:
            raise FailedPrecondition(
                f"processes of an earlier start of run {folder.path} do not end: kill -9 {pids}, and repeat the command"
            )
        if not told:
            told = True
            tell(f"{folder.path}: waiting for the end of what an earlier start has left, processes {pids}")
        time.sleep(_POLL_SECONDS)


def orphans(folder: RunFolder, services: Sequence[str]) -> Sequence[int]:
    """The process ids of the guards of what a killed launcher left; a guard is the last to go of its service."""
    programs = {f"services.{service}" for service in services}
    jobs = {file.absolute() for file in (folder.job_file, *map(folder.config_of, services))}
    found = []
    for guard, command in orphaned_guards():
        with suppress(psutil.Error):  # it ended while we looked
            if programs.intersection(command) and jobs & {Path(guard.cwd()) / word for word in command}:
                found.append(guard.pid)
    return found
