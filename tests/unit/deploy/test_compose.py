"""The compose file names images, options and commands that exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.errors import ConfigError
from tests.support.deployments import DEPLOY, PORTS, PROBE, SERVICES, job_of, targets, variables_of_images

COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def test_every_image_is_a_target_of_the_containerfile() -> None:
    assert set(COMPOSE["services"]) == {*SERVICES, "certs"}
    for name, service in COMPOSE["services"].items():
        build = service["build"]
        assert build["target"] in targets(), name
        assert service["image"] == f"headrace-{build['target']}"
        assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_gets_a_job_that_can_be_loaded(service: str, job_file: Path, tmp_path: Path) -> None:
    found = COMPOSE["services"][service]
    assert found["command"][0] == service
    given = {**variables_of_images(), **found["environment"]}
    job = job_of(found["command"], given, job_file)
    assert str(job.services.tls_dir) == given["HEADRACE_TLS_DIR"]
    assert not job.services.insecure
    assert job.services.metrics_port == 9464
    for other, port in PORTS.items():
        assert getattr(job.services, f"{other}_address") == f"{other}:{port}"
    with pytest.raises(ConfigError, match="HEADRACE_METRIC_PORT"):
        job_of(found["command"], {**given, "HEADRACE_METRIC_PORT": "1"}, job_file)


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_is_probed_where_it_listens_and_waits_for_those_it_needs(service: str) -> None:
    found = COMPOSE["services"][service]
    assert found["healthcheck"]["test"] == ["CMD", *PROBE, f"127.0.0.1:{PORTS[service]}"]
    needed = {"buffer": {"certs"}, "reward": {"certs"}, "rollout": {"buffer", "reward"}}
    assert set(found["depends_on"]) == needed.get(service, {"buffer", "rollout"})
    for other, how in found["depends_on"].items():
        done = "service_completed_successfully" if other == "certs" else "service_healthy"
        assert how == {"condition": done}
