"""How per-token losses become one number, as a weight for each sample's tokens.

Weights make the result independent of how samples are cut into micro-batches or shared out over ranks: the loss is the
plain sum of weight × per-token loss over all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.trajectory import Status
from services.trainer.batch import SampleFacts


def rollout_weights(samples: Sequence[SampleFacts], *, per_token: bool) -> dict[str, float]:
    """Sample id → weight of each of its trained tokens, over one optimizer step.

    Default: each rollout's token mean, averaged over the rollouts: 1 / (tokens of it × rollouts). `per_token`: the mean
    over all tokens: 1 / tokens of all. Failed samples and those without trained tokens weigh 0 and count nowhere.
    """
    trained = [s for s in samples if s.trained_tokens and s.status != Status.FAILED.value]
    all_tokens = sum(s.trained_tokens for s in trained)
    weights = {s.sample_id: 0.0 for s in samples}
    for sample in trained:
        weights[sample.sample_id] = 1.0 / all_tokens if per_token else 1.0 / (sample.trained_tokens * len(trained))
    return weights
