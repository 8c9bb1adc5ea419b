"""A trainer whose buffer or rollout service stays away ends with the exit code of that, and names it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from headrace import job_buffer
from headrace.api.rollout.v1 import rollout_pb2
from headrace.client.buffer import Buffer
from headrace.client.rollout import RolloutClient
from headrace.errors import ConfigError, Unavailable
from headrace.job.schema.job import Job
from headrace.job.schema.run import PublishSection
from headrace.job.schema.services import ServicesSection
from headrace.job_buffer import buffer_of
from headrace.process.exit_status import PEER_AWAY
from headrace.rpc.net import free_port
from services.trainer import __main__ as trainer
from services.trainer.control import build, publication
from services.trainer.control.build import Built, TrainerBuild
from services.trainer.control.publication import Publisher
from services.trainer.control.ranks import RankGroup
from services.trainer.control.transport import Transport
from services.trainer.gpu_sharing import OwnDevices
from services.trainer.serving.console import TrainerConsole
from services.trainer.state import NONE_STALE, TrainState

BUILT = {"layout": SimpleNamespace(device=torch.device("cpu")), "checkpoints": None, "restored_step": 0}


class FleetThatAnswersEveryOtherTime:
    """A rollout service, as far as a trainer asks it for its fleet."""

    def __init__(self) -> None:
        self.answers = True
        self._calls = 0

    async def get_fleet(self, *, deadline_seconds: float) -> rollout_pb2.GetFleetResponse:
        self._calls += 1
        if self.answers and self._calls % 2 == 0:
            return rollout_pb2.GetFleetResponse(policy_version=0)
        raise Unavailable(f"the rollout service gave no answer within {deadline_seconds} s")


async def rank0_that_asks_the_buffer(build: object, serving: object, buffer: Buffer, *_: object) -> None:
    await buffer.stats("train")


async def rank0_that_publishes(build: TrainerBuild, *_: object) -> None:
    async with RolloutClient(build.rollout_address) as rollout:
        await rollout.begin_publish(rollout_pb2.BeginPublishRequest(), deadline_seconds=0.25)


def test_after_the_peers_wait_without_its_buffer_the_trainer_ends_as_one_whose_peer_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trainer, "run_rank0", rank0_that_asks_the_buffer)
    monkeypatch.setattr(job_buffer, "PEER_WAIT_SECONDS", 0.25)
    services = {"buffer_address": f"127.0.0.1:{free_port()}"}
    config = tmp_path / "job.json"
    config.write_text(Job.model_validate({"model": {"hf_checkpoint": "m"}, "services": services}).model_dump_json())
    assert trainer.main(["--config", str(config), "--run-dir", str(tmp_path)]) == PEER_AWAY
    assert f"trainer: the buffer at {services['buffer_address']} gave no answer within 0.25 s" in capfd.readouterr().err


def test_a_trainer_whose_rollout_service_stays_away_ends_as_one_whose_peer_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trainer, "run_rank0", rank0_that_publishes)
    address = f"127.0.0.1:{free_port()}"
    services = {"buffer_address": "127.0.0.1:9", "rollout_address": address}
    config = tmp_path / "job.json"
    config.write_text(Job.model_validate({"model": {"hf_checkpoint": "m"}, "services": services}).model_dump_json())
    assert trainer.main(["--config", str(config), "--run-dir", str(tmp_path)]) == PEER_AWAY
    assert f"trainer: the rollout service at {address} gave no answer within 0.25 s" in capfd.readouterr().err


async def rank0_that_awaits_a_batch(build: TrainerBuild, *_: object) -> None:
    async with RolloutClient(build.rollout_address) as rollout:
        ranks = build.ranks(
            cast(RankGroup, None), cast(Built, SimpleNamespace(**BUILT)), rollout, cast(TrainerConsole, None)
        )
        while True:
            assert await ranks.stale_engines(TrainState(0, 0, 1)) == NONE_STALE


def test_a_trainer_that_awaits_a_batch_gives_up_a_rollout_service_that_has_had_time_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trainer, "run_rank0", rank0_that_awaits_a_batch)
    monkeypatch.setattr(publication, "_FLEET_SECONDS", 0.1)
    services = {"buffer_address": "127.0.0.1:9", "rollout_address": f"127.0.0.1:{free_port()}"}
    services |= {"start_timeout_seconds": 0.4}
    monkeypatch.setattr(build, "PEER_WAIT_SECONDS", 0.2)
    config = tmp_path / "job.json"
    config.write_text(Job.model_validate({"model": {"hf_checkpoint": "m"}, "services": services}).model_dump_json())
    assert trainer.main(["--config", str(config), "--run-dir", str(tmp_path)]) == PEER_AWAY
    said = capfd.readouterr().err
    assert f"trainer: the rollout service at {services['rollout_address']} gave no answer within 0.1 s" in said
    assert "while a batch was awaited" in said


async def test_a_rollout_service_that_answers_now_and_then_is_not_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication, "_FLEET_SECONDS", 0.05)
    asked = FleetThatAnswersEveryOtherTime()
    ranks, rollout, transport = cast(RankGroup, None), cast(RolloutClient, asked), cast(Transport, None)
    publisher = Publisher(
        ranks, [rollout], transport, PublishSection(), backend="gloo", away_seconds=0.0, devices=OwnDevices()
    )
    for _ in range(6):
        assert await publisher.stale_engines(TrainState(0, 0, 1)) == NONE_STALE
    asked.answers = False
    await publisher.stale_engines(TrainState(0, 0, 1))
    with pytest.raises(Unavailable, match="nor any call"):
        await publisher.stale_engines(TrainState(0, 0, 1))


def test_a_job_without_a_buffers_address_is_told_the_flag() -> None:
    with pytest.raises(ConfigError, match="pass --buffer-address host:port"):
        buffer_of(ServicesSection())
