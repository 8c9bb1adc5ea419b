"""The recipes of docs/architecture.md, followed in a copy of the tree: what they make works, and `make lint` passes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.long_forms import whole_run

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
PROTOS = ROOT / ".venv-protos" / "bin"
_COPIED = (
    *("headrace", "services", "tests", "tools", "examples", "deploy", "docs", "protos", "requirements"),
    *("pyproject.toml", "README.md", "CHANGELOG.md", "Makefile"),
)


@dataclass(frozen=True)
class Recipe:
    """`lines`: (file, the text that they come after, they). `shown` is a program of the changed tree that prints ok."""

    shown: str
    files: Mapping[str, str] = field(default_factory=dict)
    lines: tuple[tuple[str, str, str], ...] = ()


ALGORITHM = Recipe(
    files={
        "services/trainer/rl/algorithms/batch_mean.py": '''"""The batch's mean is the baseline (Williams 1992)."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from services.trainer.plan.batch import SampleFacts
from services.trainer.rl.algorithms.algorithm import Algorithm


class BatchMean(Algorithm):
    """A sample's reward counts against those of the whole batch."""

    def rewards(self, samples: Sequence[SampleFacts]) -> dict[str, float]:
        raw = super().rewards(samples)
        mean = fmean(raw.values()) if raw else 0.0
        return {sample_id: reward - mean for sample_id, reward in raw.items()}
'''
    },
    lines=(
        (
            "services/trainer/rl/algorithms/table.py",
            "from services.trainer.rl.algorithms.algorithm import Algorithm\n",
            "from services.trainer.rl.algorithms.batch_mean import BatchMean\n",
        ),
        ("services/trainer/rl/algorithms/table.py", '    "ppo": Ppo,\n', '    "batch_mean": BatchMean,\n'),
        ("headrace/job/algorithms.py", "_SPECS = (\n", '    AlgorithmSpec("batch_mean", ("eps_clip_c",)),\n'),
    ),
    shown="""
from headrace.job.schema.training import TrainSection
from services.trainer.rl.algorithms.table import algorithm
print("ok", algorithm(TrainSection(advantage_estimator="batch_mean")).rewards([]))
""",
)

SCORER = Recipe(
    files={
        "services/reward/scorers/brevity.py": '''"""1 for an empty response, less for each character."""

from __future__ import annotations

from headrace.score import ScoreItem


def score(item: ScoreItem) -> float:
    return 1.0 / (1 + len(item.response))
'''
    },
    lines=(
        (
            "services/reward/registry.py",
            "BUILTINS: Sequence[Builtin] = (\n",
            '    Builtin("brevity", "1 for an empty response, less for each character."),\n',
        ),
    ),
    shown="""
from services.reward.registry import installed
print("ok" if "brevity" in installed() else "")
""",
)

FAMILY = Recipe(
    files={
        "headrace/models/families/llama_like.py": '''"""A decoder with Llama's tensors under another model_type."""

from __future__ import annotations

from headrace.models.architecture import read_decoder
from headrace.models.family import Family

FAMILY = Family(model_types=("llama_like",), read=read_decoder, presets=())
'''
    },
    lines=(
        ("headrace/models/registry.py", "    llama,\n", "    llama_like,\n"),
        ("headrace/models/registry.py", "    llama.FAMILY,\n", "    llama_like.FAMILY,\n"),
    ),
    shown="""
from headrace.models.registry import architecture
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
rest = {"rms_norm_eps": 1e-6, "max_position_embeddings": 128, "hidden_act": "silu", "vocab_size": 256}
print("ok", architecture({"model_type": "llama_like", **sizes, **rest}).num_layers)
""",
)

COMMAND = Recipe(
    files={
        "headrace/cli/commands/hello.py": '''"""`headrace hello`: greets."""

from __future__ import annotations

import click
from rich.console import Console


@click.command()
def hello() -> int:
    """Prints one line."""
    Console().print("ok")
    return 0
'''
    },
    lines=(
        (
            "headrace/cli/main.py",
            "_COMMANDS: Mapping[str, Command] = {\n",
            '    "hello": Command("hello:hello", "hello", "greet"),\n',
        ),
    ),
    shown="from headrace.cli.main import main; main(['hello'])",
)

_FLAG_TEST = '''"""The flag reaches the job."""

from __future__ import annotations


def test_run_motto_reaches_the_job(load_with) -> None:
    assert load_with("--run-motto", "carpe diem").run.run_motto == "carpe diem"
'''
FLAG = Recipe(
    files={"tests/unit/job/test_run_motto.py": _FLAG_TEST},
    lines=(
        (
            "headrace/job/schema/run.py",
            "class RunSection(Section):\n",
            '    run_motto: str | None = None\n    """A line that the run is known by."""\n',
        ),
        (
            "tests/flags.toml",
            "[shown_by]\n",
            'run_motto = "tests/unit/job/test_run_motto.py::test_run_motto_reaches_the_job"\n',
        ),
    ),
    shown="""
from headrace.job.option import options
print("ok", options()["run_motto"].flag)
""",
)

_HOOK_TEST = '''"""The hook is loaded by its form."""

