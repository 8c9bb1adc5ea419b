"""A language model as the judge, at any URL that speaks OpenAI's chat completions.

`--judge-prompt` is a file with {prompt}, {response} and {label}. The judge ends its text with one grade: in a box, or
alone on the last line, or as JSON. The reward is the grade divided by `--judge-scale`, between 0 and 1. With
`--judge-json` the server makes the judge answer in JSON. A text without a clear grade is an error, never a reward.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

from headrace.errors import InvalidArgument
from headrace.hooks import HookArgs
from headrace.limits import from_json, shown
from headrace.score import ScoreItem
from services.reward.scorers.answers import after_thinking, boxed, last_line, with_ascii_signs
from services.reward.scorers.remote_rm import post

PROMPT = """You grade an answer. Be strict: what is asked has to be answered, and answered right.

# What was asked
{prompt}

# What is right, if that is known
{label}

# The answer
{response}

Think about it briefly. Then end with its grade, a whole number from 0 (wrong) to {scale:g} (right and complete),
in a box:
\\boxed{{grade}}"""
JSON_PROMPT = PROMPT.partition("Think about it")[0] + (
    'Answer in JSON: {{"reason": "a brief reason", "grade": '
    "a whole number from 0 (wrong) to {scale:g} (right and complete)}}"
)
KEY = "HEADRACE_JUDGE_KEY"
_NUMBER = r"[-+]?[0-9]+(?:\.[0-9]+)?"
_WRAPPER = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_LEAD = (
    r"(?:(?:so|thus|therefore|hence|overall|in conclusion|conclusion)\W+)?"
    r"(?:(?:the|my|its|final|overall|total|a|i|would|will|i'd|give|grade|rate|deserves?|assign|award|this|it)\W+)*"
    r"(?:(?:grade|score|rating|mark|points?|verdict|result|note|nota|punkte|оценка|(?:最终|总)?(?:得分|评分|分数)|評価)\b"
    r"(?:\s*[(\[]\s*\d+\s*[-–—]\s*\d+\s*[)\]])?(?:\s+of)?\W*(?:is|are|would be|should be|of)?)?"
)
_GRADE = re.compile(
    rf"(?![^\d]*[<>≤≥])\W*?{_LEAD}[\s:=*_`$(\[]*"
    rf"(?:\\[dt]?frac\s*\{{\s*(?P<above>{_NUMBER})\s*\}}\s*\{{\s*(?P<below>{_NUMBER})\s*\}}"
    rf"|(?P<number>{_NUMBER})(?:[\s*_(]*(?:/|out of|of)\s*(?P<scale>{_NUMBER})|\s*\\?(?P<percent>%))?)"
    r"\s*(?:points?)?[\s.*_`$)\]!]*"
    r"(?:(?:\(|[-–—]\s|\b(?:because|since|as)\b)(?:(?!\b(?:or|maybe|no|wait)\b)\D)*)?",
    re.IGNORECASE,
)
_BOXES = re.compile(r"\\(?:boxed|fbox)\s*\{")
# The response that is graded may have a box of its own, and the judge may quote it.
_QUOTED = re.compile(
    r"```.*?```|^\s*>[^\n]*$|\"[^\"\n]*\"|“[^”]*”|<(response|answer)>.*?</\1>", re.DOTALL | re.MULTILINE
)
_SENTENCE_END = re.compile(
    r"[.!?][\"')\]*]*\s|(?<![:,;])(?<!\bsaid)(?<!\bsays)(?<!\bwrote)(?<!\bwrites)(?<!\bwith)(?<!\bis)(?<!\bwas)(?<!\bhas)"
    r"(?<!\bgave)(?<!\bboxed)(?<!\banswer)(?<!\bresponse)\n\s*\n"
)
_QUOTES = re.compile(
    r"\b(?:sa(?:ys|id|y)|wr(?:ites|ote|itten)|writes|response|answer(?:s|ed)?|student|model|claim(?:s|ed)?|state[sd]?|"
    r"conclude[sd]?|gave|gives|end(?:s|ed)?|quote[sd]?|box(?:ed)?|obtain(?:s|ed)?|get|got|gets|result(?:s|ed)?|put)\b",
    re.IGNORECASE,
)
_NAMES_A_GRADE = re.compile(
    r"\b(?:grade|score|rating|mark|verdict|points?)\b\W*(?:(?:is|are|of|would be|should be|:|=)\W*)*$"
    r"|\b(?:correct|right|wrong|incorrect|complete|incomplete|valid|partial|partially)\b[\w\s]*,?\s*(?:so|thus|therefore|hence)\W*$",
    re.IGNORECASE,
)
_TAGGED = re.compile(r"<(grade|score|rating)>([^<>]*)</\1>", re.IGNORECASE)
_RULES = " \t\r\n-=_"
_OPENED_FENCE = re.compile(r"```(?:json)?\s*$")
_GRADE_KEYS = ("grade", "score", "rating")


async def score(item: ScoreItem, args: HookArgs) -> float:
    """Raises InvalidArgument without --judge-url and for an answer without a grade, OSError while nobody answers."""
    if args.judge_url is None:
        raise InvalidArgument("scorer judge has no model to ask: set --judge-url and --judge-model")
    asked = {
        "model": args.judge_model,
        "messages": [{"role": "user", "content": _filled(args, item)}],
        "temperature": 0.0,
    } | ({"response_format": _response_format(args.judge_scale)} if _in_json(args) else {})
    url = f"{args.judge_url.rstrip('/')}/chat/completions"
    answer = await post(url, asked, seconds=args.reward_timeout_seconds, key=os.environ.get(KEY))
    said = _content(url, answer)
    return (json_grade if _in_json(args) else grade)(said, args.judge_scale)


def grade(said: str, scale: float) -> float:
    """Returns the judge's grade over the highest one.

    Raises InvalidArgument for a text without one clear grade, and for a grade outside of its range.
    """
    text = _verdict(said)
    verdict = _json_object(text)
    if verdict is not None:
        return _from_json(verdict, said, scale)
    text = _TAGGED.sub(r"\\boxed{\2}", with_ascii_signs(_QUOTED.sub(" ", text))).strip().rstrip(_RULES)
    boxes = [match.start() for match in _BOXES.finditer(text)]
    match = _GRADE.fullmatch(_boxed_grade(text, boxes[-1]) if boxes else last_line(text))
    if match is None:
        raise _without_grade(said)
    highest = "100" if match["percent"] else match["below"] or match["scale"]
    return _in_range(float(match["above"] or match["number"]), float(highest) if highest else None, scale)


def json_grade(said: str, scale: float) -> float:
    """Returns the `grade` of the judge's JSON over the highest one. Raises InvalidArgument as `grade` does."""
    return _from_json(_json_object(_verdict(said)), said, scale)


