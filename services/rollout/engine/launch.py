"""`python -m services.rollout.engine.launch --engine N --port P OPTIONS`: one SGLang server.

The names of the job's own arguments are checked here, because only this process imports SGLang and so knows them.
"""

from __future__ import annotations

import argparse
import atexit
import multiprocessing
import os
import runpy
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import ConfigError
from headrace.job.engine_shape import EngineShape
from headrace.rpc.net import Address
from services.rollout.engine import arguments, cpu
from services.rollout.engine.arguments import EngineOptions, Machine, NodeOptions

# The start of an engine on a CPU does once, or not at all, what is half of its seconds and more of its processor time.
# The scheduler and the detokenizer are forks of the server. SGLang would start new interpreters, and each would import
# torch and SGLang again. A fork takes along no thread, so they are forked only while this process has a single one; and
# never with an accelerator, because CUDA does not survive a fork. The tokenizer, which all three use, is loaded before
# they part. SGLang's registry of hooks, which is made for plugins, is where both are chosen.

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
    os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", cpu.__name__)
    os.environ[cpu.CHECKPOINT] = str(hf_checkpoint)


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


# Has an engine say for every request which experts its tokens were routed to, and which tokens they were sampled from,
# whether or not the request asks. sglang-router sends on the fields of a request that it knows, and
# `return_routed_experts` and `return_sampling_mask` are not among them. SGLang's registry of hooks, which is made for
# plugins, is where the server reads the request as one that asks.

_NORMALIZE = "sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments"


def always_returned(options: EngineOptions) -> None:
    """Called before the server starts, in its process, where every request is read."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def asked(normalize: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
        if options.returns_experts:
            request.return_routed_experts = True
        if options.mask_tokens is not None:
            request.return_sampling_mask = _has_mask(request, options.mask_tokens)
        return normalize(request, *args, **kwargs)

    HookRegistry.register(_NORMALIZE, asked, HookType.AROUND)


def _has_mask(request: Any, mask_tokens: int) -> bool:
    """SGLang returns the masks of requests with such a top_k. In a stream each event would have all of them again."""
    params = request.sampling_params
    return isinstance(params, dict) and 1 <= (params.get("top_k") or 0) <= mask_tokens and not request.stream


REFUSED = 78
"""The exit code for a job's argument that cannot be given (sysexits.h: EX_CONFIG), after a line that says why."""
NAME = "engine"
"""That line begins with it."""


def command(options: EngineOptions, *, engine: int, port: int, node: NodeOptions | None = None) -> list[str]:
    """Returns the command that starts engine number `engine` on 127.0.0.1:`port`, or one of its machines' processes."""
    given = msgspec.json.encode({**asdict(options), "hf_checkpoint": str(options.hf_checkpoint)}).decode()
    program = [sys.executable, "-m", "services.rollout.engine.launch"]
    part = [] if node is None else ["--node-rank", str(node.rank), "--meets-at", node.meets_at]
    return [*program, "--engine", str(engine), "--port", str(port), *part, given]


def main() -> int:
    """Returns after the server has ended, or REFUSED."""
    parser = argparse.ArgumentParser(prog="python -m services.rollout.engine.launch")
    parser.add_argument("--engine", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--node-rank", type=int)
    parser.add_argument("--meets-at", metavar="HOST:PORT", help="for one of an engine's machines: with --node-rank")
    parser.add_argument("options", help="EngineOptions as JSON")
    given = parser.parse_args()
    fields = msgspec.json.decode(given.options)
    own_types = {"hf_checkpoint": Path(fields["hf_checkpoint"]), "shape": EngineShape(**fields["shape"])}
    options = EngineOptions(**{**fields, **own_types})
    node = None if given.node_rank is None else NodeOptions(given.node_rank, given.meets_at)
    os.environ.update(arguments.listening_for_weights(Address(options.host, given.port), os.environ))
    if not (scratch := Path(os.environ.get("TMPDIR", tempfile.gettempdir()))).is_dir():  # another machine's
        scratch.mkdir(mode=0o700)
        atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    machine = _machine(options.hf_checkpoint)
    try:
        arguments.check(options.sglang, machine)
        words = arguments.words(options, machine, engine=given.engine, port=given.port, node=node)
    except ConfigError as error:
        print(f"{NAME}: {error}", file=sys.stderr)  # noqa: T201  # one line to a person
        return REFUSED
    if not machine.has_accelerator:
        fork_processes()
    if options.returns_experts or options.mask_tokens is not None:
        always_returned(options)
    sys.argv = ["sglang.launch_server", *words]
    runpy.run_module("sglang.launch_server", run_name="__main__")
    return 0


def _machine(hf_checkpoint: Path) -> Machine:
    import torch

    has_accelerator = torch.accelerator.is_available()
    if not has_accelerator:
        leave_out(hf_checkpoint)
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    fields = set(ServerArgs.__struct_fields__)
    flags = {a.dest: (a.option_strings[0], a.nargs != 0) for a in parser._actions if a.dest in fields}
    return Machine(has_accelerator, flags)


if __name__ == "__main__":
    sys.exit(main())
