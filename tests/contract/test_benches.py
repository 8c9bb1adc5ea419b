"""Benches in small: each prints its rows, with a baseline beside every figure. Their times are nobody's to check here.

`shard_puts` has a test of its own; those that are not here take minutes, or a model of their own.
"""

from __future__ import annotations

import functools
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.bench import evaluation, ledger_state_machine, ledger_throughput, overlap, planning
from tests.bench.ledger import tls_cost, waiters
from tests.bench.weights import delta

pytestmark = pytest.mark.timeout(300)

NUMBER = r"([\d,]+(?:\.\d+)?)"


def figures(pattern: str, said: str, count: int) -> list[float]:
    """The numbers in each of `count` matches of the pattern, whose `#` stand for them."""
    found = re.findall(re.escape(pattern).replace(r"\#", NUMBER).replace(r"\ ", r"\s+"), said)
    assert len(found) == count, said
    numbers = [float(n.replace(",", "")) for row in found for n in ([row] if isinstance(row, str) else row)]
    assert all(math.isfinite(number) for number in numbers)
    return numbers


def test_overlap(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["overlap", "--steps", "1", "--seconds", "0.1"])
    monkeypatch.setattr(overlap, "drop_logs", lambda: None)  # of this process: other tests read theirs
    overlap.main()
    said = capsys.readouterr().out
    assert all(seconds >= 0.1 for seconds in figures("alone # s", said, 2))
    assert all(number > 0 for number in figures("# s #×", said, 2))


def test_delta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    weights = {"a": torch.arange(1000.0), "b": torch.ones(24)}
    later = {name: tensor.clone() for name, tensor in weights.items()}
    later["a"][[0, 5, 900]] += 64.0  # distances of 1 byte, 1 byte and 2 bytes
    later["b"] += 1e-5  # less than bfloat16 holds
    for name, tensors in (("before", weights), ("after", later)):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    monkeypatch.setattr(sys, "argv", ["delta", str(tmp_path / "before"), str(tmp_path / "after")])
    delta.main()
    said = capsys.readouterr().out
    assert figures("# % of # values changed", said, 1) == [0.293, 1024.0]
    assert delta._listed_bytes(torch.tensor([0, 5, 900])) == 3 * 2 + 1 + 1 + 2
    assert len(figures("# MB #x of the whole", said, 3)) == 6


def test_evaluation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["evaluation", "--steps", "5", "--seconds", "0.1"])
    monkeypatch.setattr(evaluation, "drop_logs", lambda: None)
    evaluation.main()
    said = capsys.readouterr().out
    assert all(seconds >= 0.1 for seconds in figures("without evaluations # s", said, 1))
    numbers = figures("# s #× # evaluations", said, 2)
    assert all(number > 0 for number in numbers), "and each had a result"


def test_ledger_state_machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(ledger_state_machine, "SIZES", (256, 512))
    monkeypatch.setattr(sys, "argv", ["ledger_state_machine", "--steps", "3"])
    ledger_state_machine.main()
    said = capsys.readouterr().out
    rows = [[float(word.replace(",", "")) for word in line.split()] for line in said.splitlines()[2:-1]]
    assert [int(row[0]) for row in rows] == [256, 512]
    assert all(math.isfinite(look_up) and look_up > 0 and whole >= rest > 0 for _, whole, rest, look_up in rows)
    ratios = "most of least: #× a transition, #× without the collector's passes; baseline, a look-up in a bare dict: #×"
    assert all(ratio > 0 for ratio in figures(ratios, said, 1))


async def test_ledger_throughput(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ledger_throughput, "SIZES", (2_300, 18_000))
    monkeypatch.setattr(ledger_throughput, "NUM_SAMPLES", {2_300: 256, 18_000: 256})
    monkeypatch.setattr(ledger_throughput, "ROUNDS", 1)
    once = functools.partial(ledger_throughput.lease_batch_seconds, num_steps=1, asks=2)
    monkeypatch.setattr(ledger_throughput, "lease_batch_seconds", once)
    await ledger_throughput.main(None)
    said = capsys.readouterr().out
    figures("put headrace # append + fdatasync #: #× gRPC bytes #: #× Reverb: not measured", said, 2)
    figures("fetch headrace # gRPC bytes #: #× Reverb: not measured", said, 2)
    figures("CPU of client and server # µs a sample; gRPC bytes #", said, 2)
    figures("LeaseBatch of 1,024 × 8 samples: p50 # ms, p99 # ms (2 calls)", said, 1)


def test_planning(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(planning, "NUM_SAMPLES", 64)
    monkeypatch.setattr(planning.gc, "freeze", lambda: None)
    planning.main()
    rows = capsys.readouterr().out.splitlines()[1:-1]
    assert len(rows) == 2 * len(planning.draws()) * len(planning.PACKINGS) * len(planning.RANKS)
    for row in rows:
        first, most, micro, slime, work = (float(word) for word in row.split()[-5:])
        assert first >= 0
        assert most >= 0
        assert min(micro, slime) >= 1
        assert work >= 1 - 1e-4


async def test_tls_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tls_cost, "NUM_SAMPLES", {18_000: 128})
    monkeypatch.setattr(tls_cost, "ROUNDS", 1)
    await tls_cost.main()
    said = capsys.readouterr().out
    for what in ("put", "fetch"):
        rows = figures(f"{what} # a second #×, CPU # µs a sample #×", said, 3)
        assert all(number > 0 for number in rows)
        assert rows[1] == rows[3] == 1.0, "the first row is in clear"


async def test_waiters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    await waiters.run(num_waiters=400, num_calls=100, idle_seconds=0.1)
    said = capsys.readouterr().out
    sizes = figures("waiters: # MiB before, # MiB with them", said, 2)
    assert all(mib > 0 for mib in sizes)
    assert all(ms > 0 for ms in figures("groups arrive: p50 # ms, p99 # ms", said, 2))
    assert "memory of a waiter, of one with a call of its own: " in said
