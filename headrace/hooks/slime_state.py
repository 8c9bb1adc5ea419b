"""What slime's generate functions use beside `Sample`: the tokenizer, the job's sampling, and requests over HTTP."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from headrace.errors import InvalidArgument
from headrace.hooks.kit.engine import get, post
from headrace.hooks.sample import Sample

_CONCURRENCY = 512
T = TypeVar("T")
__all__ = [
    "GenerateState",
    "build_processor_kwargs",
    "encode_image_for_rollout_engine",
    "generate",
    "get",
    "get_model_url",
    "load_function",
    "load_processor",
    "load_tokenizer",
    "post",
    "run",
]


class GenerateState:
    """One for each model in a process: `tokenizer`, `processor`, `sampling_params` of the job, and a `semaphore`.

    `args` are those of the latest call. The tokenizer is loaded when it is first used.
    """

    args: Any
    _made: dict[str, GenerateState] = {}  # noqa: RUF012  # of the class: slime's is a singleton too

    def __new__(cls, args: Any) -> GenerateState:
        state = cls._made.get(str(args.hf_checkpoint))
        if state is None:
            state = cls._made[str(args.hf_checkpoint)] = super().__new__(cls)
            state.semaphore = asyncio.Semaphore(args.get("sglang_server_concurrency") or _CONCURRENCY)
            state.reset()
        state.args = args
        return state

    semaphore: asyncio.Semaphore

    @property
    def tokenizer(self) -> Any:
        """Transformers' tokenizer of the job's model."""
        return load_tokenizer(self.args.hf_checkpoint, trust_remote_code=bool(self.args.get("trust_remote_code")))

    @property
    def processor(self) -> Any:
        """Transformers' processor of a model that reads images; None for others."""
        return load_processor(self.args.hf_checkpoint, trust_remote_code=bool(self.args.get("trust_remote_code")))

    @property
    def sampling_params(self) -> dict[str, Any]:
        """A copy of the job's, under SGLang's names."""
        names = {
            "max_new_tokens": "rollout_max_response_len",
            "temperature": "rollout_temperature",
            "top_p": "rollout_top_p",
            "top_k": "rollout_top_k",
            "stop": "rollout_stop",
            "stop_token_ids": "rollout_stop_token_ids",
        }
        values = {name: self.args.get(flag) for name, flag in names.items()}
        set_values = {name: value for name, value in values.items() if value not in (None, (), [])}
        return {
            **set_values,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
        }

    @contextmanager
    def dp_rank_context(self) -> Iterator[int]:
        """Engines divide their requests themselves: the rank is 0."""
        yield 0

    def reset(self) -> None:
        """Sets the counters of slime's own loop, which headrace does not run."""
        self.remaining_batch_size, self.aborted = 0, False
        self.pendings: set[Any] = set()


async def generate(args: Any, sample: Sample, sampling_params: Mapping[str, Any]) -> Sample:
    """Asks the engines once for a response to the sample's prompt and what it has of a response."""
    state = GenerateState(args)
    if not sample.tokens:
        if not isinstance(sample.prompt, str):
            raise InvalidArgument("the prompt is messages: pass --apply-chat-template, or use headrace.hooks.kit.chat")
        sample.tokens = list(state.tokenizer.encode(sample.prompt, add_special_tokens=False))
    left = int(sampling_params["max_new_tokens"]) - sample.response_length
    if left <= 0:
        sample.status = Sample.Status.TRUNCATED
        return sample
    asked = {
        "input_ids": sample.tokens,
        "sampling_params": {**sampling_params, "max_new_tokens": left},
        "return_logprob": True,
    }
    answer = await post(get_model_url(args, "actor"), asked)
    written = answer["meta_info"].get("output_token_logprobs") or []
    sample.append_response_tokens(
        args,
        tokens=[token for _, token, *_ in written],
        log_probs=[log_prob for log_prob, *_ in written],
        meta_info=answer["meta_info"],
        text=answer["text"],
    )
    return sample


def get_model_url(args: Any, model_name: str, endpoint: str = "/generate") -> str:
    """The router's URL. A job has one policy, whatever the name."""
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}{endpoint}"


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end, from code that is no coroutine."""
    return asyncio.run(coroutine)


def load_function(path: str) -> Any:
    """The function or class that `pkg.mod.fn` or `file.py:fn` names. Raises ConfigError for what cannot be loaded."""
    from headrace.hooks.load import load_hook  # which reads this package's names

    return load_hook(path).target


@cache
def load_tokenizer(name_or_path: str, trust_remote_code: bool = False, **_: Any) -> Any:
    """Transformers' tokenizer, once a process. Raises ConfigError when there is none."""
    from headrace.models.tokenizer.tokenizer import load_tokenizer as load  # takes seconds

    return load(Path(name_or_path), trust_remote_code=trust_remote_code)


@cache
def load_processor(name_or_path: str, trust_remote_code: bool = False, **_: Any) -> Any:
    """Transformers' processor, once a process; None for a model that reads text alone."""
    if not any((Path(name_or_path) / name).is_file() for name in ("preprocessor_config.json", "processor_config.json")):
        return None
    from headrace.models.tokenizer.tokenizer import load_processor as load  # takes seconds

    return load(Path(name_or_path), trust_remote_code=trust_remote_code)


def encode_image_for_rollout_engine(image: Any) -> str:
    """An image of Pillow as a data: URL of a PNG."""
    content = io.BytesIO()
    image.convert("RGB").save(content, "PNG")
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"


def build_processor_kwargs(multimodal_inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The arguments of a processor's call for a sample's images."""
    given = {kind: media for kind, media in (multimodal_inputs or {}).items() if media}
    return {**given, "return_tensors": None, "padding": False}
