"""`headrace serve tinker` whole: Tinker's client, a Megatron rank and an SGLang engine, against peft; and a kill."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import tinker
import torch
from peft import PeftModel
from tinker import types
from transformers import AutoModelForCausalLM

from headrace.rpc.net import free_port
from tests.support.engine_stack import hugging_face_log_probs
from tests.support.models.tiny_model import make_tiny_qwen3
from tests.support.processes.training_run import TrainingRun

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore::FutureWarning")]
TOKENS = [5, 17, 42, 9, 77, 30, 8]
PROMPT = [5, 17, 42]


class TinkerRun(TrainingRun):
    """`headrace serve tinker` over a tiny model, with one engine and one rank."""

    def __init__(self, folder: Path, port: int) -> None:
        super().__init__(folder, make_tiny_qwen3(folder / "model"), name="tinker")
        self.command = [
            *(sys.executable, "-m", "headrace.cli.main", "serve", "tinker", "--run-name", "tinker"),
            *("--run-dir", str(folder / "runs"), "--hf-checkpoint", str(folder / "model"), "--tinker-port", str(port)),
            *("--lora-rank", "8"),
        ]
        self.url = f"http://127.0.0.1:{port}"

    def kill_rank(self) -> None:
        """Kill -9 of the process that trains; the launcher starts it again."""
        trainer = self.folder.services()["trainer"].pid
        assert trainer is not None
        ranks = [
            each for each in psutil.Process(trainer).children(recursive=True) if "services.trainer" in each.cmdline()
        ]
        (ranks[0] if ranks else psutil.Process(trainer)).send_signal(signal.SIGKILL)


def _trained(service: tinker.ServiceClient, steps: int, between: Any = lambda: None) -> tuple[Any, list[float]]:
    training = service.create_lora_training_client(base_model="model", rank=4, seed=7).result()
    weights = [1.0] * (len(TOKENS) - 1)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={"target_tokens": TOKENS[1:], "weights": weights},  # type: ignore[dict-item]  # it converts lists
    )
    losses = []
    for step in range(steps):
        passed = training.forward_backward([datum] * 2, "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=1e-2))
        if step == 1:
            between()
        losses.append(passed.result().metrics["loss:sum"])
        stepped.result()
    return training, losses


def _use(run: TinkerRun) -> None:
    service = tinker.ServiceClient(base_url=run.url, api_key="tml-test")
    training, losses = _trained(service, 4)
    assert losses[-1] < losses[0]
    _, again = _trained(service, 4, run.kill_rank)
    assert again == losses, "a kill changes nothing"
    path = training.save_weights_for_sampler("trained").result().path
    sampler = service.create_sampling_client(model_path=path).result()
    reply = sampler.sample(types.ModelInput.from_ints(PROMPT), 2, types.SamplingParams(max_tokens=6)).result()
    adapter = run.folder.path / "weights" / "tinker" / "checkpoints" / path.removeprefix("tinker://")
    checkpoint = Path(run.command[run.command.index("--hf-checkpoint") + 1])
    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, adapter).eval()
    for sequence in reply.sequences:
        expected = hugging_face_log_probs(model, PROMPT, list(sequence.tokens))
        assert torch.tensor(sequence.logprobs) == pytest.approx(expected, abs=2e-4)
    scored = sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()
    expected = hugging_face_log_probs(model, TOKENS[:1], TOKENS[1:])
    assert torch.tensor(scored[1:]) == pytest.approx(expected, abs=2e-4)
    passed = training.forward(
        [types.Datum(
            model_input=types.ModelInput.from_ints(TOKENS[:-1]),
            loss_fn_inputs={"target_tokens": TOKENS[1:], "weights": [1.0] * (len(TOKENS) - 1)},  # type: ignore[dict-item]  # it converts lists
        )],
        "cross_entropy",
    ).result()  # fmt: skip
    assert torch.tensor(passed.loss_fn_outputs[0]["logprobs"].tolist()) == pytest.approx(expected, abs=2e-4)
    service.close("success").result()


async def test_a_client_trains_and_samples_as_peft_computes_and_a_kill_of_the_trainer_changes_nothing(
    tmp_path: Path,
) -> None:
    run = TinkerRun(tmp_path, free_port())
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    async with run.started():
        await run.until_told("trainer ready")
        await asyncio.to_thread(_use, run)
