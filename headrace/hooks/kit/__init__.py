"""The kit of generate functions: conversations with the policy whose tokens are trained exactly as they were sampled.

In: messages, and the call that a function serves (its `args` and sampling parameters). Out: completions, and samples
with tokens, masks and log-probs. Beside it a reward model, for those who need no function of their own.
"""

from headrace.hooks.kit.conversation import AssistantMessage, build_loss_mask, chat, generate_single
from headrace.hooks.kit.environment import Environment, Step
from headrace.hooks.kit.mcp import mcp_tools
from headrace.hooks.kit.reward_model import SequenceClassifier
from headrace.hooks.kit.sandbox import SandboxResult, run_python, sandbox_of
from headrace.hooks.kit.sandbox_session import SandboxSession, open_sandbox
from headrace.hooks.kit.tool_call import ToolCall, extract_tool_call, extract_tool_calls
from headrace.hooks.kit.tools import Tools
from headrace.session import Completion

__all__ = [
    "AssistantMessage",
    "Completion",
    "Environment",
    "SandboxResult",
    "SandboxSession",
    "SequenceClassifier",
    "Step",
    "ToolCall",
    "Tools",
    "build_loss_mask",
    "chat",
    "extract_tool_call",
    "extract_tool_calls",
    "generate_single",
    "mcp_tools",
    "open_sandbox",
    "run_python",
    "sandbox_of",
]
