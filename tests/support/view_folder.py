"""Folders of data as `headrace view` writes them, without a run: for tests of the page, and to measure it.

Their texts are what a model may write: scripts, right-to-left letters, control characters, 20,000 characters, 40 turns.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.view.data import Value, script, step_name
from headrace.view.server import DATA, INDEX, STATIC

HOSTILE = (
    "</script><img src=x onerror=alert(1)><b>bold</b> \u2028\u2029 \u202eright\u202c "
    "\u05e9\u05dc\u05d5\u05dd \U0001f469\u200d\U0001f467 \x00\x1b[31m {{x}} ${x}"
)
"""A text that is markup, a line's end for JavaScript, another direction and an emoji."""
LONG = 20_000
TURNS = 40
_WORDS = (
    "the",
    "sum",
    "of",
    "both",
    "numbers",
    "is",
    "then",
    "we",
    "add",
    "carry",
    "one",
    "so",
    "answer",
    "check",
    "wait",
)
_PROMPTS = 24
_KEPT = 8
"""Each eighth step has tokens of all samples, and the others of the eight best and worst."""
_PIECES = [f" {word}" for word in _WORDS] + ["\n", "\t", *"0123456789", "<|im_end|>", "\\xE4\\xBD", HOSTILE]


@dataclass(frozen=True)
class Sizes:
    """How large a folder is."""

    steps: int = 18
    groups: int = 6
    samples: int = 8
    characters: int = 400
    tokens: int = 48
    """Of a response"""
    is_hostile: bool = True
    """With texts, failures and turns that are out of the ordinary"""


def write_view_folder(target: Path, sizes: Sizes = Sizes(), *, static: Path = STATIC, live: bool = False) -> Path:
    """Writes the page and its data. Returns the page's file."""
    chance = random.Random(7)
    (target / DATA).mkdir(parents=True)
    for file in static.iterdir():
        shutil.copyfile(file, target / file.name)
    prompts: dict[str, list[list[Any]]] = {}
    means = []
    for step in range(1, sizes.steps + 1):
        groups = [_group(chance, sizes, step, number) for number in range(sizes.groups)]
        samples = [sample for group in groups for sample in group["samples"]]
        _mark_tokens(samples, step)
        _write(target, step_name("step", step), {"step": step, "groups": groups})
        _write(
            target, step_name("tokens", step), _tokens(chance, step, [each for each in samples if each["has_tokens"]])
        )
        _write(target, step_name("trace", step), _trace(f"train/{step}-0/1/1"))
        means.append(_mean(samples))
        for number, group in enumerate(groups):
            prompts.setdefault(group["prompt"], []).append([step, number, _mean(group["samples"])])
    evaluations = [step for step in range(1, sizes.steps + 1) if step % 5 == 0]
    for step in evaluations:
        evaluated = [_group(chance, sizes, step, number) | {"set": name} for name in "ab" for number in range(4)]
        _write(target, step_name("eval", step), {"step": step, "groups": evaluated})
    untrained = _untrained(chance, sizes)
    counts = {"failed": sum(len(group["samples"]) for group in untrained if group["samples"][0]["failure"])}
    counts["filtered"] = sum(len(group["samples"]) for group in untrained) - counts["failed"]
    _write(target, "untrained", {"counts": counts, "groups": untrained})
    _write(target, "prompts", {"texts": [text[:200] for text in prompts], "at": list(prompts.values())})
    _write(target, "overview", overview(sizes, means, evaluations, counts, chance, live=live))
    return target / INDEX


