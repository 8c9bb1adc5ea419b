"""Ports for services that listen later."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from headrace.rpc.net import free_port


def test_a_free_port_is_none_that_the_kernel_gives_to_outgoing_connections() -> None:
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = [free_port() for _ in range(20)]
    assert len(set(ports)) > 1
    assert all(port < low for port in ports)
    with socket.create_server(("127.0.0.1", ports[0])):
        pass


def test_a_free_port_is_given_to_one_caller_only_and_a_server_may_listen_there() -> None:
    port = free_port()
    with socket.socket() as another, pytest.raises(OSError, match="in use"):
        another.bind(("127.0.0.1", port))  # as free_port asks
    with socket.create_server(("127.0.0.1", port)):
        pass
