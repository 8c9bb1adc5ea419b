"""Tiny random checkpoints of every family, made by transformers: `make_tiny(folder, "llama", tied=True)`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.support.models.tiny_model import make_tiny_tokenizer

VOCAB_SIZE = 320
_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 16384,
    "initializer_range": 0.15,  # far from a uniform distribution, so that a wrong weight shows
    "vocab_size": VOCAB_SIZE,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Short, so that a few positions are already in the part that YaRN stretches.
_STRETCHED = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_YARN = _STRETCHED | {"mscale": 1.0, "mscale_all_dim": 0.7}
_SIGMOID_EXPERTS = {
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
}
_LATENT_ATTENTION = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
}
# A window of 5: most samples are longer.
_GPT_OSS = {
    "head_dim": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 5,
    "swiglu_limit": 1.5,
    "rope_parameters": _STRETCHED | {"truncate": False},
}
# As it is published: transformers would write the frequencies of both kinds of layers, which SGLang does not read.
_OLMO3_ROPE = {"rope_theta": 500000.0, "rope_scaling": {n: v for n, v in _STRETCHED.items() if n != "rope_theta"}}
_OLMO3 = _OLMO3_ROPE | {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
# √hidden_size is no whole number, and attention is not scaled by 1 / √head_dim.
_GEMMA3 = {
    "hidden_size": 48,
    "head_dim": 32,
    "query_pre_attn_scalar": 20,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
    },
}
# Published with names that transformers reads and does not write, of what SGLang asks for.
_MINIMAX_M2 = {
    "head_dim": 32,
    "rotary_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "scoring_func": "sigmoid",
    "use_qk_norm": True,
    "use_routing_bias": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
}
_DELTA_NET = {
    "head_dim": 32,
    "full_attention_interval": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rms_norm_eps": 1e-3,  # a state of few tokens may answer next to nothing, whose noise its norm makes large
}
_MAMBA = {
    "head_dim": 16,
    "mlp_hidden_act": "relu2",
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "ssm_state_size": 16,
    "layer_norm_epsilon": 1e-3,  # as above
    # Transformers takes no steps below the smallest, of which published models have none.
    "time_step_min": 1e-9,
    "time_step_floor": 0.05,
}
_TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": 64,
    "patch_size": 4,
}
"""The vision tower that Qwen3.5 is published with."""
_SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "vision_use_head": False,
}
"""And Gemma 3's."""
_SHARED_EXPERT = {
    "moe_intermediate_size": 48,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 80,
}
EXPERTS_OF_ENGINES = {"moe_intermediate_size": 64}
"""SGLang pads experts on a CPU to multiples of this, and its checksums are over what is padded."""
LATENTS_OF_ENGINES = EXPERTS_OF_ENGINES | {
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
"""What SGLang reads of DeepSeek's published config and transformers does not write."""
_FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "head_dim": 32,
            "moe_intermediate_size": 48,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
    ),
    "llama3_2": ("llama", {"head_dim": 24, "rope_parameters": _LLAMA3_ROPE | {"factor": 32.0}}),
    "mistral": ("mistral", {"head_dim": 32, "sliding_window": None, "rms_norm_eps": 1e-5}),
    "smollm3": (
        "smollm3",
        {"no_rope_layer_interval": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
    ),
    "qwen2_moe": (
        "qwen2_moe",
        {
            "moe_intermediate_size": 48,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
            "shared_expert_intermediate_size": 80,
        },
    ),
    "qwen3_next": ("qwen3_next", _DELTA_NET | _SHARED_EXPERT),
    "qwen3_5": ("qwen3_5", _DELTA_NET),
    "qwen3_5_moe": ("qwen3_5_moe", _DELTA_NET | _SHARED_EXPERT),
    "glm4_32b": ("glm4", {"head_dim": 32, "attention_bias": False, "rms_norm_eps": 1e-5}),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        _SIGMOID_EXPERTS | _LATENT_ATTENTION | {"q_lora_rank": 32, "n_shared_experts": 1, "rms_norm_eps": 1e-5},
    ),
    "glm4": ("glm4", {"head_dim": 32, "attention_bias": True, "rms_norm_eps": 1e-5}),
    "glm4_moe": ("glm4_moe", _SIGMOID_EXPERTS | {"head_dim": 32, "attention_bias": True, "use_qk_norm": True}),
    "deepseek_v3": (
        "deepseek_v3",
        _SIGMOID_EXPERTS
        | _LATENT_ATTENTION
        | {"q_lora_rank": 32, "n_group": 4, "topk_group": 2, "rope_parameters": _YARN},
    ),
    "moonlight": (
        "deepseek_v3",
        _SIGMOID_EXPERTS | _LATENT_ATTENTION | {"q_lora_rank": None, "rms_norm_eps": 1e-2},
    ),
    "kimi_k2": (
        "deepseek_v3",
        _SIGMOID_EXPERTS | _LATENT_ATTENTION | {"q_lora_rank": 32, "rope_parameters": _YARN | {"beta_fast": 1.0}},
    ),
    "gpt_oss": ("gpt_oss", _GPT_OSS),
    "olmo3": ("olmo3", _OLMO3),
    "minimax_m2": ("minimax_m2", _MINIMAX_M2),
    "nemotron_h": ("nemotron_h", _MAMBA | {"hybrid_override_pattern": "M*M-"}),
    "nemotron_h_moe": (
        "nemotron_h",
        _MAMBA
        | _SIGMOID_EXPERTS
        | {"hybrid_override_pattern": "ME*E", "moe_shared_expert_intermediate_size": 80, "n_shared_experts": 1},
    ),
    "gemma3_text": ("gemma3_text", _GEMMA3),
    "gemma3": ("gemma3", _GEMMA3),
}
"""transformers' model_type and the shape. Kimi K2 is DeepSeek V3's model under another name."""
FAMILIES = tuple(_FAMILIES)


