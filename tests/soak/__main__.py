"""`python -m tests.soak FOLDER`: a job for SOAK_HOURS (4), or for SOAK_MINUTES, under all sorts of traffic.

Prints a verdict for each process and quantity. Exit code 0: nothing grows, and the audit finds nothing.
SOAK_EVERY is how often processes are looked at, in seconds.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from headrace.cli.commands.ledger import audited
from headrace.ledger_tools.audit_run import described
from tests.soak.sampling import Sampling
from tests.soak.traffic import Traffic, write_reward
from tests.support.models.tiny_model import make_tiny_qwen3
from tests.support.processes.stand_in_run import StandInRun
from tests.support.processes.training_run import SUMS

_HOURS = float(os.environ.get("SOAK_HOURS", "4"))
SECONDS = float(os.environ["SOAK_MINUTES"]) * 60 if "SOAK_MINUTES" in os.environ else _HOURS * 3600
_EVERY_SECONDS = float(os.environ.get("SOAK_EVERY", "2" if SECONDS < 3600 else "10"))
_LEAST_STEPS = 200
"""In the second half: a job that hardly trains is flat whatever it leaks."""
_SAMPLE_LOG_BYTES = 256 << 10
"""Full after a few hundred steps: in the first half of five minutes, too."""
_FLAGS = (
    *("--num-rollout", "100000000", "--save-interval", "20", "--use-fault-tolerance"),
    *("--eval-interval", "100", "--sample-log-bytes", str(_SAMPLE_LOG_BYTES)),
)


async def soak(folder: Path, seconds: float, every_seconds: float) -> bool:
    """True when a job that trained grows nowhere and lost nothing."""
    reward, prompts = folder / "reward.py", folder / "evaluated.jsonl"
    write_reward(reward, 0)
    prompts.write_text("".join(f'{{"prompt": "{row["prompt"]}", "label": "{row["label"]}"}}\n' for row in SUMS[:4]))
    flags = (*_FLAGS, "--eval-prompt-data", "sums", str(prompts))
    run = StandInRun(folder, make_tiny_qwen3(folder / "model"), *flags, reward_file=reward)
    async with run.started():
        await run.run.until_step(3)
        traffic = Traffic(run, reward, seconds)
        busy = asyncio.create_task(traffic.go_on(every_seconds))
        sampling = Sampling()
        steps_at_half = 0
        while sampling.seconds < seconds:
            if sampling.seconds < seconds / 2:
                steps_at_half = len(run.run.trained())
            assert run.run.is_running, run.run.last_words()
            if busy.done():
                busy.result()
            roots = {"launcher": run.run.pid} | ({"engine": run.engine.pid} if run.engine else {})
            await asyncio.to_thread(sampling.look, roots, _folders(run))
            await asyncio.sleep(every_seconds)
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)
        steps = len(run.run.trained())
        records = _records(run)
    found = sampling.verdicts()
    judged_steps = steps - steps_at_half
    print(f"{seconds / 60:.0f} minutes, {steps} steps, {judged_steps} in the second half; {dict(traffic.done)}")
    if judged_steps < _LEAST_STEPS:
        print(f"nothing is shown by fewer than {_LEAST_STEPS} steps in the second half: give it a calmer machine")
    grown = ", ".join(f"{name} {size / steps:.0f}" for name, size in records.items())
    print(f"history, records and logs grow by design, in bytes a step: {grown}")
    print(*found, sep="\n")
    audit = await audited(run.run.folder, "train", 120.0, deep=True)
    print(described(audit))
    is_flat = judged_steps >= _LEAST_STEPS and not any(each.grows for each in found)
    return audit.verdict.is_clean and is_flat


def _folders(run: StandInRun) -> dict[str, Path]:
    folder = run.run.folder
    return {
        "payloads": folder.ledger / "payloads",
        "checkpoints": folder.path / "checkpoints",
        "samples": folder.samples,
    }


def _records(run: StandInRun) -> dict[str, int]:
    """What grows with steps by design: file → its bytes."""
    folder = run.run.folder
    files = [folder.ledger / "ledger.sqlite", folder.metrics, folder.path / "trained.jsonl", *folder.logs.glob("*.log")]
    return {file.name: file.stat().st_size for file in files}


def main(argv: Sequence[str]) -> int:
    folder = Path(argv[0])
    folder.mkdir(parents=True, exist_ok=True)
    return 0 if asyncio.run(soak(folder, SECONDS, _EVERY_SECONDS)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
