"""A run's samples as logs of Inspect (inspect_ai), and the static page that shows them.

A group is a sample of Inspect and its index an epoch, so the viewer shows a group's samples together. A sample's
reward is its score, its conversation the messages, and its failure an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from importlib.util import find_spec
from itertools import count, groupby
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.sample_log import Answer, conversation


def write_logs(answers: Iterable[Answer], run: str, folder: Path, *, evaluated: bool = False) -> Iterator[Path]:
    """Writes one .eval file for each step, and yields it. Answers come step by step; without one they are untrained."""
    folder.mkdir(parents=True, exist_ok=True)
    for step, of_step in groupby(answers, key=lambda answer: answer.step):
        name = "untrained" if step is None else f"{'eval' if evaluated else 'step'}-{step:07}"
        yield _write_log(list(of_step), run, name, folder / f"{name}.eval")


def write_page(logs: Path, folder: Path) -> None:
    """Writes Inspect's viewer, with the logs in it, into a new folder. Any web server shows it."""
    require_inspect()
    from inspect_ai.log import bundle_log_dir

    bundle_log_dir(str(logs), str(folder.absolute()))  # a relative hf/… would be uploaded


def require_inspect() -> None:
    """Raises ConfigError where inspect_ai is not installed."""
    if find_spec("inspect_ai") is None:
        raise ConfigError("Inspect logs need the package inspect_ai: pip install 'headrace[inspect]'")


def _write_log(answers: list[Answer], run: str, name: str, file: Path) -> Path:
    require_inspect()
    from inspect_ai import log as inspect

    epochs: list[int] = []
    taken = set[tuple[str, int]]()
    for answer in answers:  # a sample that failed more than once has several
        free = (epoch for epoch in count(answer.index + 1) if (answer.group_id, epoch) not in taken)
        epochs.append(next(free))
        taken.add((answer.group_id, epochs[-1]))
    rewards = [answer.reward for answer in answers if answer.reward is not None]
    mean = {"mean": inspect.EvalMetric(name="mean", value=sum(rewards) / len(rewards))} if rewards else {}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    log = inspect.EvalLog(
        status="success",
        eval=inspect.EvalSpec(
            created=now,
            task=name,
            dataset=inspect.EvalDataset(name="prompts", samples=len({answer.group_id for answer in answers})),
            model=f"headrace/{run}",
            config=inspect.EvalConfig(epochs=max(epochs)),
        ),
        results=inspect.EvalResults(
            total_samples=len(answers),
            completed_samples=sum(answer.failure_reason is None for answer in answers),
            scores=[inspect.EvalScore(name="reward", scorer="reward", metrics=mean)],
        ),
        stats=inspect.EvalStats(started_at=now, completed_at=now),  # without them the page has a duration of NaN
        samples=[_sample(answer, epoch) for answer, epoch in zip(answers, epochs, strict=True)],
    )
    inspect.write_eval_log(log, str(file))
    return file


def _sample(answer: Answer, epoch: int) -> Any:
    from inspect_ai.log import EvalError, EvalSample
    from inspect_ai.model import (
        ChatMessageAssistant,
        ChatMessageSystem,
        ChatMessageTool,
        ChatMessageUser,
        ModelOutput,
        ModelUsage,
    )
    from inspect_ai.scorer import Score

    kinds = {"assistant": ChatMessageAssistant, "system": ChatMessageSystem, "tool": ChatMessageTool}
    messages = [kinds.get(turn["role"], ChatMessageUser)(content=turn["content"]) for turn in conversation(answer)]
    score = error = None
    if answer.failure_reason is not None:
        text = f"{answer.failure_reason}: {answer.failure_message}"
        error = EvalError(message=text, traceback=text, traceback_ansi=text)
    elif answer.reward is not None:
        said_by = {"scorer": answer.scorer, "scorer_version": answer.scorer_version}
        score = Score(value=answer.reward, answer=answer.response, metadata=said_by | dict(answer.reward_parts))
    return EvalSample(
        id=answer.group_id,
        epoch=epoch,
        input=answer.prompt,
        target=answer.label or "",
        messages=messages,
        output=ModelOutput.from_content("policy", answer.response),
        scores={"reward": score} if score else None,
        error=error,
        model_usage={
            "policy": ModelUsage(
                input_tokens=answer.prompt_tokens,
                output_tokens=answer.response_tokens,
                total_tokens=answer.prompt_tokens + answer.response_tokens,
            )
        },
        metadata={
            "sample_id": answer.sample_id,
            "status": answer.status,
            "policy_ranges": answer.policy_ranges,
            "advantage": answer.advantage,
            "log_prob_gap": answer.log_prob_gap,
            "dropped_reason": answer.dropped_reason,
            "metadata": answer.metadata,
        },
    )
