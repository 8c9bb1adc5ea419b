"""Tinker's API as its own client uses it, in front of ranks and engines that compute nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from tinker import types

from headrace.rpc.access import Access
from headrace.rpc.http_server import EndpointServer, Gate
from services.trainer.tinker import service as tinker_service
from services.trainer.tinker.checkpoints import Checkpoints
from services.trainer.tinker.http import TinkerHttp
from services.trainer.tinker.journal import Journal
from services.trainer.tinker.service import Tinker
from services.trainer.tinker.wire import TinkerWire
from tests.support.fakes.tinker_ranks import CountingRanks, EchoingEngines

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
BASE = "base"
ADAM = types.AdamParams(learning_rate=1e-3)
KEY = {"X-API-Key": "tml-test"}


class Served:
    """A server on the loopback interface; `restart` ends it as a kill would, and starts it on the same files."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self._folder = folder
        self._options = options
        self._port: int | None = None
        self.ranks = CountingRanks()
        self.engines = EchoingEngines()

    async def start(self) -> None:
        self._wire = TinkerWire(vocab_size=100, max_rank=8, max_tokens=50)
        journal, checkpoints = Journal(self._folder / "requests.sqlite"), Checkpoints(self._folder)
        self.tinker = Tinker(self.ranks, self.engines, self._wire, journal, checkpoints, max_models=2)
        gate = Gate("headrace.api.trainer.v1.TrainerService", Access(has_certificates=False, tokens=None))
        http = TinkerHttp(self.tinker, self._wire, gate, [BASE], self._folder, 50)
        self._server = EndpointServer(http.application(), self._port)
        self.url = self._server.url
        self._port = int(self.url.rpartition(":")[2])
        self.tinker.start()
        await self._server.start()

    async def stop(self) -> None:
        self.tinker.let_go()
        await self._server.stop()
        await self.tinker.stop()

    async def restart(self) -> None:
        await self.stop()
        self.ranks, self.engines = CountingRanks(), EchoingEngines()
        await self.start()


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Served]:
    served = Served(folder)
    await served.start()
    try:
        yield served
    finally:
        await served.stop()


async def in_client(work: Callable[[], Any]) -> Any:
    """What a program of a user does, in a thread of its own."""
    return await asyncio.wait_for(asyncio.to_thread(work), 60)


def opened(served: Served) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=served.url, api_key="tml-test")


def datum(tokens: list[int], **columns: list[float]) -> types.Datum:
    inputs: Any = {"target_tokens": tokens, "weights": [1.0] * len(tokens), **columns}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


