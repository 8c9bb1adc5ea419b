"""The examples' scorers of their own: a reward model that is trained on pairs, and a service that knows only protos."""

from __future__ import annotations

import asyncio
import json
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.hooks import HookArgs, Sample
from headrace.hooks.kit import SequenceClassifier
from headrace.hooks.load import load_hook
from headrace.rpc.net import free_port
from tests.support.models.chat_templates import make_chat_tokenizer
from tests.support.models.tiny_model import make_tiny_qwen3

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-protos" / "bin" / "python"
"""It has gRPC, and no headrace."""
_STUBS = ("headrace/api/reward/v1/reward.proto", "headrace/api/sample/v1/sample.proto")
Copied = Callable[[str], Path]


def test_a_reward_model_prefers_what_its_pairs_prefer(copied: Copied, tmp_path: Path) -> None:
    folder, model = copied("reward_model"), make_tiny_qwen3(tmp_path / "model")
    make_chat_tokenizer("smollm2").save_pretrained(model)
    made = runpy.run_path(str(folder / "reward_model.py"))
    made["main"].__globals__["MODEL"] = model
    made["main"]()
    classifier = SequenceClassifier(str(folder / "reward-model"))
    pairs = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()][:24]
    prompts = [pair["chosen"][:1] for pair in pairs]
    chosen, rejected = (
        classifier.compute_reward(prompts, [pair[name][1]["content"] for pair in pairs])
        for name in ("chosen", "rejected")
    )
    assert sum(better > worse for better, worse in zip(chosen, rejected, strict=True)) >= 20


async def test_a_scorer_without_headrace_scores_a_running_job(copied: Copied, monkeypatch: pytest.MonkeyPatch) -> None:
    if not PYTHON.exists():
        pytest.skip("`make protos` sets up a Python with gRPC and without headrace")
    folder, port = copied("reward_swap"), free_port()
    (folder / "stubs").mkdir()
    words = ["-I", str(ROOT / "protos"), "--python_out=stubs", "--grpc_python_out=stubs", *_STUBS]
    made = await asyncio.create_subprocess_exec(PYTHON, "-m", "grpc_tools.protoc", *words)
    assert await made.wait() == 0
    of_scorer = load_hook(f"{folder}/rewards.py:of_scorer")
    monkeypatch.setitem(of_scorer.target.__globals__, "SCORER", f"127.0.0.1:{port}")
    scorer = await asyncio.create_subprocess_exec(PYTHON, "scorer.py", f"127.0.0.1:{port}", env={"PYTHONPATH": "stubs"})
    try:
        for response, reward in (("12", 1.0), (" 13", 0.5), ("twelve", 0.0)):
            sample = Sample(prompt="7 + 5 =", response=response, label="12")
            assert await of_scorer.target(HookArgs({}), sample) == reward
        with pytest.raises(RuntimeError):
            await of_scorer.target(HookArgs({}), Sample(prompt="7 + 5 =", response="12"))
    finally:
        scorer.terminate()
        await scorer.wait()
