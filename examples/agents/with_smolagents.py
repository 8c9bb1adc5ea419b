"""The package `smolagents` as an agent: OpenAI's chat API. `python with_smolagents.py "What is 2 + 2?"`."""

import os
import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


model = OpenAIModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
print(ToolCallingAgent(tools=[add], model=model, max_steps=4).run(sys.argv[1]))
