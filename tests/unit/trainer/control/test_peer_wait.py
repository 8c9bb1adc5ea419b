"""A trainer whose buffer or rollout service stays away ends with the exit code of that, and names it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from headrace import job_buffer
from headrace.client.open import Buffer
from headrace.client.rollout import RolloutClient
from headrace.job.schema.job import Job
from headrace.process.exit_status import PEER_AWAY
from headrace.rpc.net import free_port
from services.trainer import __main__ as trainer
from services.trainer.control import build, publication
from services.trainer.control.build import Built, TrainerBuild
from services.trainer.control.ranks import RankGroup
from services.trainer.serving.console import TrainerConsole
from services.trainer.state import NONE_STALE, TrainState

BUILT = {"layout": SimpleNamespace(device=torch.device("cpu")), "checkpoints": None, "restored_step": 0}


async def rank0_that_asks_the_buffer(build: object, serving: object, buffer: Buffer, *_: object) -> None:
    await buffer.stats("train")


def test_after_the_peers_wait_without_a_buffer_the_trainer_ends_as_one_whose_peer_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trainer, "run_rank0", rank0_that_asks_the_buffer)
    monkeypatch.setattr(job_buffer, "PEER_WAIT_SECONDS", 0.25)
    address = f"127.0.0.1:{free_port()}"
    assert ended(tmp_path, buffer_address=address, rollout_address=address) == PEER_AWAY
    assert f"trainer: the buffer at {address} gave no answer within 0.25 s" in capfd.readouterr().err


async def rank0_that_awaits_a_batch(build: TrainerBuild, *_: object) -> None:
    async with RolloutClient(build.rollout_address) as rollout:
        ranks = build.ranks(
            cast(RankGroup, None), cast(Built, SimpleNamespace(**BUILT)), rollout, cast(TrainerConsole, None)
        )
        while True:
            assert await ranks.engines.stale_engines(TrainState(0, 0, 1)) == NONE_STALE


def test_a_trainer_that_awaits_a_batch_gives_up_a_rollout_service_that_has_had_time_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trainer, "run_rank0", rank0_that_awaits_a_batch)
    monkeypatch.setattr(publication, "_FLEET_SECONDS", 0.1)
    monkeypatch.setattr(build, "PEER_WAIT_SECONDS", 0.2)
    address = f"127.0.0.1:{free_port()}"
    services = {"buffer_address": "127.0.0.1:9", "rollout_address": address, "start_timeout_seconds": 0.4}
    assert ended(tmp_path, **services) == PEER_AWAY
    said = capfd.readouterr().err
    assert f"trainer: the rollout service at {address} gave no answer within 0.1 s" in said
    assert "while a batch was awaited" in said


def ended(folder: Path, **services: object) -> int:
    config = folder / "job.json"
    config.write_text(Job.model_validate({"model": {"hf_checkpoint": "m"}, "services": services}).model_dump_json())
    return trainer.main(["--config", str(config), "--run-dir", str(folder)])
