"""The sections of a job about training: the loss, LoRA, the models beside the policy, and user functions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from headrace.errors import ConfigError
from headrace.job.algorithms import ALGORITHMS
from headrace.job.schema.section import Above, Coefficient, NonNegative, Positive, Rate, Section, Share, Url

KlType = Literal["k1", "k2", "k3", "low_var_kl"]
Level = Literal["token", "sequence", "geometric"]


def _icepop(mode: object) -> object:
    """Accepts icepop, which is a mask of tokens."""
    return "mask" if mode == "icepop" else mode


def _estimator(name: str) -> str:
    if name not in ALGORITHMS:
        *others, last = (f"'{known}'" for known in ALGORITHMS)
        raise ValueError(f"should be {', '.join(others)} or {last}")
    return name


def _patterns(texts: tuple[str, ...]) -> tuple[str, ...]:
    for text in texts:
        try:
            re.compile(text)
        except re.error as error:
            raise ValueError(f"should be regular expressions: {error}") from error
    return texts


Patterns = Annotated[tuple[str, ...], AfterValidator(_patterns)]


class TrainSection(Section):
    global_batch_size: Positive | None = None
    """Samples in an optimizer step; may be derived."""
    num_steps_per_rollout: Positive | None = None
    """Optimizer steps in a rollout step; may be derived."""
    micro_batch_size: Positive = 1
    """Samples in a forward pass."""
    use_dynamic_batch_size: bool = False
    """Micro-batches of max_tokens_per_gpu, however many samples."""
    max_tokens_per_gpu: Positive | None = None
    """Largest number of tokens in a forward pass."""
    balance_data: bool = True
    """Data-parallel ranks get equally many tokens; off: samples in the order in which they come."""
    packing: Literal["padded", "packed", "shared_prompts"] | None = None
    """Samples in a row of the model: one, several, or several behind one prompt; absent: the fastest."""
    loss_type: Literal["policy_loss", "sft_loss", "custom_loss"] = "policy_loss"
    """The loss that is minimised."""
    loss_mask_type: (
        Literal["qwen", "qwen3", "qwen3_5", "llama3", "glm4", "distill_qwen", "deepseek", "kimi", "gpt_oss"]
        | Literal["olmo3", "minimax_m2", "gemma3"]
        | None
    ) = None
    """Prompts are conversations whose assistant turns are trained; names the chat template's marks."""
    keep_earlier_thoughts: bool = False
    """Earlier turns of a conversation keep their thoughts; off: the chat template decides."""
    advantage_estimator: Annotated[str, AfterValidator(_estimator)] = "grpo"
    """How rewards become advantages."""
    disable_grpo_std_normalization: bool = False
    """Do not divide advantages by the standard deviation of the group's rewards."""
    disable_rewards_normalization: bool = False
    """Rewards are advantages as they are."""
    normalize_advantages: bool = False
    """Whiten advantages over the whole rollout batch."""
    gamma: Share = 1.0
    """Discount of later tokens' rewards: ppo and reinforce_plus_plus."""
    lambd: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Lambda of GAE: ppo."""
    kl_coef: Coefficient = 0.0
    """Weight of the KL in the reward: ppo, reinforce_plus_plus and its baseline variant."""
    kl_reward_type: KlType = "k1"
    """Estimator of the KL in the reward; only k1 has the KL's gradient there."""
    eps_clip: Above = 0.2
    """Lower clip of the importance ratio: 1 - eps_clip."""
    eps_clip_high: Above | None = None
    """Upper clip of the importance ratio: 1 + eps_clip_high; absent: eps_clip."""
    eps_clip_c: Annotated[Above, Field(gt=1)] | None = None
    """Dual clip for negative advantages."""
    use_kl_loss: bool = False
    """Add kl_loss_coef times the KL to the reference policy."""
    kl_loss_coef: Coefficient = 0.0
    """Weight of the KL in the loss."""
    kl_loss_type: KlType = "low_var_kl"
    """Estimator of the KL in the loss."""
    use_unbiased_kl: bool = False
    """Multiply the KL in the loss by the importance ratio."""
    entropy_coef: Coefficient = 0.0
    """Weight of the entropy bonus."""
    calculate_per_token_loss: bool = False
    """Mean over tokens instead of over rollouts."""
    loss_constant_length: Above | None = None
    """Divide a rollout's sum by this length, not by its own (Dr.GRPO)."""
    use_tis: bool = False
    """Importance weights between trainer and engine."""
    tis_mode: Annotated[Literal["truncate", "clip", "mask"], BeforeValidator(_icepop)] = "truncate"
    """Importance weights are cut at their bounds, or are 0 beyond them (icepop)."""
    tis_level: Level = "token"
    """The ratio of each token, or of a whole response: its tokens' product, or their geometric mean."""
    tis_clip: Above = 2.0
    """Upper bound of the importance weights (alias: tis_threshold, tis_upper_bound)."""
    tis_clip_low: Coefficient | None = None
    """Lower bound of the importance weights; absent: 0 for truncate, else 1 / tis_clip (alias: tis_lower_bound)."""
    tis_batch_normalize: bool = False
    """Divide the importance weights of an optimizer step by their mean."""
    use_rs: bool = False
    """Rejection sampling: leave out tokens or responses whose ratio is outside rs_lower_bound and rs_upper_bound."""
    rs_level: Level = "token"
    """The ratio that use_rs bounds: of a token, or of a whole response."""
    rs_lower_bound: Above | None = None
    """Lower bound of use_rs; absent: that of the importance weights."""
    rs_upper_bound: Above | None = None
    """Upper bound of use_rs; absent: tis_clip."""
    rs_veto_threshold: Share | None = None
    """Leave out a response when one token's ratio is below; absent: none."""
    use_opsm: bool = False
    """Leave out bad responses that the policy has moved away from."""
    opsm_delta: Coefficient = 1e-4
    """Mean log-ratio from which use_opsm leaves a response out."""
    use_rollout_logprobs: bool = False
    """The engine's log-probs are the old policy's."""
    keep_sampling_mask: bool = False
    """Train on the distribution over the tokens that rollout_top_p and rollout_top_k let each token be sampled from."""
    true_on_policy_mode: bool = False
    """Refuse settings that make the importance ratio differ from 1; stop when trainer and engine disagree."""
    only_train_params_name_list: Patterns = ()
    """Regular expressions: parameters whose names match are trained, the others frozen."""
    freeze_params_name_list: Patterns = ()
    """Regular expressions: parameters whose names match are frozen."""
    ref_update_interval: Positive | None = None
    """Rollout steps after which the reference becomes the current policy; absent: never."""
    keep_old_actor: bool = False
    """Old log-probs are those of the policy that the sample came from, kept by the trainer."""
    use_routing_replay: bool = False
    """Tokens go to the experts that they went to when old log-probs were computed."""
    use_rollout_routing_replay: bool = False
    """Tokens go to the experts that the engines chose, in old log-probs and in training."""

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        for is_used, name, above, (low, high) in (
            (self.use_tis, "tis_clip_low", "tis_clip", self.weight_bounds),
            (self.use_rs, "rs_lower_bound", "rs_upper_bound", self.rejection_bounds),
        ):
            if is_used and low >= high:
                raise ConfigError(f"{name} {low:g} is not below {above} {high:g}: lower it")
        return self

    @property
    def weight_bounds(self) -> tuple[float, float]:
        """(lowest, highest) importance weight."""
        if self.tis_clip_low is not None:
            return self.tis_clip_low, self.tis_clip
        return 0.0 if self.tis_mode == "truncate" else 1.0 / self.tis_clip, self.tis_clip

    @property
    def rejection_bounds(self) -> tuple[float, float]:
        """(lowest, highest) ratio that rejection sampling keeps."""
        high = self.tis_clip if self.rs_upper_bound is None else self.rs_upper_bound
        low = 1.0 / self.tis_clip if self.tis_clip_low is None else self.tis_clip_low
        return (low if self.rs_lower_bound is None else self.rs_lower_bound), high


