"""What files that deploy say: the images of the Containerfile, and the job that a command and its variables make."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.cli.commands.jobs import up
from headrace.job.load.load import load
from headrace.job.rules.scope import Scope
from headrace.job.schema.job import Job

DEPLOY = Path(__file__).parents[2] / "deploy"
SERVICES = ("buffer", "reward", "rollout", "trainer")
PORTS = {name: 7001 + number for number, name in enumerate(SERVICES)}
PROBE = ["python", "-m", "headrace.launch.health"]

_STAGE = re.compile(r"^FROM \S+ AS (\S+)$", re.M)
_VARIABLE = re.compile(r"\b(HEADRACE_[A-Z_]+)=(\S+)")


def targets() -> set[str]:
    """Every stage of the Containerfile."""
    return set(_STAGE.findall((DEPLOY / "Containerfile").read_text()))


def variables_of_images() -> Mapping[str, str]:
    """The HEADRACE_ variables that every image sets."""
    return dict(_VARIABLE.findall((DEPLOY / "Containerfile").read_text()))


def job_of(words: Sequence[str], variables: Mapping[str, str], job_file: Path) -> Job:
    """The job of `headrace up WORDS` where /job/job.toml, or /etc/headrace/job.toml, is `job_file`.

    Raises ConfigError for a variable that is no option, a flag that is none, and what contradicts itself.
    """
    typed = up.make_context("up", list(words)).params
    service, path, flags = typed["service"], str(typed["config"]), typed["words"]
    assert service in SERVICES
    assert path in ("/job/job.toml", "/etc/headrace/job.toml"), path
    return load(job_file, flags, variables, lambda _: Scope([service]))
