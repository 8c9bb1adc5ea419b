"""The reward model as a class, against transformers' own logits of one answer at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from headrace.errors import ConfigError
from headrace.hooks import reward_hook
from headrace.hooks.kit.reward_model import SequenceClassifier
from tests.support.models.tiny_model import make_tiny_tokenizer


def publish(folder: Path, *, outputs: int, template: str | None) -> Path:
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = template
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_labels=outputs, initializer_range=0.3,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(folder / "classifier")
    tokenizer.save_pretrained(folder / "classifier")
    return folder / "classifier"


@pytest.mark.parametrize("template", [None, "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"])
def test_rewards_are_the_logits_of_each_conversation_alone(tmp_path: Path, template: str | None) -> None:
    folder = publish(tmp_path, outputs=1, template=template)
    prompts: list[str | list[dict[str, str]]] = ["1 + 1 =", [{"role": "user", "content": "2 + 2 ="}], "a" * 40]
    prompts = [prompts[number % 3] for number in range(20)]
    responses = ["2" * (number + 1) for number in range(20)]
    rewards = SequenceClassifier(str(folder)).compute_reward(prompts, responses)
    model = LlamaForSequenceClassification.from_pretrained(folder).double()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model.config.pad_token_id = tokenizer.pad_token_id
    for prompt, response, reward in zip(prompts, responses, rewards, strict=True):
        asked = prompt if isinstance(prompt, str) else prompt[0]["content"]
        text = f"{asked}\n{response}" if template is None else f"<user>{asked}<assistant>{response}"
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=template is None)
        assert reward == pytest.approx(model(**ids).logits.item(), abs=2e-5)
    assert max(rewards) - min(rewards) > 0.1


def test_a_model_of_several_outputs_is_refused_with_their_number(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 3 outputs"):
        SequenceClassifier(str(publish(tmp_path, outputs=3, template=None)))


def test_it_is_taken_for_a_reward_hook_of_batches() -> None:
    assert reward_hook("headrace.hooks.kit.SequenceClassifier").form.value == "prompts and responses of any samples"
