"""The examples' environments, played: right play is paid, wrong play is not, and what they say has mask 0."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.hooks import HookArgs, Sample
from headrace.hooks.agent import Task
from headrace.hooks.load import load_hook
from tests.support.sandboxes import choose_sandbox


@pytest.mark.parametrize(
    ("guesses", "reward", "given"),
    [
        ([" cow\n"], 1.0, ""),
        ([" cat\n", " cow\n"], 0.9, "Marks: c--\nGuess:"),
        ([" cat\n", " cat\n", " dog\n"], 0.1, "Marks: c--\nGuess:" * 2),
        ([" zebra\n"], 0.0, ""),
    ],
    ids=["at once", "in two guesses", "lost, with two words", "no word of the game"],
)
async def test_the_word_game_is_paid_by_its_guesses(play: Any, guesses: list[str], reward: float, given: str) -> None:
    played = await play("wordle", "game.py", Sample(prompt="Guess:", label="cow"), *guesses, max_turns=3)
    assert played.reward == pytest.approx(reward)
    assert played.written == "".join(guesses)
    assert played.given == given


@pytest.mark.parametrize(
    ("responses", "reward"),
    [
        (["<search>dish of {country}</search>", "<answer>{name}</answer>"], 1.0),
        (["<search>dish of {country}</search>", "<answer>soup</answer>"], 0.2),
        (["<search>soup</search>", "<answer>soup</answer>"], 0.1),
        (["<answer>soup</answer>"], 0.0),
    ],
    ids=["found and answered", "found and not read", "searched for something else", "guessed"],
)
async def test_a_search_is_answered_from_the_index(play: Any, copied: Any, responses: list[str], reward: float) -> None:
    facts = (json.loads(line)["text"] for line in (copied("search") / "passages.jsonl").read_text().splitlines())
    fact = next(text for text in facts if "The dish of " in text)
    country, name = fact.removeprefix("The dish of ").removesuffix(".").split(" is ")
    written = [text.format(country=country, name=name) for text in responses]
    played = await play("search", "search.py", Sample(prompt="The dish?\n", label=name), *written)
    assert played.reward == reward
    assert played.written == "".join(written)
    assert (fact in played.given) == (reward in (0.2, 1.0))


@pytest.mark.parametrize(
    ("responses", "reward", "output"),
    [
        (["<code>print(57 * 81)</code>", "The answer is 4617"], 1.0, "4617"),
        (["<code>print(57 * 81)</code>", "The answer is 7"], 0.2, "4617"),
        (["<code>print(57)</code>", "The answer is 57"], 0.1, "57"),
        (["<code>print(x)</code>", "The answer is 7"], 0.0, "NameError"),
        (["The answer is 7"], 0.0, ""),
    ],
    ids=["computed", "computed and not read", "another program", "an error", "guessed"],
)
async def test_programs_run_between_thoughts_in_the_sandbox(
    play: Any, monkeypatch: pytest.MonkeyPatch, responses: list[str], reward: float, output: str
) -> None:
    choose_sandbox("bubblewrap", monkeypatch)
    played = await play("retool", "interpreter.py", Sample(prompt="57 * 81?\n", label="4617"), *responses, max_turns=3)
    assert played.reward == reward
    assert played.written == "".join(responses)
    assert output in played.given
    assert ("<output>" in played.given) == (len(responses) > 1)


FIXES = ["open: {name}.py\n", "fix: {bug} -> {label}\n"]


@pytest.mark.parametrize(
    ("responses", "reward", "given"),
    [
        (FIXES, 1.0, ""),
        (["open: {name}.py\n", "fix: {bug} -> 0\n", "fix: 0 -> {label}\n"], 1.0, "not {wanted}"),
        (["open: {name}.py\n", "fix: {bug} -> {bug} +\n", "stop\n"], 0.2, "SyntaxError"),
        (["open: {name}.py\n", "fix: nothing -> 0\n"], 0.1, "def {name}"),
        (["open: check.py\n", "fix: CASES: -> ():\n", "stop\n"], 0.2, "not {wanted}"),
        (["fix: {bug} -> {label}\n"], 0.0, ""),
        (["open: nothing.py\n"], 0.0, ""),
    ],
    ids=["at once", "the second time", "no program", "no such text", "other tests", "unopened", "no such file"],
)
async def test_a_repository_is_paid_by_its_tests(
    play: Any, copied: Any, monkeypatch: pytest.MonkeyPatch, responses: list[str], reward: float, given: str
) -> None:
    choose_sandbox("bubblewrap", monkeypatch)
    row = json.loads((copied("swe") / "eval.jsonl").read_text().splitlines()[0])
    said = row["prompt"].splitlines()[-1]  # area.py: area(13, 5) is 8, not 65
    name, wanted = said.partition(".py")[0], said.rpartition(" ")[2]
    bug = row["metadata"]["files"][f"{name}.py"].rpartition("return ")[2].strip()
    texts = {"name": name, "bug": bug, "label": row["label"], "wanted": wanted}
    written = [text.format(**texts) for text in responses]
    sample = Sample(prompt=row["prompt"], label=row["label"], metadata=row["metadata"])
    played = await play("swe", "agent.py", sample, *written, max_turns=3)
    assert played.reward == reward
    assert played.written == "".join(written)
    assert given.format(**texts) in played.given


@pytest.mark.parametrize(
    ("moves", "expected"),
    [
        ([" 1", " 2", " 1"], {"first": 1.0, "second": 0.3}),
        ([" 2", " 2"], {"first": 0.3, "second": 1.0}),
        ([" 2", " 7"], {"first": 0.5, "second": 0.0}),
    ],
    ids=["first takes the last", "second takes the last", "a wrong move"],
)
async def test_both_players_of_a_game_are_paid(
    copied: Any, monkeypatch: pytest.MonkeyPatch, moves: list[str], expected: dict[str, float]
) -> None:
    game = load_hook(f"{copied('selfplay') / 'game.py'}:run").target
    said, asked = iter(moves), []

    class Client:
        def __init__(self, base_url: str, api_key: str = "") -> None:
            self.completions, self.url = self, base_url

        async def __aenter__(self) -> Any:
            return self

        async def __aexit__(self, *_: object) -> None:
            return None

        def with_options(self, base_url: str) -> Any:
            return Client(base_url)

        async def create(self, **_: Any) -> Any:
            asked.append(self.url)
            return SimpleNamespace(choices=[SimpleNamespace(text=next(said))])

    monkeypatch.setitem(game.__globals__, "AsyncOpenAI", Client)
    task = Task(prompt="4:", label="4")
    assert await game(HookArgs({}), task, "http://here/sessions/a.b/v1") == expected
    urls = [f"http://here/sessions/a.b~{role}/v1" for role in ("first", "second", "first")]
    assert asked == urls[: len(moves)]
