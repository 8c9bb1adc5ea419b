"""Users' rollout functions: they lease from a real buffer, and what they return becomes the batch of a step."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.trajectory import Sample, Status
from services.rollout.production.prompts import PromptEncoder
from tests.support.models.chat_templates import make_chat_tokenizer
from tests.support.rollout_functions import GROUPS, SAMPLES, SYNC, WRITES, producing

ASYNC = f"""{WRITES}
async def generate_rollout(args, rollout_id, data_source):
    async def made(group):
        await asyncio.sleep(0)
        return [copy.deepcopy(write(sample)) for sample in group]
    return list(await asyncio.gather(*map(made, data_source.get_samples(args.rollout_batch_size))))
"""
THREADED = f"""{WRITES}
from threading import Thread
def generate_rollout(args, rollout_id, data_source, evaluation=False):
    groups = []
    thread = Thread(target=lambda: groups.extend(written(g) for g in data_source.get_samples(args.rollout_batch_size)))
    thread.start()
    thread.join()
    return [sample for group in groups for sample in group]  # flat, as older functions do
"""
FAN_OUT = f"""{WRITES}
def generate_rollout(args, rollout_id, data_source, **kwargs):
    groups = data_source.get_samples(args.rollout_batch_size)
    return [[[write(s), copy.deepcopy(s)] if s.index else write(s) for s in group] for group in groups]
"""


@pytest.mark.parametrize("code", [ASYNC, THREADED, FAN_OUT])
async def test_rollout_function_path_makes_the_batch_of_a_step(tmp_path: Path, code: str) -> None:
    async with producing(tmp_path, code) as made:
        samples = await made.batch()
    assert len(samples) == GROUPS * (SAMPLES + (code == FAN_OUT))
    assert {(s.status, s.reward, s.response) for s in samples} == {(Status.COMPLETED, 1.0, "hi")}
    assert len({(s.group_id, s.index) for s in samples}) == GROUPS * SAMPLES


async def test_the_next_step_is_another_call_with_its_number(tmp_path: Path) -> None:
    async with producing(tmp_path, SYNC) as made:
        first = await made.batch()
        epoch = (await made.buffer.stats("train")).epoch
        leased = await made.buffer.try_lease_batch("train", epoch, 0)
        await made.buffer.consume("train", epoch, 0, leased.digest)
        made.sampler._weights.switch_to(1)
        await made.buffer.set_policy_version("train", epoch, 1)
        following = await made.buffer.lease_batch("train", epoch, 1, timeout_seconds=40)
        names = [envelope.sample_id for group in following.groups for envelope in group.samples]
        packed = await made.buffer.fetch_samples("train", names)
    for number, samples in enumerate((first, map(Sample.unpack, packed))):
        called = [sample.metadata["called"] for sample in samples if sample.index == 0]
        assert called == [[number, GROUPS, GROUPS, False]] * GROUPS


FAILS_ONCE = f"""{WRITES}
def generate_rollout(args, rollout_id, data_source):
    groups = data_source.get_samples(args.rollout_batch_size)
    if not os.path.exists("{{folder}}/called"):
        open("{{folder}}/called", "w").close()
        FIRST
    return [written(group) for group in groups]
"""


@pytest.mark.parametrize(
    ("first", "failed", "reason", "message"),
    [
        ("raise KeyError('lost')", 3, "HOOK_RAISED", "KeyError: 'lost'"),
        ("os.kill(os.getpid(), 9)", 0, "", ""),  # it runs again, alone, with the groups that it had
        ("return []", 3, "HOOK_INVALID", "it returned none of 3 groups"),
        ("return [[Sample(tokens=[1])], groups[0], *OTHERS]", 1, "HOOK_INCOMPLETE", "PENDING"),
        ("return [*OTHERS, [*groups[0], *groups[1]]]", 1, "HOOK_INVALID", "group_index"),
        ("groups[0][0].reward = 'good'; return [groups[0], *OTHERS]", 1, "HOOK_INVALID", "reward"),
    ],
)
async def test_what_goes_wrong_is_the_failure_of_the_groups_that_it_concerns(
    tmp_path: Path, first: str, failed: int, reason: str, message: str
) -> None:
    first = first.replace("OTHERS", "map(written, groups[1:])")
    code = FAILS_ONCE.replace("{folder}", str(tmp_path)).replace("FIRST", first)
    async with producing(tmp_path, code) as made:
        samples = await made.batch()
        stats = await made.groups("FAILED", failed)
    assert len(samples) == GROUPS * SAMPLES
    assert stats.groups["FAILED"] == failed
    told = [(each.reason, message in each.example) for each in stats.production.failures]
    assert told == [(reason, True)] * (failed > 0)
    if "KeyError" in first:
        assert f"{tmp_path / 'hook.py'}:" in stats.production.failures[0].example


async def test_after_rollout_timeout_seconds_a_call_fails(tmp_path: Path) -> None:
    code = FAILS_ONCE.replace("{folder}", str(tmp_path)).replace("FIRST", "while True: pass")
    async with producing(tmp_path, code, rollout_timeout_seconds=2.0) as made:
        stats = await made.groups("FAILED", GROUPS)
    assert [(each.reason, "2 s" in each.example) for each in stats.production.failures] == [("HOOK_TIMEOUT", True)]


CHOOSES = f"""{WRITES}
def generate_rollout(args, rollout_id, data_source):
    assert args.over_sampling_batch_size == 5
    kept = []
    while len(kept) < args.rollout_batch_size:
        for group in data_source.get_samples(args.over_sampling_batch_size):
            number = int(group[0].prompt.split()[-1][:-1])
            if number < 4:
                DROP
            else:
                kept.append(written(group))
    return kept[: args.rollout_batch_size]
