"""Generation goes on while the trainer evaluates and while it saves: only admission holds it back."""

from __future__ import annotations

from pathlib import Path

from headrace.api.rollout.v1 import rollout_pb2
from services.rollout.admission import EngineSlots, Kind, Shares
from services.rollout.engine.api import SamplingParams
from services.rollout.evaluation.dataset import EvalFiles
from services.rollout.evaluation.runner import EvalRunner
from services.rollout.production.generator import Generator
from services.rollout.production.sampling import EngineSampler
from tests.support.fakes.memory_ledger import MemoryLedger, lease
from tests.support.fakes.scripted_reward import score
from tests.support.models.tiny_model import make_tiny_tokenizer
from tests.unit.rollout.production.test_production import production


async def test_groups_are_made_while_an_evaluation_runs(tmp_path: Path) -> None:
    make_tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "eval.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    ledger = MemoryLedger([lease(number) for number in range(1000)])
    async with production(tmp_path / "tokenizer", ledger, score(0.5), token_seconds=0.005) as made:
        generator = Generator(made.fakes.fleet.engines[0].client, made.fakes.fleet.weights)
        sampler = EngineSampler(generator, made.encoder, seconds=60.0)
        evaluator = EvalRunner(
            made.encoder,
            sampler,
            made.scorer,
            SamplingParams(max_new_tokens=100),
            seed=1,
            files=EvalFiles([], tmp_path),
            slots=EngineSlots(Shares({Kind.EVALUATION: 2}), max_waiting=0),
        )
        dataset = rollout_pb2.EvalDataset(
            name="e", path=str(tmp_path / "eval.jsonl"), n_samples_per_prompt=1, input_key="prompt"
        )
        await made.fakes.until(lambda: len(ledger.puts) >= 1)
        before = len(ledger.puts)
        async for _ in evaluator.run([dataset]):
            assert not made.producer.paused
        assert len(ledger.puts) > before
