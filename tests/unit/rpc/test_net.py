"""Which of several addresses is this machine's, and at which one others reach it."""

from __future__ import annotations

import socket

import pytest

from headrace.errors import ConfigError, Unavailable
from headrace.process.computing import gloo_at
from headrace.rpc.client import _target
from headrace.rpc.net import Address, free_port, host_towards, own_place

ELSEWHERE = "203.0.113.7"  # of a documentation network (RFC 5737): no machine's


def test_a_server_and_its_standby_share_an_address_and_each_listens_at_its_own_place() -> None:
    assert own_place(f"{ELSEWHERE}:1|127.0.0.1:2") == Address("127.0.0.1", 2)
    assert own_place(f"127.0.0.2:1|{ELSEWHERE}:2") == Address("127.0.0.2", 1)
    assert own_place("buffer.example:7001") == Address("buffer.example", 7001)  # one place needs no look-up
    with pytest.raises(ConfigError, match="no place of .* is an address of this machine"):
        own_place(f"{ELSEWHERE}:1|{ELSEWHERE}:2")


def test_a_peer_is_told_the_address_on_the_way_to_it_and_not_what_the_machines_name_means() -> None:
    assert host_towards(Address("127.0.0.1", 9)) == "127.0.0.1"
    assert host_towards(Address("localhost", 9)) in ("127.0.0.1", "::1")
    with pytest.raises(Unavailable, match=r"no\.such\.host\.invalid is no name of a machine here"):
        host_towards(Address("no.such.host.invalid", 9))


@pytest.mark.parametrize(
    ("listens", "reached"), [("0.0.0.0:7", "127.0.0.1:7"), ("[::]:7", "[::1]:7"), ("10.0.0.1:7", "10.0.0.1:7")]
)
def test_a_server_on_all_interfaces_is_reached_over_loopback(listens: str, reached: str) -> None:
    assert str(Address.parse(listens).from_here) == reached


def test_places_of_one_address_are_of_the_first_ones_family() -> None:
    assert _target("127.0.0.1:1|127.0.0.2:2") == "ipv4:127.0.0.1:1,127.0.0.2:2"
    if socket.has_ipv6:
        assert _target("[::1]:1|[::1]:2") == "ipv6:[::1]:1,[::1]:2"
    assert _target("buffer:7001") == "buffer:7001"


def test_gloo_listens_at_a_name_too() -> None:
    assert gloo_at("localhost", {}) == {"GLOO_SOCKET_IFNAME": "lo"}
    assert gloo_at("localhost", {"GLOO_SOCKET_IFNAME": "ib0"}) == {}
    assert gloo_at(ELSEWHERE, {}) == {}


def test_a_free_port_is_given_to_one_caller_only_and_a_server_may_listen_there() -> None:
    port = free_port()
    with socket.socket() as another, pytest.raises(OSError, match="in use"):
        another.bind(("127.0.0.1", port))  # as free_port asks
    with socket.create_server(("127.0.0.1", port)):
        pass
