"""Runs one service as a process under a guard, with its output in a file, and ends it gracefully."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headrace.process.child import Child
from headrace.process.exit_status import ExitStatus, meaning
from headrace.process.log_file import doing, last_error, last_words, tail
from headrace.rpc.net import Address
from headrace.run_folder import last_fields_in

GRACE_SECONDS = 20.0
"""Time to end in order, at least."""
LONGEST_GRACE_SECONDS = 600.0
_STEPS = 2
"""The one that runs may take longer than the last ones, and a checkpoint follows it."""
_ROWS = 3


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """The command of a service, its addresses, and how it may be restarted."""

    name: str
    command: Sequence[str]
    address: str
    """The address at which others reach it."""
    metrics_address: str
    log_file: Path
    start_seconds: float
    environment: Mapping[str, str] = field(default_factory=dict)
    loads: str | None = None
    """What takes so long to import that a person should know: it is all that the service does before it says a word."""
    max_restarts: int | None = None
    """Within the window of the launcher's RestartPolicy, also before it was ever ready; None: as many as it says."""
    exit_status: Path | None = None
    """The file in which the service says why it failed."""
    keeps_exit_code: bool = True
    """False where what starts it ends with a code of its own: then `exit_status` counts."""
    no_restart: str | None = None
    """Why it is not started again when it ends badly, and what to do about it; None: it is."""
    bound: Address | None = None
    """The address at which it listens; None: `address`."""
    serves: bool = True
    """False where another machine's process serves at the address: this one is ready when that one is."""
    restart_request: Path | None = None
    """A file that asks for a restart while it is there."""
    held: Address | None = None
    """A port that its starter listens on and passes to it (`--listener`): callers wait while it starts again."""

    @property
    def restarts_before_ready(self) -> bool:
        """True for a trainer whose job asks for restarts: what kills it may do so while it starts."""
        return self.max_restarts is not None

    @property
    def listens_at(self) -> Address:
        return self.bound or Address.parse(self.address)

    @property
    def asked_at(self) -> str:
        """The address at which this machine asks whether it is ready."""
        return str(self.listens_at.from_here) if self.serves else self.address

    def take_restart_request(self) -> bool:
        """True once for each time that somebody asks for a restart."""
        if self.restart_request is None or not self.restart_request.exists():
            return False
        self.restart_request.unlink(missing_ok=True)
        return True


class ServiceProcess(Child):
    """The process of a service. `held` listens at the spec's held port."""

    def __init__(self, spec: ServiceSpec, held: socket.socket | None = None) -> None:
        self.spec = spec
        descriptors = [held.fileno()] if held else []
        super().__init__(
            [*spec.command, *(f"--listener={number}" for number in descriptors)],
            spec.log_file,
            spec.environment,
            orphan_seconds=GRACE_SECONDS,
            descriptors=descriptors,
        )

    async def start(self) -> None:
        """Returns once the process exists; it is not healthy yet."""
        if self.spec.exit_status is not None:
            self.spec.exit_status.unlink(missing_ok=True)
        await super().start()

    def ended_with(self, code: int) -> str:
        """Its exit code in words, with the memory that it had if it was killed."""
        return meaning(code, self.resident_bytes)

    @property
    def doing(self) -> str:
        """The last event that it logged; before that, the libraries that it loads."""
        said = doing(self.log_file, self.log_start)
        return f", last: {said}" if said else f": loading {self.spec.loads}" if self.spec.loads else ""

    @property
    def why(self) -> str:
        """The reason why it ended: its last error, else the end of its log."""
        file, start = self.log_file, self.log_start
        if not self.spec.keeps_exit_code and (told := self._told):
            return f"{told.message}\n    (its log is {file})"
        error = self.last_error
        return f"{error}\n    (its log is {file})" if error else f"the end of {file}:\n{tail(file, start=start)}"

    @property
    def last_error(self) -> str | None:
        return last_error(self.log_file, self.log_start)

    @property
    def last_words(self) -> str:
        """Its last message to a person."""
        if told := self._told:
            return f"{self.spec.name}: {told.message}"
        return last_words(self.spec.name, self.log_file, self.log_start)

    async def wait(self) -> int:
        """Returns its exit code when it and all its descendants have ended."""
        code = await super().wait()
        told = None if self.spec.keeps_exit_code else self._told
        return told.exit_code if code and told else code

    @property
    def _told(self) -> ExitStatus | None:
        return ExitStatus.read(self.spec.exit_status) if self.spec.exit_status else None


def grace_seconds(metrics_file: Path) -> float:
    """Twice the longest of a run's last steps, within bounds; the lower bound when the file has no step."""
    return min(max(GRACE_SECONDS, _STEPS * max(_step_seconds(metrics_file), default=0.0)), LONGEST_GRACE_SECONDS)


def _step_seconds(metrics_file: Path) -> list[float]:
    seconds = [row["time/step_seconds"] for row in last_fields_in(metrics_file) if "time/step_seconds" in row]
    return [float(each) for each in seconds[-_ROWS:]]