"""


async def test_groups_that_the_function_drops_are_replaced_by_others(tmp_path: Path) -> None:
    code = CHOOSES.replace("DROP", "data_source.drop_samples([written(group, 0.5)], 'too easy')")
    async with producing(tmp_path, code, spare=2, over_sampling_batch_size=5) as made:
        samples = await made.batch()
        stats = await made.groups("DROPPED", 1)
        told = await made.buffer.list_groups("train", [pb.GROUP_STATE_DROPPED])
    numbers = {int(sample.prompt.split()[-1][:-1]) for sample in samples}
    assert len(numbers) == GROUPS
    assert min(numbers) >= 4
    assert {group.failure.reason for group in told.groups} == {"FILTERED"}
    assert any("too easy" in group.failure.message for group in told.groups)
    assert stats.production.num_failed == 0


GIVES_BACK = f"""{WRITES}
def generate_rollout(args, rollout_id, data_source):
    groups = sorted(data_source.get_samples(args.rollout_batch_size), key=lambda group: group[0].prompt)
    begun = groups[0]
    if begun[0].response_length:
        for sample in begun:
            assert (sample.tokens, sample.status) == (BEGUN, Sample.Status.ABORTED)
        return [written(group) for group in groups]
    for sample in begun:
        sample.tokens, sample.response, sample.response_length = BEGUN, "h", 1
        sample.rollout_log_probs, sample.weight_versions, sample.status = [-0.5], ["0"], Sample.Status.ABORTED
    data_source.add_samples([begun])
    return [written(group) for group in groups[1:]]
"""


async def test_groups_that_are_given_back_with_tokens_are_continued_by_a_later_call(tmp_path: Path) -> None:
    make_chat_tokenizer("qwen3").save_pretrained(tmp_path)
    encoder = PromptEncoder(tmp_path, apply_chat_template=False)
    encoder.load()
    begun = [*encoder.encode_text("What is prompt 0?").tokens, 5]
    encoder.close()
    code = GIVES_BACK.replace("BEGUN", str(begun))
    async with producing(tmp_path, code, partial_rollout=True) as made:
        samples = await made.batch()
        stats = await made.buffer.stats("train")
    assert len(samples) == GROUPS * SAMPLES
    assert "interrupted with 2 tokens of 2 samples" in stats.production.last_return
    assert stats.production.num_failed == 0


SHOWS = """
import json

def shown(args, all_samples, data_source):
    with open("{folder}/shown.jsonl", "a") as file:
        file.write(json.dumps([[s.reward for s in group] for group in all_samples]) + chr(10))
    raise KeyError("it costs no sample")

def keep(args, samples, **kwargs):
    return samples[0].reward > 0
"""


async def test_rollout_all_samples_process_path_sees_the_groups_of_a_step_and_those_that_were_dropped(
    tmp_path: Path,
) -> None:
    code = (
        WRITES
        + SHOWS.replace("{folder}", str(tmp_path))
        + SYNC.replace(WRITES, "").replace(
            "written(group) for", "written(group, 0.0 if 'prompt 0' in group[0].prompt else 1.0) for"
        )
    )
    hook = f"{tmp_path / 'hook.py'}"
    paths: dict[str, Any] = {
        "rollout_all_samples_process_path": f"{hook}:shown",
        "dynamic_sampling_filter_path": f"{hook}:keep",
    }
    async with producing(tmp_path, code, **paths) as made:
        assert len(await made.batch()) == GROUPS * SAMPLES
        async with asyncio.timeout(60):
            while not (tmp_path / "shown.jsonl").exists():  # another process writes it
                await asyncio.sleep(0.02)
            while not (text := (tmp_path / "shown.jsonl").read_text()).endswith("\n"):
                await asyncio.sleep(0.02)
    (groups,) = map(json.loads, text.splitlines())
    assert sorted(groups) == [[0.0, 0.0], *[[1.0, 1.0]] * GROUPS]
