"""A trainer whose buffer or rollout service stays away ends with the exit code of that, and names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.api.rollout.v1 import rollout_pb2
from headrace.client.port import Buffer
from headrace.client.rollout import RolloutClient
from headrace.errors import ConfigError
from headrace.job.schema.job import Job, ServicesSection
from headrace.job_buffer import buffer_of
from headrace.process.exit_codes import PEER_AWAY
from headrace.rpc.net import free_port
from services.trainer import __main__ as trainer
from services.trainer.control.build import TrainerBuild


async def lead_that_asks_the_buffer(build: object, serving: object, buffer: Buffer, *_: object) -> None:
    await buffer.stats("train")


async def lead_that_publishes(build: TrainerBuild, *_: object) -> None:
    async with RolloutClient(build.rollout_address) as rollout:
        await rollout.begin_publish(rollout_pb2.BeginPublishRequest(), deadline_seconds=0.25)


def test_after_peer_wait_seconds_without_its_buffer_the_trainer_ends_as_one_whose_peer_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trainer, "lead", lead_that_asks_the_buffer)
    services = {"buffer_address": f"127.0.0.1:{free_port()}", "peer_wait_seconds": 0.25}
    config = tmp_path / "job.json"
    config.write_text(Job.model_validate({"model": {"hf_checkpoint": "m"}, "services": services}).model_dump_json())
    assert trainer.main(["--config", str(config), "--run-dir", str(tmp_path)]) == PEER_AWAY
    assert f"trainer: the buffer at {services['buffer_address']} gave no answer within 0.25 s" in capfd.readouterr().err


def test_a_trainer_whose_rollout_service_stays_away_ends_as_one_whose_peer_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trainer, "lead", lead_that_publishes)
    address = f"127.0.0.1:{free_port()}"
    services = {"buffer_address": "127.0.0.1:9", "rollout_address": address}
    config = tmp_path / "job.json"
    config.write_text(Job.model_validate({"model": {"hf_checkpoint": "m"}, "services": services}).model_dump_json())
    assert trainer.main(["--config", str(config), "--run-dir", str(tmp_path)]) == PEER_AWAY
    assert f"trainer: the rollout service at {address} gave no answer within 0.25 s" in capfd.readouterr().err


def test_a_job_without_a_buffers_address_is_told_the_flag() -> None:
    with pytest.raises(ConfigError, match="pass --buffer-address host:port"):
        buffer_of(ServicesSection())
