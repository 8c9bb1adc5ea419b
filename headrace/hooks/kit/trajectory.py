"""The tokens of one sample, in the order in which the policy saw and wrote them; no text is ever tokenized again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.errors import InvalidArgument
from headrace.hooks.sample import Sample


class Trajectory:
    """A prompt, and a response of sampled tokens (trained) and of tokens from tools and users (not trained)."""

    def __init__(self, prompt_tokens: Sequence[int]) -> None:
        self.prompt_tokens = list(prompt_tokens)
        self.response_tokens: list[int] = []
        self.loss_mask: list[int] = []
        self.log_probs: list[float] = []
        self.is_cut = False
        """True once a limit on turns or on context has ended it."""
        self._answers: list[Mapping[str, Any]] = []

    @property
    def tokens(self) -> list[int]:
        """Prompt and response: the input of the next request."""
        return self.prompt_tokens + self.response_tokens

    @property
    def turns(self) -> int:
        """The number of answers of the policy."""
        return len(self._answers)

    def append_response(self, meta_info: Mapping[str, Any]) -> list[int]:
        """Appends an answer of the engine's `/generate`, asked with return_logprob, and returns its tokens.

        Raises InvalidArgument when the answer has no log-probs.
        """
        if "output_token_logprobs" not in meta_info:
            raise InvalidArgument("the engine's answer has no output_token_logprobs: ask it with return_logprob")
        written = meta_info["output_token_logprobs"]  # (log-prob, token id, text) of each token
        tokens = [token for _, token, *_ in written]
        self.response_tokens += tokens
        self.log_probs += [log_prob for log_prob, *_ in written]
        self.loss_mask += [1] * len(tokens)
        self._answers.append({key: value for key, value in meta_info.items() if key != "output_token_logprobs"})
        return tokens

    def append_context(self, tokens: Sequence[int]) -> None:
        """Appends tokens that the policy did not write: what a tool, a user or an environment said."""
        self.response_tokens += tokens
        self.log_probs += [0.0] * len(tokens)
        self.loss_mask += [0] * len(tokens)

    def copy(self) -> Trajectory:
        """Returns one that can be continued by itself."""
        other = Trajectory(self.prompt_tokens)
        other.response_tokens, other.loss_mask = [*self.response_tokens], [*self.loss_mask]
        other.log_probs, other.is_cut, other._answers = [*self.log_probs], self.is_cut, [*self._answers]
        return other

    def write_to(self, sample: Sample) -> None:
        """Sets the sample's tokens, lengths, mask, log-probs, versions, counts and status."""
        sample.tokens, sample.response_length = self.tokens, len(self.response_tokens)
        sample.loss_mask, sample.rollout_log_probs = [*self.loss_mask], [*self.log_probs]
        for answer in self._answers:
            sample.update_from_meta_info(None, answer)
        if self.is_cut:
            sample.status = Sample.Status.TRUNCATED
