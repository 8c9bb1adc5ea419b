"""Users' generate functions, in both forms, over a fake engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.errors import ConfigError, InvalidArgument
from headrace.hooks import Sample as HookSample
from headrace.hooks import hook_args, run_generate, to_hook
from headrace.job.schema.job import Job
from headrace.trajectory import Sample, Status
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.weights import ServedWeights
from services.rollout.production.hooks import CustomGenerateSampler, custom_args
from services.rollout.production.prompts import EncodedPrompt
from services.rollout.production.sampling import SampleRequest

HELLO = EncodedPrompt("hello", (1, 2))
BODY = """
    sample.tokens = [1, 2, 3, 4]
    sample.response, sample.response_length = "hi", 2
    sample.rollout_log_probs, sample.weight_versions = [-0.5, -0.25], ["3"]
    sample.status = sample.Status.COMPLETED
    sample.metadata["router"] = f"{args.sglang_router_ip}:{args.sglang_router_port}"
"""
PER_SAMPLE = f"async def f(args, sample, sampling_params, evaluation=False):{BODY}    return sample\n"
PER_GROUP = f"async def f(args, samples, evaluation=False):\n  for sample in samples:{BODY}  return samples\n"
FAN_OUT = f"import copy\nasync def f(args, sample, sampling_params):{BODY}    return [sample, copy.deepcopy(sample)]\n"


@pytest.mark.parametrize(
    ("code", "ids"),
    [
        (PER_SAMPLE, ["g/1/0", "g/1/1"]),
        (PER_GROUP, ["g/1/0", "g/1/1"]),
        (FAN_OUT, ["g/1/0/0", "g/1/0/1", "g/1/1/0", "g/1/1/1"]),
    ],
)
async def test_a_users_function_makes_the_samples(tmp_path: Path, code: str, ids: list[str]) -> None:
    samples = await made_by(tmp_path, code)
    assert [s.sample_id for s in samples] == ids
    assert {s.metadata["router"] for s in samples} == {"127.0.0.1:4321"}
    assert {(s.status, s.rollout_id) for s in samples} == {(Status.COMPLETED, "g/1/0"), (Status.COMPLETED, "g/1/1")}
    assert [(r.policy_version, r.start, r.end) for r in samples[0].policy_ranges] == [(3, 0, 2)]


async def test_samples_of_a_group_share_its_index_and_have_sessions_of_their_own(tmp_path: Path) -> None:
    first, second = [to_hook(sample) for sample in await made_by(tmp_path, PER_SAMPLE)]
    assert first.group_index is not None
    assert first.group_index == second.group_index
    assert (first.session_id, second.session_id) == ("g/1/0", "g/1/1")


async def test_a_function_that_leaves_weight_versions_out_is_told_so_once_and_the_version_at_its_call_counts(
    tmp_path: Path,
) -> None:
    told: list[str] = []
    samples = await made_by(tmp_path, PER_SAMPLE.replace(', ["3"]', ", []"), warn=told.append)
    assert [[r.policy_version for r in sample.policy_ranges] for sample in samples] == [[3], [3]]
    (sentence,) = told
    assert "hook.py:f leaves weight_versions empty" in sentence
    assert "staleness" in sentence
    assert "append each answer's meta_info['weight_version'] to sample.weight_versions" in sentence


async def test_a_function_that_sets_weight_versions_is_told_nothing(tmp_path: Path) -> None:
    told: list[str] = []
    await made_by(tmp_path, PER_SAMPLE, warn=told.append)
    assert told == []


async def test_a_function_of_a_whole_group_is_told_how_its_samples_run_at_once(tmp_path: Path) -> None:
    told: list[str] = []
    await made_by(tmp_path, PER_GROUP, warn=told.append)
    (sentence,) = told
    assert "is called with all samples of a group" in sentence
    assert "--generate-per-sample" in sentence


SHOWS_ITS_PROMPT = PER_SAMPLE.replace(
    "    return sample\n", "    sample.train_metadata = {'prompt': sample.prompt}\n    return sample\n"
)
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]


@pytest.mark.parametrize(("apply_chat_template", "seen"), [(False, MESSAGES), (True, "<brief> hello")])
async def test_a_row_of_messages_comes_as_messages_unless_the_job_applies_the_template(
    tmp_path: Path, apply_chat_template: bool, seen: object
) -> None:
    prompt = EncodedPrompt("<brief> hello", (1, 2), messages=MESSAGES, tools=[{"name": "add"}])
    (sample,) = await made_by(
        tmp_path, SHOWS_ITS_PROMPT, count=1, prompt=prompt, data={"apply_chat_template": apply_chat_template}
    )
    assert sample.train_metadata == {"prompt": seen}
    assert sample.metadata["tools"] == [{"name": "add"}]
    assert sample.prompt == "<brief> hello"


async def test_what_a_users_function_raises_is_its_samples_failure(tmp_path: Path) -> None:
    samples = await made_by(tmp_path, "async def f(args, sample, sampling_params):\n    raise KeyError('oops')\n")
    assert [s.status for s in samples] == [Status.FAILED, Status.FAILED]
    assert samples[0].failure is not None
    assert samples[0].failure.reason == "HOOK_RAISED"
    assert "KeyError: 'oops'" in samples[0].failure.message


async def test_what_a_users_function_raises_is_told_with_its_own_file_and_line(tmp_path: Path) -> None:
    code = "import json\nasync def f(args, samples, evaluation=False):\n    return json.loads('{')\n"
    failure = (await made_by(tmp_path, code))[0].failure
    assert failure is not None
    assert failure.message.startswith(f"hook {tmp_path / 'hook.py'}:f raised JSONDecodeError: ")
    assert failure.message.endswith(f"({tmp_path / 'hook.py'}:3)")
    assert "run_generate" not in failure.message


DOCUMENTS_FORM = """
async def f(args, samples, evaluation=False):
    for sample in samples:
        sample.response = "The answer is 7."
        sample.reward = 1.0
        sample.loss_mask = [1, 1, 1, 1]
    return samples
