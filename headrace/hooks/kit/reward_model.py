"""Reward models, as classes for `--custom-rm-path`. They need torch and transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.errors import ConfigError

_BATCH = 16


class SequenceClassifier:
    """Rewards by a Hugging Face sequence classifier of one output, as reward models are published.

    `--custom-rm-path headrace.hooks.kit.SequenceClassifier --reward-model-path FOLDER`: prompt and response go
    through the model's chat template, where it has one; the logit is the reward.
    """

    def __init__(self, model_path: str) -> None:
        """Raises ConfigError for a model of several outputs, and where torch or transformers is missing."""
        try:
            import torch
            from transformers import AutoModelForSequenceClassification, AutoTokenizer
        except ImportError as error:
            raise ConfigError(
                f"a reward model needs {error.name}, which is not installed in this Python: install it, or name "
                "another with --reward-python",
                field="custom_rm_path",
            ) from error
        self._torch = torch
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
        model = AutoModelForSequenceClassification.from_pretrained(model_path, dtype="auto")
        if model.config.num_labels != 1:
            raise ConfigError(
                f"reward_model_path {model_path} has {model.config.num_labels} outputs, and a reward is one number: "
                "write a class of your own that says which counts",
                field="reward_model_path",
            )
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = model.float().eval() if self._device == "cpu" else model.eval().to(self._device)
        self._tokenizer.pad_token = self._tokenizer.pad_token or self._tokenizer.eos_token
        self._model.config.pad_token_id = self._tokenizer.pad_token_id

    def compute_reward(self, prompts: Sequence[str | list[dict[str, Any]]], responses: Sequence[str]) -> list[float]:
        """One logit an answer, in order. Answers of like length are computed together."""
        texts = [self._text(*pair) for pair in zip(prompts, responses, strict=True)]
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        rewards = [0.0] * len(texts)
        for start in range(0, len(order), _BATCH):
            chosen = order[start : start + _BATCH]
            for index, reward in zip(chosen, self._logits([texts[index] for index in chosen]), strict=True):
                rewards[index] = reward
        return rewards

    def _text(self, prompt: str | list[dict[str, Any]], response: str) -> str:
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self._tokenizer.chat_template is None:
            return "\n".join([*(str(turn["content"]) for turn in turns), response])
        text: str = self._tokenizer.apply_chat_template(
            [*turns, {"role": "assistant", "content": response}], tokenize=False
        )
        return text

    def _logits(self, texts: Sequence[str]) -> list[float]:
        # A template has written what begins and ends a conversation.
        special = self._tokenizer.chat_template is None
        encoded = self._tokenizer(list(texts), return_tensors="pt", padding=True, add_special_tokens=special)
        with self._torch.inference_mode():
            logits = self._model(**encoded.to(self._device)).logits
        rewards: list[float] = logits[:, 0].float().tolist()
        return rewards
