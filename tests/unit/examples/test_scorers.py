"""The examples' scorers of their own: a reward model that is trained on pairs, and a service that knows only protos."""

from __future__ import annotations

import asyncio
import json
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.api.reward.v1 import reward_pb2 as pb
from headrace.client.reward import RewardClient
from headrace.hooks.kit import SequenceClassifier
from headrace.rpc.net import free_port
from headrace.score import Score, ScoreError, ScoreItem, ScoreResult
from tests.support.models.chat_templates import make_chat_tokenizer
from tests.support.models.tiny_model import make_tiny_qwen3
from tests.support.processes.reward_server import served_reward

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


async def test_a_scorer_without_headrace_replaces_the_one_of_a_running_job(copied: Copied) -> None:
    if not PYTHON.exists():
        pytest.skip("`make protos` sets up a Python with gRPC and without headrace")
    folder, port = copied("reward_swap"), free_port()
    (folder / "stubs").mkdir()
    words = ["-I", str(ROOT / "protos"), "--python_out=stubs", "--grpc_python_out=stubs", *_STUBS]
    made = await asyncio.create_subprocess_exec(PYTHON, "-m", "grpc_tools.protoc", *words)
    assert await made.wait() == 0
    scorer = await asyncio.create_subprocess_exec(PYTHON, "scorer.py", f"127.0.0.1:{port}", env={"PYTHONPATH": "stubs"})
    try:
        async with served_reward(custom_rm_path=f"{folder}/rewards.py:any_number") as client:
            url = f"grpc://127.0.0.1:{port}"
            assert await close(client, "13") == Score(1.0, "custom", (await client.scorer_state()).live.version)
            await client.change_scorer(pb.ChangeScorerRequest(set=url))
            for response, reward in (("12", 1.0), (" 13", 0.5), ("twelve", 0.0)):
                assert await close(client, response) == Score(reward, "close", f"{url} 1")
            error = await close(client, "12", label=None)
            assert isinstance(error, ScoreError)
            assert error.reason == "ITEM_INVALID"
    finally:
        scorer.terminate()
        await scorer.wait()


async def close(client: RewardClient, response: str, label: str | None = "12") -> ScoreResult:
    (result,) = await client.score([ScoreItem("a", "7 + 5 =", response, label)], deadline_seconds=60)
    return result