"""


async def test_the_documents_form_as_it_is_printed_is_refused_with_all_that_it_lacks(tmp_path: Path) -> None:
    for sample in await made_by(tmp_path, DOCUMENTS_FORM):
        assert sample.failure is not None
        assert sample.failure.reason == "HOOK_INCOMPLETE"
        for part in ("hook.py:f", "status is still PENDING", "Sample.Status.COMPLETED", "never tokenized again"):
            assert part in sample.failure.message


CHANGES = (
    "pass",
    "sample.reward = 1",
    "sample.reward = {'right': 1, 'short': 0.5}",
    "sample.status = sample.Status.PENDING",
    "sample.response_length, sample.rollout_log_probs = 0, []",
    "sample.tokens = sample.tokens[-2:]",
    "sample.response = ''",
    "sample.remove_sample, sample.response_length, sample.rollout_log_probs = True, 0, []",
)


async def test_rewards_that_the_function_sets_are_kept_and_what_one_sample_lacks_is_that_samples_failure(
    tmp_path: Path,
) -> None:
    cases = "".join(f"    if sample.index == {i}: {change}\n" for i, change in enumerate(CHANGES))
    code = PER_GROUP.replace("  return samples", f"{cases}  return samples")
    bare, scalar, parts, pending, no_tokens, no_prompt, stopped_at_once, left_out = await made_by(
        tmp_path, code, count=len(CHANGES), reward={"reward_key": "short"}
    )
    assert (bare.reward, scalar.reward, parts.reward) == (None, 1.0, 0.5)
    assert parts.reward_parts == {"right": 1.0, "short": 0.5}
    assert scalar.scorer == f"hook {tmp_path / 'hook.py'}:f"
    assert {left_out.status, stopped_at_once.status} == {Status.COMPLETED}
    for sample, said in (
        (pending, "status is still PENDING"),
        (no_tokens, "response_length is 0"),
        (no_prompt, "begin with the prompt's token ids"),
    ):
        assert sample.failure is not None
        assert sample.failure.reason == "HOOK_INCOMPLETE"
        assert said in sample.failure.message


async def test_a_reward_that_is_none_is_refused_with_what_it_was(tmp_path: Path) -> None:
    code = PER_GROUP.replace("  return samples", "    sample.reward = 'good'\n  return samples")
    (tmp_path / "text.py").write_text(code)
    args = custom_args(hook_args(job_of(tmp_path)), "http://127.0.0.1:1")
    with pytest.raises(InvalidArgument, match="returned 'good'; a reward is a finite number or a dict of them"):
        await run_generate(f"{tmp_path / 'text.py'}:f", args, [HookSample()], {}, False)


async def test_a_function_with_other_arguments_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sampling_params"):
        await made_by(tmp_path, "async def f(everything):\n    return everything\n")


def job_of(folder: Path, **sections: object) -> Job:
    return Job.model_validate({"model": {"hf_checkpoint": folder}, **sections})


async def made_by(
    folder: Path,
    code: str,
    *,
    count: int = 2,
    warn: Callable[[str], None] = lambda _: None,
    prompt: EncodedPrompt = HELLO,
    **sections: object,
) -> list[Sample]:
    (folder / "hook.py").write_text(code)
    job = job_of(folder, **sections)
    weights = ServedWeights()
    weights.switch_to(3)
    args = custom_args(hook_args(job), "http://127.0.0.1:4321")
    sampler = CustomGenerateSampler(f"{folder / 'hook.py'}:f", args, weights, seconds=60, calls_at_once=8, warn=warn)
    try:
        await sampler.start()
        return await sampler.sample_all([request(index, prompt) for index in range(count)], evaluation=False)
    finally:
        await sampler.close()


def request(index: int, prompt: EncodedPrompt) -> SampleRequest:
    return SampleRequest(f"g/1/{index}", "g", index, prompt, "7", {}, SamplingParams(max_new_tokens=4))
