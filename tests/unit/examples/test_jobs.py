"""Every example's jobs, data and scorers, without an engine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.cli.commands.init import TEMPLATES
from headrace.hooks import HookArgs, Sample
from headrace.hooks.load import load_hook
from headrace.job.load.load import load
from headrace.job.rules.scope import scope_of_check
from headrace.score import ScoreItem
from services.reward.scorers import code
from tests.support.sandboxes import choose_sandbox

EXAMPLES = Path(__file__).parents[3] / "examples"
WITH_README = sorted(path.parent for path in EXAMPLES.glob("*/README.md"))
JOBS = sorted(path for folder in WITH_README for path in folder.glob("*.toml") if "[model]" in path.read_text())
Copied = Callable[[str], Path]


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("path", JOBS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_job_of_an_example_passes_its_check(copied: Copied, path: Path) -> None:
    folder = copied(path.parent.name)
    job = load(folder / path.name, (), {}, lambda job: scope_of_check(job, elsewhere=True))
    if (folder / "data.py").is_file():
        assert all(Path(file).is_file() for file in job.data.prompt_data)
        assert all(file.is_file() for _, file in job.eval.eval_prompt_data)


@pytest.mark.parametrize(
    "reward",
    [
        *("countdown/reward.py", "wordle/game.py", "search/search.py", "retool/interpreter.py", "images/reward.py"),
        "swe/agent.py",
    ],
)
async def test_a_reward_scores_a_label_as_a_response_before_the_start(copied: Copied, reward: str) -> None:
    name, file = reward.split("/")
    folder = copied(name)
    row = rows(folder / "train.jsonl")[0]
    sample = Sample(response=row["label"], label=row["label"], metadata=row.get("metadata", {}))
    assert await load_hook(f"{folder / file}:reward").target(HookArgs({}), sample) in (0.0, 1.0)


@pytest.mark.parametrize("folder", [path for path in WITH_README if (path / "data.py").is_file()], ids=lambda p: p.name)
def test_evaluation_has_no_row_of_training(copied: Copied, folder: Path) -> None:
    made = copied(folder.name)
    if not (made / "eval.jsonl").is_file():
        pytest.skip("it does not evaluate what it trains")
    train, held_out = ({json.dumps(row) for row in rows(made / f"{name}.jsonl")} for name in ("train", "eval"))
    assert held_out
    assert not train & held_out


@pytest.mark.parametrize("folder", WITH_README, ids=lambda path: path.name)
def test_an_example_is_in_the_gallery_and_begins_with_its_commands(folder: Path) -> None:
    assert f"({folder.name}/README.md)" in (EXAMPLES / "README.md").read_text()
    block = re.search(r"^```bash\n(.*?)^```", (folder / "README.md").read_text(), re.S | re.M)
    assert block
    for template in re.findall(r"--template (\w+)", block[1]):
        assert template in TEMPLATES


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("3 * 5 + 2", 1.0),
        ("(2 + 3) * 5", 0.0),
        ("3 * 5", 0.0),
        ("17", 0.0),
        ("3 * 5 + 2 = 17", 0.0),
        ("17 ** 1", 0.0),
    ],
)
async def test_countdown_pays_for_the_target_made_of_each_number_once(response: str, reward: float) -> None:
    sample = Sample(response=response, label="17", metadata={"numbers": [5, 2, 3]})
    assert await load_hook(f"{EXAMPLES}/countdown/reward.py:reward").target(HookArgs({}), sample) == reward


async def test_each_countdown_can_be_solved(copied: Copied) -> None:
    folder = copied("countdown")
    reward = load_hook(f"{folder}/reward.py:reward").target
    for row in rows(folder / "eval.jsonl"):
        orders = [(a, b, c) for a in (0, 1, 2) for b in (0, 1, 2) for c in (0, 1, 2) if len({a, b, c}) == 3]
        numbers = row["metadata"]["numbers"]
        tried = [
            f"{numbers[a]} {first} {numbers[b]} {second} {numbers[c]}"
            for a, b, c in orders
            for first in "+-"
            for second in "+-"
        ]
        samples = [Sample(response=each, label=row["label"], metadata=row["metadata"]) for each in tried]
        assert max([await reward(HookArgs({}), sample) for sample in samples]) == 1.0


async def test_a_right_program_passes_the_tests_of_its_row_and_a_wrong_one_some(
    copied: Copied, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_sandbox("bubblewrap", monkeypatch)
    folder = copied("code")
    both = rows(folder / "train.jsonl") + rows(folder / "eval.jsonl")
    row = next(row for row in both if "at_most_7(" in row["prompt"])
    for body, reward in (("min(x, 7)", 1.0), ("x", 4 / 6), ("y", 0.0)):
        program = f"```python\ndef at_most_7(x):\n    return {body}\n```"
        item = ScoreItem("1", row["prompt"], program, metadata=row["metadata"])
        assert await code.score(item) == pytest.approx(reward)


@pytest.mark.parametrize(("response", "reward"), [("red", 1.0), (" Red.", 1.0), ("blue", 0.2), ("a red one", 0.0)])
async def test_a_picture_is_paid_by_its_color(copied: Copied, response: str, reward: float) -> None:
    folder = copied("images")
    sample = Sample(response=response, label="red")
    assert await load_hook(f"{folder}/reward.py:reward").target(HookArgs({}), sample) == reward
    assert all((folder / file).is_file() for row in rows(folder / "train.jsonl") for file in row["images"])


async def test_two_data_sets_of_an_evaluation_have_scorers_of_their_own(copied: Copied) -> None:
    rewards = copied("evaluation") / "rewards.py"
    for name, response, reward in (
        ("same", " 4", 1.0),
        ("same", "4 and", 0.0),
        ("begins", " 4 and", 1.0),
        ("begins", "so 4", 0.0),
    ):
        assert await load_hook(f"{rewards}:{name}").target(HookArgs({}), Sample(response=response, label="4")) == reward
