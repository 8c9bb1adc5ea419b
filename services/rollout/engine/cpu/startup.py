"""The start of an engine on a CPU does once, or not at all, what is half of its seconds and more of its processor time.

The scheduler and the detokenizer are forks of the server. SGLang would start new interpreters, and each would import
torch and SGLang again. A fork takes along no thread, so they are forked only while this process has a single one; and
never with an accelerator, because CUDA does not survive a fork. The tokenizer, which all three use, is loaded before
they part. SGLang's registry of hooks, which is made for plugins, is where both are chosen.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.rollout.engine.cpu import models

_ENGINE = "sglang.srt.entrypoints.engine.Engine"
_GET_TOKENIZER = "sglang.srt.utils.hf_transformers.tokenizer.get_tokenizer"
_REGISTER = "sglang.srt.mem_cache.pool_host.common._cuda_host_register"
_SHARED_FILE = "sglang.srt.managers.load_snapshot.shm_path_for"


def leave_out(hf_checkpoint: Path) -> None:
    """Called before SGLang is imported: it then imports neither what is switched off on a CPU, nor what is not served.

    That is torch's compiler, whose decorators load it even so; Megatron-core, which a debugging tool of SGLang's looks
    for; and some two hundred models.
    """
    import torch

    torch.compile = torch.compiler.disable = _as_it_is  # type: ignore[assignment]
    sys.modules["megatron.core"] = None  # type: ignore[assignment]
    os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", models.__name__)
    os.environ[models.CHECKPOINT] = str(hf_checkpoint)


def fork_processes() -> None:
    """Has SGLang's server fork its processes, load one tokenizer for all of them, and leave no shared memory behind."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    tokenizer = _Tokenizer()
    HookRegistry.register(_GET_TOKENIZER, tokenizer.get, HookType.AROUND)
    HookRegistry.register(f"{_ENGINE}._launch_scheduler_processes", tokenizer.load, HookType.BEFORE)
    HookRegistry.register(_SHARED_FILE, _in_own_folder, HookType.AROUND)
    HookRegistry.register(_REGISTER, _unregistered, HookType.AROUND)
    for start in ("_launch_scheduler_processes", "_launch_detokenizer_subprocesses"):
        HookRegistry.register(f"{_ENGINE}.{start}", _forking, HookType.AROUND)


class _Tokenizer:
    """One tokenizer for each set of arguments."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}

    def get(self, load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The tokenizer that was loaded with these arguments."""
        key = repr((args, sorted(kwargs.items())))
        if key not in self._loaded:
            self._loaded[key] = load(*args, **kwargs)
        return self._loaded[key]

    def load(self, *_: Any, **__: Any) -> None:
        """Loads it with the arguments that each of the server's processes will give."""
        from sglang.srt.runtime_context import get_model, get_serving
        from sglang.srt.utils.hf_transformers_utils import get_tokenizer

        serving, model = get_serving(), get_model()
        if not serving.skip_tokenizer_init:
            get_tokenizer(
                serving.tokenizer_path,
                tokenizer_mode=serving.tokenizer_mode,
                trust_remote_code=model.trust_remote_code,
                revision=model.revision,
                tokenizer_backend=serving.tokenizer_backend,
            )


def _as_it_is(function: Any = None, *_: Any, **__: Any) -> Any:
    return (lambda decorated: decorated) if function is None else function


def _in_own_folder(path: Callable[..., str], *args: Any) -> str:
    """SGLang's file in /dev/shm outlives an engine; the temporary folder is the engine's own and goes with it."""
    return os.path.join(tempfile.gettempdir(), os.path.basename(path(*args)))


def _unregistered(*_: Any, **__: Any) -> None:
    """SGLang keeps the experts of every token in memory that it would register with CUDA, for faster copies."""


def _forking(start: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    alone = len(os.listdir("/proc/self/task")) == 1
    multiprocessing.set_start_method("fork" if alone else "spawn", force=True)
    return start(*args, **kwargs)
