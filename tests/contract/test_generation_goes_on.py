"""Generation goes on while the trainer evaluates and while it saves: only admission holds it back."""

from __future__ import annotations

import asyncio
from pathlib import Path

from headrace.api.buffer.v1 import buffer_pb2
from headrace.api.rollout.v1 import rollout_pb2
from headrace.client.buffer import BufferClient
from services.buffer.store.memory import MemoryStore
from services.rollout.admission import EngineSlots, Kind, Shares
from services.rollout.engine.api import SamplingParams
from services.rollout.evaluation.dataset import EvalFiles
from services.rollout.evaluation.runner import EvalRunner
from services.rollout.production.generator import Generator
from services.rollout.production.sampling import EngineSampler
from services.trainer.failure_budget import FailureBudget
from services.trainer.ledger import StreamLedger
from services.trainer.loop import train
from services.trainer.serving.console import TrainerConsole
from services.trainer.serving.evaluation import EvalScheduler
from services.trainer.serving.report import RunReport
from services.trainer.state import TrainState
from tests.support.fakes.certain_rollout import produce
from tests.support.fakes.memory_ledger import MemoryLedger, lease
from tests.support.fakes.scripted_reward import score
from tests.support.ledgers.buffer_samples import text_prompts
from tests.support.models.tiny_model import make_tiny_tokenizer
from tests.support.processes.buffer_server import served_buffer
from tests.unit.rollout.production.test_production import production
from tests.unit.trainer.test_loop import Everything


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


class SlowSaver(Everything):
    """Its checkpoints are written until `written` is set."""

    def __init__(self) -> None:
        super().__init__(num_steps=1, save_every=1)
        self.saving = asyncio.Event()
        self.written = asyncio.Event()

    async def save(self, state: TrainState) -> None:
        self.saving.set()
        await self.written.wait()
        await super().save(state)

    def checkpoint_path(self, step: int) -> Path:
        return Path(f"/checkpoints/{step}")

    async def export_to(self, path: Path) -> None:
        self.diary.append(f"export_to {path}")


async def test_groups_are_made_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    config = buffer_pb2.StreamConfig(name="train", n_samples_per_prompt=2, groups_per_step=2, max_staleness=1)
    async with served_buffer(MemoryStore()) as (_, server), BufferClient(server.address) as client:
        await client.create_stream(config)
        await client.submit_prompts("train", text_prompts(*(str(number) for number in range(20))))
        ranks, console = (
            SlowSaver(),
            TrainerConsole(RunReport(tmp_path), EvalScheduler(), run="r", num_steps=1, groups_per_step=2),
        )
        console.open(ranks, 1)
        producing = asyncio.create_task(produce(server.address))
        training = asyncio.create_task(
            train(StreamLedger(client, "train", console, FailureBudget(0.5, 1_000)), ranks, console, ranks)
        )
        try:
            async with asyncio.timeout(120):
                await ranks.saving.wait()
                # One step is consumed, so two more steps' groups may be ready: they come while the save goes on.
                while (await client.stats("train")).groups["READY"] < 4:
                    await asyncio.sleep(0.01)
                assert not training.done()
                ranks.written.set()
                assert (await training).step == 1
        finally:
            producing.cancel()
            training.cancel()
