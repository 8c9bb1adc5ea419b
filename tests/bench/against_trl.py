"""`make bench-trl`: GRPO end to end against TRL's GRPOTrainer, on the same model, prompts and lengths, on this CPU.

`against_trl.py TRL_PYTHON MODEL`. Both generate 4 samples for each of 8 prompts, at most 16 tokens, judge them and take
one optimizer step, one after the other with the whole machine to itself. The median step counts; the first, which
warms up, and a last one that saves do not. The learning rate is as good as 0, so that answers stay as long as they are
on both sides. headrace runs whole: buffer, engine, reward and trainer, with weights published after every step. CPU
seconds are those of all its processes: they say nearly the same on a busy machine. Then both train LoRA of rank 8, and
headrace publishes the adapters alone.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import reasoning_gym
from transformers import AutoTokenizer

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = 5
SAMPLES_PER_STEP = 32
RANK = 8
PARTS = {
    "generation": "wait",
    "fetch": "fetch",
    "log-probs": "log_probs",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "publication": "publish",
}
"""Of a step of headrace, by its metrics: the trainer waits for generation. Of TRL all but generation is the rest."""
INSTRUCTION = (
    "You are a careful calculator. Read the sum below, work it out, and answer with the result alone: one integer, no "
    "words and no signs before it but a minus where it is needed. For example, the answer to 2 + 2 = is 4.\n"
)

JOB = """
[run]
run_name = "bench"
run_dir = "{folder}"
[model]
hf_checkpoint = "{model}"
[data]
prompt_data = "{prompts}"
label_key = "label"
[rollout]
num_rollout = {steps}
rollout_batch_size = 8
n_samples_per_prompt = 4
rollout_max_response_len = 16
[buffer]
max_staleness = {staleness}
[reward]
custom_rm_path = "{repository}/headrace/templates/sums/reward.py:reward"
[train]
micro_batch_size = 32
[megatron]
lr = 1e-9
[sglang]
max_running_requests = 64
max_total_tokens = 16384
"""


def write_prompts(path: Path, model: Path) -> float:
    """Two-term sums behind an instruction; their mean number of tokens."""
    tasks = reasoning_gym.create_dataset(
        "chain_sum", size=8 * (STEPS + 2), seed=1, min_terms=2, max_terms=2, min_digits=1, max_digits=1
    )
    rows = [
        {"prompt": INSTRUCTION + task["question"].rpartition(":")[2].strip(), "label": str(task["answer"])}
        for task in tasks
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = AutoTokenizer.from_pretrained(model)
    return statistics.mean(len(tokenizer.encode(row["prompt"])) for row in rows)


@dataclass(frozen=True)
class Figures:
    """Of the steps that count, medians in seconds; a step's CPU seconds are those of all processes."""

    wall: float
    cpu: float
    new_tokens: float
    parts: Mapping[str, float]

    @classmethod
    def of(
        cls, ends: Sequence[tuple[float, float]], lengths: Sequence[float], parts: Mapping[str, Sequence[float]]
    ) -> Figures:
        """From when each step ended, on the wall's clock and on the processors', and from the seconds of its parts."""
        steps = [(after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise(ends)]
        wall, cpu = (statistics.median(each) for each in zip(*steps, strict=True))
        medians = {name: statistics.median(seconds[1 : len(ends)]) for name, seconds in parts.items()}
        return cls(wall, cpu, statistics.mean(lengths), medians | {"rest": wall - sum(medians.values())})


LORA = ("--lora-rank", str(RANK), "--lora-alpha", str(2 * RANK), "--update-weight-transport", "adapter")


def trl(python: Path, model: Path, prompts: Path, *rank: str) -> Figures:
    """TRL alone in its process."""
    program = str(REPOSITORY / "tests/bench/baselines/trl_grpo.py")
    command = [str(python), program, str(model), str(prompts), str(STEPS), *rank]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return Figures.of(found["ends"], found["lengths"], {"generation": found["generation"]})


def headrace(folder: Path, model: Path, prompts: Path, staleness: int, *flags: str) -> Figures:
    """A whole run, whose metrics are read as they come."""
    folder.mkdir()
    name = folder.name
    job = folder / "job.toml"
    values = {"folder": folder, "model": model, "prompts": prompts, "steps": STEPS + 1, "staleness": staleness}
    job.write_text(JOB.format(**values, repository=REPOSITORY))
    command = [sys.executable, "-m", "headrace.cli.main", "train", str(job), *flags]
    run = subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, cwd=REPOSITORY, stdout=subprocess.DEVNULL
    )
    metrics = folder / "bench/metrics.jsonl"
    seen: list[tuple[float, float]] = []
    try:
        while run.poll() is None:
            rows = steps_of(metrics)
            if len(rows) > len(seen):
                seen.append((rows[len(seen)]["time"], cpu_seconds(run.pid)))
                print(f"  {name}: step {len(seen)}", flush=True)
            time.sleep(0.1)
    finally:
        run.terminate()
    if run.returncode:
        raise SystemExit(f"headrace ended with {run.returncode}: see above")
    # The last step saves a checkpoint before it reports.
    rows = steps_of(metrics)
    parts = {name: [row.get(f"time/{key}_seconds", 0.0) for row in rows] for name, key in PARTS.items()}
    return Figures.of(seen[:STEPS], [row["response_length/mean"] for row in rows[:STEPS]], parts)


def steps_of(metrics: Path) -> list[dict[str, Any]]:
    """The rows of training steps so far."""
    if not metrics.exists():
        return []
    lines = [line for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [row for row in map(json.loads, lines) if "grad_norm" in row]


def cpu_seconds(pid: int) -> float:
    """Of a process and all below it, those that ended included."""
    total = 0.0
    process = psutil.Process(pid)
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def show(name: str, figures: Figures, baseline: Figures) -> None:
    samples = SAMPLES_PER_STEP / figures.wall
    print(
        f"{name:26} {figures.wall:6.2f} s a step  {samples:5.2f} samples/s  {baseline.wall / figures.wall:5.2f}×"
        f"   {figures.cpu:6.2f} CPU s  {baseline.cpu / figures.cpu:5.2f}×   {figures.new_tokens:4.1f} new tokens"
        f"   load {os.getloadavg()[1]:.1f}",
        "\n      " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in figures.parts.items()),
        flush=True,
    )


def main(python: Path, model: Path) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends what runs on the way out
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts = folder / "prompts.jsonl"
        prompt_tokens = write_prompts(prompts, model)
        print(f"{model.name}, 8 prompts × 4 samples, {prompt_tokens:.0f} prompt tokens, median of {STEPS - 1} steps")
        theirs = trl(python, model, prompts)
        show("TRL GRPO", theirs, theirs)
        show("headrace, on-policy", headrace(folder / "on-policy", model, prompts, 0), theirs)
        show("headrace, max_staleness 1", headrace(folder / "one-step-off", model, prompts, 1), theirs)
        theirs = trl(python, model, prompts, str(RANK))
        show("TRL GRPO, LoRA", theirs, theirs)
        show("headrace, LoRA", headrace(folder / "lora", model, prompts, 0, *LORA), theirs)
        show("headrace, LoRA, staleness 1", headrace(folder / "lora-off", model, prompts, 1, *LORA), theirs)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
