"""Forks the ranks of tests from a process that has loaded what they need: that takes longer than most cases do.

There are two such processes, for even and odd ranks, and in them a string has different hashes: ranks that go through a
set in its order do not agree, as they would not if each were started by itself.

A line of JSON on stdin is a launch, a line on stdout its ranks' exit codes. The process ends with its starter, and
whatever ranks have started ends with their launch: forked ranks leave without the handlers of `atexit`, by which
multiprocessing would end its processes (Megatron-core starts some for each checkpoint).
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from headrace.process.linux import adopt_orphans, die_with_parent, kill_descendants

REPOSITORY = Path(__file__).resolve().parents[3]
_PRELOADED = ("services.trainer.__main__", "services.trainer.model.build", "services.trainer.checkpoint.checkpoint")
_GRACE_SECONDS = 10.0
"""What the other ranks have to say why they end too, once one has failed."""
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Launch:
    """Ranks that run the cases of a script, each with its log.

    They are killed after `seconds`, and soon after one of them has failed: then there is the file `failed`.
    """

    script: str
    logs: Mapping[str, str]
    failed: str
    seconds: float
    environment: Mapping[str, str]


class RankHosts:
    """The processes as their starter has them; the first launch starts them."""

    def __init__(self) -> None:
        self._hosts = (_Host("1"), _Host("2"))
        self._one_at_a_time = threading.Lock()

    def run(self, launch: Launch) -> dict[str, int | None]:
        """The ranks' exit codes, None for one that was killed because it had not ended."""
        with self._one_at_a_time:
            parts = [{rank: log for rank, log in launch.logs.items() if int(rank) % 2 == odd} for odd in (0, 1)]
            asked = [(host, part) for host, part in zip(self._hosts, parts, strict=True) if part]
            for host, part in asked:
                host.ask(replace(launch, logs=part))
            return {rank: code for host, _ in asked for rank, code in host.answer().items()}

    def close(self) -> None:
        """Ends the processes, if they were started."""
        for host in self._hosts:
            host.close()


class _Host:
    def __init__(self, hash_seed: str) -> None:
        self._hash_seed = hash_seed
        self._process: subprocess.Popen[str] | None = None

    def ask(self, launch: Launch) -> None:
        if self._process is None or self._process.poll() is not None:
            self._process = self._started()
        print(json.dumps(asdict(launch)), file=self._process.stdin, flush=True)

    def answer(self) -> dict[str, int | None]:
        assert self._process is not None
        assert self._process.stdout is not None
        codes: dict[str, int | None] = json.loads(self._process.stdout.readline())
        return codes

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()

    def _started(self) -> subprocess.Popen[str]:
        changed = {"PYTHONPATH": str(REPOSITORY), "PYTHONHASHSEED": self._hash_seed, "PYTHONWARNINGS": "ignore"}
        return subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env=os.environ | changed | {"OMP_NUM_THREADS": "1"},
        )


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what packages print is no answer
    for name in _PRELOADED:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack the other threads"
    adopt_orphans()
    for line in sys.stdin:
        print(json.dumps(_codes(Launch(**json.loads(line)))), file=answers, flush=True)


def _codes(launch: Launch) -> dict[str, int | None]:
    ranks = {rank: _forked(launch, rank, log) for rank, log in launch.logs.items()}
    starter, deadline, failed = os.getppid(), time.monotonic() + launch.seconds, Path(launch.failed)
    codes: dict[int, int] = {}
    while len(codes) < len(ranks) and time.monotonic() < deadline and os.getppid() == starter:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended in ranks.values():
            codes[ended] = os.waitstatus_to_exitcode(status)
            if codes[ended]:
                failed.touch()
        if ended:
            continue
        if failed.exists():
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        time.sleep(_POLL_SECONDS)
    for pid in ranks.values():
        if pid not in codes:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    kill_descendants()
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    return {rank: codes.get(pid) for rank, pid in ranks.items()}


def _forked(launch: Launch, rank: str, log: str) -> int:
    starter = os.getpid()
    if pid := os.fork():
        return pid
    code = 1
    try:
        die_with_parent(starter, signal.SIGKILL)
        _become(launch, rank, log)
        _run_cases(Path(launch.script))
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except BaseException:  # noqa: BLE001  # the log is where its starter looks
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _become(launch: Launch, rank: str, log: str) -> None:
    for descriptor in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(launch.environment, RANK=rank, LOCAL_RANK=rank)


def _run_cases(script: Path) -> None:
    """Each case has a meeting place of its own, and leaves no process group."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from services.trainer.megatron.rendezvous import RENDEZVOUS

    started = int(os.environ["WORLD_SIZE"])
    for number, (module, kind, fields) in enumerate(json.loads(script.read_text())):
        case = getattr(importlib.import_module(module), kind)(**fields)
        ranks = fields.get("ranks") or started
        os.environ |= {"WORLD_SIZE": str(ranks), RENDEZVOUS: str(script.with_name(f"{script.stem}-meets-{number}"))}
        if int(os.environ["RANK"]) < ranks:
            try:
                case.run()
            finally:
                parallel_state.destroy_model_parallel()
                if dist.is_initialized():
                    dist.destroy_process_group()


if __name__ == "__main__":
    _serve()
