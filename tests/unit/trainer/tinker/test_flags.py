"""Where Tinker's API listens, and what it calls the base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError
from headrace.job.schema.job import Job
from headrace.rpc.net import free_port
from headrace.rpc.server import Listen, listen_of
from services.trainer.tinker.serve import endpoint_of, names_of


def job_with(**tinker: Any) -> Job:
    return Job.model_validate({"model": {"hf_checkpoint": "/models/a-base"}, "tinker": tinker})


def listen() -> Listen:
    return listen_of(
        {"address": "127.0.0.1:0", "metrics_address": None, "insecure": False, "tls_dir": None, "tokens_file": None}
    )


def test_the_api_listens_where_the_job_says() -> None:
    port = free_port()
    assert endpoint_of(job_with(tinker_port=port), listen(), None).url == f"http://127.0.0.1:{port}"


def test_the_api_is_refused_where_others_reach_it_unencrypted() -> None:
    with pytest.raises(ConfigError) as refused:
        endpoint_of(job_with(tinker_port=free_port(), tinker_host="0.0.0.0"), listen(), None)  # noqa: S104  # it is refused
    assert refused.value.field == "tinker.tinker_host"


def test_the_base_is_called_as_the_job_says() -> None:
    folder = Path("/models/a-base")
    assert names_of(job_with(tinker_port=1, tinker_model_name="Qwen/Qwen3-8B")) == [
        "Qwen/Qwen3-8B",
        "a-base",
        str(folder),
    ]
