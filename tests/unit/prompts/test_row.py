"""One rule for rows of prompts, whoever reads them."""

from __future__ import annotations

from headrace.prompts.row import chat_message


def test_a_message_keeps_the_order_of_its_keys_for_the_chat_template() -> None:
    call = {"name": "look", "arguments": {"b": 1, "a": 2}}
    message = chat_message({"role": "assistant", "tool_calls": [call], "content": None})
    assert message.extra_json == '{"tool_calls":[{"name":"look","arguments":{"b":1,"a":2}}]}'
