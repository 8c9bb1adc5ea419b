"""What a spawned rank does in the tests of Tinker's models: two of them take turns, in float64.

results.json     what each request returned, from rank 0 with all ranks' parts
initial/NAME, trained/NAME   the models as peft has them
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tests.support.ranks.lora_cases import _float64
from tests.support.ranks.ranks import RankCase, Sections

MODELS: Mapping[str, Mapping[str, Any]] = {
    "small": {"rank": 2, "seed": 1},
    "large": {"rank": 4, "seed": 2, "train_mlp": False},
}
STEPS: Sequence[tuple[str, str, Mapping[str, float]]] = (
    ("small", "cross_entropy", {}),
    ("large", "importance_sampling", {}),
    ("small", "ppo", {"clip_high_threshold": 1.1}),
    ("large", "cispo", {}),
    ("small", "dro", {"beta": 0.1}),
    ("large", "cross_entropy", {}),
)
"""(model, loss, settings): each is two requests of gradients, and a step of Adam."""
ADAM = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-4, "weight_decay": 0.01, "grad_clip_norm": 0.5}
RATES = (1e-2, 3e-3)
"""Learning rates, in turn."""


def data(request: int, vocab_size: int = 320) -> list[dict[str, list[float]]]:
    """Nine sequences, some with a common beginning; targets are not the following tokens everywhere."""
    random = np.random.default_rng(request)
    beginning = random.integers(1, vocab_size, 10)
    found = []
    for size, common in ((5, 0), (9, 0), (1, 0), (12, 10), (10, 10), (14, 9), (9, 9), (12, 0), (7, 0)):
        tokens = random.integers(1, vocab_size, size)
        tokens[:common] = beginning[:common]
        targets = np.concatenate([tokens[1:], random.integers(1, vocab_size, 1)])
        targets[: size // 3] = 0
        found.append(
            {
                "tokens": tokens.tolist(),
                "targets": targets.tolist(),
                "weights": (random.random(size) > 0.3).astype(float).tolist(),
                "logprobs": (-6 + random.normal(size=size)).astype(np.float32).astype(float).tolist(),
                "advantages": random.normal(size=size).astype(np.float32).astype(float).tolist(),
            }
        )
    return found


def to_datum(values: Mapping[str, Sequence[float]], columns: Sequence[str]) -> Any:
    """The datum as ranks get it."""
    from services.trainer.tinker.work import Datum

    return Datum(
        np.asarray(values["tokens"], dtype="<i4").tobytes(),
        np.asarray(values["targets"], dtype="<i4").tobytes(),
        {name: np.asarray(values[name], dtype="<f4").tobytes() for name in columns},
    )


@dataclass(frozen=True)
class TinkerCase(RankCase):
    """Layouts of one base."""

    plain: ClassVar[Sections] = {
        "rollout": {"num_rollout": 1},
        "train": {"max_tokens_per_gpu": 24, "use_dynamic_batch_size": True},
        "lora": {"lora_rank": 4},
    }

    def run(self) -> None:
        from services.trainer.model.build import join_ranks
        from services.trainer.tinker.slots import LoraSlots
        from services.trainer.tinker.work import AdamParams, LoraSpec

        self.out.mkdir(parents=True, exist_ok=True)
        layout = join_ranks(self.job())
        with _float64():
            worker = LoraSlots(self.job(), layout)
        for name, spec in MODELS.items():
            worker.create(name, LoraSpec(**spec))
            assert worker.save_adapter(name, str(self.out / "initial" / name)) is None
        results: list[Any] = []
        for number, (name, loss, settings) in enumerate(STEPS):
            results += [self._compute(worker, layout, name, loss, settings, 2 * number + part) for part in range(2)]
            rate = RATES[number % len(RATES)]
            results.append(worker.step(name, AdamParams(learning_rate=rate, **ADAM)))
            if number == 2:
                self._reload(worker, layout)
        for name in MODELS:
            assert worker.save_adapter(name, str(self.out / "trained" / name)) is None
        if layout.rank == 0:
            (self.out / "results.json").write_text(json.dumps(results))

    def _reload(self, worker: Any, layout: Any) -> None:
        """A model that is saved, dropped and loaded goes on as if nothing had been."""
        import torch.distributed as dist

        from services.trainer.tinker.work import LoraSpec

        file = self.out / "small.safetensors"
        assert worker.save("small", str(file)) is None
        dist.barrier()
        assert worker.refusal(str(file)) is None
        worker.drop("small")
        worker.load("small", LoraSpec(**MODELS["small"]), str(file), optimizer=True)

    def _compute(
        self, worker: Any, layout: Any, name: str, loss: str, settings: Mapping[str, float], request: int
    ) -> Any:
        import torch.distributed as dist

        from services.trainer.tinker.losses import LOSSES, loss_of

        known = loss_of(loss, settings)[1]
        batch = [to_datum(each, LOSSES[loss].columns) for each in data(request)]
        forward = worker.compute(name, batch, loss, known, False)
        found = worker.compute(name, batch, loss, known, True)
        if found is not None:
            assert np.isclose(forward.loss, found.loss)
        parts: list[Any] = [None] * layout.world_size
        dist.all_gather_object(parts, found)
        reported = [part for part in parts if part is not None]
        log_probs = {i: row for part in reported for i, row in part.log_probs.items()}
        rows = [np.frombuffer(log_probs[i], dtype="<f4").astype(float).tolist() for i in range(len(batch))]
        return {"log_probs": rows, "loss": sum(part.loss for part in reported)}