from __future__ import annotations

from pathlib import Path

from headrace.hooks.trainer import trainer_hook


def test_custom_after_step_path_is_called_with_the_step(load_with, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def after(args, rollout_id): ...")
    path = load_with("--custom-after-step-path", f"{tmp_path}/mine.py:after").hooks.custom_after_step_path
    trainer_hook(path, "after_step")
'''
HOOK = Recipe(
    files={"tests/unit/hooks/test_after_step.py": _HOOK_TEST},
    lines=(
        (
            "headrace/job/hook_files.py",
            "TRAINER_FORMS: Mapping[str, TrainerForm] = {\n",
            '    "after_step": TrainerForm("custom_after_step_path", ("args", "rollout_id"), "None"),\n',
        ),
        (
            "headrace/job/schema/training.py",
            '    """User functions in the trainer, as pkg.mod.fn or file.py:fn."""\n',
            '\n    custom_after_step_path: str | None = None\n    """f(args, step)."""\n',
        ),
        (
            "tests/flags.toml",
            "[shown_by]\n",
            "custom_after_step_path = "
            '"tests/unit/hooks/test_after_step.py::test_custom_after_step_path_is_called_with_the_step"\n',
        ),
    ),
    shown="""
from headrace.job.hook_files import TRAINER_FORMS
print("ok", TRAINER_FORMS["after_step"].accepted)
""",
)

RPC = Recipe(
    lines=(
        (
            "protos/headrace/api/reward/v1/reward.proto",
            "service RewardService {\n",
            "  // How many calls were answered.\n  rpc GetCount(GetCountRequest) returns (GetCountResponse);\n",
        ),
        (
            "protos/headrace/api/reward/v1/reward.proto",
            'import "headrace/api/sample/v1/sample.proto";\n',
            "\n// Asks for the number.\nmessage GetCountRequest {}\n\n// The number.\nmessage GetCountResponse {\n"
            "  // Calls since the start.\n  uint64 count = 1;\n}\n",
        ),
        (
            "services/reward/server.py",
            "        self._scorer = batch_scorer\n",
            "\n    async def GetCount(self, request: pb.GetCountRequest, context: Any) -> pb.GetCountResponse:\n"
            "        return pb.GetCountResponse(count=0)\n",
        ),
        (
            "headrace/client/reward.py",
            "        self._stub = RewardServiceStub(self._channel)\n",
            "\n    async def get_count(self, *, deadline_seconds: float = DEFAULT_DEADLINE_SECONDS) -> int:\n"
            '        """Calls since the service\'s start."""\n'
            "        asked = pb.GetCountRequest()\n"
            "        answer = call(self._stub.GetCount, asked, deadline_seconds=deadline_seconds, peer=self._peer)\n"
            "        count: int = (await answer).count\n"
            "        return count\n",
        ),
        ("headrace/rpc/access.py", '        "Score": _ASKS,\n', '        "GetCount": _LOOKS,\n'),
    ),
    shown="""
from headrace.api.reward.v1 import reward_pb2
from headrace.rpc.access import Role, roles_of
print("ok" if Role.VIEWER in roles_of("headrace.api.reward.v1.RewardService", "GetCount") else "")
""",
)

STORE = Recipe(
    files={
        "services/buffer/store/forgetful.py": '''"""A store under another name."""

from __future__ import annotations

from services.buffer.store.memory import MemoryStore


class ForgetfulStore(MemoryStore):
    name = "forgetful"
'''
    },
    lines=(
        ("headrace/job/schema/services.py", 'buffer_store: Annotated[Literal["memory", ', '"forgetful", '),
        (
            "services/buffer/build.py",
            "from services.buffer.store.base import Store\n",
            "from services.buffer.store.forgetful import ForgetfulStore\n",
        ),
        (
            "services/buffer/build.py",
            "    match section.buffer_store:\n",
            '        case "forgetful":\n            return ForgetfulStore()\n',
        ),
    ),
    shown="""
from pathlib import Path
from headrace.job.schema.services import BufferSection
from services.buffer.build import open_store
print("ok", open_store(BufferSection(buffer_store="forgetful"), Path("none"), "run").name)
""",
)

_TRACKER_TEST = '''"""The tracker is opened where the job asks for it."""

from __future__ import annotations

from pathlib import Path

from services.trainer.control.build import TrainerBuild


def test_use_html_writes_a_line_for_each_step(load_with, tmp_path: Path) -> None:
    report = TrainerBuild(load_with("--use-html"), tmp_path).report()
    report.resume(0)
    report.write(1, {"reward/mean": 0.5})
    report.close()
    assert (tmp_path / "metrics.html").read_text() == "<p>1: 0.5</p>"
'''
TRACKER = Recipe(
    files={"tests/unit/trainer/serving/test_html.py": _TRACKER_TEST},
    lines=(
        (
            "services/trainer/serving/trackers.py",
            "_PARAM_LENGTH = 500\n",
            '''
class Html:
    """A page in the run's folder."""

    def __init__(self, run: TrackedRun) -> None:
        self._page = run.folder / "metrics.html"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds a line."""
        with self._page.open("a") as page:
            page.write(f"<p>{step}: {metrics['reward/mean']}</p>")

    def log_rollouts(self, step: int, rollouts: Sequence[Answer]) -> None:
        """Leaves them out."""

    def close(self) -> None:
        """Has nothing to close."""

''',
        ),
        ("services/trainer/serving/trackers.py", '    "mlflow": Mlflow,\n', '    "html": Html,\n'),
        (
            "headrace/job/schema/run.py",
            "class TrackingSection(Section):\n",
            '    use_html: bool = False\n    """Write a page into the run\'s folder."""\n',
        ),
        (
            "tests/flags.toml",
            "[shown_by]\n",
            'use_html = "tests/unit/trainer/serving/test_html.py::test_use_html_writes_a_line_for_each_step"\n',
        ),
    ),
    shown="""
from pathlib import Path
from tempfile import mkdtemp
from headrace.job.schema.run import TrackingSection
from services.trainer.serving.trackers import trackers
folder = Path(mkdtemp())
opened = trackers(TrackingSection(use_html=True, use_tensorboard=False), "run", {}, folder)(0)
opened.log(1, {"reward/mean": 0.5})
opened.close()
print("ok" if "0.5" in (folder / "metrics.html").read_text() else "")
""",
)