def _in_json(args: HookArgs) -> bool:
    # Users' reward functions may call this scorer with an object of their own, which need not have this flag.
    return getattr(args, "judge_json", False)


def _verdict(said: str) -> str:
    """Returns what follows the judge's own thoughts; a later `</think>` is the response's, which the judge quotes."""
    _, found, verdict = said.partition("</think>")
    return (verdict if found else after_thinking(said)).strip()


def _boxed_grade(text: str, start: int) -> str:
    """Returns what the last box has, where it ends the text or stands alone, and is no quotation; empty otherwise."""
    content = boxed(text[start:])
    if content is None:
        return ""
    if _is_quoted(text[:start].rstrip(" $*_`([\n")):
        return ""
    return _WRAPPER.sub(r" \1 ", content)


def _is_quoted(before: str) -> bool:
    """True where the sentence in front of a grade says that it is another one's."""
    sentences = list(_SENTENCE_END.finditer(before + " "))
    sentence = before[sentences[-1].end() :] if sentences else before
    return bool(_QUOTES.search(sentence)) and not _NAMES_A_GRADE.search(before)


def _without_grade(said: str) -> InvalidArgument:
    return InvalidArgument(
        f"the judge said {shown(said[-200:])}, without a grade: have it end with \\boxed{{grade}}, or with "
        "the grade alone on a line, or set --judge-json"
    )


def _in_range(given: float, highest: float | None, scale: float) -> float:
    if highest is not None and highest != scale:
        raise InvalidArgument(f"the judge gave {given:g} of {highest:g}, and --judge-scale is {scale:g}: use one scale")
    if not 0 <= given <= scale:
        raise InvalidArgument(f"the judge gave {given:g}, outside 0 to --judge-scale {scale:g}")
    return given / scale


def _json_object(text: str) -> dict[str, Any] | None:
    """Returns the object that the text is or ends with, perhaps in a block of code; None for one that is quoted."""
    end = text.rfind("}") + 1
    start = 0 if text.startswith("{") else text.find("\n{", 0, end) + 1
    rest, before = text[end:].strip(), _OPENED_FENCE.sub("", text[:start])
    if not text[start:].startswith("{") or (rest and not rest.startswith("```")) or _is_quoted(before):
        return None
    try:
        return from_json(text[start:end])
    except InvalidArgument:
        return None


def _from_json(verdict: dict[str, Any] | None, said: str, scale: float) -> float:
    given = [value for key, value in verdict.items() if key.lower() in _GRADE_KEYS] if verdict is not None else []
    if len(given) != 1 or isinstance(given[0], bool) or not isinstance(given[0], int | float):
        raise InvalidArgument(f'the judge said {shown(said[-200:])}, which is not JSON with one number as "grade"')
    return _in_range(float(given[0]), None, scale)


def _response_format(scale: float) -> dict[str, Any]:
    grade_schema = {"type": "number", "minimum": 0, "maximum": scale}
    schema = {
        "type": "object",
        "properties": {"reason": {"type": "string"}, "grade": grade_schema},
        "required": ["reason", "grade"],
        "additionalProperties": False,
    }
    return {"type": "json_schema", "json_schema": {"name": "verdict", "schema": schema}}


def _content(url: str, answer: Any) -> str:
    try:
        content = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        content = None
    if not isinstance(content, str):
        raise InvalidArgument(f"{url} answered {shown(str(answer))}, which is no chat completion with a text")
    return content


def _filled(args: HookArgs, item: ScoreItem) -> str:
    parts = {"prompt": _text(item.prompt), "response": item.response, "label": item.label or "(not known)"}
    if args.judge_prompt is not None:
        return _template(args.judge_prompt).format_map(parts)
    return (JSON_PROMPT if _in_json(args) else PROMPT).format_map({**parts, "scale": args.judge_scale})


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
