"""`python -m pytest` in this folder: what the function pays, and whether the service keeps its promises."""

import asyncio
import socket
import subprocess

import pytest
from reward import reward

from headrace.hooks import Sample


@pytest.mark.parametrize(("response", "expected"), [("7", 1.0), (" 7\n", 1.0), ("8", 0.1), ("seven", 0.0), ("", 0.0)])
def test_a_response_is_paid(response, expected):
    sample = Sample(prompt="3 + 4 =", response=response, label="7")
    assert asyncio.run(reward(None, sample)) == expected


def test_the_service_keeps_its_promises():
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    service = subprocess.Popen(["headrace", "reward", "serve", "reward.py:reward", "--address", address])
    try:
        assert subprocess.run(["headrace", "conformance", "reward", address], timeout=300).returncode == 0
    finally:
        service.terminate()
        service.wait(30)
