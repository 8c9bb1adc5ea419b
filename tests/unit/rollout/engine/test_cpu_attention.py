"""Attention of CPU engines, which repeats no work, against SGLang's own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import torch

from services.rollout.engine.cpu.attention import decoded


def test_attention_is_sglangs() -> None:
    program = [sys.executable, "-W", "ignore", "-m", "tests.support.engines.attention_cases"]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    differences = json.loads(done.stdout.splitlines()[-1])
    assert len(differences) == 8
    assert {case: value for case, value in differences.items() if not value < 1e-6} == {}  # not NaN either


def test_one_long_request_beside_short_ones_is_left_to_sglang() -> None:
    asked: list[Any] = []
    lengths, query, cache = torch.tensor([2] * 7 + [90]), torch.zeros(8, 2, 8), torch.zeros(200, 2, 8)
    rest: Any = (query, query, cache, cache, torch.zeros(8, 128), torch.arange(8), lengths, None)
    decoded(lambda *_, **named: asked.append(named), None, *rest, scaling=0.1)
    assert asked == [{"scaling": 0.1}]
