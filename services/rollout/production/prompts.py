"""Prompts become tokens here, once; responses are never tokenized again.

Tokenizing a prompt of megabytes takes seconds, so prompts from outside are encoded by `off_loop`, in separate threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from headrace.api.sample.v1 import sample_pb2 as pb
from headrace.errors import ConfigError, InvalidArgument
from headrace.images import BAD_IMAGE
from headrace.limits import MAX_PROMPT_BYTES, require_bytes, require_json_array, require_json_object
from headrace.models.tokenizer.chat import render_prompt
from headrace.models.tokenizer.tokenizer import load_tokenizer
from headrace.trajectory import check_text
from services.rollout.chat.images import EncodedImages, ImageReader, references_of
from services.rollout.chat.template import Segment, readable, require_read
from services.rollout.engine.api import PromptImages

_THREADS = 2
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as text and as tokens."""

    text: str
    tokens: tuple[int, ...]
    trained: tuple[range, ...] = ()
    """The tokens that assistants wrote, in a conversation for supervised fine-tuning."""
    messages: Sequence[Mapping[str, Any]] | None = None
    """The conversation that the text was rendered from, for users' functions."""
    tools: Sequence[Any] = ()
    """The tool definitions that the chat template was given."""
    images: EncodedImages | None = field(default=None, compare=False)

    @property
    def for_engine(self) -> PromptImages | None:
        """Its images, as an engine wants them."""
        if self.images is None:
            return None
        return PromptImages(len(self.tokens), self.images.engine_tokens, self.images.data)


NOT_ENCODED = EncodedPrompt("", ())


