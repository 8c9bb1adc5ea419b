"""Users' generate functions, in both forms, over a fake engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config.job import Job
from headrace.errors import ConfigError
from headrace.trajectory import Sample, Status
from services.rollout.custom import CustomMaker, custom_args
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.weights import ServedWeights
from services.rollout.prompts import EncodedPrompt
from services.rollout.sampling import SampleRequest

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


async def test_what_a_users_function_raises_is_its_samples_failure(tmp_path: Path) -> None:
    samples = await made_by(tmp_path, "async def f(args, sample, sampling_params):\n    raise KeyError('oops')\n")
    assert [s.status for s in samples] == [Status.FAILED, Status.FAILED]
    assert samples[0].failure is not None
    assert samples[0].failure.reason == "HOOK_RAISED"
    assert "KeyError: 'oops'" in samples[0].failure.message


async def test_a_function_with_other_arguments_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sampling_params"):
        await made_by(tmp_path, "async def f(everything):\n    return everything\n")


async def made_by(folder: Path, code: str) -> list[Sample]:
    (folder / "hook.py").write_text(code)
    job = Job.model_validate({"model": {"hf_checkpoint": folder}})
    weights = ServedWeights()
    weights.switch_to(3)
    maker = CustomMaker(f"{folder / 'hook.py'}:f", custom_args(job, "http://127.0.0.1:4321"), weights, seconds=60)
    try:
        await maker.start()
        return await maker.make_all([request(0), request(1)], evaluation=False)
    finally:
        await maker.close()


def request(index: int) -> SampleRequest:
    prompt = EncodedPrompt("hello", (1, 2))
    return SampleRequest(f"g/1/{index}", "g", index, prompt, "7", {}, SamplingParams(max_new_tokens=4))
