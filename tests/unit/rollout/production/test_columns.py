"""What travels with a sample: the experts of each token, a served teacher's log-probs, and what engines count."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.hooks.convert import to_hook
from headrace.rpc.net import free_port
from headrace.trajectory import ROUTED_EXPERTS, SAMPLING_MASK, SAMPLING_MASK_COUNTS, Failure, Sample, Status
from services.rollout.engine.api import NOTHING_YET, SamplingParams
from services.rollout.engine.client import EngineClient
from services.rollout.engine.replies import BadAnswer, EngineCounts, Finish, decode
from services.rollout.production.generator import Generator
from services.rollout.production.groups import Teacher
from services.rollout.production.partial import generation_of
from services.rollout.production.prompts import PromptEncoder
from services.rollout.production.sampling import EngineSampler, SampleRequest
from tests.support.fakes.fake_engine import VOCAB_SIZE
from tests.support.fakes.fake_fleet import FakeFleet, fake_fleet
from tests.support.models.tiny_model import make_tiny_tokenizer

PARAMS = SamplingParams(max_new_tokens=40)


async def test_a_sample_has_a_row_for_every_token_but_its_last(fakes: FakeFleet, tmp_path: Path) -> None:
    async with EngineClient(fakes.fleet.engines[0].url, routed_experts=True) as client:
        sample = await _sampler(fakes, client, tmp_path, num_layers=2).sample(_request(tmp_path))
    column = sample.columns[ROUTED_EXPERTS]
    assert (column.dtype, column.shape) == (np.int16, (len(sample.tokens) - 1, 2, 1))
    assert column[:, 0, 0].tolist() == (sample.tokens[:-1] % 4).tolist()


@pytest.mark.parametrize(("top_k", "asked"), [(None, 60), (20, 20), (90, 64)])
async def test_a_sample_has_the_tokens_that_each_token_was_sampled_from(
    fakes: FakeFleet, tmp_path: Path, top_k: int | None, asked: int
) -> None:
    request = replace(_request(tmp_path), params=replace(PARAMS, top_p=0.9, top_k=top_k))
    engine = fakes.fleet.engines[0]
    async with EngineClient(engine.url, mask_tokens=64, vocab_size=VOCAB_SIZE) as client:
        sampler = _sampler(fakes, client, tmp_path, mask_tokens=64)
        sample = await sampler.sample(request)
        unmasked = await sampler.sample(request, evaluation=True)
    response = sample.tokens[sample.prompt_length :]
    assert sample.columns[SAMPLING_MASK_COUNTS].tolist() == [2] * len(response)
    assert sample.columns[SAMPLING_MASK][::2].tolist() == response.tolist()
    np.testing.assert_allclose(sample.rollout_log_probs, np.log(0.5), rtol=1e-6)
    assert not unmasked.columns
    assert [body["sampling_params"].get("top_k") for body in fakes.fake(0).bodies] == [asked, top_k]


async def test_tokens_that_are_sampled_from_all_have_no_mask(fakes: FakeFleet, tmp_path: Path) -> None:
    async with EngineClient(fakes.fleet.engines[0].url, mask_tokens=64) as client:
        assert not (await _sampler(fakes, client, tmp_path, mask_tokens=64).sample(_request(tmp_path))).columns


async def test_a_response_that_is_continued_keeps_its_masks(fakes: FakeFleet, tmp_path: Path) -> None:
    request = replace(_request(tmp_path), params=replace(PARAMS, top_p=0.9))
    async with EngineClient(fakes.fleet.engines[0].url, mask_tokens=64) as client:
        sampler = _sampler(fakes, client, tmp_path, mask_tokens=64)
        whole = await sampler.sample(request)
        cut = generation_of(whole).until(5, whole.prompt_length, Finish.ABORT)
        half = sampler._sample(request, cut)
        assert half.columns[SAMPLING_MASK_COUNTS].tolist() == [2] * 5
        continued = await sampler.sample(replace(request, begun=Sample.unpack(half.pack())))
    for name in (SAMPLING_MASK, SAMPLING_MASK_COUNTS):
        assert continued.columns[name].tolist() == whole.columns[name].tolist()


async def test_a_mask_that_is_larger_than_the_engine_returns_is_a_failure_that_names_the_flag(
    fakes: FakeFleet, tmp_path: Path
) -> None:
    fakes.fake(0).faults["/generate"] = "mask_too_large"
    request = replace(_request(tmp_path), params=replace(PARAMS, top_p=0.9))
    async with EngineClient(fakes.fleet.engines[0].url, mask_tokens=64) as client:
        failure = (await _sampler(fakes, client, tmp_path, mask_tokens=64).sample(request)).failure
    assert failure is not None
    assert failure.reason == "SAMPLING_MASK_TOO_LARGE"
    assert "--sglang-sampling-mask-max-tokens" in failure.message


async def test_what_was_made_before_a_break_keeps_its_experts(fakes: FakeFleet, tmp_path: Path) -> None:
    engine = fakes.fleet.engines[0]
    async with EngineClient(engine.url, routed_experts=True) as client:
        prompt = _request(tmp_path).prompt.tokens
        done, changed_at = NOTHING_YET, 0
        async for piece in Generator(client, fakes.fleet.weights).stream(prompt, PARAMS, request_id="r", seconds=20):
            done = piece
            if len(piece.tokens) == 5 and not changed_at:
                await engine.client.pause("abort")
                await fakes.name_weights(0, 1)
                await engine.client.resume()
                changed_at = 5
    numbers = np.frombuffer(done.routed_experts or b"", dtype="<i4").reshape(-1, 2)
    tokens = np.asarray([*prompt, *done.tokens])[:-1]
    assert numbers[:, 0].tolist() == (tokens % 4).tolist()
    first, second = done.policy_ranges
    assert (first.policy_version, second.policy_version) == (0, 1)
    rows_before = len(prompt) + first.end - 1  # an engine has not routed the token that it said last
    versions = np.arange(len(tokens)) >= rows_before
    assert numbers[:, 1].tolist() == ((tokens + versions) % 4).tolist()


def _sampler(fakes: FakeFleet, client: EngineClient, folder: Path, **options: Any) -> EngineSampler:
    return EngineSampler(Generator(client, fakes.fleet.weights), _encoder(folder), seconds=20, **options)


def _request(folder: Path) -> SampleRequest:
    return SampleRequest("s", "g", 0, _encoder(folder).encode_plain("one two"), None, {}, PARAMS)


def _encoder(folder: Path) -> PromptEncoder:
    make_tiny_tokenizer().save_pretrained(folder / "tokenizer")
    return PromptEncoder(folder / "tokenizer", apply_chat_template=False)


META = {"prompt_tokens": 9, "cached_tokens": 4, "completion_tokens": 12}
SPECULATIVE = {"spec_num_correct_drafts": 6, "spec_num_proposed_drafts": 20, "spec_verify_ct": 5}


def counts_in(meta: dict[str, Any]) -> EngineCounts:
    return decode(json.dumps(meta).encode(), EngineCounts)


def sample_with(counts: EngineCounts) -> Sample:
    sample = Sample(
        *("s", "g", 0, "prompt", "response"),
        tokens=np.asarray([1, 2], dtype=np.int32),
        loss_mask=np.ones(1, dtype=np.uint8),
        rollout_log_probs=np.asarray([-0.5], dtype=np.float32),
        status=Status.ABORTED,
        hook_fields=counts.hook_fields(),
    )
    return Sample.unpack(sample.pack())


@pytest.mark.parametrize("meta", [META, META | SPECULATIVE])
def test_counts_travel_with_a_sample_and_go_on_when_it_is_continued(meta: dict[str, Any]) -> None:
    sample = sample_with(counts_in(meta))
    seen = to_hook(sample)
    assert seen.prefix_cache_info.prefix_cache_hit_rate == 4 / 9
    assert seen.spec_info.spec_verify_ct == meta.get("spec_verify_ct", 0)
    assert seen.spec_info.spec_accept_rate == (0.3 if "spec_verify_ct" in meta else 0.0)
    later = generation_of(sample).counts + counts_in(META)
    assert (later.prompt_tokens, later.cached_tokens) == (18, 8)
    if "spec_verify_ct" in meta:
        assert (later.correct_drafts, later.verifications, later.completion_tokens) == (6, 5, 24)


@pytest.mark.parametrize("value", [-1, 1.5, "4", True, None, 1 << 64])
@pytest.mark.parametrize("name", [*META, *SPECULATIVE])
def test_a_count_that_is_none_is_a_bad_answer(name: str, value: Any) -> None:
    with pytest.raises(BadAnswer, match=name):
        counts_in(META | SPECULATIVE | {name: value})


def sample(tokens: list[int], response: int, failure: Failure | None = None) -> Sample:
    return Sample(
        sample_id="s",
        group_id="g",
        index=0,
        prompt="",
        response="",
        tokens=np.asarray(tokens, dtype=np.int32),
        loss_mask=np.ones(response, dtype=np.uint8),
        rollout_log_probs=np.zeros(response, dtype=np.float32),
        status=Status.FAILED if failure else Status.COMPLETED,
        failure=failure,
    )


async def test_each_response_token_gets_the_teachers_log_prob_and_it_travels() -> None:
    tokens = [5, 9, 11, 3, 8]
    async with fake_fleet(1) as fakes:
        url = fakes.fleet.engines[0].url
        teacher = Teacher(url, call_seconds=60.0)
        async with EngineClient(url) as client:
            expected = await client.score(tokens, cache_key="", seconds=60.0)
        marked = await teacher.mark([sample(tokens, 3), sample(tokens, 5), sample(tokens[:2], 0)])
        await teacher.close()
    columns = [Sample.unpack(one.pack()).columns["teacher_log_probs"] for one in marked]
    np.testing.assert_allclose(columns[0], expected[-3:], rtol=1e-6)
    np.testing.assert_allclose(columns[1], [0.0, *expected], rtol=1e-6)  # no prompt: its first token is not trained
    assert columns[2].shape == (0,)
    assert len(set(expected)) > 1


async def test_a_sample_that_the_teacher_cannot_score_is_failed_with_the_reason() -> None:
    teacher = Teacher(f"http://127.0.0.1:{free_port()}", call_seconds=0.5, patience_seconds=0.0)
    before = sample([1, 2], 1, Failure("ENGINE_GONE", "it went away"))
    lost, kept = await teacher.mark([sample([1, 2, 3], 2), before])
    await teacher.close()
    assert lost.status is Status.FAILED
    assert lost.failure is not None
    assert lost.failure.reason == "TEACHER_ENGINE_UNREACHABLE"
    assert kept is before
