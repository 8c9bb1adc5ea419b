"""Tests that `make chaos` runs and `make test` leaves out: slow ones, of what shorter ones hold in parts.

`make chaos` runs each file below unit, contract and e2e that imports this one.
"""

from __future__ import annotations

import os

import pytest

ALL = os.environ.get("HEADRACE_WHOLE_RUNS") == "all"
whole_run = pytest.mark.skipif(not ALL, reason="long: make chaos sets HEADRACE_WHOLE_RUNS")