class CriticSection(Section):
    """The critic of advantage_estimator ppo."""

    critic_load: Path | None = None
    """Hugging Face or torch_dist folder that the critic starts from; absent: hf_checkpoint."""
    critic_lr: Rate = 1e-6
    """The critic's highest learning rate."""
    critic_lr_warmup_iters: NonNegative = 0
    """Optimizer steps of the critic's warm-up."""
    num_critic_only_steps: NonNegative = 0
    """Rollout steps at the start in which only the critic is trained."""
    value_clip: Above = 0.2
    """Largest change of a value that the critic's loss counts."""


class DistillationSection(Section):
    """Options of on-policy distillation: advantages minus the reverse KL to a teacher."""

    use_opd: bool = False
    """Distil from a teacher."""
    opd_type: Literal["sglang", "megatron"] = "sglang"
    """The teacher is served at opd_teacher_url, or held by the trainer's ranks."""
    opd_kl_coef: Annotated[Coefficient, Field(gt=0)] = 1.0
    """Weight of the reverse KL to the teacher."""
    opd_teacher_url: Url | None = None
    """An SGLang server of the teacher, with the policy's tokenizer."""
    opd_teacher_load: Path | None = None
    """Hugging Face or torch_dist folder of the teacher; same architecture."""


class HooksSection(Section):
    """User functions in the trainer, as pkg.mod.fn or file.py:fn."""

    custom_reward_post_process_path: str | None = None
    """f(args, samples) -> (raw rewards, rewards)."""
    rollout_sample_filter_path: str | None = None
    """f(args, samples): groups of samples; sets remove_sample on those to leave out of the loss."""
    custom_convert_samples_to_train_data_path: str | None = None
    """f(args, samples) -> dict with rewards, loss_masks, rollout_log_probs, a list each."""
    custom_rollout_log_function_path: str | None = None
    """f(rollout_id, args, samples, rollout_extra_metrics, rollout_time) -> bool: True logs alone."""
    custom_eval_rollout_log_function_path: str | None = None
    """f(rollout_id, args, data, extra_metrics) -> bool: True logs alone."""
    custom_advantage_function_path: str | None = None
    """f(args, rollout_data): sets advantages and returns."""
    rollout_data_postprocess_path: str | None = None
    """f(args, rollout_id, rollout_data): before training, after advantages."""
    custom_loss_function_path: str | None = None
    """f(args, batch, logits, sum_of_sample_mean) -> (loss, log); with loss_type custom_loss."""
    custom_tis_function_path: str | None = None
    """f(args, *, pg_loss, train_log_probs, ...) -> (pg_loss, loss_masks, metrics)."""
    custom_pg_loss_reducer_function_path: str | None = None
    """f(total_lengths, response_lengths, loss_masks, per_token) -> reducer."""
    custom_megatron_init_path: str | None = None
    """f(args): on every rank, once Megatron is up."""
    custom_model_provider_path: str | None = None
    """f(pre_process, post_process, vp_stage) -> GPTModel: a stage of the model."""
    custom_megatron_before_log_prob_hook_path: str | None = None
    """f(args, model, store_prefix): before a pass for log-probs."""
    custom_megatron_before_train_step_hook_path: str | None = None
    """f(args, rollout_id, step_id, model, optimizer, opt_param_scheduler)."""


