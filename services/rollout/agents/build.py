"""Builds what agents need from a job: the endpoint of OpenAI's protocol, and the sampler whose agents use it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.hooks import HookArgs
from headrace.hooks.kit.tool_call import tool_call_parser
from headrace.job.rules.training import mask_tokens
from headrace.job.schema.job import Job
from headrace.job.schema.production import ContextLimit
from headrace.limits import PEER_WAIT_SECONDS
from headrace.models.architecture import Architecture
from headrace.rpc.access import Access
from headrace.rpc.http_server import EndpointServer, Gate
from headrace.rpc.server import Listen
from services.rollout.admission import EngineSlots
from services.rollout.agents.hosts import AgentHosts
from services.rollout.agents.sampler import AgentSampler, Player, WorkerPlayer
from services.rollout.agents.session import AgentPolicy, AgentSessions, SessionLimits
from services.rollout.agents.tool_calls import ToolCallReader
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.arguments import evaluation_priority
from services.rollout.production.generator import Generator
from services.rollout.production.prompts import PromptEncoder

TASK_LEASE_SECONDS = 30.0
"""Tasks of an agent host that is not heard of for so long are given to another."""


@dataclass(frozen=True, slots=True)
class OpenaiParts:
    """The endpoint of OpenAI's protocol, and the sampler of agents that use it, if the job has one."""

    server: EndpointServer
    tool_calls: ToolCallReader
    sampler: AgentSampler | None


def openai_parts(
    job: Job,
    args: HookArgs,
    generator: Generator,
    encoder: PromptEncoder,
    params: SamplingParams,
    architecture: Architecture,
    *,
    listen: Listen,
    slots: EngineSlots,
    calls_at_once: int,
    warn: Callable[[str], None],
    ended: Callable[[str], None],
) -> OpenaiParts | None:
    """None unless the job has an agent or asks for the endpoint. `ended` is told of background work that broke off."""
    agent = job.rollout.agent_function_path
    if agent is None and job.rollout.openai_port is None:
        return None
    from services.rollout.agents.endpoint import SERVICE, Endpoint  # half a second: only where there is an endpoint

    rollout, seconds = job.rollout, job.rollout.generate_timeout_seconds
    sessions, tool_calls = (
        AgentSessions(encoder, params, SessionLimits(seconds)),
        ToolCallReader(tool_call_parser(args)),
    )
    policy = AgentPolicy(generator, encoder, tool_calls, slots)
    gate = Gate(SERVICE, Access(has_certificates=listen.tls is not None, tokens=listen.tokens))
    endpoint = Endpoint(sessions, policy, encoder, job.model.hf_checkpoint.name, gate)
    server = EndpointServer(
        endpoint.application(),
        rollout.openai_port,
        host=rollout.openai_host,
        tls=listen.tls,
        end_calls=endpoint.calls.end,
    )
    server.require_private(insecure=listen.insecure, has_tokens=listen.tokens is not None)
    if agent is None:
        return OpenaiParts(server, tool_calls, None)
    context = ContextLimit.of(rollout, job.sglang, architecture, job.placement.engine_groups)
    player: Player
    if rollout.agent_hosts:
        player = AgentHosts(
            agent,
            args,
            server.url,
            seconds=seconds,
            lease_seconds=TASK_LEASE_SECONDS,
            patience_seconds=PEER_WAIT_SECONDS,
            warn=warn,
            ended=ended,
        )
    else:
        player = WorkerPlayer(agent, args, server.url, seconds=seconds, calls_at_once=calls_at_once)
    sampler = AgentSampler(
        agent,
        args,
        sessions,
        player,
        limits=SessionLimits(seconds, rollout.max_turns, context.tokens if context else None),
        calls_at_once=calls_at_once,
        evaluation_priority=evaluation_priority(job.sglang),
        mask_tokens=mask_tokens(job),
        warn=warn,
    )
    return OpenaiParts(server, tool_calls, sampler)
