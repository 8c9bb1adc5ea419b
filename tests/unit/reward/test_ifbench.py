"""IFBench's scorer: the checkers' own verdicts, and an error that names the way out where they cannot be had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError, InvalidArgument
from headrace.score import ScoreItem
from services.reward.registry import Registry

nltk = pytest.importorskip("nltk")
pytest.importorskip("if_verifiable")

from if_verifiable.common import evaluate_instructions  # noqa: E402  # a package of an extra

from services.reward.scorers import ifbench  # noqa: E402  # likewise


@pytest.fixture(autouse=True)
def no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders without contents: the package downloads nothing, and what reads them finds nothing there."""
    for path in ifbench._DATA.values():
        (tmp_path / path).mkdir(parents=True)
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])


def item(response: str, *instructions: tuple[str, Any]) -> ScoreItem:
    metadata = {"instruction_id_list": [n for n, _ in instructions], "kwargs": [given for _, given in instructions]}
    return ScoreItem(item_id="1", prompt="Say it.", response=response, metadata=metadata)


NUMBERS = ("count:numbers", {"N": 2, "keyword": None})
WORDS = ("count:word_count_range", {"min_words": 3, "max_words": 9})
SOLID = ("format:no_whitespace", {})


def test_verdicts_are_the_packages_own() -> None:
    checkers = ifbench._checkers()
    responses = (
        "solid",
        "I have 2 cats and 3 dogs",
        "A man, a plan. Level noon!\n\n* one\n* two\n",
        "ab (c [d {e} f] g)",
    )
    instructions = [(n, None) for n, c in checkers.items() if not c(n).get_instruction_args_keys()]
    instructions += [NUMBERS, WORDS]
    compared = 0
    for name, given in instructions:
        for response in responses:
            try:
                theirs = evaluate_instructions(response, [name], [given or {}], "Say it.", dict(checkers))[1]
            except LookupError:
                continue  # it reads data
            except (AttributeError, ValueError, TypeError):
                continue
            assert ifbench.score(item(response, (name, given)))["score"] == theirs.binary_strict, (name, response)
            compared += 1
    assert compared > 60


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "needs metadata.instruction_id_list"),
        ({"instruction_id_list": ["format:no_whitespace"], "kwargs": []}, "a list of as many objects"),
        ({"instruction_id_list": ["format:no_whitespaces"], "kwargs": [{}]}, "did you mean 'format:no_whitespace'"),
        ({"instruction_id_list": ["count:numbers"], "kwargs": [{"N": None}]}, "count:numbers have no 'N'"),
        ({"instruction_id_list": ["count:numbers"], "kwargs": [{"N": 2, "M": 1}]}, "count:numbers does not take"),
    ],
)
def test_what_cannot_be_checked_is_refused(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        ifbench.score(ScoreItem(item_id="1", prompt="", response="x", metadata=metadata))


def test_without_nltks_data_there_is_no_reward_and_nothing_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LookupError, match=r"words:start_verb is not on .*: python -m nltk.downloader -d FOLDER punkt "):
        ifbench.score(item("Go there", ("words:start_verb", {})))
    ifbench._checkers.cache_clear()
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "elsewhere")])
    with pytest.raises(LookupError, match="NLTK_DATA=FOLDER"):
        ifbench.score(item("solid", SOLID))


def test_a_scorer_whose_package_is_missing_says_how_to_install_it() -> None:
    with pytest.raises(ConfigError, match=r"rm_type is ifbench, which needs the package if-verifiable: pip install"):
        Registry([], "ifbench")
