"""`headrace check hook` on code as the user's documents write it."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.cli.main import main

REWARDS = """
async def reward_func(args, sample, **kwargs) -> float:
    return 1.0 if sample.response.strip() == sample.label.strip() else 0.0

async def batched_custom_rm(args, samples) -> list[float]:
    return [await reward_func(args, sample) for sample in samples]

class CustomRewardModel:
    def __init__(self, model_path):
        self.path = model_path

    def compute_reward(self, prompts, responses):
        return [float(len(self.path)) for _ in prompts]

class Needy(CustomRewardModel):
    def __init__(self, model_path):
        self.path = open(model_path + "/weights").read()

    def compute_reward(self, prompts, responses):
        return [1.0 for _ in prompts]

def raises(args, sample):
    raise KeyError("answer")

def post_process(args, samples):
    return [s.reward for s in samples], [0.5 for _ in samples]
"""
GENERATES = """
import json
import urllib.request

async def custom_generate(args, samples, evaluation=False):
    for sample in samples:
        for turn in range(args.max_turns):
            sample.response = "an answer"
        sample.reward = 1.0
    return samples

async def generate(args, sample, sampling_params, evaluation=False):
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    asked = json.dumps({"text": sample.prompt, "sampling_params": sampling_params, "return_logprob": True})
    answer = json.loads(urllib.request.urlopen(urllib.request.Request(url, data=asked.encode())).read())
    sample.tokens = [1, 2, 3, *answer["output_ids"]]
    sample.response, sample.response_length = answer["text"], len(answer["output_ids"])
    sample.rollout_log_probs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    sample.update_from_meta_info(args, answer["meta_info"])
    return sample
"""
AGENTS = """
from openai import AsyncOpenAI

async def run(args, task, base_url):
    async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
        made = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": task.prompt}])
    return 1.0 if task.label == made.choices[0].message.content else None

async def judged(args, task, base_url):
    pass
"""


@pytest.fixture
def hooks(tmp_path: Path) -> Path:
    (tmp_path / "rm.py").write_text(REWARDS)
    (tmp_path / "gen.py").write_text(GENERATES)
    (tmp_path / "agent.py").write_text(AGENTS)
    return tmp_path


@pytest.mark.parametrize(
    ("hook", "flags", "code", "parts"),
    [
        ("rm.py:reward_func", (), 0, ["is a reward function", "scores 4 sample responses: [1.0, 0.0, 0.0, 0.0]"]),
        ("rm.py:batched_custom_rm", (), 0, ["is a group_reward function", "[1.0, 0.0, 0.0, 0.0]"]),
        ("rm.py:CustomRewardModel", ("--reward-model-path", "/folder"), 0, ["[7.0, 7.0, 7.0, 7.0]"]),
        ("rm.py:Needy", (), 1, ["weights", "name its own with --reward-model-path FOLDER or --job JOB.toml"]),
        ("rm.py:raises", (), 1, ["ok      loads", "raised KeyError: 'answer'"]),
        ("rm.py:post_process", ("--kind", "reward_post_process"), 0, ["makes [0.5, 0.5, 0.5, 0.5] of the rewards"]),
        ("gen.py:generate", (), 0, ["is a generate function", "2 samples of 2 prompts: 4 response tokens, 4 of them"]),
        ("agent.py:run", (), 0, ["is an agent", "plays a prompt: reward 1.0"]),
        ("agent.py:judged", (), 0, ["is an agent", "leaves its reward to the scorer"]),
        ("gen.py:custom_generate", (), 1, ["is a generate function", "cannot be trained: status is still PENDING"]),
        ("gen.py:custom_generate", ("--job", "job.toml"), 1, ["cannot be trained: status is still PENDING"]),
    ],
)
def test_a_hook_is_tried_as_the_documents_write_it(
    hooks: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    hook: str,
    flags: tuple[str, ...],
    code: int,
    parts: list[str],
) -> None:
    monkeypatch.chdir(hooks)
    (hooks / "job.toml").write_text(
        '[model]\nhf_checkpoint = "m"\n[rollout]\nrollout_batch_size = 2\nn_samples_per_prompt = 2\nmax_turns = 3\n'
    )
    assert main(["check", "hook", hook, *flags]) == code
    printed, logged = capfd.readouterr()
    assert all(part in printed for part in parts), printed
    assert all(line.startswith(("ok      ", "failed  ")) for line in printed.splitlines())
    assert logged == ""


def test_a_file_alone_tries_each_hook_in_it(hooks: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "hook", str(hooks / "gen.py")]) == 1
    printed = capfd.readouterr().out
    assert [line.rpartition(":")[2] for line in printed.splitlines() if line.startswith("/")] == [
        "custom_generate",
        "generate",
    ]
    assert "judges" not in printed
