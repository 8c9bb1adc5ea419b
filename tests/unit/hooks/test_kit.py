"""The kit for generate functions: conversations by their tokens, templates, limits and tool calls."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import FailedPrecondition, InvalidArgument, Unavailable
from headrace.hooks import HookArgs, Sample
from headrace.hooks.kit import Completion, Tools, build_loss_mask, chat, extract_tool_call, generate_single
from headrace.hooks.kit.conversation import Call, attach_tokens, calling, renderer_of
from headrace.hooks.kit.engine import ask_engine
from headrace.rpc.net import free_port
from headrace.session import RecordedAnswer, SessionRecord
from headrace.trajectory import Status
from tests.support.fakes.scripted_engine import ScriptedEngine
from tests.support.models.chat_templates import CHAT_MODELS, make_chat_tokenizer

USER = {"role": "user", "content": "What is 3 + 4?"}
AGAIN = {"role": "user", "content": "Are you sure?"}
PLAIN = ("qwen2.5", "llama3", "llama3.1", "kimi_k2", "smollm2")
"""Templates that show a conversation as it was, thoughts included."""


CALLED = 'I add.\n<tool_call>\n{"name":  "add", "arguments": {"b": 4, "a": 3}}\n</tool_call>'  # by no template
tools = Tools()


@tools.register
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


async def scripted(folder: Path, *says: str) -> AsyncIterator[ScriptedEngine]:
    tokenizer = make_chat_tokenizer("qwen2.5")
    tokenizer.save_pretrained(folder)
    running = ScriptedEngine(tokenizer, list(says))
    await running.start(seconds=60)
    yield running
    await running.stop()


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[ScriptedEngine]:
    async for running in scripted(tmp_path, "It is 7.", "Yes."):
        yield running


@pytest.fixture
async def caller(tmp_path: Path) -> AsyncIterator[ScriptedEngine]:
    async for running in scripted(tmp_path, CALLED, "It is 7.", "Yes."):
        yield running


def call_of(engine: ScriptedEngine, folder: Path, **args: Any) -> Call:
    """A call with one sample that asks the engine."""
    host, port = engine.url.removeprefix("http://").split(":")
    options = {"hf_checkpoint": str(folder), "generate_timeout_seconds": 60.0}
    options |= {"sglang_router_ip": host, "sglang_router_port": int(port), **args}
    params = {"max_new_tokens": 200, "stop_token_ids": [engine.end_of_turn], "sampling_seed": 5}
    return Call(HookArgs(options), [Sample()], params)


def renderer(folder: Path) -> Any:
    return renderer_of(HookArgs({"hf_checkpoint": str(folder)}))


def require_continued(first: Completion, second: Completion) -> None:
    tokens = first.turn.tokens()
    assert second.turn.tokens()[: len(tokens)] == tokens


async def test_a_later_turn_continues_the_tokens_that_were_sampled(engine: ScriptedEngine, tmp_path: Path) -> None:
    with calling(call_of(engine, tmp_path)):
        first = await generate_single([USER])
        second = await generate_single([USER, {"role": "assistant", "content": first}, AGAIN])
    assert (first, second) == ("It is 7.", "Yes.")
    whole = second.turn.branch()
    require_continued(first, second)
    assert whole.response[-len(engine.turns[1]) :] == tuple(engine.turns[1])
    between = len(whole.response) - len(engine.turns[0]) - len(engine.turns[1])
    assert [*whole.loss_mask] == [1] * len(engine.turns[0]) + [0] * between + [1] * len(engine.turns[1])


async def test_a_text_that_goes_on_where_a_response_ended_continues_its_tokens(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    text, since_then = "3 + 4 =<|im_start|>assistant\n", " Sure?<|im_start|>assistant\n"
    with calling(call_of(engine, tmp_path)):
        first = await generate_single(text)
        second = await generate_single(f"{text}{first}{since_then}")
    whole = second.turn.branch()
    require_continued(first, second)
    since = whole.response[len(engine.turns[0]) : -len(engine.turns[1])]
    assert renderer(tmp_path).decode(since, special=True) == since_then
    assert [*whole.loss_mask] == [1] * len(engine.turns[0]) + [0] * len(since) + [1] * len(engine.turns[1])


async def test_a_sample_whose_response_is_a_text_of_the_function_has_the_tokens_of_all_turns(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    call = call_of(engine, tmp_path)
    sample = Sample(prompt="3 + 4 =<|im_start|>assistant\n")
    with calling(call):
        first = await generate_single(sample.prompt)
        second = await generate_single(f"{sample.prompt}{first} Sure?<|im_start|>assistant\n")
    sample.response = f"{first} Sure? {second}"
    made = attach_tokens(sample, call)
    assert (made.response, made.status) == (f"{first} Sure? {second}", Sample.Status.COMPLETED)
    assert made.tokens == second.turn.tokens()
    assert made.loss_mask == [*second.turn.branch().loss_mask]
    alone = attach_tokens(Sample(prompt=sample.prompt, response=str(first)), call)
    assert (alone.tokens, alone.turns) == (first.turn.tokens(), None)


async def test_a_text_of_several_turns_is_told_turn_by_turn_even_when_the_last_response_is_empty(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    prompt, since = "3 + 4 =<|im_start|>assistant\n", " Sure?<|im_start|>assistant\n"
    call = call_of(engine, tmp_path, max_turns=1)
    with calling(call):
        first = await generate_single(prompt)
        last = await generate_single(f"{prompt}{first}{since}")
    made = attach_tokens(Sample(prompt=prompt, response=last), call)
    assert made.response == ""
    assert made.turns == [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": "It is 7."},
        {"role": "user", "content": since},
        {"role": "assistant", "content": ""},
    ]


async def test_messages_that_were_edited_before_a_response_are_a_new_prompt(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    with calling(call_of(engine, tmp_path)):
        first = await generate_single([USER])
        second = await generate_single([AGAIN, {"role": "assistant", "content": first}, AGAIN])
    assert second.turn.parent is None
    assert second.turn.context != first.turn.context


async def test_a_context_without_room_ends_the_sample_as_truncated(engine: ScriptedEngine, tmp_path: Path) -> None:
    prompt = renderer(tmp_path).tokens_of_rendered(renderer(tmp_path).render([USER], None))
    call = call_of(engine, tmp_path, rollout_max_context_len=len(prompt) + 3)
    with calling(call):
        first = await generate_single([USER])
        second = await generate_single([USER, {"role": "assistant", "content": first}, AGAIN])
    assert [*first.turn.answer.tokens] == engine.turns[0][:3]
    made = attach_tokens(Sample(response=second), call)
    assert (second, made.status, made.response_length) == ("", Sample.Status.TRUNCATED, len(made.loss_mask or ()))
    assert made.tokens[len(prompt) :][:3] == engine.turns[0][:3]


async def test_a_turn_beyond_max_turns_is_empty_and_its_sample_truncated(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    call = call_of(engine, tmp_path, max_turns=1)
    with calling(call):
        first = await generate_single([USER])
        second = await generate_single([USER, {"role": "assistant", "content": first}, AGAIN])
    assert attach_tokens(Sample(response=first), call).status is Sample.Status.COMPLETED
    assert (second, attach_tokens(Sample(response=second), call).status) == ("", Sample.Status.TRUNCATED)


async def test_what_the_function_sets_itself_stays(engine: ScriptedEngine, tmp_path: Path) -> None:
    call = call_of(engine, tmp_path)
    with calling(call):
        first = await generate_single([USER])
    mask = [0] * len(engine.turns[0])
    own = Sample(response=first, status=Sample.Status.TRUNCATED, loss_mask=mask, metadata={"said": [first]})
    made = attach_tokens(own, call)
    assert (made.status, made.loss_mask, made.metadata) == (Sample.Status.TRUNCATED, mask, {"said": ["It is 7."]})
    assert {type(made.response), type(made.metadata["said"][0])} == {str}
    assert build_loss_mask(own) == [1] * len(engine.turns[0])
    assert build_loss_mask(Sample(response="a text")) is None


def test_each_request_of_a_call_has_its_own_seed_and_the_same_in_the_next_run() -> None:
    runs = [Call(HookArgs({}), [Sample()], {"sampling_seed": 5}) for _ in range(2)]
    seeds = [[run.params()["sampling_seed"] for _ in range(4)] for run in runs]
    assert seeds[0] == seeds[1]
    assert seeds[0][0] == 5
    assert len(set(seeds[0])) == 4


async def test_outside_a_generate_function_it_says_how_to_run_one() -> None:
    with pytest.raises(FailedPrecondition, match="--custom-generate-function-path"):
        await generate_single([USER])


async def test_an_engine_that_is_away_or_refuses_is_said(engine: ScriptedEngine) -> None:
    with pytest.raises(Unavailable, match=r"gave no response in 0\.3 s"):
        await ask_engine(f"http://127.0.0.1:{free_port()}/generate", [1], {}, seconds=0.3)
    engine.faults["/generate"] = "refuse"
    with pytest.raises(InvalidArgument, match=r"refused the request \(400\).*told to"):
        await ask_engine(f"{engine.url}/generate", [1], {}, seconds=60.0)


@pytest.mark.parametrize("name", CHAT_MODELS)
def test_what_was_said_since_a_response_is_rendered_by_every_template_without_the_response(
    tmp_path: Path, name: str
) -> None:
    tokenizer = make_chat_tokenizer(name)
    tokenizer.save_pretrained(tmp_path)
    said = {"role": "assistant", "content": "It is 7."}
    letters = tuple(token for letter in "It is 7." for token in tokenizer.encode(letter, add_special_tokens=False))
    wholes = []
    for ended in (False, True):
        record = SessionRecord(renderer(tmp_path))
        ends = wholes[0].context[:1] if ended else ()
        answer = RecordedAnswer(letters + ends, (-0.5,) * len(letters + ends), (), Status.COMPLETED, "It is 7.")
        turn = record.add(record.ask([USER], None), answer, said)
        ask = record.ask_behind([USER, said, AGAIN], None)
        assert ask is not None
        assert ask.parent is turn
        wholes.append(ask)
    since = tokenizer.decode(wholes[0].context)
    assert "Are you sure?" in since
    assert "7" not in since
    assert wholes[0].tokens == wholes[1].tokens  # a response that ended its turn itself is not ended once more
    if name in PLAIN:
        messages = [USER, said, AGAIN]
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(wholes[0].tokens) == rendered


def test_tool_calls_are_found_in_special_tokens_that_the_text_leaves_out(tmp_path: Path) -> None:
    raw = "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    make_chat_tokenizer("qwen2.5").save_pretrained(tmp_path)
    record = SessionRecord(renderer(tmp_path))
    turn = record.add(record.ask_text("?"), RecordedAnswer((1,), (-0.5,), (), Status.COMPLETED, raw), None)
    assert extract_tool_call(Completion.of("add{}", turn)) == {"name": "add", "arguments": {}}


async def test_an_answer_without_log_probs_is_refused(
    engine: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def without(*_: Any, **__: Any) -> dict[str, Any]:
        return {"finish_reason": {"type": "stop"}}

    monkeypatch.setattr("headrace.hooks.kit.conversation.ask_engine", without)
    with calling(call_of(engine, tmp_path)), pytest.raises(InvalidArgument, match="return_logprob"):
        await generate_single([USER])


async def converse(sample: Sample, most: int = 5) -> list[dict[str, Any]]:
    """Messages until the policy calls no more tool."""
    messages: list[dict[str, Any]] = [USER]
    sample.prompt = messages
    for _ in range(most):
        message = await chat(messages, tools=tools.schemas())
        messages.append(message)
        if not message.tool_calls:
            break
        messages += await tools.messages(message)
    return messages


async def test_a_message_with_tool_calls_is_continued_by_its_tokens(caller: ScriptedEngine, tmp_path: Path) -> None:
    call, sample = call_of(caller, tmp_path), Sample()
    with calling(call):
        messages = await converse(sample)
    function = {"name": "add", "arguments": {"a": 3, "b": 4}}
    assert messages == [
        USER,
        {
            "role": "assistant",
            "content": "I add.\n",
            "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
        },
        {"role": "tool", "name": "add", "content": "7", "tool_call_id": "call_0"},
        {"role": "assistant", "content": "It is 7."},
    ]
    made = attach_tokens(sample, call)
    first, second = caller.turns[:2]
    between = made.response_length - len(first) - len(second)
    assert made.tokens[-made.response_length :][: len(first)] == first
    assert made.tokens[-len(second) :] == second
    assert made.loss_mask == [1] * len(first) + [0] * between + [1] * len(second)
    assert "7" in renderer_of(call.args).decode(made.tokens[: -len(second)][-between:], special=True)
    assert (made.status, made.response, len(made.rollout_log_probs or ())) == (
        Sample.Status.COMPLETED,
        "It is 7.",
        made.response_length,
    )
    assert {type(message.get("content")) for message in made.prompt} == {str}


async def test_a_conversation_that_ends_at_max_turns_in_a_call_is_truncated_and_shows_the_call(
    caller: ScriptedEngine, tmp_path: Path
) -> None:
    call, sample = call_of(caller, tmp_path), Sample()
    with calling(call):
        await converse(sample, most=1)
    made = attach_tokens(sample, call)
    assert (made.status, made.response) == (Sample.Status.TRUNCATED, CALLED)
    limited = call_of(caller, tmp_path, max_turns=1)
    with calling(limited):
        messages = await converse(sample)
    assert (messages[-1], len(messages)) == ({"role": "assistant", "content": ""}, 4)
    assert attach_tokens(sample, limited).status is Sample.Status.TRUNCATED


async def test_a_message_whose_calls_were_edited_is_a_new_prompt(caller: ScriptedEngine, tmp_path: Path) -> None:
    with calling(call_of(caller, tmp_path)):
        first = await chat([USER], tools.schemas())
        first["tool_calls"][0]["function"]["arguments"]["a"] = 5
        second = await chat([USER, first, {"role": "tool", "content": "9"}], tools.schemas())
    assert second.content.turn.parent is None
    assert '"a": 5' in renderer_of(call_of(caller, tmp_path).args).decode(second.content.turn.context, special=False)


async def test_without_tools_a_message_is_its_whole_text(caller: ScriptedEngine, tmp_path: Path) -> None:
    with calling(call_of(caller, tmp_path)):
        message = await chat([USER], sampling_params={"temperature": 0.5})
    assert message == {"role": "assistant", "content": CALLED}
    assert extract_tool_call(message.content) == {"name": "add", "arguments": {"a": 3, "b": 4}}
