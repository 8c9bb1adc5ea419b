"""From leases to puts, over a fake engine, a ledger in memory and a scripted reward service."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from headrace.api.buffer.v1 import buffer_pb2
from headrace.api.reward.v1 import reward_pb2
from headrace.errors import DataLoss, Unavailable
from headrace.hooks import HookArgs, hook_args
from headrace.job.schema.job import Job
from headrace.job.schema.production import ContextLimit, RolloutSection
from headrace.job.schema.run import ModelSection
from headrace.sample_log import SampleLog
from headrace.trajectory import Sample, Status
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.client import EngineClient
from services.rollout.metrics import RolloutMetrics
from services.rollout.production.generator import Generator, request_ender
from services.rollout.production.groups import GroupSampler, UntrainedSamples
from services.rollout.production.hooks import GroupFilter
from services.rollout.production.partial import PartialRollout
from services.rollout.production.producer import Producer
from services.rollout.production.prompts import PromptEncoder
from services.rollout.production.sampling import EngineSampler, seed_of
from services.rollout.scoring import SampleScorer
from tests.support.fakes.fake_engine import response_to
from tests.support.fakes.fake_fleet import FakeFleet, fake_fleet
from tests.support.fakes.memory_ledger import MemoryLedger, lease
from tests.support.fakes.scripted_reward import Answer, ScriptedReward, refuse, score, scripted_reward
from tests.support.models.tiny_model import make_tiny_tokenizer

PARAMS = SamplingParams(max_new_tokens=8)


@dataclass
class Production:
    fakes: FakeFleet
    ledger: MemoryLedger
    producer: Producer
    scorer: SampleScorer
    reward: ScriptedReward
    encoder: PromptEncoder
    metrics: RolloutMetrics
    registry: CollectorRegistry


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tiny_tokenizer().save_pretrained(folder)
    return folder


@contextlib.asynccontextmanager
async def production(
    folder: Path,
    ledger: MemoryLedger,
    answer: Answer,
    *,
    token_seconds: float = 0.0,
    max_prompt_tokens: int | None = None,
    context: ContextLimit | None = None,
    max_groups_in_flight: int = 2,
    params: SamplingParams = PARAMS,
    partial_rollout: PartialRollout | None = None,
    group_filter: GroupFilter | None = None,
    patience: float = 60.0,
    untrained_samples: UntrainedSamples | None = None,
) -> AsyncIterator[Production]:
    async with (
        fake_fleet(1, token_seconds=token_seconds) as fakes,
        scripted_reward(answer) as reward,
        EngineClient(fakes.fleet.engines[0].url) as client,
    ):
        encoder = PromptEncoder(folder, apply_chat_template=False)
        scorer = SampleScorer(reward.address, item_seconds=0.1, call_seconds=patience, patience_seconds=patience)
        sampler = EngineSampler(Generator(client, fakes.fleet.weights, fakes.fleet.suspect), encoder, seconds=60.0)
        groups = GroupSampler(
            encoder,
            sampler,
            scorer,
            params,
            rollout_seed=42,
            max_prompt_tokens=max_prompt_tokens,
            context=context,
            group_filter=group_filter,
            partial_rollout=partial_rollout,
            untrained_samples=untrained_samples,
        )
        registry = CollectorRegistry()
        metrics = RolloutMetrics(registry)
        producer = Producer(
            ledger,
            groups,
            lambda: fakes.fleet.policy_version,
            metrics,
            max_groups_in_flight=max_groups_in_flight,
            interrupt=fakes.fleet.interrupt,
            end_requests=request_ender(lambda: fakes.fleet.engines),
        )
        producer.start()
        try:
            yield Production(fakes, ledger, producer, scorer, reward, encoder, metrics, registry)
        finally:
            await producer.drain()
            await scorer.close()


async def put_of(
    folder: Path, answer: Answer, *, leased: buffer_pb2.GroupLease | None = None, **options: Any
) -> buffer_pb2.GroupPut:
    """What becomes of one group."""
    ledger = MemoryLedger([leased or lease(0)])
    async with production(folder, ledger, answer, **options) as made:
        await made.fakes.until(lambda: len(ledger.puts) == 1)
    return ledger.puts[0]


async def test_every_lease_becomes_a_scored_group(tokenizer_folder: Path) -> None:
    ledger = MemoryLedger([lease(number) for number in range(5)])
    async with production(tokenizer_folder, ledger, score(0.5)) as made:
        await made.fakes.until(lambda: len(ledger.puts) == 5)
        prompt = made.encoder.encode_text("hello").tokens
    assert {put.outcome for put in ledger.puts} == {buffer_pb2.PUT_OUTCOME_COMPLETE}
    samples = [Sample.unpack(packed) for put in ledger.puts for packed in put.samples]
    assert len({s.sample_id for s in samples}) == 15
    for sample in samples:
        assert sample.tokens.tolist() == [*prompt, *response_to(prompt, 8)]
        assert (sample.reward, sample.scorer, sample.status) == (0.5, "scripted", Status.TRUNCATED)
        assert [(r.policy_version, r.start, r.end) for r in sample.policy_ranges] == [(0, 0, 8)]
        assert (sample.label, sample.metadata) == ("7", {"n": 1})
    assert made.metrics.groups_produced == 5
    assert made.metrics.tokens_produced == 5 * 3 * 8


async def test_what_failed_stays_readable_and_a_folder_that_cannot_be_written_fails_no_group(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    """Also of a group whose samples all failed: the ledger takes none of them."""
    (tmp_path / "taken").write_text("a file where the folder should be")
    for folder, expected in ((tmp_path / "samples", 3), (tmp_path / "taken", 0)):
        log = SampleLog(folder)
        failed = UntrainedSamples(log, 1 << 20)
        put = await put_of(tokenizer_folder, refuse("SCORER_RAISED"), untrained_samples=failed)
        assert put.outcome == buffer_pb2.PUT_OUTCOME_FAILED
        answers = list(log.failed())
        assert len(answers) == expected
        assert all(answer.failure_reason == "SCORER_RAISED" and answer.response for answer in answers)


async def test_a_sample_that_could_not_be_scored_is_failed_and_has_no_reward(tokenizer_folder: Path) -> None:
    answers = iter([refuse("SCORER_TIMEOUT"), score(1.0), score(0.0)])
    put = await put_of(tokenizer_folder, lambda item: next(answers)(item))
    samples = [Sample.unpack(packed) for packed in put.samples]
    assert [(s.status, s.reward) for s in samples] == [
        (Status.FAILED, None),
        (Status.TRUNCATED, 1.0),
        (Status.TRUNCATED, 0.0),
    ]
    assert samples[0].failure is not None
    assert samples[0].failure.reason == "SCORER_TIMEOUT"


async def test_set_reward_changes_who_scores_from_the_next_group_on(tokenizer_folder: Path) -> None:
    ledger = MemoryLedger([lease(0)])
    async with (
        production(tokenizer_folder, ledger, score(0.0, "old")) as made,
        scripted_reward(score(1.0, "new")) as other,
    ):
        await made.fakes.until(lambda: len(ledger.puts) == 1)
        await made.scorer.retarget(address=other.address, scorer=None)
        ledger.queued.append(lease(1))
        await made.fakes.until(lambda: len(ledger.puts) == 2)
    assert [put.samples[0].envelope.scorer for put in ledger.puts] == ["old", "new"]


async def test_a_prompt_that_is_too_long_is_dropped_with_its_length(tokenizer_folder: Path) -> None:
    put = await put_of(tokenizer_folder, score(1.0), max_prompt_tokens=20, leased=lease(0, text="word " * 50))
    assert put.outcome == buffer_pb2.PUT_OUTCOME_DROPPED
    assert put.failure.reason == "PROMPT_TOO_LONG"
    assert "rollout_max_prompt_len is 20" in put.failure.message


async def test_a_prompt_beyond_the_context_is_dropped_and_no_engine_is_asked(tokenizer_folder: Path) -> None:
    ledger = MemoryLedger([lease(0, text="word " * 50)])
    context = ContextLimit(20, "the model's max_position_embeddings")
    async with production(tokenizer_folder, ledger, score(1.0), context=context) as made:
        await made.fakes.until(lambda: len(ledger.puts) == 1)
        length = len(made.encoder.encode_text("word " * 50).tokens)
        assert "/generate" not in made.fakes.fake(0).calls
    put = ledger.puts[0]
    assert (put.outcome, put.failure.reason) == (buffer_pb2.PUT_OUTCOME_DROPPED, "PROMPT_TOO_LONG")
    assert f"{length} tokens" in put.failure.message


async def test_a_response_ends_where_rollout_max_context_len_ends(tokenizer_folder: Path) -> None:
    ledger = MemoryLedger([lease(0)])
    length = len(PromptEncoder(tokenizer_folder, apply_chat_template=False).encode_text("hello").tokens)
    rollout = RolloutSection(rollout_max_context_len=length + 3, rollout_max_response_len=length + 2)
    architecture = SimpleNamespace(max_position_embeddings=4096)
    context = ContextLimit.of(rollout, {}, architecture)  # type: ignore[arg-type]
    async with production(tokenizer_folder, ledger, score(1.0), context=context) as made:
        await made.fakes.until(lambda: len(ledger.puts) == 1)
    assert [s.envelope.response_tokens for s in ledger.puts[0].samples] == [3, 3, 3]


async def test_leases_are_renewed_while_a_group_is_made_and_given_up_when_lost(tokenizer_folder: Path) -> None:
    ledger = MemoryLedger([lease(0, seconds=0.06)])
    slow = SamplingParams(max_new_tokens=5000)
    async with production(tokenizer_folder, ledger, score(1.0), token_seconds=0.01, params=slow) as made:
        await made.fakes.until(lambda: len(ledger.renewed) >= 2)
        ledger.lost.add("lease-0")
        ledger.queued.append(lease(1))
        await made.fakes.until(lambda: not made.producer._groups or "lease-0" not in made.producer._groups)
    assert ledger.puts == []


LONG = SamplingParams(max_new_tokens=60)


async def interrupted(folder: Path, partial_rollout: PartialRollout) -> tuple[MemoryLedger, list[Sample]]:
    """A group of three that was drained in the middle: (ledger, its partial samples)."""
    ledger = MemoryLedger([lease(0)])
    async with production(
        folder, ledger, score(1.0), token_seconds=0.01, params=LONG, partial_rollout=partial_rollout
    ) as made:
        await made.fakes.until(lambda: made.fakes.fake(0).num_tokens >= 9)
        await made.producer.drain()
    assert ledger.puts == []
    return ledger, [Sample.unpack(packed) for packed in ledger.releases[0].partial_samples]


def continued(ledger: MemoryLedger, policy_version: int) -> buffer_pb2.GroupLease:
    """The next lease of the group that was released."""
    again = lease(0, policy_version=policy_version)
    again.partial_samples.extend(ledger.releases[0].partial_samples)
    return again


async def test_a_drained_group_is_released_with_its_tokens_and_the_next_producer_goes_on_there(
    tokenizer_folder: Path,
) -> None:
    mode = PartialRollout(mask_offpolicy=False, max_staleness=1)
    first, partials = await interrupted(tokenizer_folder, mode)
    assert [s.status for s in partials] == [Status.ABORTED] * 3
    assert all(0 < s.response_length < 60 for s in partials)
    ledger = MemoryLedger([continued(first, policy_version=0)])
    async with production(tokenizer_folder, ledger, score(1.0), params=LONG, partial_rollout=mode) as made:
        await made.fakes.until(lambda: len(ledger.puts) == 1)
        prompt = made.encoder.encode_text("hello").tokens
        asked = made.fakes.fake(0).num_tokens
    samples = [Sample.unpack(packed) for packed in ledger.puts[0].samples]
    assert [s.tokens.tolist() for s in samples] == [[*prompt, *response_to(prompt, 60)]] * 3
    assert asked == 3 * 60 - sum(s.response_length for s in partials)
    assert all(s.loss_mask.all() for s in samples)


async def test_tokens_of_an_older_policy_are_masked_when_asked(tokenizer_folder: Path) -> None:
    mode = PartialRollout(mask_offpolicy=True, max_staleness=0)
    first, partials = await interrupted(tokenizer_folder, mode)
    ledger = MemoryLedger([])
    async with production(tokenizer_folder, ledger, score(1.0), params=LONG, partial_rollout=mode) as made:
        await made.fakes.name_weights(0, 3)
        made.fakes.fleet.weights.policy_version = 3
        ledger.queued.append(continued(first, policy_version=3))
        await made.fakes.until(lambda: len(ledger.puts) == 1)
    for packed, begun in zip(ledger.puts[0].samples, partials, strict=True):
        sample, length = Sample.unpack(packed), begun.response_length
        assert sample.loss_mask.tolist() == [0] * length + [1] * (60 - length)
        assert not sample.rollout_log_probs[:length].any()
        assert [(r.policy_version, r.start, r.end, r.masked) for r in sample.policy_ranges] == [
            (0, 0, length, True),
            (3, length, 60, False),
        ]


async def test_a_publication_that_aborts_requests_hands_the_group_back_once_with_its_tokens(
    tokenizer_folder: Path,
) -> None:
    ledger = MemoryLedger([lease(0)])
    mode = PartialRollout(mask_offpolicy=False, max_staleness=1)
    async with production(
        tokenizer_folder, ledger, score(1.0), token_seconds=0.01, params=LONG, partial_rollout=mode
    ) as made:
        await made.fakes.until(lambda: made.fakes.fake(0).num_tokens >= 9)
        engine = made.fakes.fleet.engines[0].client
        await engine.pause("abort")
        await made.fakes.until(lambda: len(ledger.releases) == 1)
        ledger.queued.append(continued(ledger, policy_version=0))
        await made.fakes.until(lambda: made.fakes.fake(0).calls.count("/generate") >= 6)
        await engine.resume()
        await made.fakes.until(lambda: len(ledger.puts) == 1)
    assert len(ledger.releases) == 1
    assert [s.envelope.response_tokens for s in ledger.puts[0].samples] == [60, 60, 60]


@pytest.mark.parametrize(
    ("answers", "end"),
    [
        ([1.0, 1.0, 1.0], (buffer_pb2.PUT_OUTCOME_DROPPED, "FILTERED", 1.0, 1.0, 1.0)),
        ([1.0, 0.0, 1.0], (buffer_pb2.PUT_OUTCOME_COMPLETE, "")),
    ],
)
async def test_a_dynamic_filter_drops_groups_of_equal_rewards(
    tokenizer_folder: Path, answers: list[float], end: tuple[object, ...]
) -> None:
    given = iter(answers)
    rollout = RolloutSection(dynamic_sampling_filter_path="headrace.hooks.filter.check_reward_nonzero_std")
    job = Job(model=ModelSection(hf_checkpoint=tokenizer_folder), rollout=rollout)
    group_filter = GroupFilter.of(job.rollout, hook_args(job))
    assert group_filter is not None
    await group_filter.start()
    put = await put_of(tokenizer_folder, lambda item: score(next(given))(item), group_filter=group_filter)
    await group_filter.close()
    assert (put.outcome, put.failure.reason, *put.rewards) == end


async def test_the_samples_of_a_dropped_group_stay_readable(tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def keep(args, samples):\n    return False\n")
    log = SampleLog(tmp_path / "samples")
    group_filter = GroupFilter(f"{tmp_path}/mine.py:keep", HookArgs({}))
    await group_filter.start()
    untrained = UntrainedSamples(log, 1 << 20)
    put = await put_of(tokenizer_folder, score(1.0), group_filter=group_filter, untrained_samples=untrained)
    await group_filter.close()
    assert put.outcome == buffer_pb2.PUT_OUTCOME_DROPPED
    assert [(each.dropped_reason, each.reward) for each in log.untrained()] == [(put.failure.message, 1.0)] * 3
    assert not list(log.failed())


async def test_a_filter_that_raises_fails_the_group_and_not_the_run(tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def keep(args, samples):\n    raise KeyError('oops')\n")
    ledger = MemoryLedger([lease(0)])
    group_filter = GroupFilter(f"{tmp_path}/mine.py:keep", HookArgs({}))
    async with production(tokenizer_folder, ledger, score(1.0), group_filter=group_filter) as made:
        await made.fakes.until(lambda: len(ledger.puts) == 1)
    await group_filter.close()
    assert (ledger.puts[0].outcome, ledger.puts[0].failure.reason) == (buffer_pb2.PUT_OUTCOME_FAILED, "FILTER_FAILED")
    assert "KeyError: 'oops'" in ledger.puts[0].failure.message


class RefusingLedger(MemoryLedger):
    """Refuses samples as the ledger does what it can never take."""

    async def put(self, group: buffer_pb2.GroupPut) -> buffer_pb2.PutResult:
        if group.outcome == buffer_pb2.PUT_OUTCOME_COMPLETE:
            raise DataLoss("other bytes")
        return await super().put(group)


async def test_a_group_that_the_ledger_never_takes_is_put_as_failed(tokenizer_folder: Path) -> None:
    ledger = RefusingLedger([lease(0)])
    async with production(tokenizer_folder, ledger, score(1.0)) as made:
        await made.fakes.until(lambda: len(ledger.puts) == 1)
    assert (ledger.puts[0].outcome, ledger.puts[0].failure.reason) == (buffer_pb2.PUT_OUTCOME_FAILED, "PUT_REFUSED")
    assert "other bytes" in ledger.puts[0].failure.message


@pytest.mark.parametrize(
    ("error", "released", "reason"),
    [
        (KeyError("a bug"), False, "GROUP_RAISED"),
        (Unavailable("later", reason="WEIGHTS_REFUSED"), True, "WEIGHTS_REFUSED"),
    ],
)
async def test_whatever_a_groups_work_raises_ends_in_a_put_or_a_release(
    tokenizer_folder: Path, error: Exception, released: bool, reason: str
) -> None:
    ledger = MemoryLedger([lease(0)])
    async with production(tokenizer_folder, ledger, score(1.0)) as made:
        await made.fakes.until(lambda: len(ledger.puts) == 1)

        async def make(*_: object) -> object:
            raise error

        made.producer._sampler = SimpleNamespace(  # type: ignore[assignment]
            sample=make, returns_partials=False, oldest_version=lambda leased: leased.policy_version
        )
        ledger.queued.append(lease(1))
        await made.fakes.until(lambda: bool(ledger.released) if released else len(ledger.puts) == 2)
        assert made.producer._groups == {}
    if released:
        assert reason in ledger.releases[0].reason
    else:
        assert (ledger.puts[1].outcome, ledger.puts[1].failure.reason) == (buffer_pb2.PUT_OUTCOME_FAILED, reason)


async def test_tokens_of_a_version_that_is_not_served_any_more_are_released(tokenizer_folder: Path) -> None:
    def judged_while_another_trainer_starts(item: reward_pb2.ScoreItem) -> reward_pb2.ScoreResult:
        made.fakes.fleet.weights.switch_to(3)  # from an older checkpoint
        return score(1.0)(item)

    ledger = MemoryLedger([])
    async with production(tokenizer_folder, ledger, judged_while_another_trainer_starts) as made:
        await made.fakes.name_weights(0, 5)
        made.fakes.fleet.weights.switch_to(5)
        ledger.queued.append(lease(0, policy_version=5))
        await made.fakes.until(lambda: bool(ledger.released))
    assert ledger.puts == []
    assert "version 5 is not served any more" in ledger.releases[0].reason


def test_seeds_differ_by_every_part_and_repeat() -> None:
    seeds = {seed_of(1, "g", 1, 0), seed_of(2, "g", 1, 0), seed_of(1, "h", 1, 0), seed_of(1, "g", 2, 0)}
    assert len(seeds | {seed_of(1, "g", 1, 1)}) == 5
    assert seed_of(1, "g", 1, 0) == seed_of(1, "g", 1, 0)