def make_tiny(
    folder: Path, family: str, *, tied: bool = False, seed: int = 7, num_layers: int = 2, **shape: Any
) -> Path:
    """A float32 Hugging Face folder with a tokenizer; untied Llama has Llama 3's stretched rotary frequencies."""
    torch.manual_seed(seed)
    config = _config(family, tied=tied, num_layers=num_layers, **shape)
    kind = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    model = kind.from_config(config)
    _shake(model)
    model.save_pretrained(folder, max_shard_size="100KB")
    make_tiny_tokenizer().save_pretrained(folder)
    if family == "kimi_k2":
        _rewrite(folder, lambda config: config | {"model_type": "kimi_k2"})
    if family.startswith("nemotron_h"):
        _rewrite(folder, _readable)
    if family == "olmo3":
        _rewrite(folder, lambda config: {n: v for n, v in config.items() if n != "rope_parameters"} | _OLMO3_ROPE)
    if family == "gemma3":
        _name_tower(folder)
    return folder


def tiny_config(family: str) -> dict[str, Any]:
    """The config.json of a tiny model with a head of its own, without making the model."""
    config: dict[str, Any] = json.loads(_config(family, tied=False, num_layers=2).to_json_string(use_diff=False))
    return _readable(config)


def _readable(config: dict[str, Any]) -> dict[str, Any]:
    """Transformers does not read the infinity that it writes."""
    return {name: value for name, value in config.items() if name != "time_step_limit"}


def _config(family: str, *, tied: bool, num_layers: int, **shape: Any) -> Any:
    model_type, particular = _FAMILIES[family]
    tied = tied or family == "gemma3"  # as every one is published
    rope = {"rope_parameters": _LLAMA3_ROPE} if family == "llama" and not tied else {}
    chosen = {"tie_word_embeddings": tied, "num_hidden_layers": num_layers} | rope | shape
    values = _SHAPE | dict(particular) | chosen
    if tower := _SIGLIP if model_type == "gemma3" else _TOWER if model_type.startswith("qwen3_5") else None:
        values = {"text_config": values, "vision_config": tower, "tie_word_embeddings": tied}
    return CONFIG_MAPPING[model_type](**values)


def _shake(model: Any) -> None:
    """Norms are ones, and biases and router biases zeros otherwise, which hides mix-ups."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith(("_bias", "_projection_weight")):
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.3)


def _name_tower(folder: Path) -> None:
    """As it is published, and as SGLang reads it; transformers 5 writes shorter names."""
    short, whole = "vision_tower.", "vision_tower.vision_model."
    for file in folder.glob("*.safetensors"):
        save_file({n.replace(short, whole): t for n, t in load_file(file).items()}, file, {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(short, whole))


def _rewrite(folder: Path, changed: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(changed(json.loads(path.read_text()))))
