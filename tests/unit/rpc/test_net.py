"""Ports for services that listen later."""

from __future__ import annotations

import socket

import pytest

from headrace.rpc.net import free_port


def test_a_free_port_is_given_to_one_caller_only_and_a_server_may_listen_there() -> None:
    port = free_port()
    with socket.socket() as another, pytest.raises(OSError, match="in use"):
        another.bind(("127.0.0.1", port))  # as free_port asks
    with socket.create_server(("127.0.0.1", port)):
        pass
