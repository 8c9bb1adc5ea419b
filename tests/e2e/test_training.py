"""The whole stack, four processes and two SGLang engines, on a tiny random Qwen3: it learns, and it survives."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.request import urlopen

import grpc
import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.api.buffer.v1 import buffer_pb2
from headrace.api.reward.v1 import reward_pb2
from headrace.api.rollout.v1 import rollout_pb2
from headrace.api.trainer.v1 import trainer_pb2
from headrace.cli.main import main
from headrace.client.rollout import RolloutClient
from headrace.rpc.net import free_port
from headrace.sample_log import SampleLog
from headrace.traces import by_trace, lanes_of, of_sample, read_spans
from tests.long_forms import whole_run
from tests.support.faults.malformed import MALFORMED, call_raw, methods
from tests.support.models.tiny_model import make_tiny_qwen3
from tests.support.processes.listening import listening_of_tree, open_to_others
from tests.support.processes.training_run import ROOT, TrainingRun, consumed_by_step

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SERVICES = {
    "reward": reward_pb2.DESCRIPTOR.services_by_name["RewardService"],
    "rollout": rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"],
    "trainer": trainer_pb2.DESCRIPTOR.services_by_name["TrainerService"],
}
VOWELS = '''
async def vowels(args, sample, **kwargs):
    """Share of the response's characters that are vowels: a tiny random model learns it in a few steps."""
    return sum(character in "aeiou" for character in sample.response) / max(len(sample.response), 1)
'''
LENGTH = '''
async def length(args, sample, **kwargs):
    """Another reward, to be told apart from the first."""
    return 2.0 + len(sample.response) / 1000