def trains_on_old_log_probs(train: TrainSection) -> bool:
    """True also for a custom loss, because its batch contains them."""
    return train.loss_type != "sft_loss" and not train.use_rollout_logprobs


ALL_LINEAR = "all-linear"
"""Stands for every linear layer but the output layer."""
_HIGHEST_RANK = 1 << 14


def _targets(names: tuple[str, ...]) -> tuple[str, ...]:
    if not names or (ALL_LINEAR in names and len(names) > 1):
        raise ValueError(f"should be names of layers, or {ALL_LINEAR} alone")
    return names


class LoraSection(Section):
    """Low-rank adaptation (https://arxiv.org/abs/2106.09685), with the meanings of the package peft."""

    lora_rank: Annotated[int, Field(gt=0, le=_HIGHEST_RANK)] | None = None
    """Rank of the adapters B·A that are trained while the model's weights stay; absent: no LoRA."""
    lora_alpha: Above = 8.0
    """Adapters are multiplied by lora_alpha / lora_rank."""
    lora_use_rslora: bool = False
    """Multiply adapters by lora_alpha / √lora_rank instead (https://arxiv.org/abs/2312.03732)."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's input that is dropped in a training pass."""
    lora_target_modules: Annotated[tuple[Annotated[str, Field(max_length=100)], ...], AfterValidator(_targets)] = (
        ALL_LINEAR,
    )
    """Layers that get an adapter, by their Hugging Face names: q_proj v_proj …; all-linear: every linear layer but the
    output layer."""
    lora_init: Literal["kaiming", "gaussian"] = "kaiming"
    """How A begins: kaiming is peft's default, gaussian has the deviation 1 / lora_rank. B begins at 0."""
    lora_load: Path | None = None
    """Folder that peft or `headrace export --format peft` wrote: adapters to begin with."""
