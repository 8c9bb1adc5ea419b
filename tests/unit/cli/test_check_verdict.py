"""What `headrace check` says first and last: for which machine it checked, and whether a start would work."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.errors import ConfigError
from headrace.job.rules.rules import warnings
from headrace.models.registry import find

SERVICES = [f"--{name}-address=127.0.0.1:70{at}" for at, name in enumerate(("buffer", "reward", "rollout"), 10)]
"""Services that start here are checked by processes of their own, which take seconds."""


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--bf16"], "it has --bf16, and this machine has no GPU"),
        (["--elsewhere"], "--elsewhere"),
        (["--sglang-mem-fraction-static", "0.7"], "it has --sglang-mem-fraction-static"),
    ],
)
def test_the_first_line_says_that_a_job_is_checked_for_another_machine(
    job_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: list[str], why: str
) -> None:
    monkeypatch.setattr("headrace.job.rules.scope.num_gpus", lambda: 0)
    main(["check", str(job_file), *SERVICES, *flags])
    lines = said(capsys)
    first, verdict = lines.partition(" run ")[0], lines[-60:]
    assert first.startswith("This job is checked for another machine (")
    assert why in first
    assert "nothing prevents a start" not in verdict


def test_a_job_for_this_machine_has_no_such_line(job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(job_file), *SERVICES]) == 0
    lines = said(capsys)
    assert lines.startswith("run ")
    assert lines.endswith("nothing prevents a start")


@pytest.mark.parametrize(
    "script",
    [
        "echo 'Traceback (most recent call last):' >&2; echo 'KeyError: 7' >&2; exit 1",
    ],
)
@pytest.mark.parametrize("service", ["reward", "buffer"])
def test_a_check_that_breaks_is_no_check_that_found_nothing(
    job_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], service: str, script: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    elsewhere = [flag for flag in SERVICES if not flag.startswith(f"--{service}")]
    assert main(["check", str(job_file), *elsewhere, f"--{service}-python", str(python)]) != 0
    assert "nothing prevents a start" not in said(capsys)


SLIMES = "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer"


@pytest.mark.parametrize(
    ("flags", "warned"),
    [
        ("--lr 0", "lr 0: the policy never changes"),
        ("--advantage-estimator ppo --critic-lr 0", "critic_lr 0: the critic never changes"),
        ("--bf16", "bf16 on this machine is slower than float32"),
        (SLIMES, "optimizer_cpu_offload, overlap_cpu_optimizer_d2h_h2d, use_precision_aware_optimizer: without effect"),
        ("--no-check-for-nan-in-loss-and-grad", None),
    ],
)
def test_what_changes_nothing_or_is_slow_on_a_cpu_is_warned_of(
    load_with, monkeypatch: pytest.MonkeyPatch, flags: str, warned: str | None
) -> None:
    for module in ("training", "rules"):
        monkeypatch.setattr(f"headrace.job.rules.{module}.num_gpus", lambda: 0)
    monkeypatch.setattr("headrace.job.rules.rules.cpu_has_bfloat16", lambda: False)
    found = warnings(load_with(*flags.split()))
    assert [warned] == [sentence[: len(warned)] for sentence in found] if warned else found == []


@pytest.mark.parametrize(
    ("model_name", "flags", "needed"),
    [
        ("llama3.3-70B", ["--elsewhere"], ["1 trainer rank of about 1,129 GB"]),
        (
            "mistral-small-24B",
            ["--lora-rank", "8", "--elsewhere"],
            ["1 trainer rank of about 95 GB", "46,202,880 trained parameters, 0.20% of 23,572,403,200"],
        ),
    ],
)
def test_the_memory_of_a_job_is_compared_with_this_machines(
    job_file: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    model_name: str,
    flags: list[str],
    needed: list[str],
) -> None:
    monkeypatch.setattr("headrace.cli.view.plan.num_gpus", lambda: 0, raising=False)
    config = {**find(model_name).config, "rope_scaling": None}
    (model / "config.json").write_text(json.dumps(config))
    (model / "model.safetensors").unlink()
    main(["check", str(job_file), *SERVICES, *flags])
    lines = said(capsys)
    assert all(each in lines for each in needed)
    assert "and this machine has" in lines


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        (f"{SLIMES} --bf16 --use-distributed-optimizer", None),
        (f"{SLIMES} --bf16", "--optimizer-cpu-offload: .* pass --use-distributed-optimizer"),
        ("--optimizer-cpu-offload --use-distributed-optimizer", "--optimizer-cpu-offload: .* pass --bf16"),
        ("--optimizer-cpu-offload --optimizer-offload-fraction 0.5", "--optimizer-offload-fraction 0.5: "),
        ("--use-precision-aware-optimizer --use-distributed-optimizer", "--use-precision-aware-optimizer: on a GPU"),
        ("--no-optimizer-cpu-offload", None),
    ],
)
def test_on_a_gpu_states_that_no_checkpoint_holds_are_refused(
    load_with, monkeypatch: pytest.MonkeyPatch, flags: str, refused: str | None
) -> None:
    for module in ("training", "rules"):
        monkeypatch.setattr(f"headrace.job.rules.{module}.num_gpus", lambda: 8)
    with pytest.raises(ConfigError, match=f"^{refused}") if refused else nullcontext():
        load_with(*flags.split())
