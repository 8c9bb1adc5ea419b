"""A knob that the chosen algorithm ignores is refused, with what would read it; so are choices that clash."""

from __future__ import annotations

import re

import pytest

from headrace.job.option import ALIASES, options
from headrace.job.rules.rules import algorithm_warnings, warnings

KL_IN_REWARD = "--advantage-estimator ppo --kl-coef 0.01"
LONE = "--n-samples-per-prompt 1"
TEACHER = "--use-opd --opd-teacher-url http://127.0.0.1:1"


@pytest.mark.parametrize(
    "flags",
    [
        "--advantage-estimator gspo --eps-clip 3e-4 --eps-clip-high 4e-4",
        "--advantage-estimator cispo --disable-grpo-std-normalization",
        "--advantage-estimator rloo --normalize-advantages",
        "--advantage-estimator reinforce_plus_plus --normalize-advantages --kl-coef 0.01 --gamma 0.99",
        "--advantage-estimator ppo --critic-lr 1e-5 --value-clip 0.2 --lambd 0.95 --num-critic-only-steps 2",
        "--disable-grpo-std-normalization --loss-constant-length 1024",
        "--use-tis --tis-mode mask --mis-level geometric --tis-threshold 2 --tis-clip-low 0.5",
        "--use-opsm --opsm-delta 0.1",
        "--use-kl-loss --kl-loss-coef 0.01 --use-unbiased-kl",
        f"{KL_IN_REWARD} --kl-reward-type low_var_kl",
        TEACHER,
        "--true-on-policy-mode --num-steps-per-rollout 1",
        "--true-on-policy-mode --num-steps-per-rollout 1 --rollout-top-p 0.95 --keep-sampling-mask",
    ],
)
def test_what_belongs_together_is_taken(load_with, flags: str) -> None:
    words = flags.split()
    given = {word: value for word, value in zip(words, [*words[1:], "--"], strict=True) if word.startswith("--")}
    job = load_with(*words)
    for flag, value in given.items():
        option = options()[ALIASES.get(name := flag[2:].replace("-", "_"), name)]
        found = getattr(getattr(job, option.section), option.name)
        assert found is True if value.startswith("--") else found == type(found)(value)


def test_kept_sampling_masks_are_the_way_out_that_the_warning_names(load_with) -> None:
    (found,) = algorithm_warnings(load_with("--rollout-top-p", "0.95"))
    assert "--keep-sampling-mask" in found
    assert not algorithm_warnings(load_with("--rollout-top-p", "0.95", "--keep-sampling-mask"))


@pytest.mark.parametrize(
    ("flags", "warning"),
    [
        ("--rollout-top-p 0.95", r"rollout_top_p 0.95: engines sample from fewer tokens"),
        (LONE, r"grpo compares the samples of a prompt, and n_samples_per_prompt is 1"),
        ("--sglang-kv-cache-dtype fp8_e4m3", r"fp8_e4m3: engines sample from rounded .* --use-tis"),
        ("--rollout-temperature 0", r"rollout_temperature 0: all samples of a prompt are the same"),
    ],
)
def test_what_is_allowed_and_probably_not_meant_is_warned_of(load_with, flags: str, warning: str) -> None:
    (found,) = algorithm_warnings(load_with(*flags.split()))
    assert re.search(warning, found)


@pytest.mark.parametrize("flags", ["--sglang-kv-cache-dtype fp8_e4m3 --use-tis", "--sglang-kv-cache-dtype bfloat16"])
def test_a_rounded_cache_that_is_corrected_for_is_not_warned_of(load_with, flags: str) -> None:
    assert not algorithm_warnings(load_with(*flags.split()))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--sglang-speculative-algorithm NGRAM --sglang-attention-backend triton", []),
        ("--sglang-speculative-algorithm EAGLE", ["spec_accept_length"]),
        ("--sglang-speculative-algorithm EAGLE3 --sglang-speculative-draft-model-path d/raft", ["d/raft"]),
        ("--sglang-speculative-algorithm EAGLE --debug-rollout-only", []),
    ],
)
def test_a_draft_that_does_not_follow_the_policy_is_warned_of_once(load_with, flags: str, said: list[str]) -> None:
    found = [warning for warning in warnings(load_with(*flags.split())) if "--sglang-speculative-algorithm" in warning]
    assert len(found) == len(said)
    assert all(word in warning for word, warning in zip(said, found, strict=True))
