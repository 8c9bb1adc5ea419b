"""Users' generate functions, in both forms: what they make, what they raise, and how many run at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from headrace.hooks import hook_args
from headrace.job.schema.job import Job
from headrace.trajectory import Sample, Status
from services.rollout.build import rollout_service
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.weights import ServedWeights
from services.rollout.production.hooks import CustomGenerateSampler, custom_args
from services.rollout.production.prompts import EncodedPrompt
from services.rollout.production.sampling import SampleRequest
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.models.tiny_model import make_tiny_qwen3

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


async def test_a_function_that_leaves_weight_versions_out_is_told_so_once_and_the_version_at_its_call_counts(
    tmp_path: Path,
) -> None:
    told: list[str] = []
    samples = await made_by(tmp_path, PER_SAMPLE.replace(', ["3"]', ", []"), warn=told.append)
    assert [[r.policy_version for r in sample.policy_ranges] for sample in samples] == [[3], [3]]
    (sentence,) = told
    assert "hook.py:f leaves weight_versions empty" in sentence
    assert "append each answer's meta_info['weight_version'] to sample.weight_versions" in sentence


async def test_what_a_users_function_raises_is_its_samples_failure_with_the_file_and_the_line(tmp_path: Path) -> None:
    samples = await made_by(tmp_path, "async def f(args, sample, sampling_params):\n    raise KeyError('oops')\n")
    assert [s.status for s in samples] == [Status.FAILED, Status.FAILED]
    assert samples[0].failure is not None
    assert samples[0].failure.reason == "HOOK_RAISED"
    assert samples[0].failure.message.endswith(f"KeyError: 'oops' ({tmp_path / 'hook.py'}:2)")


WAITS = f"""
import asyncio

async def f(args, samples, evaluation=False):
  for sample in samples:
    reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
    await reader.read()
    writer.close(){BODY}  return samples
"""


async def test_256_samples_of_a_step_are_in_flight_at_once(tmp_path: Path) -> None:
    """generate_per_sample: the function takes a list, and would make one sample after another."""
    arrived, all_there = 0, asyncio.Event()

    async def hold(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal arrived
        arrived += 1
        if arrived == 256:
            all_there.set()
        await all_there.wait()
        writer.close()

    make_tiny_qwen3(tmp_path)
    async with asyncio.timeout(120), await asyncio.start_server(hold, "127.0.0.1", 0, backlog=256) as server:
        (tmp_path / "hook.py").write_text(WAITS.replace("PORT", str(server.sockets[0].getsockname()[1])))
        functions = {"custom_generate_function_path": f"{tmp_path / 'hook.py'}:f", "generate_per_sample": True}
        job = job_of(
            tmp_path,
            services={"buffer_address": "127.0.0.1:9", "reward_address": "127.0.0.1:9"},
            rollout={"rollout_batch_size": 32, "n_samples_per_prompt": 8, **functions},
        )
        service = rollout_service(job, lambda _: FakeEngine(), tmp_path, CollectorRegistry())
        service.parts.fleet.weights.switch_to(3)
        sampler = service.parts.sampler
        assert isinstance(sampler, CustomGenerateSampler)
        try:
            await sampler.start()
            groups = [[request(index, HELLO) for index in range(8)] for _ in range(32)]
            made = await asyncio.gather(*(sampler.sample_all(group, evaluation=False) for group in groups))
        finally:
            await sampler.close()
            await service.stop()
    assert [sample.failure for group in made for sample in group] == [None] * 256


@pytest.mark.parametrize("hangs", ["await asyncio.Event().wait()", "time.sleep(1e6)"], ids=["waits", "blocks"])
async def test_a_function_that_hangs_for_one_sample_fails_that_sample_alone(tmp_path: Path, hangs: str) -> None:
    code = PER_SAMPLE.replace(BODY, f"\n    if sample.index == 3:\n        {hangs}\n{BODY}")
    samples = await made_by(tmp_path, f"import asyncio, time\n{code}", count=8, seconds=4.0)
    assert {s.index: s.failure.reason for s in samples if s.failure} == {3: "HOOK_TIMEOUT"}


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


def job_of(folder: Path, **sections: object) -> Job:
    return Job.model_validate({"model": {"hf_checkpoint": folder}, **sections})


async def made_by(
    folder: Path,
    code: str,
    *,
    count: int = 2,
    warn: Callable[[str], None] = lambda _: None,
    prompt: EncodedPrompt = HELLO,
    seconds: float = 60.0,
    **sections: object,
) -> list[Sample]:
    (folder / "hook.py").write_text(code)
    job = job_of(folder, **sections)
    weights = ServedWeights()
    weights.switch_to(3)
    args = custom_args(hook_args(job), "http://127.0.0.1:4321")
    path = f"{folder / 'hook.py'}:f"
    sampler = CustomGenerateSampler(path, args, weights, seconds=seconds, calls_at_once=8, warn=warn)
    try:
        await sampler.start()
        return await sampler.sample_all([request(index, prompt) for index in range(count)], evaluation=False)
    finally:
        await sampler.close()


def request(index: int, prompt: EncodedPrompt) -> SampleRequest:
    return SampleRequest(f"g/1/{index}", "g", index, prompt, "7", {}, SamplingParams(max_new_tokens=4))
