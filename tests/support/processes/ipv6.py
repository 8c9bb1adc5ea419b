"""The mark of tests that need a socket on `::` which takes IPv4's connections too."""

from __future__ import annotations

import contextlib
import socket

import pytest


def _has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


needs_both_families = pytest.mark.skipif(
    not (_has_ipv6() and socket.has_dualstack_ipv6()), reason="no socket for both families here"
)
