"""deploy/slurm/train.sbatch: the command that it starts, and when its job is requeued."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.job.load.flags import parse_flags
from headrace.job.option import options
from tests.support.deployments import DEPLOY

SCRIPT = DEPLOY / "slurm" / "train.sbatch"
HEADRACE = """#!{python}
import json, os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(os.environ["CODE_WHEN_ASKED"])))
names = ("HEADRACE_SERVICE_HOST", "MASTER_ADDR")
started = json.dumps([sys.argv[1:], {{name: os.environ[name] for name in names if name in os.environ}}])
pathlib.Path("started").write_text(started)
time.sleep(float(os.environ.get("SECONDS_OF_RUN", "0")))
sys.exit(int(os.environ.get("CODE", "0")))
"""
NODE = "NodeName=gpu1 Arch=x86_64\n   NodeAddr=10.0.0.7 NodeHostName=gpu1 Version=22.05.8"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with stand-ins for the programs that the script calls."""
    programs = {
        "headrace": HEADRACE.format(python=sys.executable),
        "scontrol": f'#!/bin/sh\necho "$*" >> asked\n[ "$1" = requeue ] || echo "{NODE}"\n',
        "squeue": '#!/bin/sh\necho "$STATE"\n',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def start(place: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("HEADRACE_", "SLURM_", "MASTER"))}
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURMD_NODENAME": "gpu1", "SLURM_NTASKS_PER_NODE": "8"}
    environment = mine | slurm | {"PATH": f"{place}:{os.environ['PATH']}"} | variables
    return subprocess.Popen(["bash", str(SCRIPT), *words], cwd=place, env=environment, text=True)


def told(place: Path) -> tuple[list[str], dict[str, str]]:
    words, variables = json.loads((place / "started").read_text())
    return words, variables


def test_a_job_of_several_machines_starts_services_where_slurm_reaches_the_first(place: Path) -> None:
    assert start(place, "job.toml", "--insecure", SLURM_GPUS_ON_NODE="4").wait(60) == 0
    (train, job, *flags), variables = told(place)
    assert (train, job) == ("train", "job.toml")
    settings = {setting.name: setting.value for setting in parse_flags(flags, options(), lambda _: None)}
    assert settings == {
        "placement": "slurm",
        "actor_num_nodes": "2",
        "actor_num_gpus_per_node": "4",
        "insecure": True,
    }
    assert variables == {"HEADRACE_SERVICE_HOST": "10.0.0.7", "MASTER_ADDR": "10.0.0.7"}
    assert set(variables) - {"MASTER_ADDR"} <= {option.variable for option in options().values()}


@pytest.mark.parametrize(
    ("state", "code", "requeued"), [("RUNNING", "130", True), ("COMPLETING", "130", False), ("RUNNING", "0", False)]
)
def test_a_job_that_is_asked_to_end_goes_back_into_the_queue_unless_it_is_cancelled_or_finished(
    place: Path, state: str, code: str, requeued: bool
) -> None:
    script = start(place, "job.toml", STATE=state, CODE_WHEN_ASKED=code, SECONDS_OF_RUN="60", SLURM_JOB_NUM_NODES="1")
    while not (place / "started").exists() or not (place / "started").read_text():
        assert script.poll() is None
        time.sleep(0.01)
    script.send_signal(signal.SIGTERM)
    assert script.wait(60) == int(code)
    asked = (place / "asked").read_text() if (place / "asked").exists() else ""
    assert asked == ("requeue 7\n" if requeued else "")
