"""Code that a folder brings for its tokenizer, as Kimi K2 and Moonlight do, runs only where it is trusted."""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiktoken
from prometheus_client import CollectorRegistry

from headrace.cli.view.plan import plan
from headrace.errors import AlreadyExists, ConfigError
from headrace.hooks.args import hook_args
from headrace.hooks.kit.conversation import renderer_of
from headrace.job.schema.job import Job
from headrace.models.tokenizer.tokenizer import load_tokenizer
from headrace.models.tokenizer.without_code import main, write_without_code
from services.rollout.build import rollout_service
from services.rollout.production.prompts import PromptEncoder
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.fakes.fake_fleet import WIRE
from tests.support.models.published_kimi import PATTERN, SPECIAL, publish
from tests.support.models.tiny_families import make_tiny

TEXTS = (
    "What is 12 + 345678?  It's THE answer, isn't it.",
    "今天天气很好，我们ABC去公园。\n\n  \n They're  ",
    "<|im_user|>user<|im_middle|>naïve 🙂 Ünïcödé\tx<|im_end|>",
    " ",
    "",
)
TRUST = ("--trust-remote-code", "--sglang-trust-remote-code")
KINDS = [("tokenization_kimi", "kimi_k2"), ("tokenization_moonshot", "deepseek_v3")]


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Transformers copies trusted code to a folder of its own before it runs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield


@pytest.mark.parametrize(("module", "model_type"), KINDS)
async def test_trusted_code_of_a_tokenizer_runs_in_the_rollout_service_and_in_a_hooks_template(
    tmp_path: Path, module: str, model_type: str
) -> None:
    folder = make_tiny(tmp_path / model_type, "kimi_k2")
    for path in (*folder.glob("*token*"), folder / "chat_template.jinja"):
        path.unlink()
    ran = publish(folder, module=module, model_type=model_type)
    (folder / "configuration_deepseek.py").write_text(_CONFIGURATION)
    values: dict[str, object] = {
        "model": {"hf_checkpoint": folder, "trust_remote_code": True},
        "data": {"apply_chat_template": True},
        "services": {"buffer_address": "127.0.0.1:1", "reward_address": "127.0.0.1:2"},
    }
    job = Job.model_validate(values)
    service = rollout_service(job, lambda number: FakeEngine(WIRE), tmp_path, CollectorRegistry())
    encoder = service.parts.encoder
    await service.stop()
    prompt = encoder.encode_text("It's 12")
    assert encoder.decode_exactly(prompt.tokens) == prompt.text
    assert prompt.text.startswith("<|im_user|>user<|im_middle|>It's 12<|im_end|>")
    kit = renderer_of(hook_args(job))
    assert kit.tokens_of_rendered(kit.render([{"role": "user", "content": "It's 12"}], None)) == prompt.tokens
    assert set(ran.read_text().split()) == {str(os.getpid())}


_CONFIGURATION = """
from transformers import DeepseekV3Config as Base

class DeepseekV3Config(Base):
    model_type = "kimi_k2"
"""


def test_a_tokenizer_json_beside_the_code_is_used_without_running_it(tmp_path: Path) -> None:
    ran = publish(tmp_path / "model")
    write_without_code(tmp_path / "model", tmp_path / "plain")
    shutil.copy(tmp_path / "plain" / "tokenizer.json", tmp_path / "model")
    tokenizer = load_tokenizer(tmp_path / "model", trust_remote_code=False)
    assert [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS] == _of_tiktoken(tmp_path / "model")
    assert not ran.exists()


@pytest.mark.parametrize(("module", "model_type"), KINDS)
def test_a_folder_without_code_has_the_same_tokens_and_weights(
    tmp_path: Path, module: str, model_type: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = tmp_path / "model", tmp_path / "plain"
    ran = publish(model, module=module, model_type=model_type, vocab_size=400)
    (model / "model.safetensors").write_bytes(b"weights")
    monkeypatch.setattr("sys.argv", ["without_code", str(model), str(plain)])
    assert main() == 0
    assert "tokenizer.json of 400 tokens" in capsys.readouterr().out
    encoder = PromptEncoder(plain, apply_chat_template=False)
    encoder.load()
    assert [list(encoder.encode_text(text).tokens) for text in TEXTS] == _of_tiktoken(model)
    assert [encoder.decode_exactly(encoder.encode_text(text).tokens) for text in TEXTS] == list(TEXTS)
    assert encoder.is_special(encoder.encode_text("<|im_end|>").tokens[0])
    assert (plain / "model.safetensors").read_bytes() == b"weights"
    assert not list(plain.glob("*.py"))
    assert "auto_map" not in json.loads((plain / "config.json").read_text())
    assert not ran.exists()
    assert main() == 2
    with pytest.raises(AlreadyExists, match="exists already"):
        write_without_code(model, plain)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda folder: (folder / "tokenization_kimi.py").unlink(), "is not there, though auto_map names it"),
        (lambda folder: (folder / "tokenization_kimi.py").write_text("pat_str = f()"), "is not a constant"),
        (lambda folder: (folder / "tokenization_kimi.py").write_bytes(b"#" * (2 << 20)), "is longer than"),
        (lambda folder: (folder / "tiktoken.model").write_text("IQ== 0\n"), "not numbered from 0 with every byte"),
        (lambda folder: (folder / "tiktoken.model").write_text("??? 0\n"), "line 1: not a token in base64"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("["), "is not JSON"),
    ],
)
def test_a_folder_that_cannot_be_written_without_code_says_why(
    tmp_path: Path, break_it: Callable[[Path], object], message: str
) -> None:
    publish(tmp_path / "model")
    break_it(tmp_path / "model")
    with pytest.raises(ConfigError, match=message):
        write_without_code(tmp_path / "model", tmp_path / "plain")
    assert not (tmp_path / "plain").exists()


def test_code_of_another_repository_is_never_fetched(tmp_path: Path) -> None:
    publish(tmp_path / "model")
    about = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    about["auto_map"] = {"AutoTokenizer": ["someone/else--tokenization_kimi.TikTokenTokenizer", None]}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(about))
    with pytest.raises(ConfigError, match=r"code of another repository, 'someone/else': headrace downloads none"):
        load_tokenizer(tmp_path / "model", trust_remote_code=True)


def test_a_job_is_refused_until_each_process_that_runs_the_code_is_told_to(
    load_with: Callable[..., Job], model: Path
) -> None:
    publish(model, model_type="qwen3", vocab_size=0)
    (model / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenization_kimi.py, words_kimi.py\), which is not run unless you trust"):
        load_with()
    with pytest.raises(ConfigError, match=r"engines load the tokenizer too.*pass --sglang-trust-remote-code as well"):
        load_with(TRUST[0])
    said = dict(plan(load_with(*TRUST)))["remote code"]
    assert said.startswith("tokenization_kimi.py, words_kimi.py, configuration_deepseek.py of ")
    assert "the rollout service, hooks that use headrace.hooks.kit and in the engines" in said


def _of_tiktoken(folder: Path) -> list[list[int]]:
    lines = (folder / "tiktoken.model").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
    special = {name: len(ranks) + place for place, name in enumerate(SPECIAL)}
    encoding = tiktoken.Encoding("it", pat_str="|".join(PATTERN), mergeable_ranks=ranks, special_tokens=special)
    return [encoding.encode(text, allowed_special="all") for text in TEXTS]
