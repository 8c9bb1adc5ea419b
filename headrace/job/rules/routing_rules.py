"""Rules of routing replay: which jobs may send tokens to the experts that were chosen before."""

from __future__ import annotations

from headrace.errors import ConfigError
from headrace.job.megatron.arguments import megatron
from headrace.job.schema.job import Job
from headrace.job.schema.training import trains_on_old_log_probs
from headrace.models.architecture import Architecture


def replays_routing(job: Job) -> bool:
    """True when experts are chosen only once: by the engines, or when old log-probs are computed."""
    return job.train.use_routing_replay or job.train.use_rollout_routing_replay


def check_routing_replay(job: Job, architecture: Architecture) -> None:
    """Raises ConfigError for the first rule that is broken."""
    if not replays_routing(job):
        return
    flag = "use_rollout_routing_replay" if job.train.use_rollout_routing_replay else "use_routing_replay"
    if architecture.experts is None:
        raise ConfigError(
            f"{flag}: this {architecture.family} model has no experts to choose: leave it out", field=flag
        )
    _router(job, flag)
    if not job.train.use_rollout_routing_replay:
        _old_log_probs(job)


def _router(job: Job, flag: str) -> None:
    args = megatron(job.megatron)
    if args.moe_router_fusion:
        raise ConfigError(
            f"{flag} with moe_router_fusion: the fused router does not take experts from outside: leave one out",
            field="moe_router_fusion",
        )
    if args.moe_router_load_balancing_type in ("sinkhorn", ("sinkhorn",)):
        raise ConfigError(
            f"{flag} with moe_router_load_balancing_type sinkhorn: sinkhorn chooses other experts than the best "
            f"scores: leave one out",
            field="moe_router_load_balancing_type",
        )


def _old_log_probs(job: Job) -> None:
    train = job.train
    if train.keep_old_actor:
        raise ConfigError(
            "use_routing_replay with keep_old_actor: old log-probs would be of several policies: pass "
            "--use-rollout-routing-replay, which replays the experts that each sample was generated with",
            field="use_routing_replay",
        )
    if not trains_on_old_log_probs(train) or train.num_steps_per_rollout == 1:
        raise ConfigError(
            "use_routing_replay has no effect: this job computes no old log-probs, because it takes one optimizer "
            "step per rollout or uses the engines' log-probs: leave it out, or pass --use-rollout-routing-replay",
            field="use_routing_replay",
        )
