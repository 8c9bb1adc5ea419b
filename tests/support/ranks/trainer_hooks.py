"""User functions as people write them for slime: each does what the trainer does by itself, and notes what it saw."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch


def _note(name: str, value: Any) -> None:
    folder = Path(os.environ["HEADRACE_TEST_NOTES"])
    folder.mkdir(exist_ok=True)
    with (folder / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps(value) + "\n")


def advantage(args: Any, rollout_data: dict[str, Any]) -> None:
    """The reward for every token."""
    _note("advantage", [rollout_data["metadata"], rollout_data["sample_metadata"], args.eps_clip])
    rollout_data["advantages"] = [
        reward * mask for reward, mask in zip(rollout_data["rewards"], rollout_data["loss_masks"], strict=True)
    ]
    rollout_data["returns"] = rollout_data["advantages"]


def post_process(args: Any, samples: list[Any]) -> tuple[list[float], list[float]]:
    """Twice the reward, less its group's mean."""
    groups: dict[int, list[float]] = {}
    for sample in samples:
        groups.setdefault(sample.group_index, []).append(sample.get_reward_value(args))
    raw = [sample.get_reward_value(args) for sample in samples]
    means = {index: sum(rewards) / len(rewards) for index, rewards in groups.items()}
    _note("post_process", [sample.train_metadata for sample in samples])
    return raw, [2.0 * (r - means[sample.group_index]) for r, sample in zip(raw, samples, strict=True)]


def data_postprocess(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """Leaves everything as it is."""
    _note("data_postprocess", [rollout_id, len(rollout_data["advantages"]), rollout_data["response_lengths"]])


def loss(args: Any, batch: dict[str, Any], logits: torch.Tensor, sum_of_sample_mean: Any) -> tuple[Any, dict[str, Any]]:
    """The policy gradient without a ratio, from the logits."""
    _note("loss", batch["metadata"])
    found = []
    for row, (tokens, mask) in enumerate(zip(batch["tokens"], batch["loss_masks"], strict=True)):
        answer = tokens[len(tokens) - len(mask) :]
        table = (logits[row, : len(mask)].float() / args.rollout_temperature).log_softmax(-1)
        found.append(table.gather(1, answer[:, None])[:, 0])
    loss = sum_of_sample_mean(-torch.cat(found) * torch.cat(batch["advantages"]))
    return loss, {"loss": loss.detach()}


def tis(
    args: Any,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: list[torch.Tensor],
    rollout_log_probs: list[torch.Tensor],
    loss_masks: list[torch.Tensor],
    **kwargs: Any,
) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    """Truncated weights."""
    _note("tis", sorted(kwargs))
    ratio = torch.exp(torch.cat(train_log_probs) - torch.cat(rollout_log_probs))
    return pg_loss * ratio.clamp(args.tis_clip_low, args.tis_clip), loss_masks, {"tis": ratio}


def reducer(
    total_lengths: list[int], response_lengths: list[int], loss_masks: list[torch.Tensor], per_token: bool
) -> Any:
    """Dr.GRPO's: a sum over a fixed length."""
    return lambda flat: (flat * torch.cat(loss_masks)).sum() / 16.0


def before_train_step(
    args: Any, rollout_id: int, step_id: int, model: list[Any], optimizer: Any, opt_param_scheduler: Any
) -> None:
    """Notes where it is."""
    _note("before_train_step", [rollout_id, step_id, len(model), optimizer.param_groups[0]["lr"]])


def sample_filter(args: Any, samples: list[list[Any]]) -> None:
    """Leaves the first of each group out of the loss, and the last token of the others."""
    for group in samples:
        group[0].remove_sample = True
        for sample in group[1:]:
            sample.loss_mask = [*sample.loss_mask[:-1], 0]


def train_data(args: Any, samples: list[Any]) -> dict[str, list[Any]]:
    """What slime's conversion gives, with rewards, masks and log-probs of its own."""
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": [float(number) for number, _ in enumerate(samples)],
        "raw_reward": [sample.get_reward_value(args) for sample in samples],
        "truncated": [int(sample.status == sample.Status.TRUNCATED) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "loss_masks": [[1] * sample.response_length for sample in samples],
        "rollout_log_probs": [torch.tensor(sample.rollout_log_probs) - 0.1 for sample in samples],
    }


def rollout_log(
    rollout_id: int, args: Any, samples: list[Any], rollout_extra_metrics: dict[str, Any], rollout_time: float
) -> bool:
    """Reports a figure of its own, and something that is none."""
    _note("rollout_log", [rollout_id, len(samples), rollout_time > 0])
    rollout_extra_metrics |= {"rollout/longest": max(sample.response_length for sample in samples), "what": "text"}
    if rollout_id == 1:
        raise RuntimeError("a tracker is away")
    return True


def megatron_init(args: Any) -> None:
    """Notes that Megatron is up."""
    from megatron.core import parallel_state

    _note("megatron_init", [args.seed, parallel_state.get_data_parallel_world_size()])


def before_log_prob(args: Any, model: list[Any], store_prefix: str) -> None:
    """Notes whose log-probs are next."""
    _note("before_log_prob", [store_prefix, len(model)])


def model_provider(pre_process: bool, post_process: bool, vp_stage: int | None, build_default: Any) -> Any:
    """The trainer's own, with one layer looked at."""
    model = build_default()
    model.decoder.layers[0].register_forward_hook(lambda *_: _note("forward", model.training))
    _note("model_provider", [pre_process, post_process, vp_stage])
    return model
