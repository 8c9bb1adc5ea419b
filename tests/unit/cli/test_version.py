"""`headrace --version`."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from headrace.cli.main import main


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"headrace {version('headrace')}\n"