RECIPES = {
    "an algorithm": ALGORITHM,
    "a scorer": SCORER,
    "a flag": FLAG,
    "a model family": FAMILY,
    "a command": COMMAND,
    "a hook kind": HOOK,
    "an RPC": RPC,
    "a store": STORE,
    "a tracker": TRACKER,
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The copy, after all recipes, `make format` and what writes generated files."""
    copy = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns("__pycache__", "typescript")
    for name in _COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=ignored, symlinks=True)
        else:
            shutil.copy2(ROOT / name, copy / name)
    if (ROOT / ".mypy_cache").is_dir():  # else mypy reads everything
        shutil.copytree(ROOT / ".mypy_cache", copy / ".mypy_cache")
    for recipe in RECIPES.values():
        for path, text in recipe.files.items():
            assert not (copy / path).exists(), path
            (copy / path).write_text(text)
        for path, after, line in recipe.lines:
            text = (copy / path).read_text()
            assert text.count(after) >= 1, f"{path} has no {after!r}"
            (copy / path).write_text(text.replace(after, after + line, 1))
    _run(copy, BIN / "ruff", "format", ".")
    _run(copy, "protos/generate.sh", PROTOS / "python")
    _run(copy, BIN / "python", "-m", "tools.flags", "--write")
    _run(copy, BIN / "python", "-m", "tools.roles", "--write")
    _run(copy, BIN / "python", "-m", "tools.families", "--write")
    return copy


@pytest.mark.parametrize("name", RECIPES)
def test_what_a_recipe_makes_works(tree: Path, name: str) -> None:
    assert _run(tree, BIN / "python", "-c", RECIPES[name].shown).startswith("ok")


@pytest.mark.parametrize(
    "gate",
    [
        (BIN / "ruff", "check", "."),
        (BIN / "ruff", "format", "--check", "."),
        pytest.param((BIN / "mypy",), marks=whole_run, id="mypy"),
        (BIN / "lint-imports", "--no-cache"),
        (BIN / "python", "-m", "tools.flags"),
        (BIN / "python", "-m", "tools.roles"),
        (BIN / "python", "-m", "tools.families"),
        (BIN / "python", "-m", "tools.sizes"),
        ("tools/check_protos.sh", PROTOS),
    ],
    ids=lambda gate: " ".join(Path(word).name for word in gate),
)
def test_the_gates_of_make_lint_pass_with_all_of_them(tree: Path, gate: tuple[str | Path, ...]) -> None:
    _run(tree, *gate)


def test_every_gate_of_make_lint_is_tried_here() -> None:
    recipe = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    assert recipe.count("echo") == 8, "ruff, mypy, import-linter, flags, page, roles, families, sizes: try another, too"


def test_every_recipe_of_the_document_is_followed_here() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text().partition("## Where do I change")[2]
    assert {line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| a")} == set(RECIPES)


def _run(tree: Path, *words: str | Path) -> str:
    done = subprocess.run(
        [str(word) for word in words], cwd=tree, env={"PYTHONPATH": str(tree), "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=840, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{' '.join(map(str, words))}: {done.stdout[-4000:]}{done.stderr[-2000:]}"
    return done.stdout
