"""Functions that are written for slime, as its examples are: its names are headrace's, and they run."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.cli.main import main

APPENDS = """
from NAMES_STATE import GenerateState
from NAMES_HTTP import post
from NAMES_SAMPLE import Sample

async def generate(args, sample, sampling_params):
    state = GenerateState(args)
    params = {**state.sampling_params, **sampling_params}
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    sample.tokens = list(state.tokenizer.encode(sample.prompt))
    for turn in range(3):
        made = await post(url, {"input_ids": sample.tokens, "sampling_params": params, "return_logprob": True})
        pairs = made["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            args, tokens=[each[1] for each in pairs], log_probs=[each[0] for each in pairs], trainable=True,
            meta_info=made["meta_info"], text=made["text"])
        seen = state.tokenizer.encode(" go on ")
        given = {"log_probs": [0.0] * len(seen)} if turn else {}
        sample.append_response_tokens(args, tokens=seen, trainable=False, text=" go on ", **given)
    assert sample.loss_mask[-len(seen):] == [0] * len(seen) and sum(sample.loss_mask) == 3 * len(pairs)
    assert len(sample.rollout_log_probs) == len(sample.loss_mask) == sample.response_length
    assert sample.response == "7 go on 7 go on 7 go on " and sample.status is Sample.Status.COMPLETED
    return sample
"""
FANS_OUT = """
import copy

from NAMES_SAMPLE import Sample

async def generate(args, sample, sampling_params):
    from NAMES_STATE import generate as once

    first = await once(args, sample, sampling_params)
    others = [copy.deepcopy(first) for _ in range(sample.index)]
    return [first, *others]
"""
FILTERS = """
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.filter_hub.dynamic_sampling_filters import check_reward_nonzero_std
from slime.utils.types import Sample

def generous(args, samples: list[Sample], **kwargs):
    found = check_reward_nonzero_std(args, samples, **kwargs)
    return DynamicFilterOutput(keep=found.keep, reason="generous: " + str(found.reason))
"""
REWARDS = """
from slime.data import Sample

async def reward_func(args, sample: Sample, **kwargs) -> float:
    return float(isinstance(sample, Sample) and sample.response.strip() == sample.label.strip())
"""
SLIMES = {"STATE": "slime.rollout.sglang_rollout", "HTTP": "slime.utils.http_utils", "SAMPLE": "slime.utils.types"}
OURS = dict.fromkeys(SLIMES, "headrace.hooks")
NEWER = {**SLIMES, "HTTP": "slime.utils.network.http_utils", "SAMPLE": "slime.utils.core.types"}


def named(code: str, modules: dict[str, str]) -> str:
    for name, module in modules.items():
        code = code.replace(f"NAMES_{name}", module)
    return code


@pytest.mark.parametrize(
    ("code", "function", "words", "part"),
    [
        (named(APPENDS, NEWER), "generate", (), "makes 2 samples of 2 prompts"),
        (named(APPENDS, OURS), "generate", (), "makes 2 samples of 2 prompts"),
        (named(FANS_OUT, SLIMES), "generate", (), "makes 3 samples of 2 prompts"),
        (FILTERS, "generous", ("--kind", "filter"), "kept, dropped (generous: all rewards are 1.0)"),
        (REWARDS, "reward_func", (), "[1.0, 0.0, 0.0, 0.0]"),
    ],
)
def test_a_function_that_is_written_for_slime_runs(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    function: str,
    words: tuple[str, ...],
    part: str,
) -> None:
    monkeypatch.setenv("HEADRACE_SLIME_IMPORTS", "true")
    (tmp_path / "own.py").write_text(code)
    result = main(["check", "hook", f"{tmp_path / 'own.py'}:{function}", *words])
    said = capfd.readouterr().out
    assert part in said, said
    assert result == 0


@pytest.mark.parametrize(
    ("line", "way"),
    [
        ("from slime.rollout.sglang_rollout import generate_and_rm_group", "leave the rewards to the job's scorer"),
        ("import slime.backends.megatron_utils.loss", "of slime there are slime.data"),
    ],
)
def test_names_of_slime_that_are_not_here_say_what_to_do(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: str, way: str
) -> None:
    monkeypatch.setenv("HEADRACE_SLIME_IMPORTS", "true")
    (tmp_path / "own.py").write_text(
        f"{line}\n\nasync def generate(args, sample, sampling_params):\n    return sample\n"
    )
    assert main(["check", "hook", f"{tmp_path / 'own.py'}:generate"]) == 1
    assert way in capfd.readouterr().out


def test_without_the_flag_slimes_names_are_not_there_and_the_message_names_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADRACE_SLIME_IMPORTS", raising=False)
    (tmp_path / "own.py").write_text(REWARDS)
    assert main(["check", "hook", f"{tmp_path / 'own.py'}:reward_func"]) == 1
    assert "--slime-imports" in capfd.readouterr().out
