"""Nothing that another user, host or file sent is run: whatever could do that is listed here, with its reason."""

from __future__ import annotations

import ast
import pickle
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path

import pytest

from headrace.limits import syntax_tree
from headrace.process.workers import WorkerCrashed, WorkerPool, WorkerRaised

ROOT = Path(__file__).parents[3]
MODULES = frozenset(
    {
        *("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "shelve", "runpy"),
        *("yaml", "multiprocessing", "code", "codeop", "xmlrpc"),
    }
)
"""What reads objects or runs code: importing one is enough to be listed."""
BUILTINS = frozenset({"eval", "exec", "compile", "__import__"})
METHODS = frozenset(
    {
        *("import_module", "exec_module", "load_module", "run_module", "run_path", "from_pretrained", "recv_pyobj"),
        *("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list"),
        *("recv_object_list", "read_pickle", "load_state_dict_from_url"),
    }
)
"""By their last name, whatever they are called on."""
WHOLE = frozenset({"torch.load", "np.load", "numpy.load", "pickle.loads", "pickle.load", "pickle.Unpickler"})

ALLOWED = {
    ("headrace/cli/main.py", "import_module"): "commands of headrace, by a table of their names",
    ("headrace/rpc/log.py", "import_module"): "grpc's own, by its name",
    ("headrace/hooks/kit/reward_model.py", "from_pretrained"): "the job's reward model, without its code",
    ("headrace/hooks/load.py", "exec_module"): "the user's own functions, which the job names",
    ("headrace/hooks/load.py", "import_module"): "the same, of a module",
    ("headrace/hooks/slime_names.py", "import_module"): "headrace's own modules, by a table of slime's names",
    ("headrace/job/load/resolve.py", "import yaml"): "a job's file of engine groups",
    ("headrace/migrate/table.py", "import yaml"): "another project's configuration, by its safe loader",
    ("headrace/models/tokenizer/tokenizer.py", "from_pretrained"): "a folder's code runs with trust_remote_code alone",
    ("headrace/models/torch_dist.py", "import pickle"): "that reader: a name is answered with a stand-in",
    ("headrace/models/torch_dist.py", "pickle.Unpickler"): "the same: its find_class is replaced",
    ("headrace/models/torch_dist.py", "read_pickle"): "the reader that imports nothing",
    ("headrace/process/worker_main.py", "import multiprocessing"): "its fork server, which starts workers",
    ("headrace/process/workers.py", "import multiprocessing"): "the same: what it unpickles, its own service wrote",
    ("headrace/process/worker_main.py", "import pickle"): "a worker reads what its own service sent it",
    ("headrace/process/worker_main.py", "pickle.loads"): "the same: a function and its arguments, over a socket pair",
    ("headrace/process/workers.py", "import pickle"): "the service writes them; it reads MessagePack",
    ("services/reward/registry.py", "import_module"): "headrace's own scorers, by a table of their names",
    ("services/reward/scorers/code_tests.py", "import_module"): "modules of the standard library, by a table",
    ("services/rollout/chat/images.py", "from_pretrained"): "an image processor of transformers; no code of a folder",
    (
        "services/rollout/engine/cpu/served.py",
        "import_module",
    ): "SGLang's module of a family that headrace knows",
    ("services/rollout/engine/launch.py", "import multiprocessing"): "SGLang's own processes are forks",
    ("services/rollout/engine/launch.py", "import runpy"): "SGLang's own server",
    ("services/rollout/engine/launch.py", "run_module"): "the same",
    ("services/trainer/hugging_face/torch_dist.py", "torch.load"): "a tensor, with weights_only",
    (
        "services/trainer/hugging_face/starter.py",
        "from_pretrained",
    ): "a starter model, checked by SHA-256",
    ("services/trainer/hugging_face/rank_model.py", "from_pretrained"): "a configuration; no code of a folder",
}
"""By file and what stands there."""


def found_in(file: Path) -> Iterator[str]:
    for node in ast.walk(syntax_tree(file.read_text())):
        match node:
            case ast.Import(names):
                yield from _imported(alias.name for alias in names)
            case ast.ImportFrom(module):
                yield from _imported([module or ""])
            case ast.Name(name, ast.Load()) if name in BUILTINS | METHODS:
                yield name
            case ast.Attribute(_, name) if name in METHODS:
                yield name
            case ast.Attribute() if ast.unparse(node) in WHOLE:
                yield ast.unparse(node)
            case ast.keyword("trust_remote_code" | "allow_pickle" as name, ast.Constant(True)):
                yield f"{name}=True"
            case ast.keyword("weights_only", value) if ast.unparse(value) != "True":
                yield "weights_only that is not True"


def _imported(names: Iterable[str]) -> Iterator[str]:
    return (f"import {name}" for name in names if name.split(".")[0] in MODULES)


def test_nothing_reads_objects_or_runs_code_but_what_is_listed_with_its_reason() -> None:
    sources = [file for part in ("headrace", "services") for file in sorted((ROOT / part).rglob("*.py"))]
    found = {
        (str(file.relative_to(ROOT)), what)
        for file in sources
        if not file.is_relative_to(ROOT / "headrace" / "api")
        for what in found_in(file)
    }
    assert found - ALLOWED.keys() == set()
    assert ALLOWED.keys() - found == set(), "what is listed and not there any more"


class Bomb:
    """Makes a file where it is unpickled."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path(self.mark),)  # type: ignore[return-value]  # pickle takes any tuple


def a_bomb(mark: str) -> Bomb:
    return Bomb(mark)


def a_pickled_bomb(mark: str) -> bytes:
    return pickle.dumps(Bomb(mark))


def a_bomb_on_the_channel(mark: str) -> bytes:
    """Into every socket of the worker, as no message."""
    import os
    import stat

    for name in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                os.write(int(name), pickle.dumps(Bomb(mark)) * 100)
        except OSError:
            continue
    return b""


@pytest.fixture
async def pool() -> AsyncIterator[WorkerPool]:
    pool = WorkerPool(1)
    await pool.start()
    yield pool
    await pool.close()


async def test_what_a_users_function_answers_is_never_unpickled(pool: WorkerPool, tmp_path: Path) -> None:
    """The pool answers in MessagePack: bytes stay bytes, and objects are no answer."""
    mark = tmp_path / "unpickled"
    answer = await pool.run(a_pickled_bomb, str(mark), timeout_seconds=60.0)
    assert isinstance(answer, bytes)
    with pytest.raises(WorkerRaised):
        await pool.run(a_bomb, str(mark), timeout_seconds=60.0)
    with pytest.raises(WorkerCrashed):
        await pool.run(a_bomb_on_the_channel, str(mark), timeout_seconds=60.0)
    assert not mark.exists()
    pickle.loads(answer)
    assert mark.exists(), "the bomb is one"