async def test_a_client_trains_samples_saves_and_loads(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:

        def work() -> None:
            service = opened(served)
            training = service.create_lora_training_client(base_model=BASE, rank=4, seed=1).result()
            info = training.get_info()
            assert (info.model_data.model_name, info.lora_rank) == (BASE, 4)
            passed = training.forward_backward([datum([1, 2, 3]), datum([4, 5])], "cross_entropy")
            step = training.optim_step(ADAM)
            assert passed.result().metrics == {"loss:sum": 5.0}
            rows = [each["logprobs"].tolist() for each in passed.result().loss_fn_outputs]
            assert rows == [pytest.approx([-0.1, -0.2, -0.3]), pytest.approx([-0.4, -0.5])]
            assert step.result().metrics == {"grad_norm": 5.0}
            training.forward([datum([1, 2])], "cross_entropy").result()
            saved = training.save_state("one").result().path
            sampler = training.save_weights_and_get_sampling_client().result()
            prompt = types.ModelInput.from_ints([7, 8])
            reply = sampler.sample(prompt, 2, types.SamplingParams(max_tokens=4)).result()
            assert [(list(each.tokens), each.stop_reason) for each in reply.sequences] == [
                ([7, 5], "stop"),
                ([7, 5], "length"),
            ]
            assert reply.sequences[0].logprobs == [-0.5, -0.25]
            assert sampler.compute_logprobs(prompt).result() == [None, -0.5]
            loaded = service.create_training_client_from_state_with_optimizer(saved).result()
            assert loaded.optim_step(ADAM).result().metrics == {"grad_norm": 5.0}
            service.close("success").result()

        await in_client(work)
        assert served.ranks.models == {}
        assert served.ranks.calls[-2:] == ["drop", "drop"]


async def test_a_custom_loss_runs_in_the_client(tmp_path: Path) -> None:
    import torch

    async with serving(tmp_path) as served:

        def work() -> dict[str, float]:
            training = opened(served).create_lora_training_client(base_model=BASE, rank=4).result()

            def loss(data: Any, log_probs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
                return -sum(row.sum() for row in log_probs), {"rows": float(len(log_probs))}

            metrics: dict[str, float] = training.forward_backward_custom([datum([1, 2])], loss).result().metrics
            return metrics

        assert (await in_client(work))["loss:sum"] == pytest.approx(0.3)
        assert served.ranks.calls[-2:] == ["cross_entropy forward", "cross_entropy backward"]


async def test_requests_of_a_model_are_carried_out_in_their_order_whichever_comes_first(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, httpx.AsyncClient(base_url=served.url, headers=KEY) as client:
        model_id = await _model(client)
        steps = [(await _step(client, model_id, seq, rate))["request_id"] for seq, rate in ((3, 3), (2, 2), (1, 1))]
        for request_id in steps:
            await _outcome(client, request_id)
        again = await _step(client, model_id, 3, 3)  # a client that heard nothing asks again
        assert again["request_id"] == steps[0]
        assert served.ranks.calls == ["create 2", "step 1", "step 2", "step 3"]


async def test_clients_take_turns_and_a_model_too_many_is_refused_until_a_session_ends(tmp_path: Path) -> None:
    """tinker_models is 2 here."""
    async with serving(tmp_path) as served:

        def train(rank: int) -> float:
            service = opened(served)
            training = service.create_lora_training_client(base_model=BASE, rank=rank).result()
            futures = [training.forward_backward([datum([rank])], "cross_entropy") for _ in range(5)]
            total = float(training.optim_step(ADAM).result().metrics["grad_norm"])
            [future.result() for future in futures]
            service.close("success").result()
            return total

        assert await asyncio.gather(*(in_client(lambda rank=rank: train(rank)) for rank in (1, 2))) == [5.0, 5.0]  # type: ignore[misc]  # mypy cannot infer a lambda with a default
        async with httpx.AsyncClient(base_url=served.url, headers=KEY) as client:
            first = await _model(client)
            await _model(client)
            refused = await _create(client, await _session(client))
            assert (refused.status_code, refused.json()["reason"]) == (429, "RESOURCE_EXHAUSTED")
            await client.post(f"/api/v1/sessions/{first.partition(':')[0]}/finish", json={})
            await _model(client)


async def test_a_silent_session_ends_and_its_model_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tinker_service, "SESSION_SECONDS", 0.05)
    monkeypatch.setattr(tinker_service, "_SWEEP_SECONDS", 0.01)
    async with serving(tmp_path) as served, httpx.AsyncClient(base_url=served.url, headers=KEY) as client:
        session = await _session(client)
        assert (await _create(client, session)).status_code == 200
        async with asyncio.timeout(20):
            while served.ranks.calls[-1:] != ["drop"]:
                await asyncio.sleep(0.01)
            beat = await client.post("/api/v1/session_heartbeat", json={"session_id": session})
        assert beat.status_code == 410


async def test_futures_survive_a_restart_and_the_model_is_what_it_was(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        done, waiting = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def work() -> tuple[Any, ...]:
            training = opened(served).create_lora_training_client(base_model=BASE, rank=2).result()
            training.forward_backward([datum([1, 2])], "cross_entropy").result()
            training.optim_step(ADAM).result()
            sampler = training.save_weights_and_get_sampling_client().result()
            loop.call_soon_threadsafe(done.set)
            asyncio.run_coroutine_threadsafe(waiting.wait(), loop).result()
            passed = training.forward_backward([datum([3])], "cross_entropy")
            step = training.optim_step(ADAM)
            sampled = sampler.sample(types.ModelInput.from_ints([7]), 1, types.SamplingParams(max_tokens=2))
            return passed.result().metrics, step.result().metrics, list(sampled.result().sequences[0].tokens)

        client = asyncio.create_task(in_client(work))
        await done.wait()
        served.ranks.held.clear()
        served.engines.held.clear()
        waiting.set()
        async with asyncio.timeout(20):
            while len(list(served.tinker._journal.since(_only_model(served), 3))) < 2:
                await asyncio.sleep(0.01)
        await served.restart()
        assert await client == ({"loss:sum": 1.0}, {"grad_norm": 3.0}, [7, 2])
        assert served.ranks.calls == [
            *("create 2", "cross_entropy backward", "step 0.001"),
            *("cross_entropy backward", "step 0.001"),
        ]


async def test_a_restart_begins_with_the_last_state_and_carries_out_only_what_came_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tinker_service, "_STATE_SECONDS", 0.0)
    async with serving(tmp_path) as served, httpx.AsyncClient(base_url=served.url, headers=KEY) as client:
        model_id = await _model(client)
        await _outcome(client, (await _step(client, model_id, 1, 1))["request_id"])
        async with asyncio.timeout(20):
            while "save" not in served.ranks.calls:
                await asyncio.sleep(0.01)
        monkeypatch.setattr(tinker_service, "_STATE_SECONDS", 1e9)
        await _outcome(client, (await _step(client, model_id, 2, 2))["request_id"])
        await served.restart()
        await _outcome(client, (await _step(client, model_id, 3, 3))["request_id"])
        assert served.ranks.calls == ["load True", "step 2", "step 3"]


async def test_a_save_that_a_restart_interrupts_is_made_once(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, httpx.AsyncClient(base_url=served.url, headers=KEY) as client:
        model_id = await _model(client)
        body = {"model_id": model_id, "seq_id": 1, "path": "kept"}
        asked = (await client.post("/api/v1/save_weights", json=body)).json()
        first = await _outcome(client, asked["request_id"])
        served.tinker._journal._db.execute("UPDATE requests SET media_type = NULL WHERE kind = 'save_weights'")
        await served.restart()
        assert await _outcome(client, asked["request_id"]) == first
        assert served.ranks.calls == ["create 2"]


async def test_a_model_outlives_the_checkpoint_that_it_was_loaded_from(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        loop = asyncio.get_running_loop()

        def work() -> None:
            service = opened(served)
            training = service.create_lora_training_client(base_model=BASE, rank=2).result()
            training.forward_backward([datum([1, 2])], "cross_entropy").result()
            path = training.save_state("kept").result().path
            loaded = service.create_training_client_from_state(path).result()
            service.create_rest_client().delete_checkpoint_from_tinker_path(path).result()
            asyncio.run_coroutine_threadsafe(served.restart(), loop).result()
            assert loaded.optim_step(ADAM).result().metrics == {"grad_norm": 2.0}

        await in_client(work)


async def test_what_ends_the_work_in_the_background_ends_the_server(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, httpx.AsyncClient(base_url=served.url, headers=KEY) as client:
        model_id = await _model(client)
        served.ranks.models.clear()
        await _step(client, model_id, 1, 1)
        with pytest.raises(KeyError):
            await asyncio.wait_for(served.tinker.broken(), 20)


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "a loss that is not published": ("gspo", {}),
    "a setting that the loss does not have": ("ppo", {"loss_fn_config": {"beta": 1.0}}),
    "a token that the model does not have": ("cross_entropy", {"data": [datum([100])]}),
    "a target that the model does not have": ("cross_entropy", {"data": [datum([1], target_tokens=[-1])]}),
    "a column that is too short": ("cross_entropy", {"data": [datum([1, 2], weights=[1.0])]}),
    "a column that is missing": ("importance_sampling", {}),
    "a number that is not finite": ("cross_entropy", {"data": [datum([1], weights=[float("nan")])]}),
    "a sequence beyond the context": ("cross_entropy", {"data": [datum([1] * 51)]}),
}


@pytest.mark.parametrize("what", BAD)
async def test_a_client_is_told_what_is_wrong_with_its_data(tmp_path: Path, what: str) -> None:
    loss_fn, given = BAD[what]
    async with serving(tmp_path) as served:

        def work() -> int:
            training = opened(served).create_lora_training_client(base_model=BASE, rank=2).result()
            with pytest.raises(tinker.APIStatusError) as refused:
                training.forward_backward(**{"data": [datum([1])], "loss_fn": loss_fn, **given}).result()
            return refused.value.status_code

        assert await in_client(work) == 422
        assert served.ranks.calls == ["create 2"]


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ({"base_model": "another"}, 422),
        ({"lora_config": {"rank": 9}}, 422),
        ({"lora_config": {"rank": 2, "train_attn": False, "train_mlp": False}}, 422),
        ({"lora_config": None}, 422),
        ({"optimizer_config": {"type": "dimuon"}}, 422),
        ({"session_id": "gone"}, 404),
    ],
)
async def test_a_model_that_cannot_be_is_refused(tmp_path: Path, given: dict[str, Any], status: int) -> None:
    async with serving(tmp_path) as served, httpx.AsyncClient(base_url=served.url, headers=KEY) as client:
        refused = await _create(client, await _session(client), **given)
        assert refused.status_code == status


async def test_a_failed_step_is_its_clients_and_the_model_goes_on(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, httpx.AsyncClient(base_url=served.url, headers=KEY) as client:
        model_id = await _model(client)
        failed = await _outcome(client, (await _step(client, model_id, 1, 500))["request_id"])
        assert failed["category"] == "user"
        found = await _outcome(client, (await _step(client, model_id, 2, 1))["request_id"])
        assert found["metrics"] == {"grad_norm": 0.0}


async def test_checkpoints_have_names_are_listed_expire_and_are_deleted(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:

        def work() -> None:
            service = opened(served)
            training = service.create_lora_training_client(base_model=BASE, rank=2).result()
            kept = training.save_state("kept", user_metadata={"why": "best"}).result().path
            for_sampling = training.save_weights_for_sampler("for-sampling").result().path
            with pytest.raises(tinker.RequestFailedError):
                training.save_state("kept").result()
            assert training.save_state("kept", overwrite=True).result().path == kept
            with pytest.raises(tinker.APIStatusError):
                training.save_state("../../elsewhere").result()
            with pytest.raises(tinker.APIStatusError):
                service.create_training_client_from_state(for_sampling).result()
            rest = service.create_rest_client()
            listed = rest.list_checkpoints(training.model_id).result().checkpoints
            assert {each.tinker_path for each in listed} == {kept, for_sampling}
            assert rest.get_weights_info_by_tinker_path(kept).result().lora_rank == 2
            rest.delete_checkpoint_from_tinker_path(kept).result()
            assert len(rest.list_checkpoints(training.model_id).result().checkpoints) == 1

        await in_client(work)


async def test_a_path_that_is_not_served_is_named(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, httpx.AsyncClient(base_url=served.url, headers=KEY) as client:
        reply = await client.get("/api/v1/sessions")
        assert reply.status_code == 404
        assert "/api/v1/sessions" in reply.json()["detail"]


def _only_model(served: Served) -> str:
    (model,) = served.tinker._journal.models()
    return model.model_id


async def _session(client: httpx.AsyncClient) -> str:
    body = {"tags": [], "user_metadata": None, "sdk_version": "0"}
    reply = await client.post("/api/v1/create_session", json=body)
    session: str = reply.json()["session_id"]
    return session


async def _create(client: httpx.AsyncClient, session: str, **given: Any) -> httpx.Response:
    body = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 2}, **given}
    return await client.post(
        "/api/v1/create_model", json={key: value for key, value in body.items() if value is not None}
    )


async def _model(client: httpx.AsyncClient) -> str:
    reply = (await _create(client, await _session(client))).json()
    model_id: str = (await _outcome(client, reply["request_id"]))["model_id"]
    return model_id


async def _step(client: httpx.AsyncClient, model_id: str, seq: int, rate: float) -> dict[str, Any]:
    params = {"learning_rate": rate}
    reply = await client.post("/api/v1/optim_step", json={"model_id": model_id, "seq_id": seq, "adam_params": params})
    found: dict[str, Any] = reply.json()
    return found


async def _outcome(client: httpx.AsyncClient, request_id: str) -> dict[str, Any]:
    while (reply := await client.post("/api/v1/retrieve_future", json={"request_id": request_id})).status_code == 408:
        pass
    found: dict[str, Any] = reply.json()
    return found
