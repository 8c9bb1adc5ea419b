"""The templates' functions, played with an engine that does what a policy would have learned."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.hooks import HookArgs, Sample
from headrace.hooks.generate import run_generate
from headrace.hooks.load import load_hook
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.models.chat_templates import make_chat_tokenizer

ROOT = Path(__file__).parents[3]
CALCULATOR = str(ROOT / "headrace/templates/tools/generate.py")


class Calculating(FakeEngine):
    """Calls the calculator for the product in the last line, and ends behind its result; else it only talks."""

    def __init__(self, tokenizer: Any, *, calls: bool = True) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._calls = calls
        self._end = int(tokenizer.convert_tokens_to_ids("<|im_end|>"))

    def _next_token(self, context: Sequence[int]) -> int:
        line = self._tokenizer.decode(list(context)).rpartition("\n")[2]
        a, b = re.findall(r"\d+", line)[:2]
        written = f"{a} * {b} = <<{a} * {b}>>" if self._calls else f"{a} * {b} = many{'!' * 40}"
        if not written.startswith(line):
            return self._end
        return int(self._tokenizer.encode(written[len(line)])[0]) if len(line) < len(written) else self._end


@pytest.mark.parametrize(("calls", "worth"), [(True, 1.0), (False, 0.0)])
async def test_the_calculators_answer_is_in_the_response_and_is_not_trained(
    tmp_path: Path, calls: bool, worth: float
) -> None:
    tokenizer = make_chat_tokenizer("qwen2.5")
    tokenizer.save_pretrained(tmp_path)
    engine = Calculating(tokenizer, calls=calls)
    await engine.start(seconds=60)
    host, port = engine.url.removeprefix("http://").split(":")
    args = HookArgs(
        {
            "hf_checkpoint": str(tmp_path),
            "generate_timeout_seconds": 60.0,
            "sglang_router_ip": host,
            "sglang_router_port": int(port),
            "max_turns": 2,
        }
    )
    params = {"max_new_tokens": 16, "stop_token_ids": [tokenizer.convert_tokens_to_ids("<|im_end|>")]}
    asked = Sample(prompt="12 * 34 = <<12 * 34>> 408<|im_end|>\n57 * 81 =", label="4617")
    try:
        ((sample,),) = await run_generate(f"{CALCULATOR}:generate", args, [asked], params, evaluation=False)
    finally:
        await engine.stop()
    response = sample.tokens[-sample.response_length :]
    said = tokenizer.decode(response, skip_special_tokens=True)  # the fake ends a turn by a token, not by >>
    given = [token for token, mask in zip(response, sample.loss_mask or [], strict=True) if not mask]
    assert (" <<57 * 81>> 4617" in said) == calls
    assert tokenizer.decode(given) == (" 4617" if calls else "")
    assert await load_hook(f"{CALCULATOR}:reward").target(args, sample) == worth
