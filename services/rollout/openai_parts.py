"""Builds the OpenAI endpoint, and the sampler of agents that use it, if the job has one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.hooks import HookArgs
from headrace.job.model.context_limit import ContextLimit
from headrace.job.schema.job import Job
from headrace.models.architecture import Architecture
from services.rollout.admission.engine_slots import EngineSlots
from services.rollout.agents.sampler import AgentSampler
from services.rollout.agents.server import EndpointServer
from services.rollout.agents.session import AgentPolicy, AgentSessions, SessionLimits
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.arguments import evaluation_priority
from services.rollout.evaluation.evaluate import SAMPLES_AT_ONCE
from services.rollout.in_flight import samples_at_once
from services.rollout.production.generator import Generator
from services.rollout.production.prompts import PromptEncoder


@dataclass(frozen=True, slots=True)
class OpenaiParts:
    """The endpoint of OpenAI's protocol, and the sampler of agents that use it, if the job has one."""

    server: EndpointServer
    sampler: AgentSampler | None


def openai_parts(
    job: Job,
    args: HookArgs,
    generator: Generator,
    slots: EngineSlots,
    encoder: PromptEncoder,
    params: SamplingParams,
    architecture: Architecture,
    warn: Callable[[str], None],
) -> OpenaiParts | None:
    """None unless the job has an agent or asks for the endpoint."""
    agent = job.rollout.agent_function_path
    if agent is None and job.rollout.openai_port is None:
        return None
    from services.rollout.agents.endpoint import Endpoint  # half a second: only where there is an endpoint

    seconds = job.rollout.generate_timeout_seconds
    sessions = AgentSessions(encoder, params, SessionLimits(seconds))
    endpoint = Endpoint(sessions, AgentPolicy(generator, encoder, slots), encoder, job.model.hf_checkpoint.name)
    server = EndpointServer(endpoint.application(), job.rollout.openai_port)
    if agent is None:
        return OpenaiParts(server, None)
    context = ContextLimit.of(job.rollout, job.sglang, architecture, job.placement.engine_groups)
    sampler = AgentSampler(
        *(agent, args, sessions, server.url),
        limits=SessionLimits(seconds, job.rollout.max_turns, context.tokens if context else None),
        calls_at_once=samples_at_once(job.rollout) + SAMPLES_AT_ONCE,
        evaluation_priority=evaluation_priority(job.sglang),
        warn=warn,
    )
    return OpenaiParts(server, sampler)
