"""A disk that refuses one rank: all ranks hear the same, nobody waits in a collective, and the next save is whole."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from headrace.cli.main import main
from headrace.job.schema.job import Job
from headrace.models.folders import is_whole
from headrace.run_folder import RunFolder, ServiceEntry
from tests.support.models.tiny_model import make_tiny_qwen3
from tests.support.modes import closed
from tests.support.ranks.file_cases import FilesCase
from tests.support.ranks.ranks import run_cases

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

RUNS = {"saved-at-once": (False, {}), "saved-beside": (True, {"tensor_model_parallel_size": 2})}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    model, smaller = make_tiny_qwen3(folder / "model"), make_tiny_qwen3(folder / "smaller", ffn_size=64)
    cases = []
    for name, (in_background, megatron) in RUNS.items():
        (folder / name).mkdir()
        cases.append(FilesCase(str(folder / name), str(model), str(smaller), in_background, megatron))
    run_cases(folder, 2, cases, 240.0)
    return folder


@pytest.mark.parametrize("run", RUNS)
def test_what_one_ranks_disk_refuses_is_the_same_error_on_all_and_all_go_on(runs: Path, run: str) -> None:
    log, other = ((runs / run / f"log-{rank}.txt").read_text() for rank in (0, 1))
    assert log == other
    expected = [
        ("save", "ok"),
        ("save, rank 0 has a full disk", "ResourceExhausted: rank 0: the disk is full: .*File too large"),
        ("export, rank 0 has a full disk", "ResourceExhausted: rank 0: the disk is full: .*File too large"),
        ("publication, rank 0 has a full disk: the error is in its answer", "ok"),
        ("save, rank 1 has a full disk", "ResourceExhausted: rank 1: the disk is full: .*File too large"),
        ("export, rank 1 has a full disk and nothing to write", "ok"),
        ("publication, rank 1 has a full disk and nothing to write", "ok"),
        ("export below a file", "InvalidArgument: rank 0: the disk refuses: .*taken"),
        ("export to a folder that got files", "AlreadyExists: rank 0: .*used exists already and is not empty"),
        ("save where a file is", "FailedPrecondition: rank 0: the disk refuses: .*File exists: .*checkpoints"),
        ("save", "ok"),
        ("save by an older trainer", "Fenced: rank 0: .*takes checkpoints of epoch 5, and this trainer has epoch 4"),
        ("export to where one is", "AlreadyExists: rank 0: .*full exists already and is not empty"),
        ("export to where one is torn", "ok"),
        ("restore", "ok"),
        (
            "resume with a smaller model of the same names",
            "DataLoss: .*is of another model: ffn_hidden_size .* there",
        ),
        ("its weights alone", "DataLoss: .*is not of this job's model: .*mlp.down_proj.weight/weight has shape "),
    ]
    for (what, line), found in zip(expected, log.splitlines(), strict=True):
        assert re.match(line, found), f"{what}: {found}"


@pytest.mark.parametrize("run", RUNS)
def test_a_version_that_a_disk_refuses_leaves_nothing_and_all_ranks_go_on(runs: Path, run: str) -> None:
    said = [[(runs / run / f"sent-e1-v{ill}-0a1b2c3d-{rank}.txt").read_text() for rank in (0, 1)] for ill in (0, 1)]
    assert re.match("rank 0: the disk is full: .*: free some space, or name a folder on another disk", said[0][0])
    assert said[0][1] == said[1][0] == said[1][1] == "None"
    (version,) = (runs / run / "weights").iterdir()
    assert version.name == "e1-v1-0a1b2c3d"
    assert is_whole(version)


def test_a_checkpoint_of_two_tensor_ranks_is_exported_without_the_run(runs: Path, tmp_path: Path) -> None:
    """By `headrace export`, when nothing of the run lives; weights that nobody read would be torch's random ones."""
    tensor_parallel = "saved-beside"
    run = RunFolder(tmp_path / "run")
    sections = {
        "model": {"hf_checkpoint": str(runs / "model")},
        "checkpoint": {"save": str(runs / tensor_parallel / "checkpoints")},
    }
    run.create(Job.model_validate({**sections, "megatron": RUNS[tensor_parallel][1]}))
    run.write_services({"trainer": ServiceEntry("127.0.0.1:1", None, 2**22 + 1)})
    assert main(["export", str(tmp_path / "model"), str(run.path)]) == 0
    exported, original = (load_file(folder / "model.safetensors") for folder in (tmp_path / "model", runs / "model"))
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], original[name]) for name in original)
    assert main(["export", str(tmp_path / "model"), str(run.path)]) == 1  # it is not empty now
    assert main(["export", str(tmp_path / "other"), str(run.path), "--step", "7"]) == 1


@pytest.mark.parametrize("run", RUNS)
def test_what_was_written_in_the_end_is_whole_and_nothing_else_is_left(runs: Path, run: str) -> None:
    owner = json.loads((runs / run / "checkpoints" / ".owner.json").read_text())
    assert (owner["run"], owner["epoch"]) == (str(runs / run), 5)
    left = {path.name for path in (runs / run / "checkpoints").iterdir()}
    assert left - {".owner.json", ".alive", ".lock"} == {"step-00000001"}
    assert [(runs / run / f"restored-{rank}.txt").read_text() for rank in (0, 1)] == ["1\n", "1\n"]
    exports = runs / run / "exports"
    assert is_whole(exports / "full")
    assert {path.name for path in exports.iterdir()} == {"full", ".full.torn"}


@pytest.mark.parametrize("run", RUNS)
def test_checkpoints_exports_and_publications_can_be_read_by_whom_the_umask_lets(runs: Path, run: str) -> None:
    """An engine, or a service of an export, may be another user's."""
    assert closed(runs / run) == []
