"""`python -m tools.gpu_wheels FOLDER`: what `make gpu` needs beside torch, for a machine with a GPU and no network.

The folder has wheels for Linux x86_64 (60 MiB at most), and the one module of SGLang that the tests compare with. Carry
it to the machine and run `make gpu WHEELS=FOLDER` there.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

REQUIREMENTS = Path(__file__).parents[1] / "requirements"
SETS = ("cuda-trainer.txt", "dev.txt")
NAMES = """
annotated-types annotated-doc blake3 execnet googleapis-common-protos grpcio grpcio-health-checking
grpcio-reflection hypothesis iniconfig megatron-core msgspec peft pluggy prometheus-client protobuf
psutil pydantic pydantic-core pytest pytest-asyncio pytest-timeout pytest-xdist regex
sortedcontainers structlog tokenizers tomli-w transformers typing-extensions typing-inspection
"""
MODULE = "sglang.kernels.ops.memory.gpu_tensor_hash"
PLATFORMS = [f"manylinux{tag}_x86_64" for tag in ("2014", "2010", "_2_17", "_2_24", "_2_28")]


def pins() -> list[str]:
    """NAME==VERSION of each name: the trainer's on GPUs, else that of the tests."""
    found: dict[str, str] = {}
    for file in SETS:
        for name, version in re.findall(r"^([\w.-]+)(?:\[\w+\])?==([\w.]+)", (REQUIREMENTS / file).read_text(), re.M):
            found.setdefault(name.lower().replace("_", "-"), version)
    return [f"{name}=={found[name]}" for name in NAMES.split() if name in found]


def copy_module(site: Path) -> None:
    """The engine's checksum alone: SGLang itself does not load beside the trainer's torch."""
    *packages, name = MODULE.split(".")
    source = Path(next(iter(find_spec("sglang").submodule_search_locations))).joinpath(*packages[1:], f"{name}.py")  # type: ignore[union-attr, arg-type]
    target = site.joinpath(*packages)
    target.mkdir(parents=True, exist_ok=True)
    for depth in range(1, len(packages) + 1):
        site.joinpath(*packages[:depth], "__init__.py").touch()
    shutil.copy(source, target)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_wheels", description="Wheels for `make gpu`.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python-version", default="3.12")
    chosen = parser.parse_args(words)
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", *platforms]
    version = ["--python-version", chosen.python_version, "--dest", str(chosen.folder)]
    if code := subprocess.run([*download, *version, *pins()]).returncode:
        return code
    copy_module(chosen.folder / "site")
    size = sum(file.stat().st_size for file in chosen.folder.rglob("*") if file.is_file())
    print(f"{chosen.folder}: {len(list(chosen.folder.glob('*.whl')))} wheels, {size >> 20} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
