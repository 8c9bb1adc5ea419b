"""A trainer whose buffer is away longer than `peer_wait_seconds` ends with the exit code and sentence of that."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.client.port import Buffer
from headrace.errors import ConfigError
from headrace.job.schema.job import Job, ServicesSection
from headrace.job_buffer import buffer_of
from headrace.process.exit_codes import PEER_AWAY
from headrace.rpc.net import free_port
from services.trainer import __main__ as trainer


async def lead_that_asks_the_buffer(build: object, serving: object, buffer: Buffer, *_: object) -> None:
    await buffer.stats("train")


def test_after_peer_wait_seconds_without_its_buffer_the_trainer_ends_as_one_whose_peer_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trainer, "lead", lead_that_asks_the_buffer)
    services = {"buffer_address": f"127.0.0.1:{free_port()}", "peer_wait_seconds": 0.25}
    config = tmp_path / "job.json"
    config.write_text(Job.model_validate({"model": {"hf_checkpoint": "m"}, "services": services}).model_dump_json())
    assert trainer.main(["--config", str(config), "--run-dir", str(tmp_path)]) == PEER_AWAY
    assert "gave no answer within 0.25 s" in capfd.readouterr().err


def test_a_job_without_a_buffers_address_is_told_the_flag() -> None:
    with pytest.raises(ConfigError, match="pass --buffer-address host:port"):
        buffer_of(ServicesSection())
