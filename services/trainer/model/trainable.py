"""The choice of parameters that are trained, by regular expressions on Megatron's names.

Names are those of the whole model: `decoder.layers.31.mlp.linear_fc1.weight` whatever stage holds the layer, and
`embedding.word_embeddings.weight` for a tied embedding's copy on the last stage, which is frozen or trained with it
(otherwise the stages would wait for each other's gradients until their timeout).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import nn

from headrace.errors import ConfigError
from headrace.job.schema.training import TrainSection
from services.trainer.megatron.parallel import Layout

_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def choose_trainable(chunks: Sequence[GPTModel], config: TrainSection, layout: Layout) -> None:
    """Freezes what the job does not train; before gradients get their buffers. Collective.

    Raises ConfigError for a pattern that matches nothing in the whole model, or when nothing is left to train.
    """
    only, freeze = config.only_train_params_name_list, config.freeze_params_name_list
    if not only and not freeze:
        return
    named = [entry for chunk in chunks for entry in named_parameters(chunk)]
    _require_matches([*only, *freeze], [name for name, _ in named], layout)
    trained = 0
    for name, parameter in named:
        is_trained = _matches(only, name) if only else not _matches(freeze, name)
        parameter.requires_grad_(is_trained)
        trained += parameter.numel() if is_trained else 0
    if _over_all(torch.tensor([trained], dtype=torch.int64), layout)[0] == 0:
        raise ConfigError(
            f"nothing is left to train: freeze_params_name_list {list(freeze)} matches every parameter: freeze fewer",
            field="freeze_params_name_list",
        )


def named_parameters(model: GPTModel) -> Iterator[tuple[str, nn.Parameter]]:
    """A stage's parameters by their names in the whole model."""
    numbers = {str(place): str(layer.layer_number - 1) for place, layer in enumerate(model.decoder.layers)}
    is_tied = model.share_embeddings_and_output_weights
    for name, parameter in model.named_parameters():
        words = name.split(".")
        if words[:2] == ["decoder", "layers"]:
            words[2] = numbers[words[2]]
        whole = ".".join(words)
        yield (_EMBEDDING if is_tied and whole == _OUTPUT else whole), parameter


def _require_matches(patterns: Sequence[str], names: Sequence[str], layout: Layout) -> None:
    found = torch.tensor([sum(bool(re.search(p, name)) for name in names) for p in patterns], dtype=torch.int64)
    for pattern, matches in zip(patterns, _over_all(found, layout), strict=True):
        if matches == 0:
            raise ConfigError(
                f"{pattern!r} matches no parameter's name; names are Megatron's, e.g. {', '.join(names[:4])}"
            )


def _over_all(counts: torch.Tensor, layout: Layout) -> list[int]:
    counts = counts.to(layout.device)
    dist.all_reduce(counts)
    return [int(count) for count in counts.tolist()]


def _matches(patterns: Sequence[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)
