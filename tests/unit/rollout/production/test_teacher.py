"""A served teacher's log-probs, over a fake engine: of the response's tokens, on the sample, or the sample FAILED."""

from __future__ import annotations

import numpy as np

from headrace.rpc.net import free_port
from headrace.trajectory import Failure, Sample, Status
from services.rollout.engine.client import EngineClient
from services.rollout.production.groups import Teacher
from tests.support.fakes.fake_fleet import fake_fleet


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


async def test_marking_changes_nothing_else() -> None:
    async with fake_fleet(1) as fakes:
        teacher = Teacher(fakes.fleet.engines[0].url, call_seconds=60.0)
        original = sample([7, 8, 9], 2)
        (marked,) = await teacher.mark([original])
        await teacher.close()
    assert marked.tokens.tolist() == original.tokens.tolist()
    assert marked.loss_mask.tolist() == [1, 1]
    assert marked.status is Status.COMPLETED
