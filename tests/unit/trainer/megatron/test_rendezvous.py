"""Where ranks look for each other, and what they say when they do not find anybody."""

from __future__ import annotations

import datetime
import os
import socket
from pathlib import Path

import pytest

from headrace.errors import ConfigError, DeadlineExceeded
from services.trainer.megatron import rendezvous


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


def test_ranks_of_several_machines_meet_on_the_interface_that_leads_to_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rendezvous.listen_towards("127.0.0.1")
    assert "GLOO_SOCKET_IFNAME" not in os.environ, "one machine needs none"
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    rendezvous.listen_towards("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    rendezvous.listen_towards("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"


def test_a_rank_zero_that_never_comes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rendezvous.RENDEZVOUS, str(tmp_path / "meet"))
    monkeypatch.setattr(rendezvous, "_WAIT", datetime.timedelta(seconds=0.2))
    with pytest.raises(DeadlineExceeded, match="rank 0 did not write .*meet within 0 s: see its log"):
        rendezvous.join(1, 2, "gloo", datetime.timedelta(seconds=1))
