"""IFBench: whether a response follows all instructions of its prompt, by the benchmark's own checkers (if-verifiable).

`metadata.instruction_id_list` and `metadata.kwargs` are a row's fields of that name (Pyatkin et al. 2025,
arXiv:2507.02833). The checkers' package downloads what it lacks of NLTK's data when it is imported, so nothing is
scored where that data is not there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import nltk

from headrace.errors import InvalidArgument
from headrace.limits import nearest
from headrace.score import ScoreItem
from services.reward.scorers.answers import after_thinking

_DATA = {
    "punkt": "tokenizers/punkt",
    "punkt_tab": "tokenizers/punkt_tab",
    "averaged_perceptron_tagger_eng": "taggers/averaged_perceptron_tagger_eng",
    "stopwords": "corpora/stopwords",
}


def score(item: ScoreItem) -> dict[str, float]:
    """Returns `score`, 1 when all instructions are followed, and `share`, of those that are.

    Raises InvalidArgument for instructions that cannot be checked, and LookupError without NLTK's data.
    """
    names, arguments = _instructions(item.metadata)
    response = after_thinking(item.response).strip()
    followed = [_follows(response, name, given) for name, given in zip(names, arguments, strict=True)]
    return {"score": float(all(followed)), "share": sum(followed) / len(followed)}


def _instructions(metadata: Mapping[str, Any]) -> tuple[Sequence[str], Sequence[Mapping[str, Any]]]:
    names, arguments = metadata.get("instruction_id_list"), metadata.get("kwargs")
    if not isinstance(names, list) or not names or not isinstance(arguments, list) or len(arguments) != len(names):
        raise InvalidArgument(
            "scorer ifbench needs metadata.instruction_id_list, a list of names, and metadata.kwargs, a list of as "
            "many objects: --metadata-key names the field of a row that holds both"
        )
    for name, given in zip(names, arguments, strict=True):
        if not isinstance(name, str) or name not in _checkers():
            near = nearest(name, _checkers()) if isinstance(name, str) else None
            hint = f": did you mean {near!r}?" if near else ""
            raise InvalidArgument(f"scorer ifbench: there is no instruction {name!r:.80}{hint}")
        if given is not None and not isinstance(given, dict):
            raise InvalidArgument(f"scorer ifbench: kwargs of {name} are {given!r:.80}, not an object")
    return names, [{key: value for key, value in (g or {}).items() if value is not None} for g in arguments]


def _follows(response: str, name: str, given: Mapping[str, Any]) -> bool:
    checker = _checkers()[name](name)
    if missing := set(checker.get_instruction_args_keys()) - given.keys():  # it would draw a value at random
        raise InvalidArgument(f"scorer ifbench: kwargs of {name} have no {sorted(missing)[0]!r}")
    try:
        checker.build_description(**given)
    except (TypeError, ValueError, KeyError) as error:
        raise InvalidArgument(f"scorer ifbench: {name} does not take {dict(given)!r:.200}: {error}") from error
    try:
        return bool(response and checker.check_following(response))
    except LookupError as error:
        if isinstance(error, IndexError | KeyError):
            raise
        raise _without_data(name) from error


@cache
def _checkers() -> Mapping[str, Any]:
    for path in _DATA.values():
        try:
            nltk.data.find(path)
        except LookupError as error:
            raise _without_data(path) from error
    from if_verifiable.ifbench.instructions_registry import INSTRUCTION_DICT  # its import would download the data

    checkers: Mapping[str, Any] = INSTRUCTION_DICT
    return checkers


def _without_data(what: str) -> LookupError:
    return LookupError(
        f"scorer ifbench: NLTK's data for {what} is not on the reward service's machine: "
        f"python -m nltk.downloader -d FOLDER {' '.join(_DATA)}, and NLTK_DATA=FOLDER in its environment"
    )
