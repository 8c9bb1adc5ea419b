"""A resource server of NeMo Gym gets the row (`/seed_session`), then the trajectory (`/verify`), and gives the reward.

The row's fields are the sample's metadata. Its `responses_create_params` are sent as they are, where it has some. The
trajectory is a response of OpenAI's Responses API: messages, thoughts, function calls and their outputs. Cookies of the
server are kept for one sample. Other numbers of its answer that the row does not have are parts of the reward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from http.cookiejar import CookieJar
from typing import Any

from headrace.errors import InvalidArgument
from headrace.hooks import HookArgs, Reward
from headrace.hooks.reward import checked_reward
from headrace.limits import shown
from headrace.score import ScoreItem
from headrace.trajectory import Status, whole_conversation
from services.reward.scorers.answers import after_thinking
from services.reward.scorers.remote_rm import post

_MOST_BYTES = 16 << 20
"""Of an answer, in which the server repeats the trajectory."""
_PARAMS = "responses_create_params"
_ROLES = ("user", "assistant", "system", "developer")

Message = Mapping[str, Any]


async def score(item: ScoreItem, args: HookArgs) -> Reward:
    """Raises InvalidArgument without --rm-url, for a trajectory that was cut, and for what the server refuses.

    Raises OSError while nobody answers.
    """
    if args.rm_url is None:
        raise InvalidArgument("scorer nemo_gym has no resource server to ask: set --rm-url")
    url, cookies = args.rm_url.rstrip("/"), CookieJar()
    asked, said = _divided(item)
    if not isinstance(own := item.metadata.get(_PARAMS, {}), dict):
        raise InvalidArgument(f"metadata.{_PARAMS} is {shown(str(own))}, must be an object: what NeMo Gym's rows have")
    params = {"input": [_asked(message) for message in asked]} | own
    row = {**item.metadata, _PARAMS: params}
    seconds = args.reward_timeout_seconds
    await post(f"{url}/seed_session", row, seconds=seconds, cookies=cookies)
    response = _response(item, params, said)
    answer = await post(
        f"{url}/verify", row | {"response": response}, seconds=seconds, cookies=cookies, most_bytes=_MOST_BYTES
    )
    if not isinstance(answer, dict) or not isinstance(answer.get("reward"), int | float):
        raise InvalidArgument(f"{url}/verify answered no reward: {shown(str(answer))}")
    reward = checked_reward(f"{url}/verify", {name: answer[name] for name in answer.keys() - row.keys()})
    if isinstance(reward, str):
        raise InvalidArgument(reward.removeprefix("hook "))
    return reward


def _divided(item: ScoreItem) -> tuple[Sequence[Message], Sequence[Message]]:
    """The messages before the first of the policy, and the others. Raises InvalidArgument where some were left out."""
    messages = whole_conversation(item.hook_fields)
    if not messages:
        return [{"role": "user", "content": item.prompt}], [{"role": "assistant", "content": item.response}]
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    return messages[:first], messages[first:]


def _asked(message: Message) -> dict[str, Any]:
    role = message["role"] if message["role"] in _ROLES else "user"
    return {"type": "message", "role": role, "content": message["content"]}


def _response(item: ScoreItem, params: Mapping[str, Any], said: Sequence[Message]) -> dict[str, Any]:
    is_whole = item.status != Status.TRUNCATED.value
    return {
        "id": f"resp_{item.item_id}",
        "object": "response",
        "created_at": 0.0,
        "model": params.get("model") or "policy",
        "status": "completed" if is_whole else "incomplete",
        "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
        "output": [each for number, message in enumerate(said) for each in _items(message, number)],
        "tools": params.get("tools") or [],
        "tool_choice": params.get("tool_choice") or "auto",
        "parallel_tool_calls": True,
    }


def _items(message: Message, number: int) -> Iterator[dict[str, Any]]:
    """A message as items of a response's output."""
    text = message["content"]
    if message["role"] == "tool":
        yield {"type": "function_call_output", "call_id": message.get("tool_call_id", ""), "output": text}
    elif message["role"] != "assistant":
        yield _asked(message)
    else:
        answer, calls = after_thinking(text), message.get("tool_calls", ())
        if thought := text.removesuffix(answer).strip().removeprefix("<think>").removesuffix("</think>").strip():
            yield {"type": "reasoning", "id": f"rs_{number}", "summary": [{"type": "summary_text", "text": thought}]}
        if answer.strip() or not calls:
            part = {"type": "output_text", "text": answer.strip(), "annotations": []}
            yield {"type": "message", "id": f"msg_{number}", "role": "assistant", "content": [part]}
        for call in calls:
            yield {"type": "function_call", "call_id": call["id"], **call["function"]}
