"""The checkpoint's chat template: tokens of a conversation, and of what was said since a response."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from headrace.errors import InvalidArgument
from headrace.hooks.args import HookArgs
from headrace.models.tokenizer.chat import render_prompt
from headrace.models.tokenizer.tokenizer import load_tokenizer


def template_of(args: HookArgs) -> Template:
    """The template of the job's checkpoint with the job's variables. Loads the tokenizer, once a process."""
    variables = json.dumps(args.get("apply_chat_template_kwargs") or {})
    return _loaded(str(args.hf_checkpoint), variables, bool(args.get("trust_remote_code")))


@cache
def _loaded(hf_checkpoint: str, variables: str, trust_remote_code: bool) -> Template:
    return Template(hf_checkpoint, json.loads(variables), trust_remote_code=trust_remote_code)


class Template:
    """A tokenizer and its chat template."""

    def __init__(
        self,
        hf_checkpoint: str,
        variables: Mapping[str, Any] = MappingProxyType({}),
        *,
        trust_remote_code: bool = False,
    ) -> None:
        self._variables = variables
        self._tokenizer = load_tokenizer(Path(hf_checkpoint), trust_remote_code=trust_remote_code)

    def prompt(self, conversation: Any, tools: Sequence[Any] | None, *, is_rendered: bool) -> list[int]:
        """Returns the tokens of messages up to the policy's turn, or those of a text as it is."""
        if isinstance(conversation, str):
            return self._encode(conversation, special=not is_rendered)
        return self._encode(self._render(conversation, tools))

    def text(self, text: str) -> list[int]:
        """Returns the tokens of a text in the midst of a conversation."""
        return self._encode(text)

    def since(self, messages: Sequence[Any], position: int, tools: Sequence[Any] | None, last_token: int) -> list[int]:
        """Returns the tokens behind the response at `position`, up to the policy's next turn.

        A text stands in for the response, so that it is neither rendered nor tokenized again. What ends a turn in the
        template is left out where the response's `last_token` is that already.
        """
        mark = f"response-{secrets.token_hex(8)}"
        response = {key: value for key, value in messages[position].items() if key not in ("content", "tool_calls")}
        marked = [*messages[:position], {**response, "content": mark}, *messages[position + 1 :]]
        _, found, behind = self._render(marked, tools, first=position).rpartition(mark)
        if not found:
            raise InvalidArgument(
                "the chat template leaves the policy's earlier response out, so its tokens cannot be continued: append "
                "it with the role assistant"
            )
        tokens = self._encode(behind)
        return tokens[1:] if tokens and tokens[0] == last_token else tokens

    def decode(self, tokens: Sequence[int], *, special: bool) -> str:
        """Returns the text, with special tokens or without."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=not special))

    def without_special(self, text: str) -> str:
        """Returns the text without the special tokens that are written in it."""
        for token in self._tokenizer.all_special_tokens:
            text = text.replace(token, "")
        return text

    def _render(self, messages: Sequence[Any], tools: Sequence[Any] | None, *, first: int = 0) -> str:
        return render_prompt(self._tokenizer, messages, tools, self._variables, first=first)

    def _encode(self, text: str, *, special: bool = False) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=special))
