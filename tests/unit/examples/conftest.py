"""An example's folder with its data, and its functions, played with an engine whose responses the test writes."""

from __future__ import annotations

import runpy
import shutil
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.hooks import HookArgs, Sample
from headrace.hooks.generate import run_generate
from headrace.hooks.load import load_hook
from services.rollout.production.generator import Texts
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.models.chat_templates import make_chat_tokenizer

EXAMPLES = Path(__file__).parents[3] / "examples"
_IGNORED = shutil.ignore_patterns("runs", "__pycache__", "*.jsonl")

Copied = Callable[[str], Path]
Play = Callable[..., Awaitable["Played"]]


class Writing(FakeEngine):
    """Writes the given responses, one a request, and then ends its turn."""

    def __init__(self, tokenizer: Any, responses: Sequence[str]) -> None:
        super().__init__()
        self._end = int(tokenizer.convert_tokens_to_ids("<|im_end|>"))
        self._responses = [tokenizer.encode(text, add_special_tokens=False) for text in responses]
        self.texts = Texts(tokenizer.decode, lambda text: len(tokenizer.encode(text, add_special_tokens=False)))

    def _next_token(self, context: Sequence[int]) -> int:
        response = self._responses[len(self.bodies) - 1]
        number = len(context) - len(self.bodies[-1]["input_ids"])
        return int(response[number]) if number < len(response) else self._end


class Played:
    """A sample, its reward, and the texts that the policy wrote and that it was given."""

    def __init__(self, sample: Sample, reward: float, tokenizer: Any) -> None:
        response = sample.tokens[len(sample.tokens) - sample.response_length :]
        marked = list(zip(response, sample.loss_mask or [1] * len(response), strict=True))
        self.sample, self.reward = sample, reward
        self.written = tokenizer.decode([token for token, mask in marked if mask], skip_special_tokens=True)
        self.given = tokenizer.decode([token for token, mask in marked if not mask], skip_special_tokens=True)


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Copied:
    """`copied("countdown")`: a copy of the example, whose data.py has run; it is the current folder."""

    def copy(name: str) -> Path:
        folder = tmp_path / "examples" / name
        shutil.copytree(EXAMPLES / name, folder, ignore=_IGNORED, dirs_exist_ok=True)
        monkeypatch.chdir(folder)
        if (folder / "data.py").is_file():
            modules = set(sys.modules)
            monkeypatch.syspath_prepend(folder)
            runpy.run_path(str(folder / "data.py"), run_name="__main__")
            for module in set(sys.modules) - modules:
                del sys.modules[module]
        return folder

    return copy


@pytest.fixture
def play(copied: Copied, tmp_path: Path) -> Play:
    """`await play("wordle", "game.py", sample, *responses)` generates with a function and scores with another."""

    async def played(name: str, file: str, sample: Sample, *responses: str, max_turns: int = 5) -> Played:
        tokenizer = make_chat_tokenizer("qwen2.5")
        tokenizer.save_pretrained(tmp_path / "model")
        engine = Writing(tokenizer, responses)
        await engine.start(seconds=60)
        host, port = engine.url.removeprefix("http://").split(":")
        args = HookArgs(
            {
                "hf_checkpoint": str(tmp_path / "model"),
                "generate_timeout_seconds": 60.0,
                "sglang_router_ip": host,
                "sglang_router_port": int(port),
                "max_turns": max_turns,
            }
        )
        params = {"max_new_tokens": 200, "stop_token_ids": [tokenizer.convert_tokens_to_ids("<|im_end|>")]}
        path = str(copied(name) / file)
        try:
            ((made,),) = await run_generate(f"{path}:generate", args, [sample], params, evaluation=False)
        finally:
            await engine.stop()
        return Played(made, await load_hook(f"{path}:reward").target(args, made), tokenizer)

    return played
