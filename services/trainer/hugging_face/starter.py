"""`python -m services.trainer.hugging_face.starter WEIGHTS.gguf FOLDER`: a Llama of GGUF as a float32 folder."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM


def write(weights: Path, folder: Path) -> None:
    place, name = str(weights.parent), weights.name
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
    write(Path(sys.argv[1]), Path(sys.argv[2]))
