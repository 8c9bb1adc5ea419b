"""What the two distributions of this repository ask for, and what requirements/*.txt pin, agree name by name."""

from __future__ import annotations

import importlib.metadata
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import headrace
from headrace import installed
from headrace.errors import ConfigError
from tools.pinned import FOLDER, ROOT, pins_of
from tools.requirements import PROJECTS, allowed

CLIENT, SERVICES = (tomllib.loads((ROOT / file).read_text()) for file in PROJECTS)
EXTRAS = CLIENT["project"]["optional-dependencies"]
CPU = ("cpu.txt", "cpu-no-deps.txt")
FILES = {
    "": CPU,
    "buffer": ("buffer.txt",),
    "reward": ("reward.txt",),
    "rollout-cpu": CPU,
    "trainer-cpu": CPU,
    "rollout-cuda": ("cuda-rollout.txt",),
    "trainer-cuda": ("cuda-trainer.txt",),
    "postgres": ("buffer.txt",),
    "parquet": ("buffer.txt",),
    "certs": CPU,
    "hub": CPU,
    "ray": ("ray.txt",),
    "wandb": ("wandb.txt",),
    "ifbench": ("ifbench.txt",),
    "trackio": ("trackio.txt",),
    "mlflow": ("mlflow.txt",),
    "inspect": ("inspect.txt",),
    "mcp": ("mcp.txt",),
    "tinker": ("tinker.txt", *CPU),
    "trace": ("trace.txt",),
    "json-schema": CPU,
    "migrate": CPU,
}
"""Which files have the pins of an extra. Those of headrace without one stand in all of them."""
OPTIONAL = ("ray", "wandb", "ifbench", "trackio", "mlflow", "inspect", "mcp", "tinker", "trace")
"""Installed on top of `CPU`, by `make`."""


@pytest.mark.parametrize("extra", ["", *EXTRAS])
def test_what_an_extra_asks_for_is_pinned_in_a_version_that_it_takes(extra: str) -> None:
    pinned = [pin for file in FILES[extra] for pin in pins_of(FOLDER / file)]
    core = {requirement.name for requirement in allowed(())}
    for requirement in allowed((extra,) if extra else ()):
        versions = [pin.version for pin in pinned if pin.name == canonicalize_name(requirement.name)]
        assert versions or (requirement.name in core and extra in OPTIONAL), requirement
        assert all(requirement.specifier.contains(version, prereleases=True) for version in versions), requirement


def test_both_distributions_and_their_extras_have_one_version() -> None:
    services = SERVICES["project"]
    assert CLIENT["project"]["version"] == services["version"] == headrace.__version__
    assert services["dependencies"] == [f"headrace=={headrace.__version__}"]
    own = [Requirement(line) for lines in EXTRAS.values() for line in lines if line.startswith(services["name"])]
    assert {str(requirement.specifier) for requirement in own} == {f"=={headrace.__version__}"}
    assert {extra for requirement in own for extra in requirement.extras} == set(services["optional-dependencies"])


def test_the_client_asks_for_no_package_of_a_model() -> None:
    assert not {"torch", "transformers", "sglang", "megatron-core"} & {each.name for each in allowed(())}


def test_both_distributions_carry_the_same_licence() -> None:
    for name in ("LICENSE", "NOTICE"):
        assert (ROOT / "services" / name).read_text() == (ROOT / name).read_text()


def test_the_citation_says_what_the_package_says() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = CLIENT["project"]
    assert cited["version"] == Version(project["version"]).base_version
    assert (cited["title"], cited["license"]) == (project["name"], project["license"])
    assert cited["abstract"].strip() == project["description"]
    assert cited["keywords"] == project["keywords"] == SERVICES["project"]["keywords"]
    assert [each["name"] for each in cited["authors"]] == [each["name"] for each in project["authors"]]


def test_uv_is_told_which_extras_have_an_environment_of_their_own() -> None:
    pairs = {frozenset(each["extra"] for each in pair) for pair in CLIENT["tool"]["uv"]["conflicts"]}
    cuda = {extra for extra in EXTRAS if extra.endswith("-cuda")}
    assert pairs == {
        frozenset((one, other))
        for one in cuda
        for other in EXTRAS
        if one != other and other.endswith(("-cpu", "-cuda"))
    }


def test_sglang_for_uv_is_what_its_wheel_says_and_without_cuda_what_cpu_txt_has() -> None:
    stated = next(each for each in CLIENT["tool"]["uv"]["dependency-metadata"] if each["name"] == "sglang")
    assert stated["version"] == importlib.metadata.version("sglang")
    requirements = [Requirement(line) for line in stated["requires-dist"]]
    wheel = [Requirement(line) for line in importlib.metadata.requires("sglang") or []]
    of_wheel = {_versions(each) for each in wheel if "extra" not in str(each.marker)}
    plain = {each for each in requirements if "extra" not in str(each.marker)}
    of_cuda = {_versions(each) for each in set(requirements) - plain}
    assert of_wheel - {_versions(each) for each in plain} == of_cuda
    assert {each.name for each in plain} <= {each.name for each in wheel}
    pins = {pin.name: pin.version for file in CPU for pin in pins_of(FOLDER / file)}
    for each in plain:
        assert each.specifier.contains(pins[canonicalize_name(each.name)], prereleases=True), each


def _versions(requirement: Requirement) -> tuple[str, frozenset[str], str]:
    return canonicalize_name(requirement.name), frozenset(requirement.extras), str(requirement.specifier)


def test_the_extras_that_a_message_names_are_there() -> None:
    assert set(installed.EXTRAS.values()) <= set(EXTRAS)


def test_a_python_without_services_is_refused_with_the_extras_that_bring_them(
    load_with, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"headrace\[buffer,reward,rollout-cpu,trainer-cpu\]"):
        load_with()
    load_with(*(f"--{name}-python=/bin/true" for name in installed.EXTRAS))
