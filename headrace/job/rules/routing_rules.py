"""Rules over routing replay: which jobs may send tokens to the experts that were chosen before."""

from __future__ import annotations

from headrace.errors import ConfigError
from headrace.job.megatron.arguments import megatron
from headrace.job.schema.job import Job
from headrace.job.schema.old_log_probs import trains_on_old_log_probs
from headrace.models.architecture import Architecture


def replays_routing(job: Job) -> bool:
    """True when experts are chosen once: by the engines, or as old log-probs are computed."""
    return job.train.use_routing_replay or job.train.use_rollout_routing_replay


def check_routing_replay(job: Job, architecture: Architecture) -> None:
    """Raises ConfigError for the first rule that is broken."""
    if not replays_routing(job):
        return
    flag = "use_rollout_routing_replay" if job.train.use_rollout_routing_replay else "use_routing_replay"
    if architecture.experts is None:
        raise ConfigError(f"{flag}: this {architecture.family} has no experts to choose: leave it out", field=flag)
    _router(job, flag)
    if not job.train.use_rollout_routing_replay:
        _old_log_probs(job)


def _router(job: Job, flag: str) -> None:
    args = megatron(job)
    if args.moe_router_fusion:
        raise ConfigError(
            f"{flag} with moe_router_fusion: the fused router asks nobody: leave one out", field="moe_router_fusion"
        )
    if args.moe_router_load_balancing_type in ("sinkhorn", ("sinkhorn",)):
        raise ConfigError(
            f"{flag} with moe_router_load_balancing_type sinkhorn: its experts are not the best scores: leave one out",
            field="moe_router_load_balancing_type",
        )


def _old_log_probs(job: Job) -> None:
    train = job.train
    if train.keep_old_actor:
        raise ConfigError(
            "use_routing_replay with keep_old_actor: old log-probs are of several policies then: pass "
            "--use-rollout-routing-replay, which replays what each sample was made with",
            field="use_routing_replay",
        )
    if not trains_on_old_log_probs(train) or train.num_steps_per_rollout == 1:
        raise ConfigError(
            "use_routing_replay has no effect: no old log-probs are computed in this job, for it takes one optimizer "
            "step per rollout or the engines' own: leave it out, or pass --use-rollout-routing-replay",
            field="use_routing_replay",
        )
