"""`make bench-trl`: GRPO end to end against TRL's GRPOTrainer, on the same model, prompts and lengths, on this CPU.

`against_trl.py TRL_PYTHON MODEL`. Both generate 4 samples for each of 8 prompts, at most 16 tokens, judge them and take
one optimizer step, on-policy, one after the other with the whole machine to itself. The median step counts; the first,
which warms up, and the last, which saves, do not. headrace runs whole: buffer, engine, reward and trainer, with weights
published after every step.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import reasoning_gym
from transformers import AutoTokenizer

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = 7
SAMPLES_PER_STEP = 32
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
custom_rm_path = "{repository}/examples/quickstart/reward.py:bare_and_right"
[train]
micro_batch_size = 32
[megatron]
lr = 2e-5
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


def trl(python: Path, model: Path, prompts: Path) -> tuple[list[float], float]:
    """Seconds of the steps that count, and the mean length of the responses."""
    command = [str(python), str(REPOSITORY / "tests/bench/trl_grpo.py"), str(model), str(prompts), str(STEPS)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return found["seconds"][1:-1], statistics.mean(found["lengths"])


def headrace(folder: Path, model: Path, prompts: Path, staleness: int) -> tuple[list[float], float]:
    """The same of a whole run."""
    folder.mkdir()
    job = folder / "job.toml"
    values = {"folder": folder, "model": model, "prompts": prompts, "steps": STEPS, "staleness": staleness}
    job.write_text(JOB.format(**values, repository=REPOSITORY))
    command = [sys.executable, "-m", "headrace.cli.main", "train", str(job)]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, cwd=REPOSITORY, check=True)
    rows: list[dict[str, Any]] = [
        json.loads(line) for line in (folder / "bench/metrics.jsonl").read_text().splitlines()
    ]
    ends = [row["time"] for row in rows if "grad_norm" in row["metrics"]]
    seconds = [after - before for before, after in itertools.pairwise(ends)]
    return seconds[:-1], statistics.mean(row["metrics"]["response_length/mean"] for row in rows)


def show(name: str, seconds: Sequence[float], length: float, baseline: float) -> None:
    median = statistics.median(seconds)
    print(
        f"{name:28} {median:6.2f} s a step   {SAMPLES_PER_STEP / median:5.2f} samples/s   {baseline / median:.2f}×"
        f"   ({length:.1f} new tokens)"
    )


def main(python: Path, model: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts = folder / "prompts.jsonl"
        prompt_tokens = write_prompts(prompts, model)
        theirs, their_length = trl(python, model, prompts)
        ours, our_length = headrace(folder / "on-policy", model, prompts, 0)
        behind, behind_length = headrace(folder / "one-step-off", model, prompts, 1)
    baseline = statistics.median(theirs)
    load = os.getloadavg()
    print(f"{model.name}, 8 prompts × 4 samples, {prompt_tokens:.0f} prompt tokens, {len(theirs)} steps")
    print(f"load of the machine: {load[0]:.1f} over the last minute, {load[2]:.1f} over fifteen")
    show("TRL GRPO", theirs, their_length, baseline)
    show("headrace, on-policy", ours, our_length, baseline)
    show("headrace, max_staleness 1", behind, behind_length, baseline)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
