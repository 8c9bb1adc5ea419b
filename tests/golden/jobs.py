"""Twelve jobs that are the same each time they run: whole runs on a CPU, with an engine that has no model.

A job's record has a digest of each sample, the figures of metrics.jsonl that are neither a time nor about the machine,
and a digest of the exported weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from safetensors.numpy import load_file

ROOT = Path(__file__).parents[2]
HEADRACE = Path(sys.executable).with_name("headrace")
FUNCTIONS = Path(__file__).with_name("functions.py")
PROMPTS = [{"prompt": f"What is {i} + {i + 3}?", "label": str(2 * i + 3), "metadata": {"number": i}} for i in range(24)]
CONVERSATIONS = [
    {
        "prompt": [
            {"role": "user", "content": f"What is {i} + 1?"},
            {"role": "assistant", "content": f"It is {i + 1}, and not {i}."},
        ]
    }
    for i in range(24)
]
SHAPE = (
    "--num-rollout 3 --rollout-batch-size 4 --n-samples-per-prompt 4 --micro-batch-size 4 "
    "--rollout-max-response-len 12 --actor-num-gpus-per-node 1 --rollout-num-gpus 1 --lr 1e-3 --seed 7 "
    "--rollout-seed 11 --rollout-shuffle --max-groups-in-flight 1 --update-weight-probe-tolerance 1e6 "
    "--no-use-tensorboard"
)
"""One group at a time, so that groups are ready in one order. The engine has no model that a probe could compare."""


@dataclass(frozen=True)
class GoldenJob:
    """`turns` is what the engine says, as tests.golden.engine has it; without them it says random tokens."""

    flags: str
    turns: Sequence[str] = ()
    prompts: Sequence[Mapping[str, Any]] = tuple(PROMPTS)
    is_timed: bool = False
    """Which version made a token depends on when it was made: versions and what follows from them are left out."""


_EVEN = f"--custom-rm-path {FUNCTIONS}:even"
_TALK = ("so <<2+3>>|it is <<4*4>> then", "well five|so <<1>> again|six", "at last eight|none")
JOBS: Mapping[str, GoldenJob] = {
    "grpo": GoldenJob(f"{_EVEN} --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.01 --entropy-coef 0.01"),
    "ppo": GoldenJob(
        f"{_EVEN} --advantage-estimator ppo --critic-lr 2e-3 --num-critic-only-steps 1 --lambd 0.95 --kl-coef 0.01"
    ),
    "reinforce_plus_plus": GoldenJob(
        f"{_EVEN} --advantage-estimator reinforce_plus_plus --normalize-advantages --kl-coef 0.02 --gamma 0.99"
    ),
    "gspo": GoldenJob(f"{_EVEN} --advantage-estimator gspo --num-steps-per-rollout 2 --eps-clip 3e-4"),
    "sft": GoldenJob("--loss-type sft_loss --loss-mask-type qwen --n-samples-per-prompt 1", prompts=CONVERSATIONS),
    "opd": GoldenJob(f"{_EVEN} --use-opd --opd-type megatron --opd-teacher-load {{teacher}} --opd-kl-coef 0.5"),
    "lora": GoldenJob(f"{_EVEN} --lora-rank 4 --lora-alpha 8 --lora-target-modules q_proj v_proj down_proj"),
    "stale": GoldenJob(f"{_EVEN} --max-staleness 2 --partial-rollout --use-tis", is_timed=True),
    "tools": GoldenJob(
        f"{_EVEN} --custom-generate-function-path {FUNCTIONS}:with_tool --max-turns 3 --rollout-max-response-len 64",
        turns=_TALK,
    ),
    "agent": GoldenJob(
        f"--agent-function-path {FUNCTIONS}:agent --max-turns 3 --rollout-max-response-len 64 --apply-chat-template",
        turns=_TALK,
    ),
    "tp2_pp2": GoldenJob(
        f"{_EVEN} --actor-num-gpus-per-node 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    ),
    "cp2": GoldenJob(f"{_EVEN} --actor-num-gpus-per-node 2 --context-parallel-size 2"),
}


def played(name: str, folder: Path) -> dict[str, Any]:
    """Runs the job in the folder, and returns its record. Raises RuntimeError with what it said where it fails."""
    from tests.support.models.tiny_model import make_tiny_qwen3

    job = JOBS[name]
    model = make_tiny_qwen3(folder / "model", seed=3)
    teacher = make_tiny_qwen3(folder / "teacher", seed=4)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in job.prompts))
    export, run = folder / "export", folder / "runs" / "golden"
    words = [*SHAPE.split(), *job.flags.format(teacher=teacher).split()]
    label = [] if name == "sft" else ["--label-key", "label"]
    with engine(model, job.turns) as address:
        headrace(
            "train", "--run-name", "golden", "--run-dir", str(folder / "runs"), "--hf-checkpoint", str(model),
            "--prompt-data", str(prompts), *label, "--save-hf", str(export),
            "--rollout-external-engine-addrs", address, *_last_of_each(words),
        )  # fmt: skip
    headrace("buffer", "export", str(run), "--parquet", str(folder / "samples.parquet"))
    return {
        "samples": samples_of(folder / "samples.parquet", is_timed=job.is_timed),
        "metrics": metrics_of(run / "metrics.jsonl", is_timed=job.is_timed),
        "weights": None if job.is_timed else weights_of(export),
    }


def samples_of(parquet: Path, *, is_timed: bool) -> dict[str, str]:
    """Group and index → digest of all that a trained sample has.

    What was generated beyond the last step depends on when the run ended, and a scorer's version has its file's path.
    """
    left_out = _CHANCE | (_TIMED_COLUMNS if is_timed else set())
    rows = [row for row in pq.read_table(parquet).to_pylist() if row["step"] is not None]
    return {
        f"{row['group_id']} {row['index']}": _digest(_without_places(row, left_out))
        for row in sorted(rows, key=lambda row: (row["group_id"], row["index"]))
    }


def _without_places(row: Mapping[str, Any], left_out: set[str]) -> str:
    kept = {key: value for key, value in row.items() if key not in left_out}
    if kept["tags"]:  # a map, which has no order on the wire
        kept["tags"] = sorted(kept["tags"])
    text = json.dumps(kept, sort_keys=True, default=str)
    return re.sub(r"sha256:[0-9a-f]+", "sha256", text.replace(str(ROOT), "{tree}"))


def metrics_of(file: Path, *, is_timed: bool) -> list[dict[str, Any]]:
    """The rows without times, rates, and what is about the machine."""
    left_out = re.compile(_TIMES.pattern + (f"|{_TIMED_METRICS}" if is_timed else ""))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [{key: value for key, value in sorted(row.items()) if not left_out.search(key)} for row in rows]


def weights_of(export: Path) -> str:
    """One digest of all tensors, by name."""
    tensors = {name: value for file in export.glob("*.safetensors") for name, value in load_file(file).items()}
    return _digest(
        "".join(f"{name} {_digest(np.ascontiguousarray(tensors[name]).tobytes())}\n" for name in sorted(tensors))
    )


_CHANCE = {"scorer_version"}
_TIMED_COLUMNS = {"policy_ranges", "step"}
_TIMES = re.compile(r"^busy/|seconds|time|per_second|/s$|tflops|mfu|memory|bytes")
_TIMED_METRICS = "reward/all|clip|ratio|log_prob_diff|loss|grad|mismatch|kl|staleness|entropy|publish|tis"


def _digest(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:24]


def _last_of_each(words: Sequence[str]) -> list[str]:
    """A job's own flag stands in place of the common one."""
    flags: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            flags[word] = []
            current = flags[word]
        else:
            current.append(word)
    return [word for flag, values in flags.items() for word in (flag, *values)]


def headrace(*words: str) -> str:
    """What the command prints. Raises RuntimeError with its last words where it fails."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([HEADRACE, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    if done.returncode != 0:
        raise RuntimeError(
            f"headrace {' '.join(words)} ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        )
    return done.stdout


@contextlib.contextmanager
def engine(model: Path, turns: Sequence[str]) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.golden.engine", str(port), str(model), *turns]
    process = subprocess.Popen(command, cwd=ROOT, env=env)
    try:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the golden engine did not start")
            time.sleep(0.1)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()
