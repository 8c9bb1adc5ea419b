"""--eval-config: a TOML file of data sets, each with its own sampling, lengths, keys, scorer and interval."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError
from headrace.job.eval_sets import eval_dataset, eval_sets, own_rewards
from headrace.job.schema.job import Job

CONFIG = """
[defaults]
n_samples_per_eval_prompt = 4
temperature = 0.6
label_key = "answer"

[[datasets]]
name = "aime"
path = "aime.jsonl"
n_samples_per_eval_prompt = 16
max_response_len = 4096
min_new_tokens = 2
max_prompt_len = 100
max_context_len = 5000
top_p = 0.9
top_k = 20
stop = ["</answer>"]
stop_token_ids = [7]
input_key = "question"
metadata_key = "extra"
tool_key = "functions"
rm_type = "math"
reward_key = "right"
metadata_overrides = {level = 5, hint = false}
custom_generate_function_path = "agent.py:generate"
pass_reward = 0.5
interval = 10

[[datasets]]
name = "gsm8k"
path = "/data/gsm8k.jsonl"
"""


def job_of(folder: Path, config: str, **evaluation: object) -> Job:
    file = folder / "eval.toml"
    file.write_text(config)
    return Job.model_validate({"model": {"hf_checkpoint": "m"}, "eval": {"eval_config": file, **evaluation}})


def test_each_data_set_of_an_eval_config_is_asked_for_as_it_says(tmp_path: Path) -> None:
    job = job_of(tmp_path, CONFIG, eval_temperature=1.0, eval_max_response_len=99)
    aime, gsm8k = (eval_dataset(each, job.eval, job.rollout, job.data) for each in eval_sets(job.eval))
    expected: dict[str, Any] = {
        "name": "aime", "path": str(tmp_path / "aime.jsonl"), "n_samples_per_prompt": 16, "max_prompt_tokens": 100,
        "max_context_tokens": 5000, "input_key": "question", "label_key": "answer", "metadata_key": "extra",
        "tool_key": "functions", "rm_type": "math", "generate_function_path": f"{tmp_path}/agent.py:generate",
        "pass_reward": 0.5, "reward_key": "right", "metadata_overrides_json": '{"hint":false,"level":5}',
    }  # fmt: skip
    assert {name: getattr(aime, name) for name in expected} == expected
    sampling = aime.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.9, 20)
    assert (sampling.max_new_tokens, sampling.min_new_tokens) == (4096, 2)
    assert (list(sampling.stop), list(sampling.stop_token_ids)) == (["</answer>"], [7])
    assert (gsm8k.path, gsm8k.n_samples_per_prompt, gsm8k.sampling.max_new_tokens) == ("/data/gsm8k.jsonl", 4, 99)
    assert (gsm8k.input_key, gsm8k.rm_type, gsm8k.generate_function_path) == ("prompt", "", "")
    assert (gsm8k.reward_key, gsm8k.metadata_overrides_json) == ("", "")
    job = job_of(tmp_path, CONFIG, eval_reward_key="short")
    assert [eval_dataset(each, job.eval, job.rollout, job.data).reward_key for each in eval_sets(job.eval)] == [
        "right",
        "short",
    ]


def test_a_set_may_have_a_reward_function_of_its_own(tmp_path: Path) -> None:
    config = CONFIG.replace('rm_type = "math"', 'custom_rm_path = "judge.py:fair"')
    job = job_of(tmp_path, config)
    sets = eval_sets(job.eval)
    assert own_rewards(sets) == [f"{tmp_path}/judge.py:fair"]
    aime, gsm8k = (eval_dataset(each, job.eval, job.rollout, job.data) for each in sets)
    expected = {"level": 5, "hint": False, "rm_type": f"{tmp_path}/judge.py:fair"}
    assert (json.loads(aime.metadata_overrides_json), gsm8k.metadata_overrides_json) == (expected, "")
    both = job_of(tmp_path, CONFIG.replace('rm_type = "math"', 'rm_type = "math"\ncustom_rm_path = "judge.py:fair"'))
    with pytest.raises(ConfigError, match="data set aime: rm_type math and custom_rm_path both score it"):
        eval_sets(both.eval)


AIME = '[[datasets]]\nname = "aime"\npath = "aime.jsonl"\n'


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (AIME + "temprature = 1.0", "data set aime: temprature is unknown: did you mean temperature"),
        ("[default]\ntop_p = 1.0\n" + AIME, "default is unknown: did you mean defaults"),
        ("", "there must be one"),
        ('[defaults]\npath = "x"\n' + AIME, "path would be the same for all"),
        (AIME + "temperature = -1", "data set aime: temperature: "),
        ('[[datasets]]\nname = "x"', "data set x: path: is missing"),
        (AIME + AIME, "two data sets are called aime"),
        ("[[datasets", "it is not TOML"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused_with_file_and_key(tmp_path: Path, config: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        eval_sets(job_of(tmp_path, config).eval)
    assert said in caught.value.message


def test_files_and_functions_of_a_config_are_looked_for_before_the_run(tmp_path: Path, load_with) -> None:
    file = tmp_path / "eval.toml"
    file.write_text(AIME)
    with pytest.raises(ConfigError, match=r"eval_prompt_data aime .*aime\.jsonl does not exist"):
        load_with("--eval-config", str(file))
    (tmp_path / "aime.jsonl").write_text('{"prompt": "a"}\n')
    file.write_text(AIME + 'custom_generate_function_path = "agent.py:generate"')
    with pytest.raises(ConfigError, match=r"agent\.py does not exist"):
        load_with("--eval-config", str(file))
