"""Tasks of agents on the wire, and what hosts say of them."""

from __future__ import annotations

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.errors import Aborted, FailedPrecondition, HeadraceError, InvalidArgument
from headrace.hooks.reward import Reward, checked_reward
from headrace.job.schema.run import without_secrets
from headrace.limits import (
    MAX_TASK_WAIT_SECONDS,
    MAX_TASKS_PER_CALL,
    cut_text,
    require_finite,
    require_id,
    require_json_object,
    require_name,
    require_path,
)
from headrace.prompts import chat_message, label_mark, label_text, ordered_json
from services.rollout.agents.hosts import AgentHosts, LentTask


def require_hosts(hosts: AgentHosts | None) -> AgentHosts:
    """Raises FailedPrecondition where the job's agents are played by the service itself, or it has none."""
    if hosts is None:
        raise FailedPrecondition(
            "this job lends no tasks: start its rollout service with --agent-hosts --agent-function-path FILE.py:FN"
        )
    return hosts


async def lease_tasks(hosts: AgentHosts, request: pb.LeaseTasksRequest) -> pb.LeaseTasksResponse:
    """Raises InvalidArgument for a host without a name, or a wait that is no number."""
    host_id = require_id(request.host_id, "host_id")
    wait_seconds = min(require_finite(request.wait_seconds, "wait_seconds"), MAX_TASK_WAIT_SECONDS)
    path = request.agent_function_path and require_path(request.agent_function_path, "agent_function_path")
    tasks = await hosts.lend(host_id, min(request.max_tasks, MAX_TASKS_PER_CALL), wait_seconds, path or hosts.path)
    return pb.LeaseTasksResponse(
        tasks=[_task(task) for task in tasks],
        lease_seconds=hosts.lease_seconds,
        agent_function_path=hosts.path,
        args_json=ordered_json(without_secrets(_plain(dict(hosts.args)))) if request.return_args else "",
    )


def finish_task(hosts: AgentHosts, request: pb.FinishTaskRequest) -> bool:
    """False where the lease had ended. Raises InvalidArgument for a reward that is none."""
    lease_id = require_id(request.lease_id, "lease_id")
    match request.WhichOneof("result"):
        case "returned":
            return hosts.give_back(lease_id)
        case "failure":
            reason = require_name(request.failure.reason, "failure.reason")
            return hosts.finish(lease_id, Aborted(cut_text(request.failure.message) or reason, reason=reason))
        case "reward":
            return hosts.finish(lease_id, _reward(request.reward, "reward"))
        case "reward_parts_json":
            parts = require_json_object(request.reward_parts_json, "reward_parts_json")
            return hosts.finish(lease_id, _reward(parts, "reward_parts_json"))
    return hosts.finish(lease_id, None)


def _reward(value: object, field: str) -> Reward | HeadraceError:
    reward = checked_reward("of the host", value)
    if isinstance(reward, str):
        raise InvalidArgument(f"{field}: {reward}", field=field)
    return reward


def _task(lent: LentTask) -> pb.AgentTask:
    task = lent.task
    made = pb.AgentTask(
        lease_id=lent.lease_id,
        base_url=lent.base_url,
        label=label_text(task.label),
        label_is_json=bool(label_mark(task.label)),
        metadata_json=ordered_json(task.metadata) if task.metadata else "",
        index=task.index,
        evaluation=task.evaluation,
        seconds=lent.seconds,
        sample_id=lent.sample_id,
    )
    if isinstance(task.prompt, str):
        made.text = task.prompt
    else:
        made.messages.CopyFrom(sample_pb2.ChatMessages(messages=[chat_message(each) for each in task.prompt]))
    return made


def _plain(value: object) -> object:
    """Options as JSON has them: a path is a text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
