"""README and docs name only what exists: commands and their arguments, flags, files, links, make's targets."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from headrace.cli import main as command_line
from headrace.cli.commands.access import tokens
from headrace.cli.commands.env import env
from headrace.cli.commands.ledger import buffer
from headrace.cli.commands.live import rollout
from headrace.cli.commands.reward import reward
from headrace.job.option import ALIASES, Arity, options
from tools import families

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "requirements" / "README.md",
    ROOT / "protos" / "typescript" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
FOLDERS = ("deploy", "docs", "examples", "headrace", "protos", "requirements", "services", "tests", "tools")

_FENCE = re.compile(r"^```[a-z]*\n(.*?)^```", re.S | re.M)
_CODE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9]*(?:-[a-z0-9]+)*\b")
_OTHERS_FLAGS = {
    *("--nodes", "--gpus-per-node"),
    *("--model-path", "--tp-size", "--host", "--port"),
    *("--no-deps", "--logdir", "--schema", "--trace-python-allocators", "--picture", "--write", "--resolve", "--mbit"),
    *("--require-hashes", "--security-opt", "--rm"),
    *("--set-file", "--values", "--build-arg"),
    *("--signal", "--batch", "--head", "--dashboard-host"),
    *("--torch-backend", "--python", "--use-slime-router", "--rm"),
    *("--project", "--backend-store-uri", "--tasks"),
    *("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
    *("--env", "--volume", "--user", "--from-file", "--follow", "--selector", "--num-gpus"),
}
"""Of Slurm, Ray, slime, SGLang, pip, uv, Docker, trackers, pg_dump, memray, a bench, tools.flags, Codex, Helm and
kubectl, lm-eval."""
_OF_A_JOB = ("train", "check", "up")
_WITH_ITS_FLAGS = (*_OF_A_JOB, "eval", "env train", "replay", "serve")
_GROUPS = {"buffer": buffer, "env": env, "reward": reward, "rollout": rollout, "tokens": tokens}
_HELP = {"--help", "--config"}


@pytest.fixture(params=DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def document(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_every_link_leads_somewhere(document: Path) -> None:
    for link in _LINK.findall(document.read_text()):
        if link.startswith("http"):
            continue
        path, _, heading = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), link
        assert not heading or heading in headings(target), link


def test_every_file_that_is_named_is_there(document: Path) -> None:
    for code in codes(document):
        for word in code.split():
            path = word.rstrip(".,:;)").partition("#")[0].partition(":")[0]
            if path.startswith(tuple(f"{folder}/" for folder in FOLDERS)) and "*" not in path and "NAME" not in path:
                assert (ROOT / path).exists(), word


def test_every_flag_is_one(document: Path) -> None:
    known = job_flags() | of_services() | _OTHERS_FLAGS | {flag for name in names() for flag in own_flags(name)}
    named = {flag for flag in _FLAG.findall(document.read_text()) if not flag.startswith("--sglang")}
    assert named - known == set()


def test_every_command_has_the_arguments_that_are_given(document: Path) -> None:
    for words in commands(document):
        name, rest = words[0], words[1:]
        assert name in command_line._COMMANDS, f"headrace {' '.join(words)}"
        if name in _GROUPS and rest:
            assert rest[0] in _GROUPS[name].commands, f"headrace {' '.join(words)}"
            name = f"{name} {rest[0]}"
        known = own_flags(name) | (job_flags() | _HELP if name in _WITH_ITS_FLAGS else set())
        flags = {flag for word in rest for flag in _FLAG.findall(word) if not flag.startswith("--sglang")}
        assert flags - known == set(), f"headrace {' '.join(words)}"


def codes(document: Path) -> Iterator[str]:
    """Blocks and spans of code."""
    text = document.read_text()
    yield from (block.replace("\\\n", " ") for block in _FENCE.findall(text))
    yield from _CODE.findall(_FENCE.sub("", text))


def commands(document: Path) -> Iterator[Sequence[str]]:
    """The words behind `headrace`."""
    for code in codes(document):
        for line in code.splitlines():
            if line.strip().startswith("headrace "):
                words = shlex.split(line.replace("…", "").replace("'s", ""), comments=True)[1:]
                if words and re.fullmatch(r"[a-z]+", words[0]):
                    yield words


def headings(document: Path) -> set[str]:
    """As GitHub names their anchors."""
    titles = re.findall(r"^#+ (.*)$", document.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@cache
def job_flags() -> frozenset[str]:
    """Also the other names of options, and `--no-SWITCH`."""
    flags = {option.flag for option in options().values()} | {f"--{each.replace('_', '-')}" for each in ALIASES}
    switches = {option.flag for option in options().values() if option.arity is Arity.SWITCH}
    return frozenset(flags | {flag.replace("--", "--no-", 1) for flag in switches})


def names() -> list[str]:
    of_groups = [f"{group} {name}" for group, commands in _GROUPS.items() for name in commands.commands]
    return [*command_line._COMMANDS, "check hook", *of_groups]


@cache
def own_flags(name: str) -> frozenset[str]:
    """What `headrace NAME --help` lists."""
    if name in _OF_A_JOB:
        return frozenset({"--kind", "--job", "--fast", "--elsewhere", "--json"}) if name == "check" else frozenset()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        command_line.main([*name.split(), "--help"])
    return frozenset(_FLAG.findall(printed.getvalue()))


@cache
def of_services() -> frozenset[str]:
    """Of `python -m services.X`, which starts what `headrace up X` starts."""
    files = [*(ROOT / "services").glob("*/__main__.py"), ROOT / "headrace/rpc/server.py"]
    flags = r'add_argument\(\s*"(--[a-z-]+)"'
    return frozenset(flag for path in files for flag in re.findall(flags, path.read_text()))


def test_the_table_of_families_is_that_of_their_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert families.main([]) == 0
    monkeypatch.setattr(families, "PAGE", tmp_path / "models.md")
    families.PAGE.write_text(f"# Models\n\n{families.BEGIN}{families.END}\nbehind\n")
    assert families.main([]) == 1
    assert families.main(["--write"]) == families.main([]) == 0
    assert families.PAGE.read_text().startswith("# Models\n")
    assert families.PAGE.read_text().endswith(f"{families.END}\nbehind\n")


def test_a_test_that_is_gone_shows_nothing_of_a_family(monkeypatch: pytest.MonkeyPatch) -> None:
    [test] = families.COLUMNS["LoRA"]
    monkeypatch.setattr(families, "COLUMNS", {"LoRA": (replace(test, function="test_gone"),)})
    assert "test_gone, which is not there" in families.mistakes()[0]
    monkeypatch.setattr(families, "COLUMNS", {"LoRA": (replace(test, lists=("LORA",)),)})
    assert "lora_rank is no family" in families.mistakes()[0]