'''


class RewardProcess:
    """A reward service of its own, stopped and started at one address."""

    def __init__(self, folder: Path) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._log = folder / "reward.log"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, hook: str) -> None:
        with self._log.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "services.reward", "--address", self.address, "--custom-rm-path", hook,
                cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=output, stderr=output,
            )  # fmt: skip

    async def stop(self) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()


async def send_malformed_bytes(run: TrainingRun) -> None:
    """To every method of the services that work on the run; the run must not notice."""
    addresses = {name: entry.address for name, entry in run.folder.services().items()}
    for name, descriptor in SERVICES.items():
        async with grpc.aio.insecure_channel(addresses[name]) as channel:
            for method in methods(descriptor):
                for data in MALFORMED:
                    assert await call_raw(channel, method, data) is grpc.StatusCode.INVALID_ARGUMENT, method.full_name


async def require_conformance(run: TrainingRun) -> None:
    """Every service of a live run keeps the promises of its proto."""
    for name, entry in run.folder.services().items():
        assert await asyncio.to_thread(main, ["conformance", name, entry.address]) == 0, name


async def require_metrics(run: TrainingRun) -> None:
    """The trainer's page has the newest row for Prometheus."""
    url = f"http://{run.folder.services()['trainer'].metrics_address}/metrics"
    page = await asyncio.to_thread(lambda: urlopen(url, timeout=10).read().decode())
    assert 'headrace_trainer_metric{name="tokens_per_second_per_rank"}' in page


def require_traces(run: TrainingRun, sample_ids: Sequence[str]) -> None:
    """A fifth of the samples has spans of all services and ranks that belong to the run."""
    spans, name = read_spans(run.folder), run.folder.job().run.run_name
    lives = [of_sample(by_trace(spans), name, sample_id) for sample_id in sample_ids]
    assert 0.1 < sum(map(bool, lives)) / len(lives) < 0.3
    for life in filter(None, lives):
        lanes = [lane for lane in lanes_of(life) if not lane.startswith("engine")]
        assert lanes == ["buffer", "rollout", "trainer", "rank 0", "rank 1"]
        assert {"headrace.consumed", "rl.sample.generate", "rl.reward", "rl.loop"} <= {span.name for span in life}
    assert {span.service for span in spans} >= {"engine 0", "engine 1"}


async def test_two_data_ranks_learn_while_the_reward_service_is_replaced(tmp_path: Path) -> None:
    checkpoint = make_tiny_qwen3(tmp_path / "model")
    for name, code in (("vowels", VOWELS), ("length", LENGTH)):
        (tmp_path / f"{name}.py").write_text(code)
    reward = RewardProcess(tmp_path)
    await reward.start(f"{tmp_path}/vowels.py:vowels")
    run = TrainingRun(
        tmp_path, checkpoint, "--reward-address", reward.address,
        "--num-rollout", "22", "--lr", "5e-3", "--save-hf", str(tmp_path / "export"), "--trace-sample-ratio", "0.2",
    )  # fmt: skip
    try:
        async with run.started():
            await run.until_step(1)
            async with RolloutClient(run.folder.services()["rollout"].address) as rollout:
                fleet = await rollout.get_fleet()
            assert len(fleet.engines) == 2
            assert len({engine.weights_digest for engine in fleet.engines}) == 1
            assert fleet.engines[0].weights_digest
            listens = listening_of_tree(run.pid)
            assert any("sglang" in command for command in listens.values())
            assert open_to_others(listens) == [], listens
            await send_malformed_bytes(run)
            await require_conformance(run)
            await require_metrics(run)
            await run.until_step(16)
            await reward.stop()
            await reward.start(f"{tmp_path}/length.py:length")
            await run.finished()
    finally:
        await reward.stop()

    initial, after = [event for event in run.events("rollout") if event["event"] == "published"][:2]
    assert (initial["policy_version"], initial["paused_seconds"]) == (0, 0.0), "engines had loaded these weights"
    assert (after["policy_version"], after["paused_seconds"] > 0) == (1, True)
    rows = {row["step"]: row for row in run.metrics()}
    assert sorted(rows) == list(range(1, 23))
    assert max(row["log_prob_diff/max"] for row in rows.values()) < 1e-3
    first, last = ([rows[step]["reward/mean"] for step in steps] for steps in (range(1, 4), range(13, 17)))
    assert sum(last) / len(last) > sum(first) / len(first) + 0.1

    groups = await run.groups()
    trained = [group for group in groups if group.state == buffer_pb2.GROUP_STATE_COMMITTED]
    assert len(trained) == 22 * 4
    for sample in (sample for group in trained for sample in group.samples):
        assert sample.HasField("reward")
        assert (sample.reward >= 2.0) == ("length" in sample.scorer or "length" in sample.scorer_version)
        assert sample.policy_ranges
    log = SampleLog(run.folder.samples)
    kept = [answer for step in log.steps() for answer in log.of_step(step)]
    assert sorted(each.sample_id for each in kept) == sorted(s.sample_id for group in trained for s in group.samples)
    assert all(each.prompt and each.reward is not None for each in kept)
    assert len({(sample.scorer, sample.scorer_version) for group in trained for sample in group.samples}) == 2
    assert max(r.policy_version for group in trained for s in group.samples for r in s.policy_ranges) >= 20

    require_traces(run, [each.sample_id for each in kept])
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    assert all(parameter.isfinite().all() for parameter in exported.parameters())


@whole_run
async def test_two_tensor_ranks_survive_kill_9_of_every_service(tmp_path: Path) -> None:
    checkpoint = make_tiny_qwen3(tmp_path / "model")
    (tmp_path / "vowels.py").write_text(VOWELS)
    run = TrainingRun(
        tmp_path, checkpoint, "--custom-rm-path", f"{tmp_path}/vowels.py:vowels", "--num-rollout", "16",
        "--tensor-model-parallel-size", "2", "--max-staleness", "1", "--save-interval", "3", "--lr", "1e-3",
        "--use-fault-tolerance",
    )  # fmt: skip
    async with run.started():
        for step, service in ((2, "buffer"), (4, "reward"), (6, "trainer"), (8, "rollout")):
            await run.until_step(step)
            run.kill(service)
        await run.finished()

    assert [row["step"] for row in run.metrics()] == list(range(1, 17))
    events = await run.history()
    groups = {group.group_id: group for group in await run.groups()}
    consumed = consumed_by_step(events)
    trained = run.trained()
    assert sorted(consumed) == sorted(trained) == list(range(16))
    for step, group_ids in consumed.items():
        of_ledger = {sample.sample_id for group_id in group_ids for sample in groups[group_id].samples}
        assert of_ledger == set(trained[step])
    fed = [sample_id for sample_ids in trained.values() for sample_id in sample_ids]
    assert len(fed) == len(set(fed)) == 16 * 4 * 8
    assert await asyncio.to_thread(main, ["audit", str(run.folder.path)]) == 0
    # Nothing is lost: every prompt the ledger handed out was trained, or still waits in it.
    waiting = {buffer_pb2.GROUP_STATE_QUEUED, buffer_pb2.GROUP_STATE_LEASED, buffer_pb2.GROUP_STATE_READY}
    states = {group.state for group in groups.values()}
    assert states <= waiting | {buffer_pb2.GROUP_STATE_COMMITTED}
    assert sum(group.state == buffer_pb2.GROUP_STATE_COMMITTED for group in groups.values()) == 16 * 4
