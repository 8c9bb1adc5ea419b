"""A knob that the chosen algorithm ignores is refused, with what would read it; so are choices that clash."""

from __future__ import annotations

import re

import pytest

from headrace.errors import ConfigError
from headrace.job.option import ALIASES, options
from headrace.job.rules.warnings import algorithm_warnings

KL_IN_REWARD = "--advantage-estimator ppo --kl-coef 0.01"
LONE = "--n-samples-per-prompt 1"
TEACHER = "--use-opd --opd-teacher-url http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--use-routing-replay", r"use_routing_replay: this \w+ model has no experts to choose: leave it out"),
        ("--use-rollout-routing-replay", r"use_rollout_routing_replay: this \w+ model has no experts to choose"),
        ("--kl-coef 0.1", r"kl_coef is only read by .*ppo.* --use-kl-loss; this job has advantage_estimator grpo"),
        ("--advantage-estimator rloo --kl-coef 0.1", r"kl_coef is only read by"),
        ("--gamma 0.9", r"gamma is only read by advantage_estimator ppo, reinforce_plus_plus"),
        ("--lambd 0.9", r"lambd is only read by advantage_estimator ppo"),
        ("--critic-lr 1e-5", r"critic_lr is only read by advantage_estimator ppo.*leave --critic-lr out"),
        ("--critic-lr-warmup-iters 3", r"critic_lr_warmup_iters is only read by advantage_estimator ppo"),
        ("--num-critic-only-steps 3", r"num_critic_only_steps is only read by advantage_estimator ppo"),
        ("--value-clip 0.1", r"value_clip is only read by advantage_estimator ppo"),
        ("--advantage-estimator rloo --disable-rewards-normalization", r"disable_rewards_normalization is only read"),
        ("--advantage-estimator ppo --disable-grpo-std-normalization", r"disable_grpo_std_normalization is only read"),
        ("--disable-rewards-normalization --disable-grpo-std-normalization", r"with their rewards normalized"),
        ("--advantage-estimator cispo --eps-clip-c 3", r"eps_clip_c is only read by an advantage_estimator other than"),
        ("--mis-level geometric", r"tis_level has no effect without use_tis"),
        ("--tis-batch-normalize", r"tis_batch_normalize has no effect without use_tis"),
        ("--rs-veto-threshold 1e-4", r"rs_veto_threshold has no effect without use_rs"),
        ("--use-rs --rs-lower-bound 3", r"rs_lower_bound 3 is not below rs_upper_bound 2"),
        ("--tis-mode icepop", r"tis_mode has no effect without use_tis"),
        ("--custom-tis-function-path a.b", r"custom_tis_function_path has no effect without use_tis"),
        ("--opsm-delta 0.1", r"opsm_delta has no effect without use_opsm"),
        ("--use-unbiased-kl", r"use_unbiased_kl has no effect without use_kl_loss"),
        ("--opd-kl-coef 2", r"opd_kl_coef has no effect without use_opd"),
        ("--custom-loss-function-path a.b", r"custom_loss_function_path is only read by loss_type custom_loss"),
        ("--loss-type sft_loss --use-tis", r"use_tis is only read by a policy loss"),
        ("--loss-type sft_loss --entropy-coef 0.1", r"entropy_coef is only read by a policy loss"),
        ("--loss-type sft_loss --advantage-estimator ppo", r"ppo has no effect with loss_type sft_loss"),
        ("--loss-mask-type qwen3", r"loss_mask_type is only read by loss_type sft_loss"),
        ("--loss-type sft_loss --loss-mask-type qwen3", r"n_samples_per_prompt is 8: set it to 1"),
        ("--loss-type custom_loss", r"custom_loss needs a loss: pass --custom-loss-function-path"),
        ("--calculate-per-token-loss --loss-constant-length 64", r"by a fixed length: choose one"),
        ("--use-tis --tis-clip 2 --tis-clip-low 2", r"tis_clip_low 2 is not below tis_clip 2"),
        ("--advantage-estimator reinforce_plus_plus", r"whitened advantages: add --normalize-advantages"),
        ("--advantage-estimator reinforce_plus_plus_baseline", r"whitened advantages: add --normalize-advantages"),
        ("--use-opd", r"opd_type sglang needs a teacher: pass --opd-teacher-url"),
        ("--use-opd --opd-type megatron", r"opd_type megatron needs a teacher: .*--opd-teacher-load"),
        (f"{TEACHER} --opd-type megatron", r"opd_teacher_url is only read by opd_type sglang"),
        ("--use-opd --opd-teacher-url there:1", r"opd_teacher_url there:1 is not a URL: write http://host:port"),
        (f"{TEACHER} --rollout-temperature 0.7", r"at temperature 1, and rollout_temperature is 0.7"),
        ("--kl-reward-type k3", r"kl_reward_type has no effect without kl_coef: add --kl-coef"),
        ("--kl-loss-type k1", r"kl_loss_type has no effect without use_kl_loss"),
        (f"{KL_IN_REWARD} --kl-loss-type k1", r"kl_loss_type has no effect without use_kl_loss"),
        (f"{KL_IN_REWARD} --use-kl-loss --kl-loss-coef 0.001", r"kl_coef 0.01 .*kl_loss_coef 0.001.* count twice"),
        ("--use-tis --use-rollout-logprobs", r"use_tis with use_rollout_logprobs corrects .* twice"),
        ("--true-on-policy-mode", r"true_on_policy_mode needs num_steps_per_rollout 1, and it is 2"),
    ],
)
def test_what_would_have_no_effect_is_refused(load_with, flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_with(*flags.split())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--max-staleness 1", r"needs max_staleness 0, and it is 1"),
        ("--use-rollout-logprobs", r"needs use_rollout_logprobs False"),
        ("--use-tis", r"needs use_tis False"),
        ("--use-opsm", r"needs use_opsm False"),
        ("--use-rs", r"needs use_rs False"),
        ("--rollout-top-p 0.95", r"needs rollout_top_p 1.0, and it is 0.95"),
        ("--rollout-top-k 50", r"needs rollout_top_k None, and it is 50"),
    ],
)
def test_true_on_policy_mode_refuses_what_makes_the_ratio_differ_from_one(load_with, flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_with("--true-on-policy-mode", "--num-steps-per-rollout", "1", *flags.split())


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


@pytest.mark.parametrize(
    ("flags", "warning"),
    [
        ("--rollout-top-p 0.95", r"rollout_top_p 0.95: engines sample from fewer tokens"),
        ("--rollout-top-k 20", r"rollout_top_k 20: engines sample from fewer tokens"),
        ("--rollout-top-p 0.9 --rollout-top-k 20", r"rollout_top_p 0.9 and rollout_top_k 20: engines"),
        (LONE, r"grpo compares the samples of a prompt, and n_samples_per_prompt is 1"),
        (f"{LONE} --advantage-estimator rloo", r"rloo compares the samples of a prompt"),
        ("--rollout-temperature 0", r"rollout_temperature 0: all samples of a prompt are the same"),
    ],
)
def test_what_is_allowed_and_probably_not_meant_is_warned_of(load_with, flags: str, warning: str) -> None:
    (found,) = algorithm_warnings(load_with(*flags.split()))
    assert re.search(warning, found)


@pytest.mark.parametrize(
    "flags",
    [
        "--rollout-top-p 1 --rollout-temperature 0.8",
        f"{LONE} --disable-rewards-normalization",
        f"{LONE} --advantage-estimator ppo",
        f"{LONE} --loss-type sft_loss --loss-mask-type qwen3 --rollout-top-p 0.9",
    ],
)
def test_what_is_meant_is_not_warned_of(load_with, flags: str) -> None:
    assert algorithm_warnings(load_with(*flags.split())) == []
