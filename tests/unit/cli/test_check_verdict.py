"""What `headrace check` says first and last: for which machine it checked, and whether a start would work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli.main import main
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


@pytest.mark.parametrize(
    ("flags", "warned"),
    [
        (["--lr", "0"], "lr 0: the policy never changes"),
        (["--advantage-estimator", "ppo", "--critic-lr", "0"], "critic_lr 0: the critic never changes"),
    ],
)
def test_a_learning_rate_of_0_is_warned_of(
    job_file: Path, capsys: pytest.CaptureFixture[str], flags: list[str], warned: str
) -> None:
    one_sample = ["--n-samples-per-prompt", "1", "--num-steps-per-rollout", "1"] if "sft_loss" in flags else []
    assert main(["check", str(job_file), *SERVICES, *flags, *one_sample]) == 0
    assert warned in said(capsys)


@pytest.mark.parametrize("cpu", ["fpu sse2 avx2", "fpu avx512f avx512_vnni amx_int8", "fpu"])
def test_bfloat16_is_called_slow_on_a_cpu_without_its_instructions(
    job_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, cpu: str
) -> None:
    read_text = Path.read_text

    def with_this_cpu(path: Path, *args: object, **kwargs: object) -> str:
        return f"flags : {cpu}" if str(path) == "/proc/cpuinfo" else read_text(path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "read_text", with_this_cpu)
    monkeypatch.setattr("headrace.job.rules.warnings.num_gpus", lambda: 0, raising=False)
    main(["check", str(job_file), *SERVICES, "--bf16"])
    assert "bf16 on this machine is slower than float32" in said(capsys)
    main(["check", str(job_file), *SERVICES])
    assert "slower" not in said(capsys)


@pytest.mark.parametrize(
    ("model_name", "flags", "needed"),
    [
        ("llama3.3-70B", ["--elsewhere"], "1 trainer rank of about 1,129 GB"),
        ("mistral-small-24B", ["--lora-rank", "8", "--elsewhere"], "1 trainer rank of about 94 GB"),
    ],
)
def test_the_memory_of_a_job_is_compared_with_this_machines(
    job_file: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    model_name: str,
    flags: list[str],
    needed: str,
) -> None:
    monkeypatch.setattr("headrace.cli.view.plan.num_gpus", lambda: 0, raising=False)
    config = {**find(model_name).config, "rope_scaling": None}
    (model / "config.json").write_text(json.dumps(config))
    (model / "model.safetensors").unlink()
    main(["check", str(job_file), *SERVICES, *flags])
    lines = said(capsys)
    assert needed in lines
    assert "and this machine has" in lines


SLIMES = "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (SLIMES, "optimizer_cpu_offload, overlap_cpu_optimizer_d2h_h2d, use_precision_aware_optimizer: without effect"),
        ("--no-check-for-nan-in-loss-and-grad", ""),
    ],
)
def test_slimes_flags_for_the_optimizers_states_are_taken_and_said_to_do_nothing_on_a_cpu(
    job_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: str, named: str
) -> None:
    for module in ("job.rules.training", "job.rules.warnings"):
        monkeypatch.setattr(f"headrace.{module}.num_gpus", lambda: 0, raising=False)
    assert main(["check", str(job_file), *SERVICES, *flags.split()]) == 0
    assert named in said(capsys)


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        (SLIMES, "--optimizer-cpu-offload, --use-precision-aware-optimizer"),
        ("--use-precision-aware-optimizer --use-distributed-optimizer", "--use-precision-aware-optimizer"),
        ("--no-optimizer-cpu-offload", None),
    ],
)
def test_on_a_gpu_states_that_no_checkpoint_holds_are_refused(
    job_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: str, refused: str | None
) -> None:
    for module in ("job.rules.training", "job.rules.warnings"):
        monkeypatch.setattr(f"headrace.{module}.num_gpus", lambda: 8, raising=False)
    assert main(["check", str(job_file), *SERVICES, *flags.split()]) == (2 if refused else 0)
    if refused:
        told = " ".join(capsys.readouterr().err.split())
        assert f"{refused}: on a GPU the optimizer's states then have a form that headrace's checkpoints cannot" in told
