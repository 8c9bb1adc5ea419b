"""`[JOB.toml] [flags]`, as train, check and up take them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from headrace.config.job import Job
from headrace.config.leaf import Leaf, Shape, leaves
from headrace.config.load import load
from headrace.config.megatron import DESCRIBED

_OTHERS = (
    "",
    "  and any other field of Megatron-core's TransformerConfig, MLATransformerConfig, OptimizerConfig,",
    "  DistributedDataParallelConfig and OptimizerParamScheduler, by its name",
    "",
    "[sglang]",
    "  --sglang-NAME VALUE: any argument of SGLang's server",
)


def load_job(argv: Sequence[str]) -> Job:
    """The checked job: the file, then HEADRACE_* variables, then flags. Raises ConfigError."""
    has_file = bool(argv) and not argv[0].startswith("-")
    return load(Path(argv[0]) if has_file else None, argv[1:] if has_file else argv, os.environ)


def wants_help(argv: Sequence[str]) -> bool:
    """True when -h or --help is among the words."""
    return "-h" in argv or "--help" in argv


def flags_help() -> str:
    """Every flag by section, with what it means and its default."""
    parts: list[str] = []
    described = [leaf for leaf in leaves().values() if leaf.section != "megatron" or leaf.name in DESCRIBED]
    for section, group in groupby(described, key=lambda leaf: leaf.section):
        parts += ["", f"[{section}]", *(_line(leaf) for leaf in group)]
    return "\n".join([*parts, *_OTHERS])


def _line(leaf: Leaf) -> str:
    words = {Shape.SWITCH: "", Shape.ONE: " X", Shape.MANY: " X …", Shape.PAIRS: " NAME PATH …"}[leaf.shape]
    default = "" if leaf.required or leaf.default in (None, ()) or leaf.shape is Shape.SWITCH else f" ({leaf.default})"
    return f"  {leaf.flag + words:<42} {leaf.description}{default}"
