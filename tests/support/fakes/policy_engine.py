"""A fake engine whose log-probs are those of the weights that came over the wire: transformers computes them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.support.fakes.engine_checksums import stood_for
from tests.support.fakes.gloo_engine import GlooEngine
from tests.support.ranks.rank_results import network


class PolicyEngine(GlooEngine):
    """Of the model whose config.json is in `checkpoint`."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__()
        self._checkpoint = checkpoint

    def _score(self, tokens: Sequence[int]) -> list[tuple[float, int, None]]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            config = json.loads((self._checkpoint / "config.json").read_text())
            config.pop("quantization_config", None)
            (folder / "config.json").write_text(json.dumps(config))
            save_file(stood_for(self.tensors), folder / "model.safetensors", metadata={"format": "pt"})
            model = network(folder)
        row = torch.tensor(tokens)
        with torch.no_grad():
            table = model(row[None, :-1]).logits[0].log_softmax(-1)
        log_probs = [0.0, *table.gather(1, row[1:, None])[:, 0].tolist()]
        return [(log_prob, token, None) for log_prob, token in zip(log_probs, tokens, strict=True)]