class PromptEncoder:
    """The checkpoint's tokenizer and chat template."""

    def __init__(
        self,
        hf_checkpoint: Path,
        *,
        apply_chat_template: bool,
        variables: Mapping[str, Any] = MappingProxyType({}),
        trust_remote_code: bool = False,
        images: ImageReader | None = None,
    ) -> None:
        self._hf_checkpoint = hf_checkpoint
        self._trust_remote_code = trust_remote_code
        self.variables = variables
        self._threads = ThreadPoolExecutor(_THREADS, "tokenize")
        self._apply_chat_template = apply_chat_template
        self._images = images

    def load(self) -> None:
        """Loads the tokenizer, which takes seconds, so that no prompt has to.

        Raises ConfigError when there is none, or when its chat template does not read one of `variables`.
        """
        _ = self.tokenizer
        if self.variables:
            require_read(self._readable, self.variables)
        if self._images is not None:
            self._images.load()

    @cached_property
    def tokenizer(self) -> Any:
        """Transformers' tokenizer. Raises ConfigError when the checkpoint has none, or code that is not trusted."""
        return load_tokenizer(self._hf_checkpoint, trust_remote_code=self._trust_remote_code)

    async def off_loop(self, work: Callable[..., T], *args: Any) -> T:
        """Runs `work(*args)` in one of the encoder's threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    def close(self) -> None:
        """Ends the threads once they are idle."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def vocab_size(self) -> int:
        """The number of token ids that the tokenizer knows."""
        return len(self.tokenizer)

    def encode(self, prompt: pb.Prompt) -> EncodedPrompt:
        """Raises InvalidArgument for a prompt without content or one that the chat template refuses."""
        kind = prompt.WhichOneof("content")
        if kind == "messages":
            try:
                return self.encode_messages(*messages_of(prompt))
            except InvalidArgument as error:
                if error.reason != BAD_IMAGE:
                    raise
                raise InvalidArgument(f"prompt {prompt.prompt_id}: {error.message}", reason=BAD_IMAGE) from error
        if kind != "text":
            raise InvalidArgument(f"prompt {prompt.prompt_id} has no content", field="prompt.content")
        return self.encode_text(prompt.text)

    def encode_text(self, text: str) -> EncodedPrompt:
        """Encodes the text as it is, or as one user turn if the job says so."""
        if self._apply_chat_template:
            return self.encode_messages([{"role": "user", "content": text}], None)
        return self.encode_plain(text)

    def encode_plain(self, text: str) -> EncodedPrompt:
        """Encodes the text as it is. Raises InvalidArgument when it is too large."""
        return EncodedPrompt(text, self._tokens(text, add_special_tokens=True))

    def decode(self, tokens: Sequence[int]) -> str:
        """Leaves out special tokens: the text is for people and scorers."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def decode_exactly(self, tokens: Sequence[int]) -> str:
        """Returns the text with special tokens, as the chat template writes them."""
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    def is_special(self, token: int) -> bool:
        """True for a token that is no text, as one that ends a turn."""
        return token in self._special

    @cached_property
    def _special(self) -> frozenset[int]:
        added = self.tokenizer.added_tokens_decoder
        return frozenset((*self.tokenizer.all_special_ids, *(token for token, one in added.items() if one.special)))

    def encode_messages(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> EncodedPrompt:
        """Encodes a conversation in OpenAI's format.

        Raises InvalidArgument when the chat template refuses it, or leaves out the text of a message.
        """
        plain, references = references_of(messages)
        text = render_prompt(self.tokenizer, plain, tools, self.variables, needs_calls=True)
        tokens, images = self.tokens_of_rendered(text), None
        if references:
            if self._images is None:
                raise InvalidArgument(
                    f"the prompt has {len(references)} images, and the model of hf_checkpoint reads none",
                    field="prompt.messages",
                )
            tokens, images = self._images.encode(tokens, references)
        return EncodedPrompt(text, tokens, messages=messages, tools=tools or (), images=images)

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        variables: Mapping[str, Any] = MappingProxyType({}),
        first: int = 0,
    ) -> str:
        """Returns the conversation's text up to the policy's turn, with a request's own variables of the template.

        Raises InvalidArgument as `encode_messages` does, and for a variable that the template never reads.
        """
        if variables:
            try:
                require_read(self._readable, variables, "chat_template_kwargs")
            except ConfigError as error:
                raise InvalidArgument(error.message, field="chat_template_kwargs") from error
        return render_prompt(self.tokenizer, messages, tools, {**self.variables, **variables}, first=first)

    def known(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Returns those variables that the chat template reads."""
        return {name: value for name, value in variables.items() if name in self._readable} if variables else {}

    @cached_property
    def _readable(self) -> frozenset[str]:
        return readable(self.tokenizer)

    def tokens_of_rendered(self, text: str) -> tuple[int, ...]:
        """Tokenizes a text of the chat template. Raises InvalidArgument when it is too large."""
        return self._tokens(text, add_special_tokens=False)

    def encode_segments(self, segments: Sequence[Segment]) -> EncodedPrompt:
        """Encodes each segment by itself, as it is encoded at inference: a prompt apart from a response."""
        text = "".join(segment.text for segment in segments)
        require_bytes(len(text.encode()), MAX_PROMPT_BYTES, "prompt")
        tokens, trained = list[int](), list[range]()
        for segment in segments:
            start = len(tokens)
            tokens.extend(self._tokens(segment.text, add_special_tokens=False))
            if segment.trained:
                trained.append(range(start, len(tokens)))
        return EncodedPrompt(text, tuple(tokens), tuple(trained))

    def _tokens(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        check_text("prompt", text)
        require_bytes(len(text.encode()), MAX_PROMPT_BYTES, "prompt")
        if self.tokenizer.is_fast:  # only the ids: all else that transformers makes of them holds the interpreter
            backend = self.tokenizer.backend_tokenizer
            return tuple(backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
        return tuple(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))


def messages_of(prompt: pb.Prompt) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """Returns a conversation in OpenAI's format, and its tools. Raises InvalidArgument for bad JSON."""
    tools = require_json_array(prompt.tools_json, "prompt.tools_json") or None
    return [_message(message) for message in prompt.messages.messages], tools


def _message(message: pb.ChatMessage) -> dict[str, Any]:
    extra = require_json_object(message.extra_json, "prompt.messages.extra_json")
    return {"role": message.role, "content": message.content, **extra}


_UNFINISHED = "\ufffd"


class IncrementalDetokenizer:
    """The pieces put together are the text of all tokens.

    A token's text may depend on the token before it (a space, a character of several tokens), so each piece is what the
    tokens of two pieces decode to, less the text of the first of them.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._before = 0
        self._sent = 0

    def next(self, tokens: Sequence[int], *, is_last: bool) -> str | None:
        """Takes all tokens so far. Returns None in the middle of a character, which more tokens complete."""
        known = self._decode(tokens[self._before : self._sent])
        text = self._decode(tokens[self._before :])
        if text.endswith(_UNFINISHED) and not is_last:
            return None
        self._before, self._sent = self._sent, len(tokens)
        return text[len(known) :]
