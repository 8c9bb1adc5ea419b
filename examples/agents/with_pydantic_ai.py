"""The package `pydantic-ai` as an agent: `python with_pydantic_ai.py "What is 2 + 2?" anthropic:policy`.

Also `openai-chat:policy` and `openai-responses:policy`, which are the other two dialects.
"""

import sys

from pydantic_ai import Agent

agent = Agent(sys.argv[2], instructions="Use the tool to add.")


@agent.tool_plain
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


print(agent.run_sync(sys.argv[1]).output)
