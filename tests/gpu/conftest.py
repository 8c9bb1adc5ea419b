"""Figures of `make gpu` are printed as rows of docs/performance.md. Steps that several parts look at run once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.gpu.devices import DEVICES, SIZES, Figure, Trained
from tests.support.ranks.device_case import run

_FIGURE = "figure"


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Figure:
    """`figure(what, figure, beside_what)` is a row of the table at the end."""
    return lambda *columns: record_property(_FIGURE, f"| {' | '.join(columns)} |")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports: Sequence[pytest.TestReport] = terminalreporter.getreports("passed")
    rows = [str(row) for report in reports for name, row in report.user_properties if name == _FIGURE]
    for line in ["", "| what | figure | beside what |", "|---|---|---|", *rows] if rows else []:
        terminalreporter.write_line(line)


@pytest.fixture(scope="session", params=DEVICES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp(request.param)
    size = SIZES[request.param]
    torch.manual_seed(3)
    model = Qwen3ForCausalLM(Qwen3Config(**size.config, tie_word_embeddings=True))
    model.to(torch.bfloat16).save_pretrained(folder / "model")
    del model
    case = size.case(folder / "model", bf16=True)
    result = run(case, folder / "bf16", device=request.param, timeout_seconds=600)
    assert result["device"] == request.param
    return Trained(request.param, size, folder / "model", result)
