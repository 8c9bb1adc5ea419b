"""The package `langgraph` as an agent: `python with_langgraph.py "What is 2 + 2?" openai`, or `anthropic`."""

import sys

from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


model = ChatOpenAI(model="policy") if sys.argv[2] == "openai" else ChatAnthropic(model="policy")
said = create_react_agent(model, [add], prompt="Use the tool to add.").invoke({"messages": [("user", sys.argv[1])]})
print(said["messages"][-1].text)
