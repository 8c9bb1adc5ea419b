"""A language model as the judge, at any URL that speaks OpenAI's chat completions.

`--judge-prompt` is a file with {prompt}, {response} and {label}. Of the judge's answer counts the last box, else the
last number: divided by `--judge-scale`, between 0 and 1.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

from headrace.errors import InvalidArgument
from headrace.hooks import HookArgs
from headrace.score import ScoreItem
from headrace.wire.checks import shown
from headrace.wire.json_text import from_json
from services.reward.post import post
from services.reward.scorers.answers import after_thinking, boxed

PROMPT = """You grade an answer. Be strict: what is asked has to be answered, and answered right.

# What was asked
{prompt}

# What is right, if that is known
{label}

# The answer
{response}

Think about it briefly. Then end with its grade, a whole number from 0 (wrong) to 10 (right and complete), in a box:
\\boxed{{grade}}"""
KEY = "HEADRACE_JUDGE_KEY"
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


async def score(item: ScoreItem, args: HookArgs) -> float:
    """Raises InvalidArgument without --judge-url and for an answer without a grade, OSError while nobody answers."""
    if args.judge_url is None:
        raise InvalidArgument("scorer judge has no model to ask: set --judge-url and --judge-model")
    asked = {
        "model": args.judge_model,
        "messages": [{"role": "user", "content": _filled(args.judge_prompt, item)}],
        "temperature": 0.0,
    }
    url = f"{args.judge_url.rstrip('/')}/chat/completions"
    answer = await post(url, asked, seconds=args.reward_timeout_seconds, key=os.environ.get(KEY))
    return grade(_content(url, answer), args.judge_scale)


def grade(said: str, scale: float) -> float:
    """The judge's grade over the highest one. Raises InvalidArgument where there is none, or none in its range."""
    text = after_thinking(said)
    found = boxed(text)
    numbers = _NUMBER.findall(found if found is not None else text)
    if not numbers:
        raise InvalidArgument(
            f"the judge said {shown(said[-200:])}, without a grade: have it end with \\boxed{{grade}}"
        )
    given = float(numbers[-1])
    if not 0 <= given <= scale:
        raise InvalidArgument(f"the judge gave {given:g}, outside 0 to --judge-scale {scale:g}")
    return given / scale


def _content(url: str, answer: Any) -> str:
    try:
        content = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        content = None
    if not isinstance(content, str):
        raise InvalidArgument(f"{url} answered {shown(str(answer))}, which is no chat completion with a text")
    return content


def _filled(path: str | None, item: ScoreItem) -> str:
    template = PROMPT if path is None else _template(path)
    parts = {"prompt": _text(item.prompt), "response": item.response, "label": item.label or "(not known)"}
    return template.format_map(parts)


@cache
def _template(path: str) -> str:
    text = Path(path).read_text(encoding="utf-8")
    try:
        text.format_map({"prompt": "", "response": "", "label": ""})
    except (KeyError, ValueError, IndexError, AttributeError) as error:
        raise InvalidArgument(
            f"judge_prompt {path}: {error} is none of {{prompt}}, {{response}}, {{label}}; write other braces twice"
        ) from error
    return text


def _text(prompt: str) -> str:
    """A chat as lines of role and text; other prompts as they are."""
    if not prompt.startswith("[{"):
        return prompt
    try:
        turns = from_json(f'{{"turns": {prompt}}}')["turns"]
        return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in turns)
    except (InvalidArgument, KeyError, TypeError):
        return prompt
