"""HTTP proxies of the environment. A run's own addresses are reached directly; addresses of others keep the proxy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from headrace.rpc.net import Address

_VARIABLES = ("http_proxy", "https_proxy", "all_proxy")
NO_PROXY = "no_proxy"
"""Names the hosts that are asked directly."""
_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
_EVERYTHING = "*"


def direct_to(*hosts: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables for a process that a run starts: what it asks on this machine and at `hosts` goes through no proxy.

    They keep the hosts that `no_proxy` names already. Clients read either spelling, so both are set.
    """
    given = [host.strip() for host in _value(NO_PROXY, environment).split(",") if host.strip()]
    if _EVERYTHING in given:
        return _both(_EVERYTHING)
    return _both(",".join(dict.fromkeys([*given, *_THIS_MACHINE, *(host.strip("[]") for host in hosts)])))


def direct_to_all() -> dict[str, str]:
    """Variables for a process that asks only addresses of the run: it has no proxy at all.

    `no_proxy=*` would not do: reqwest, Rust's client, applies it to names and not to numeric addresses.
    """
    return {name: "" for each in _VARIABLES for name in (each, each.upper())}


def is_here(url: str) -> bool:
    host = urlsplit(url).hostname
    return host is not None and Address(host, 0).is_loopback


def uses_proxy(url: str) -> bool:
    """True where Python's own client asks the URL through a proxy of this process's environment."""
    place, found = urlsplit(url), getproxies()
    has_one = place.scheme in found or "all" in found
    return has_one and not is_here(url) and not proxy_bypass(place.netloc.rpartition("@")[2])


def proxies(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The proxies that are set, by variable, without their passwords."""
    found = {name: _value(name, environment) for name in (*_VARIABLES, NO_PROXY)}
    return {name: _without_password(value) for name, value in found.items() if value}


def _value(name: str, environment: Mapping[str, str]) -> str:
    """The lower-case spelling comes first, as in Python's own clients."""
    return environment.get(name) or environment.get(name.upper(), "")


def _both(hosts: str) -> dict[str, str]:
    return {NO_PROXY: hosts, NO_PROXY.upper(): hosts}


def _without_password(value: str) -> str:
    login, at, place = value.rpartition("@")
    return f"{login.partition('://')[0]}://…@{place}" if at and "://" in login else f"…@{place}" if at else value
