"""The functions that slime's documents print, each under its heading: `snippet("Custom Generate Function")`."""

from __future__ import annotations

from pathlib import Path

_FILES = {
    "Custom Generate Function": "custom_generate_function.txt",
    "Step 1: Define Custom Generate Function": "define_custom_generate_function.txt",
    "Custom Reward Function": "custom_reward_function.txt",
    "Custom Reward Model": "custom_reward_model.txt",
    "RolloutDataSource (Base Class)": "data_source.txt",
    "Buffered Data Source (Off-Policy)": "buffered_data_source.txt",
    "Basic Data Source": "basic_data_source.txt",
    "Buffered Data Source": "basic_buffered_data_source.txt",
}


def snippet(heading: str, imports: str) -> str:
    """The code below the heading with `imports` in place of its own; slime's are the only ones."""
    lines = (Path(__file__).parent / _FILES[heading]).read_text().splitlines()
    return imports + "\n".join(line for line in lines if not line.startswith("from slime")) + "\n"
