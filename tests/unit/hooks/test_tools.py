"""Tools of the kit: schemas from types, arguments converted or refused, limits, and errors that the policy reads."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any, Literal

import msgspec
import pytest

from headrace.errors import AlreadyExists, InvalidArgument
from headrace.hooks.kit import ToolCall, Tools

tools = Tools(max_characters=50)


class Place(msgspec.Struct):
    """A part of a tool's arguments."""

    city: str
    country: str = "NL"


@tools.register
def multiply(a: int, b: int = 2) -> int:
    """The product of two numbers."""
    return a * b


@tools.register(name="weather", description="What the weather is.", seconds=0.05)
async def slow(where: Place, unit: Literal["C", "F"] = "C", days: Annotated[int, msgspec.Meta(ge=1)] = 1) -> Any:
    await asyncio.sleep(10 if where.city == "Nowhere" else 0)
    return {"where": where.city, "unit": unit, "days": days}


@tools.register
def fail(text: str) -> str:
    raise ValueError(text)


@tools.register(seconds=0.05)
def hang(text) -> str:
    time.sleep(0.3)
    return text


async def answer(name: str, **arguments: Any) -> str:
    return await tools.call(ToolCall(name=name, arguments=arguments))


def test_schemas_are_those_that_openai_has() -> None:
    product, weather, *_ = tools.schemas()
    assert product == {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "The product of two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "default": 2}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }
    parameters = weather["function"]["parameters"]
    assert weather["function"]["description"] == "What the weather is."
    assert parameters["required"] == ["where"]
    assert parameters["properties"]["unit"] == {"enum": ["C", "F"], "default": "C"}
    assert parameters["$defs"]["Place"]["properties"]["country"] == {"type": "string", "default": "NL"}


async def test_a_tool_answers_with_text_json_and_defaults() -> None:
    assert await answer("multiply", a="3") == "6"  # as templates without JSON have numbers
    assert await answer("weather", where={"city": "Delft"}) == '{"where": "Delft", "unit": "C", "days": 1}'


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("multiply", {}, "error: multiply: Object missing required field `a`"),
        ("multiply", {"a": "x"}, "error: multiply: Expected `int`, got `str` - at `$.a`"),
        ("multiply", {"a": 1, "c": 2}, "error: multiply: Object contains unknown field `c`"),
        ("weather", {"where": {"city": "Delft"}, "days": 0}, "error: weather: Expected `int` >= 1 - at `$.days`"),
        ("weather", {"where": {"city": "Nowhere"}}, "error: weather took longer than 0.05 s"),
        ("hang", {"text": "x"}, "error: hang took longer than 0.05 s"),
        ("fail", {"text": "no"}, "error: ValueError: no"),
        ("multply", {"a": 1}, "error: there is no tool multply: did you mean multiply?; there are multiply, weather"),
    ],
)
async def test_what_goes_wrong_is_an_answer(name: str, arguments: dict[str, Any], said: str) -> None:
    assert (await answer(name, **arguments)).startswith(said)


async def test_a_long_answer_is_cut_and_says_so() -> None:
    assert await answer("fail", text="x" * 100) == f"error: ValueError: {'x' * 31}\n… cut: 119 characters, 50 are shown"


async def test_calls_of_a_response_are_answered_side_by_side_in_their_order() -> None:
    response = "".join(
        f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'
        for name, arguments in (("hang", '{"text": "x"}'), ("multiply", '{"a": 4}'), ("other", "{}"))
    )
    found = await tools.messages(response)
    assert [(message["role"], message["name"]) for message in found] == [
        ("tool", "hang"),
        ("tool", "multiply"),
        ("tool", "other"),
    ]
    assert found[1]["content"] == "8"
    assert await tools.messages("no call") == []


def test_what_is_no_tool_is_refused() -> None:
    def anything(*values: int) -> None: ...

    def unknown(value: complex) -> None: ...

    with pytest.raises(InvalidArgument, match="tool anything has the parameter .*values.*given by their names"):
        Tools().register(anything)
    with pytest.raises(InvalidArgument, match="tool unknown: .* use types that JSON has"):
        Tools().register(unknown)
    with pytest.raises(AlreadyExists, match="there is a tool multiply already"):
        tools.register(multiply)
