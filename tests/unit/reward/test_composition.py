"""A reward of several parts: the arithmetic in closed form, the penalties, and a composition that a service scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.api.reward.v1 import reward_pb2 as pb
from headrace.errors import ConfigError, InvalidArgument
from headrace.hooks import HookArgs
from headrace.job.schema.services import RewardPart, RewardSection
from headrace.score import Score, ScoreError, ScoreItem
from services.reward.composition import Part, combined, digest_of
from services.reward.scorers import json_schema, penalties
from tests.support.processes.reward_server import served_reward
from tests.support.refusals import refused

RIGHT, SHORT = Part("right"), Part("short", weight=0.2)
FORMAT = Part("format", weight=0.0, gate=1.0)


@pytest.mark.parametrize(
    ("parts", "values", "combine", "reward"),
    [
        ([RIGHT, SHORT], {"right": 1.0, "short": 0.5}, "sum", 1.1),
        ([RIGHT, SHORT], {"right": 1.0, "short": 0.5}, "min", 0.1),
        ([RIGHT, SHORT], {"right": 1.0, "short": 0.5}, "max", 1.0),
        ([RIGHT, FORMAT], {"right": 0.7, "format": 1.0}, "sum", 0.7),
        ([RIGHT, FORMAT], {"right": 0.7, "format": 0.9}, "sum", 0.0),
        ([RIGHT, FORMAT], {"format": 0.0}, "max", 0.0),
        ([RIGHT, Part("format", weight=0.5, gate=1.0)], {"right": 1.0, "format": 1.0}, "sum", 1.5),
        ([RIGHT, SHORT], {"short": 0.5}, "sum", 0.1),  # `right` abstains, or scores other rows
        ([RIGHT, FORMAT], {"right": 0.7}, "sum", 0.7),
        ([RIGHT, FORMAT], {"format": 1.0}, "sum", None),
        ([Part("loss", weight=-1.0)], {"loss": 0.25}, "sum", -0.25),
    ],
)
def test_parts_become_one_reward(parts: list[Part], values: dict[str, float], combine: Any, reward: float) -> None:
    assert combined(parts, values, combine) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("values", "combine", "reward"),
    [
        ({"right": 3.0, "short": 0.5, "format": 1.0}, "sum", 2.0),  # 3.1
        ({"right": -3.0, "short": 0.5, "format": 1.0}, "min", -0.5),
        ({"right": 1.0, "short": 0.5, "format": 1.0}, "sum", 1.1),
        ({"right": -3.0, "format": 0.0}, "sum", 0.0),  # the gate is closed
        ({"format": 1.0}, "sum", None),
    ],
)
def test_a_clip_of_all_bounds_the_reward(values: dict[str, float], combine: Any, reward: float) -> None:
    assert combined([RIGHT, SHORT, FORMAT], values, combine, (-0.5, 2.0)) == pytest.approx(reward)


def test_a_part_is_clipped_and_scores_the_rows_that_it_names() -> None:
    part = Part("p", clip=(-0.5, 1.0), when={"source": ["gsm8k", "math"], "level": 2})
    assert [part.clipped(value) for value in (-2.0, 0.25, 3.0)] == [-0.5, 0.25, 1.0]
    assert part.scores({"source": "math", "level": 2})
    assert not part.scores({"source": "code", "level": 2})
    assert not part.scores({"source": "math"})


def test_equal_settings_have_equal_digests() -> None:
    assert digest_of({"a": 1, "b": [2.0]}) == digest_of({"b": [2.0], "a": 1})
    assert digest_of({"a": 1}) != digest_of({"a": 2})


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(1, 0.0), (16_384, 0.0), (18_432, -0.5), (20_480, -1.0), (99_999, -1.0)]
)
def test_overlong_is_dapos(tokens: int, penalty: float) -> None:
    assert penalties.overlong(tokens, 20_480, 4_096) == pytest.approx(penalty)
    item = ScoreItem("a", "", "", response_tokens=tokens)
    assert penalties.score_overlong(item, HookArgs({"rollout_max_response_len": 20_480})) == pytest.approx(penalty)


def test_without_a_buffer_only_the_limit_is_punished() -> None:
    assert [penalties.overlong(tokens, 10, 0) for tokens in (10, 11)] == [0.0, -1.0]


def test_length_and_repetition_are_shares() -> None:
    assert [penalties.length(tokens, 100) for tokens in (0, 25, 500)] == [-0.0, -0.25, -1.0]
    assert penalties.repetition("a b c d", 2) == 0.0
    assert penalties.repetition("a a a a a", 2) == pytest.approx(1 / 4 - 1)  # four pairs, one of them new
    assert penalties.repetition("a b a b a", 2) == pytest.approx(2 / 4 - 1)
    assert penalties.repetition("a", 2) == 0.0


def test_a_penalty_without_a_limit_names_it() -> None:
    with refused(InvalidArgument, "max_tokens", "None"):
        penalties.score_length(ScoreItem("a", "", ""), HookArgs({}))
    with refused(InvalidArgument, "ngram", "0"):
        penalties.score_repetition(ScoreItem("a", "", "", metadata={"ngram": 0}), HookArgs({}))


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ('{"n": 1}', 1.0),
        ('{"n": "1"}', 0.0),
        ('{"n": 1} and more', 0.0),
        ('Here it is:\n```json\n{"n": 1}\n```\nDone.', 1.0),
        ('```\n{"n": 1}\n```\n```json\n[]\n```', 0.0),
        ('<think>{"n": 2}</think>{"n": 1}', 1.0),
        ('{"n": NaN}', 0.0),
        ("[" * 100_000, 0.0),
        ("", 0.0),
    ],
)
def test_json_of_a_schema(response: str, reward: float) -> None:
    assert json_schema.score(ScoreItem("a", "", response, metadata={"schema": SCHEMA})) == reward


def test_a_schema_that_is_none_is_named() -> None:
    with refused(InvalidArgument, "no JSON schema"):
        json_schema.score(ScoreItem("a", "", "{}", metadata={"schema": {"type": "nothing"}}))


FUNCTIONS = """
def right(args, sample):
    open(__file__ + ".asked", "a").write(sample.response + "\\n")
    return {"score": float(sample.response.endswith(sample.label)), "seen": sample.metadata.get("extra", 0.0)}

