"""Ranks of several machines that look for each other: where, with the same job, and who is said to be missing."""

from __future__ import annotations

import datetime
import json
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from headrace.errors import ConfigError, DeadlineExceeded
from services.trainer.megatron import rendezvous
from tests.support.processes.training_run import ROOT


@pytest.fixture(autouse=True)
def no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "MASTER_ADDR",
        "MASTER_PORT",
        "GLOO_SOCKET_IFNAME",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        rendezvous.RENDEZVOUS,
    ):
        monkeypatch.setenv(name, "")  # so that what a test leaves there is taken away
        monkeypatch.delenv(name)


@pytest.fixture
def name_means_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """On each of two machines with two ranks."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)


@pytest.mark.usefixtures("name_means_loopback")
def test_on_several_machines_a_name_that_means_loopback_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"means 127\.0\.1\.1, which other machines cannot reach: set MASTER_ADDR"):
        rendezvous.own_host()
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.7")
    assert rendezvous.own_host() == "10.0.0.7"
    listens, real = ("127.0.1.1", 0), socket.create_server
    monkeypatch.setattr(socket, "create_server", lambda _, **options: real(listens, **options))
    with pytest.raises(ConfigError, match=r"trainer-0 means 127\.0\.1\.1 on this machine.*: set MASTER_ADDR"):
        rendezvous.listener("trainer-0")


def test_a_rank_zero_that_never_comes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rendezvous.RENDEZVOUS, str(tmp_path / "meet"))
    monkeypatch.setattr(rendezvous, "_WAIT", datetime.timedelta(seconds=0.2))
    with pytest.raises(DeadlineExceeded, match="rank 0 did not write .*meet within 0 s: see its log"):
        rendezvous.join(1, 2, "gloo", datetime.timedelta(seconds=1))


ENOUGH, LONGER, SHORT = 120.0, 15.0, 3.0
SLOW, FAST = {"train.lr": "0.1"}, {"train.lr": "0.2"}
MACHINES = (
    ("alike", 0, 2, SLOW, ENOUGH),
    ("alike", 1, 2, SLOW, ENOUGH),
    ("other job", 0, 3, SLOW, ENOUGH),
    ("other job", 1, 3, FAST, ENOUGH),
    ("other job", 2, 3, SLOW, ENOUGH),
    ("missing", 0, 3, SLOW, SHORT),
    ("missing", 1, 3, SLOW, LONGER),
    ("both first", 0, 2, SLOW, SHORT),
    ("both first", 0, 2, SLOW, SHORT),
)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Sequence[str]]:
    """What the machines of each meeting said at their ends; all meetings are at the same time."""
    folder = tmp_path_factory.mktemp("machines")
    words = (sys.executable, "-m", "tests.support.processes.machines_that_meet", str(folder), json.dumps(MACHINES))
    subprocess.run(words, cwd=ROOT, check=True, timeout=240)
    found: dict[str, list[str]] = {}
    for number, (meeting, *_) in enumerate(MACHINES):
        found.setdefault(meeting, []).append((folder / str(number)).read_text())
    return found


def test_machines_with_the_same_options_meet(said: Mapping[str, Sequence[str]]) -> None:
    assert said["alike"] == ["met", "met"]


def test_different_jobs_are_refused_on_every_machine_with_what_differs(said: Mapping[str, Sequence[str]]) -> None:
    for words in said["other job"]:
        assert words.startswith("ConfigError rank 1 was started with other options than rank 0")
        assert "train.lr 0.2 in place of 0.1: give all machines the same job" in words


def test_a_machine_that_never_comes_is_named_and_everybody_ends(said: Mapping[str, Sequence[str]]) -> None:
    """On a busy machine others may be late, too."""
    first, *others = said["missing"]
    assert re.match(r"DeadlineExceeded ranks \[(1, )?2\] are not at 127\.0\.0\.1:\d+ after 3 s", first)
    assert "on each machine with its own --node-rank" in first
    for words in others:
        assert words == first or re.match(r"Unavailable (rank 0|the ranks)", words)


def test_two_machines_that_both_say_they_are_the_first_are_told_so(said: Mapping[str, Sequence[str]]) -> None:
    waited, refused = sorted(said["both first"])
    assert waited.startswith("DeadlineExceeded ranks [1] are not at")
    assert refused.startswith("Unavailable 127.0.0.1")
    assert "is taken: end the process that listens there (another machine 0?)" in refused
