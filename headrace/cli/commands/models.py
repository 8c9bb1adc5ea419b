"""`headrace models`: the presets of --model."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from headrace.cli.view.lines import print_no_wrap
from headrace.models.registry import PRESETS, architecture, table

_SHORT = {
    "tensor_model_parallel_size": "tensor",
    "pipeline_model_parallel_size": "pipeline",
    "num_layers_in_last_pipeline_stage": "layers in the last",
    "expert_model_parallel_size": "experts",
}


def models(argv: Sequence[str]) -> int:
    """Prints a line for each preset: name, model_type, parameters, layers, layout."""
    argparse.ArgumentParser(prog="headrace models").parse_args(argv)
    listing = Table("model", "model_type", "parameters", "layers", "layout (arithmetic, not run)", box=None)
    for preset in PRESETS.values():
        found = architecture(preset.config)
        size = table(found).num_parameters
        listing.add_row(preset.name, found.family, _billions(size), str(found.num_layers), _layout(preset.layout))
    print_no_wrap(Console(), listing)
    return 0


def _billions(parameters: int) -> str:
    return f"{parameters / 1e9:,.2f} B" if parameters < 1e11 else f"{parameters / 1e9:,.0f} B"


def _layout(layout: Mapping[str, int]) -> str:
    return ", ".join(f"{short} {layout[name]}" for name, short in _SHORT.items() if name in layout) or "one rank"
