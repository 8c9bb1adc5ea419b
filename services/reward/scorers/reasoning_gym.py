"""Any task of reasoning_gym, scored by the task's own `score_answer`.

`metadata.reasoning_gym` is the entry as the package made it, or the same as JSON text: `{"question", "answer",
"metadata": {"source_dataset", …}}`. The answer is the last `<answer>…</answer>`, else the last boxed one, else the last
line; `metadata.answer_format` in {"tag", "boxed", "last_line", "all"} allows one of them only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import reasoning_gym

from headrace.errors import InvalidArgument
from headrace.limits import from_json
from headrace.score import ScoreItem
from services.reward.scorers.answers import after_thinking, boxed, last_line, tagged

_ScoreAnswer = Callable[[str | None, dict[str, Any]], float]


def score(item: ScoreItem) -> float:
    """Scores 0 for an answer that the task cannot read.

    Raises InvalidArgument when the entry is missing, its task unknown, or its own answer cannot be read either.
    """
    entry = _entry(item.metadata)
    task = entry.get("metadata", {}).get("source_dataset")
    if not isinstance(task, str):
        raise InvalidArgument("scorer reasoning_gym: the entry does not name its task in metadata.source_dataset")
    answer, score_answer = _answer(item), _scorer(task)
    try:
        return float(score_answer(answer, entry))
    except (Exception, SystemExit):  # noqa: BLE001 - tasks parse answers in many ways, some with eval
        _check_entry(task, score_answer, entry)
        return 0.0


def _check_entry(task: str, score_answer: _ScoreAnswer, entry: dict[str, Any]) -> None:
    """Raises InvalidArgument where the entry and not the answer is the reason that a task failed."""
    own = entry["answer"]
    try:
        score_answer(own if isinstance(own, str) else "", entry)
    except Exception as error:
        raise InvalidArgument(
            f"scorer reasoning_gym: task {task!r} cannot score the entry's own answer {own!r:.80} "
            f"({type(error).__name__}: {error}): create the entry again with the installed version of reasoning-gym"
        ) from error


def _entry(metadata: Mapping[str, Any]) -> dict[str, Any]:
    entry = metadata.get("reasoning_gym")
    if isinstance(entry, str):
        entry = from_json(entry)
    if not isinstance(entry, dict) or "answer" not in entry:
        raise InvalidArgument("scorer reasoning_gym needs the entry that the package made in metadata.reasoning_gym")
    return entry


@cache
def _scorer(task: str) -> _ScoreAnswer:
    try:
        score_answer: _ScoreAnswer = reasoning_gym.get_score_answer_fn(task)
    except ValueError as error:
        raise InvalidArgument(
            f"scorer reasoning_gym: there is no task {task!r}; `reasoning_gym.factory.DATASETS` lists them"
        ) from error
    return score_answer


def _answer(item: ScoreItem) -> str | None:
    text = after_thinking(item.response)
    match item.metadata.get("answer_format"):
        case "tag":
            return tagged(text)
        case "boxed":
            return boxed(text)
        case "last_line":
            return last_line(text)
        case "all":
            return text
        case None:
            return tagged(text) or boxed(text) or last_line(text)
        case other:
            raise InvalidArgument(f"metadata.answer_format is {other!r}: use tag, boxed, last_line or all")
