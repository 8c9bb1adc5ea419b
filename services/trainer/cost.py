"""What a sample costs to train: the measure by which data ranks are balanced."""

from __future__ import annotations

from headrace.config.architecture import Architecture
from headrace.config.job import Job
from services.trainer.batch import SampleFacts
from services.trainer.planning import Cost


def cost_of(job: Job, architecture: Architecture) -> Cost | None:
    """By tokens or by FLOPs, as the job says; None when it does not balance."""
    if not job.train.balance_data:
        return None
    if job.train.balance_by == "tokens":
        return _tokens
    per_token, per_pair = _matrix_products(architecture), _attention(architecture)
    return lambda sample: _tokens(sample) * (per_token + per_pair * _tokens(sample) // 2)


def _tokens(sample: SampleFacts) -> int:
    return sample.prompt_length + sample.response_length


def _matrix_products(architecture: Architecture) -> int:
    """Multiplications of one token's forward pass through all layers, without attention."""
    heads = 2 * architecture.num_attention_heads + 2 * architecture.num_query_groups
    attention = architecture.hidden_size * heads * architecture.kv_channels
    return architecture.num_layers * (attention + 3 * architecture.hidden_size * architecture.ffn_hidden_size)


def _attention(architecture: Architecture) -> int:
    """Multiplications for each pair of a token and one that it sees: the score and the weighted value."""
    return 2 * architecture.num_layers * architecture.num_attention_heads * architecture.kv_channels
