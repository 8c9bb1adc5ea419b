"""The package `openai-agents` as an agent: OpenAI's Responses API. `python with_openai_agents.py "What is 2 + 2?"`."""

import sys

from agents import Agent, Runner, function_tool, set_tracing_disabled


@function_tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


set_tracing_disabled(True)
agent = Agent(name="adder", instructions="Use the tool to add.", model="policy", tools=[add])
print(Runner.run_sync(agent, sys.argv[1]).final_output)
