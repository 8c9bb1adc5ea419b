"""`make bench`: from `headrace train` to the end of step 1, against the libraries alone.

The libraries alone: SGLang's own server, from its command to its first answer, beside a process that builds the model
in Megatron-core and its optimizer. No run can start faster than both. Nobody evaluates before training. Seconds of the
clock and of the processors.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from headrace.cli.commands.init import write_template
from headrace.rpc.net import free_port

REPOSITORY = Path(__file__).parents[2]
MEGATRON = """
import sys
from pathlib import Path
from tests.bench.training_step import bare_step, job, join_ranks
model = Path(sys.argv[1])
bare_step(model, join_ranks(job(model)), [])
"""
POLL_SECONDS = 0.1


@dataclass
class Processes:
    """Programs and all that they start, with the CPU time that each had used when it was last seen."""

    roots: Sequence[subprocess.Popen[bytes]]

    def __post_init__(self) -> None:
        self.used: dict[int, float] = {}
        self.started = time.monotonic()

    def wait(self, is_over: Callable[[], bool]) -> tuple[float, float]:
        """Returns seconds of the clock and of the processors until it is over; ends everything then."""
        try:
            while not is_over():
                self._look()
                time.sleep(POLL_SECONDS)
            seconds = time.monotonic() - self.started
            self._look()
        finally:
            below = [process for root in self.roots for process in _descendants(root.pid)]
            for root in self.roots:
                root.terminate()
            for root in self.roots:
                root.wait()
            for process in psutil.wait_procs(below, 10)[1]:  # a bare SGLang server leaves its own behind
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        return seconds, sum(self.used.values())

    def _look(self) -> None:
        for root in self.roots:
            for process in _descendants(root.pid):
                with suppress(psutil.NoSuchProcess):
                    times = process.cpu_times()
                    self.used[process.pid] = times.user + times.system


def _descendants(pid: int) -> list[psutil.Process]:
    """The process and all below it; nothing when it has ended."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def libraries(model: Path) -> tuple[float, float]:
    """SGLang's server and Megatron's model, side by side."""
    port = free_port()
    words = [
        *("--model-path", str(model), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"),
        *("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-overlap-schedule"),
        *("--skip-server-warmup", "--sleep-on-idle", "--max-total-tokens", "16384", "--max-running-requests", "64"),
        *("--dtype", "float32"),
    ]  # fmt: skip
    threads = {"OMP_NUM_THREADS": str(os.cpu_count()), "TORCH_COMPILE_DISABLE": "1"}
    started = [
        start([sys.executable, "-m", "sglang.launch_server", *words], threads),
        start([sys.executable, "-c", MEGATRON, str(model)], threads),
    ]

    def both() -> bool:
        return started[1].poll() is not None and answers(f"http://127.0.0.1:{port}/model_info")

    found = Processes(started).wait(both)
    if started[1].returncode:
        raise SystemExit(f"Megatron's build ended with {started[1].returncode}")
    return found


def first_step(folder: Path, model: Path) -> tuple[float, float]:
    """The quickstart's run, which is ended after its first step."""
    write_template(folder, "sums", str(model))
    words = ["--run-dir", str(folder), "--run-name", "bench", "--skip-eval-before-train"]
    run = start([sys.executable, "-m", "headrace.cli.main", "train", str(folder / "job.toml"), *words], {}, folder)
    metrics = folder / "bench/metrics.jsonl"

    def stepped() -> bool:
        if run.poll():
            raise SystemExit(f"headrace ended with {run.returncode}: see {folder}/bench/logs")
        lines = metrics.read_text().splitlines() if metrics.is_file() else []
        return any(json.loads(line)["step"] == 1 for line in lines)

    return Processes([run]).wait(stepped)


def start(command: Sequence[str], environment: dict[str, str], folder: Path = REPOSITORY) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | environment,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:  # noqa: S310  # our own server
            return bool(answer.status == 200)
    except OSError:
        return False


def main() -> None:
    model = (REPOSITORY / sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        bare, ours = libraries(model), first_step(Path(folder), model)
    print(f"the start of a run with {model.name}: seconds, and CPU seconds")
    print(f"  SGLang's server beside Megatron's model   {bare[0]:6.1f} {bare[1]:6.1f}")
    print(f"  headrace train, to the end of step 1      {ours[0]:6.1f} {ours[1]:6.1f}")
    print(f"  ratio                                     {ours[0] / bare[0]:6.2f} {ours[1] / bare[1]:6.2f}")


if __name__ == "__main__":
    main()