def overview(
    sizes: Sizes,
    means: Sequence[float | None],
    evaluations: Sequence[int],
    counts: Value,
    chance: random.Random,
    *,
    live: bool = False,
) -> Value:
    """The overview's value, with curves that look like a run's."""
    steps = list(range(1, sizes.steps + 1))

    def noisy(start: float, end: float, noise: float) -> list[float]:
        return [
            abs(start + (end - start) * step / sizes.steps + chance.gauss(0, noise) * abs(start or end))
            for step in steps
        ]

    times = {"wait": 4.0, "train": 9.0, "publish": 1.5, "save": 0.2, "evaluate": 0.3}
    times |= {"fetch": 0.1, "log_probs": 1.5, "forward": 2.2, "backward": 4.0, "optimizer": 1.0}
    columns = {"reward/mean": list(means), "reward/std": noisy(0.4, 0.2, 0.05), "entropy": noisy(1.4, 0.3, 0.04)}
    columns |= {"grad_norm": noisy(2, 1, 0.2), "response_length/mean": noisy(80, 140, 0.05), "lr": [1e-6] * len(steps)}
    columns |= {"log_prob_diff/mean": noisy(1e-4, 3e-4, 0.2), "tokens_per_second": noisy(1800, 2400, 0.05)}
    columns |= {"staleness/mean": noisy(0.5, 0.5, 0.1), "loss/policy": [None, *noisy(0.01, 0.02, 0.3)[1:]]}
    columns |= {f"time/{name}_seconds": noisy(value, value, 0.15) for name, value in times.items()}
    columns["time/step_seconds"] = noisy(15.5, 15.5, 0.01)
    rewards = [0.3 + 0.6 * step / sizes.steps for step in evaluations]
    evals = {"eval/a": rewards, "eval/b": [value * 0.8 for value in rewards]}
    evals |= {"eval_low/a": [value - 0.08 for value in rewards], "eval_high/a": [value + 0.08 for value in rewards]}
    return {
        "version": 1,
        "headrace": "0.3.0",
        "run": "sums-20261127",
        "folder": "/runs/sums-20261127",
        "made": 1795700559.4,
        "live": live,
        "state": {"phase": "running" if live else "interrupted", "step": sizes.steps, "num_rollout": sizes.steps + 2},
        "job": [["model", "SmolLM2-135M-Instruct"], ["n_samples_per_prompt", str(sizes.samples)], ["lr", "1e-6"]],
        "metrics": {"step": steps, "time": [1795700000.0 + 15 * step for step in steps], "columns": columns},
        "evaluations": {"step": list(evaluations), "columns": evals},
        "marks": [[max(1, sizes.steps // 3), "restarted with lr 2e-6"], [max(1, sizes.steps // 2), "scorer swapped"]],
        "warnings": [[2, f"a warning with {HOSTILE}"]],
        "steps": {
            "step": steps,
            "samples": [sizes.groups * sizes.samples] * len(steps),
            "groups": [sizes.groups] * len(steps),
            "tokens": [1] * len(steps),
        },
        "evals": list(evaluations),
        "traced": True,
        "untrained": counts,
        "ledger": {
            "source": "ledger",
            "time": 1795700559.0,
            "states": {"QUEUED": 3, "LEASED": 2, "READY": 4, "CONSUMED": 8, "COMMITTED": 96, "DROPPED": 5, "FAILED": 1},
            "failures": [["REWARD_TIMEOUT", 8], [HOSTILE, 2]],
            "filtered": [["all_right", 40], ["all_wrong", 16]],
            "staleness": [[0, 0.62], [1, 0.3], [2, 0.08]],
            "produced": 1200,
        },
        "tokenizer": {"error": None},
        "notes": [
            "Tokens are kept for all samples of each eighth step, and for the eight best and worst of the others."
        ],
    }


LANES = ["buffer", "rollout", "engine 0", "reward", "trainer", "rank 0", "rank 1"]


def _trace(sample_id: str) -> Value:
    """Of one sample, whose first lease was lost; the text of an error is a peer's."""
    spans: list[list[Any]] = [
        [0, "sample", 0.0, 100.0, ""],
        [0, "leased", 0.0, 60.0, f"LEASE_EXPIRED: {HOSTILE}"],
        [2, "generate", 0.1, 2.0, "CancelledError: "],
        [0, "leased", 60.0, 70.0, ""],
        [1, "lease", 60.0, 69.0, ""],
        *([2, "generate", 61.0 + turn, 61.9 + turn, ""] for turn in range(3)),
        [3, "Score", 68.0, 68.001, ""],
        [4, "loop", 71.0, 90.0, ""],
        *([rank, "forward_backward", 72.0, 80.0, ""] for rank in (5, 6)),
        [0, "consumed", 90.0, 100.0, ""],
    ]
    return {
        "lanes": LANES,
        "samples": {sample_id: [[i, n, b + 1.7e9, e + 1.7e9, error] for i, n, b, e, error in spans]},
    }


def _write(target: Path, name: str, value: Value) -> None:
    (target / DATA / f"{name}.js").write_bytes(script(name, value))


def _mean(samples: Sequence[Value]) -> float | None:
    rewards = [sample["reward"] for sample in samples if sample["reward"] is not None]
    return sum(rewards) / len(rewards) if rewards else None


def _text(chance: random.Random, characters: int) -> str:
    words = [chance.choice(_WORDS) for _ in range(characters // 3 + 1)]
    return " ".join(word + ("\n" if number % 17 == 16 else "") for number, word in enumerate(words))[:characters]


def _group(chance: random.Random, sizes: Sizes, step: int, number: int) -> Value:
    index = ((step - 1) * sizes.groups + number) % max(_PROMPTS, sizes.steps * sizes.groups // 4)
    is_odd = sizes.is_hostile and number == 1
    prompt = f"Answer briefly.\nWhat is {index} + {number}?" + (f"\n{HOSTILE}" if is_odd else "")
    skill = 0.2 + 0.6 * step / max(1, sizes.steps) * chance.random()
    common = _text(chance, sizes.characters)
    return {
        "id": f"train/{step}-{number}",
        "prompt": prompt if index else f"{prompt}\n{_text(chance, LONG)}",
        "label": str(index + number),
        "set": None,
        "version": step - 1,
        "samples": [_sample(chance, sizes, step, number, at, skill, common) for at in range(sizes.samples)],
    }


def _sample(
    chance: random.Random, sizes: Sizes, step: int, number: int, index: int, skill: float, common: str
) -> Value:
    is_right = chance.random() < skill
    response = f"{common[: len(common) // 2]} {_text(chance, len(common) // 2)}\n#### {42 if is_right else index}"
    sample: Value = {
        "id": f"train/{step}-{number}/1/{index}",
        "index": index,
        "status": "completed" if chance.random() < 0.9 else "truncated",
        "reward": float(is_right),
        "parts": {"correct": float(is_right), "format": round(chance.random(), 2)} if number % 2 else {},
        "advantage": round(float(is_right) - skill, 4),
        "gap": round(abs(chance.gauss(0, 1e-4)), 6),
        "scorer": "math",
        "scorer_version": "math sha256:0123456789ab",
        "prompt_tokens": 24,
        "response_tokens": sizes.tokens,
        "trained_tokens": sizes.tokens - 8,
        "ranges": [[step - 1, 0, 30], [step, 30, sizes.tokens]] if index % 2 else [[step - 1, 0, sizes.tokens]],
        "response": response,
        "turns": [],
        "metadata": {"level": 3, "source": {"name": "made", "tags": ["a", "b"]}} if index == 0 else None,
        "failure": None,
        "dropped": None,
        "has_tokens": False,
    }
    return sample | (_oddity(chance, number, index) if sizes.is_hostile else {})


def _oddity(chance: random.Random, number: int, index: int) -> Value:
    if number == 1 and index == 0:
        return {"response": HOSTILE}
    if number == 1 and index == 1:
        return {"response": _text(chance, LONG)}
    if number == 2:
        return {"turns": list(_turns(chance, TURNS if index == 0 else 4))}
    if number == 3 and index == 2:
        return {"status": "failed", "reward": None, "advantage": None, "failure": ["REWARD_TIMEOUT", HOSTILE]}
    return {}


def _turns(chance: random.Random, count: int) -> Iterator[Value]:
    for number in range(count):
        if number % 2:
            yield {"role": "tool", "content": f'{{"stdout": "{chance.randint(0, 99)}"}}\n{HOSTILE}'}
        else:
            call = f'<tool_call>\n{{"name": "python", "arguments": {{"code": "print({number})"}}}}\n</tool_call>'
            yield {"role": "assistant", "content": f"{_text(chance, 120)}\n{call}"}


def _mark_tokens(samples: list[Value], step: int) -> None:
    scored = sorted((each for each in samples if each["reward"] is not None), key=lambda each: float(each["reward"]))
    kept = samples if step % _KEPT == 1 else scored[:_KEPT] + scored[-_KEPT:]
    for sample in kept:
        sample["has_tokens"] = True


def _tokens(chance: random.Random, step: int, samples: Sequence[Value]) -> Value:
    columns = {}
    for sample in samples:
        prompt, response = sample["prompt_tokens"], sample["response_tokens"]
        engine = [-round(chance.expovariate(2), 4) for _ in range(response)]
        columns[sample["id"]] = {
            "t": [chance.randrange(len(_PIECES)) for _ in range(prompt + response)],
            "n": prompt,
            "mask": [int(not 10 <= at < 18) for at in range(response)],
            "engine": engine,
            "trainer": [round(value + chance.gauss(0, 1e-3), 6) for value in engine],
            "advantage": [sample["advantage"]] * response,
        }
    return {"step": step, "texts": _PIECES, "ids": list(range(100, 100 + len(_PIECES))), "samples": columns}


def _untrained(chance: random.Random, sizes: Sizes) -> list[Value]:
    groups = []
    for number in range(4):
        group = _group(chance, sizes, 3, number)
        for sample in group["samples"]:
            sample |= {"advantage": None, "gap": None}
            if number == 3:
                sample |= {"status": "failed", "reward": None, "failure": ["REWARD_TIMEOUT", f"after 30 s: {HOSTILE}"]}
            else:
                sample |= {"reward": 1.0, "dropped": "all_right", "failure": None}
        groups.append(group)
    return groups