def abstains(args, sample): return None if sample.response == "?" else 3.0

def raises(args, sample): raise ValueError("no")
"""


def items(*responses: str, **metadata: object) -> list[ScoreItem]:
    return [
        ScoreItem(str(i), "", response, "7", metadata, response_tokens=len(response))
        for i, response in enumerate(responses)
    ]


async def test_a_composition_scores_gates_first_and_names_every_part(tmp_path: Path) -> None:
    file = tmp_path / "f.py"
    file.write_text(FUNCTIONS)
    parts = [
        {"scorer": "regex", "name": "format", "gate": 1, "metadata_overrides": {"pattern": "^answer: "}},
        {"scorer": f"{file}:right", "key": "score"},
        {"scorer": "length", "weight": 0.5, "metadata_overrides": {"max_tokens": 100}},
    ]
    async with served_reward(reward_parts=parts) as client:
        results = await client.score(items("answer: 7", "answer: 8", "7"), deadline_seconds=60)
        (info,) = [each for each in await client.list_scorers() if each.is_default]
    scores = [each for each in results if isinstance(each, Score)]
    assert [each.value for each in scores] == pytest.approx([1 - 0.045, -0.045, 0.0])
    assert scores[0].parts == pytest.approx({"format": 1.0, "right": 1.0, "length": -0.09})
    assert scores[2].parts == {"format": 0.0}
    assert (scores[0].scorer, scores[0].scorer_version) == ("composed", info.version)
    asked = (tmp_path / "f.py.asked").read_text().splitlines()
    assert asked == ["answer: 7", "answer: 8"]  # the closed gate's sample cost nothing


async def test_a_part_that_abstains_is_left_out_and_one_that_fails_fails_the_sample(tmp_path: Path) -> None:
    file = tmp_path / "f.py"
    file.write_text(FUNCTIONS)
    rows = {"when": {"kind": "hard"}, "scorer": f"{file}:raises"}
    async with served_reward(reward_parts=[{"scorer": f"{file}:abstains"}, rows]) as client:
        three, none = await client.score(items("!", "?"), deadline_seconds=60)
        (hard,) = await client.score(items("!", kind="hard"), deadline_seconds=60)
    assert isinstance(three, Score)
    assert three.value == 3.0
    assert isinstance(none, ScoreError)
    assert (none.reason, none.retryable) == ("SCORER_ABSTAINED", False)
    assert isinstance(hard, ScoreError)
    assert hard.reason == "SCORER_RAISED"
    assert hard.message.startswith("raises: ")


async def test_weights_are_changed_live_by_a_file(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text(FUNCTIONS)
    file = tmp_path / "parts.toml"
    file.write_text('[[reward_parts]]\nscorer = "exact_match"\nweight = 0.5\n')
    async with served_reward(rm_type="exact_match") as client:
        state = await client.change_scorer(pb.ChangeScorerRequest(set=str(file)))
        (score,) = await client.score(items("7"), deadline_seconds=60)
        assert (score.value, score.scorer_version) == (0.5, state.live.version)
        file.write_text(
            '[reward]\nreward_parts = [{scorer = "f.py:right", key = "score", weight = 2}]\nreward_clip = [0, 1.5]\n'
        )
        after = await client.change_scorer(pb.ChangeScorerRequest(set=str(file)))
        (score,) = await client.score(items("7"), deadline_seconds=60)
        assert score.value == 1.5
        assert after.live.version != state.live.version
        for text in ('[[reward_parts]]\nscorer = "nothing"\n', "[reward]\n", "[[reward_parts]]\nweight = 1\n", "?"):
            file.write_text(text)
            with pytest.raises(InvalidArgument):
                await client.change_scorer(pb.ChangeScorerRequest(set=str(file)))
        assert (await client.scorer_state()).live == after.live


@pytest.mark.parametrize(
    "parts",
    [
        [{"scorer": "math", "gate": 1}],
        [{"scorer": "math"}, {"scorer": "math"}],
        [{"scorer": "nothing"}],
        [{"scorer": "judge"}],
    ],
)
async def test_a_composition_that_cannot_score_is_refused(parts: list[dict[str, Any]]) -> None:
    with pytest.raises(ConfigError):
        async with served_reward(reward_parts=parts):
            pass


def test_parts_are_read_from_a_flag_and_a_clip_has_an_order(load_with) -> None:
    part = {"scorer": "math", "clip": [0, 1]}
    job = load_with("--reward-parts", json.dumps(part), "--reward-combine", "max")
    assert job.reward.reward_parts == (RewardPart(scorer="math", clip=(0.0, 1.0)),)
    assert job.reward.reward_combine == "max"
    with pytest.raises(ConfigError, match="clip"):
        load_with("--reward-parts", json.dumps({"scorer": "math", "clip": [1, 0]}))
    bounded = load_with("--reward-parts", json.dumps(part), "--reward-clip", "-1", "0.5")
    assert bounded.reward.reward_clip == (-1.0, 0.5)
    with pytest.raises(ConfigError, match="reward-clip"):
        load_with("--reward-parts", json.dumps(part), "--reward-clip", "1", "0")
    with pytest.raises(ConfigError, match="reward.parts"):
        load_with("--rm-type", "math", "--reward-clip", "0", "1")
    with pytest.raises(ConfigError, match="rm_type"):
        load_with("--reward-parts", json.dumps(part), "--rm-type", "math")
    assert RewardSection().reward_parts == ()
    function, remote = ({"scorer": "f.py:fn"}, {"scorer": "grpc://a:1/f1"})
    job = load_with("--reward-parts", json.dumps(function), json.dumps(remote))
    assert [part.scorer for part in job.reward.reward_parts] == [f"{Path.cwd()}/f.py:fn", "grpc://a:1/f1"]
