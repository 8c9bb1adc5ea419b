"""The models of one rank: sets of LoRA matrices, each with gradients and Adam's state, that take turns on one base.

The base has adapters of the largest rank. A model of a smaller rank has zeros behind its own rows of A and columns of
B: their gradients are 0, so they stay 0. Matrices of the model that computes are in the adapters; all models keep
theirs beside, in float32 at least.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from headrace.disk import sync
from headrace.errors import DataLoss, HeadraceError
from headrace.job.megatron import megatron
from headrace.job.schema.job import Job
from headrace.models.family import HfTensor
from headrace.models.registry import read_architecture
from services.trainer.collective_io import write_tensors
from services.trainer.control.worker import command
from services.trainer.durable import new_folder, put_in_place
from services.trainer.hugging_face.shards import ModelShard, cut
from services.trainer.megatron.parallel import Layout
from services.trainer.metrics import Stopwatch
from services.trainer.model.build import model_of
from services.trainer.model.lora import CONFIG, WEIGHTS, InitialPairs, whole_of
from services.trainer.model.pipeline import Runner, TokenHead
from services.trainer.plan.planning import empty_micro_batch
from services.trainer.rl.inputs import MicroInputs, inference_inputs
from services.trainer.tinker.losses import LOSSES
from services.trainer.tinker.rows import Row, columns_of, inputs_of, micro_batches
from services.trainer.tinker.work import AdamParams, Datum, LoraSpec, LossShare

ALPHA = 32.0
"""What Tinker's adapters are multiplied by, over their rank."""
_MICRO_BATCH_TOKENS = 2048
"""Of a micro-batch without max_tokens_per_gpu; a single sequence may have more."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


class _Model:
    def __init__(self, spec: LoraSpec, weights: Mapping[str, Tensor]) -> None:
        self.spec = spec
        self.weights = weights
        self.gradients = {key: torch.zeros_like(weight) for key, weight in weights.items()}
        self.optimizer = torch.optim.AdamW(list(weights.values()))

    def trains(self, key: str) -> bool:
        is_attention = ".self_attn." in key or ".linear_attn." in key
        return self.spec.train_attn if is_attention else self.spec.train_mlp


class LoraSlots:
    """What rank 0 asks of every rank for Tinker's clients, in the rank's compute thread.

    What a client can do wrong is found before a command: an error of one ends the rank.
    """

    def __init__(self, job: Job, layout: Layout) -> None:
        """The base with adapters of the job's rank, and no models yet."""
        args, architecture = megatron(job.megatron), read_architecture(job.model.hf_checkpoint)
        model, adapters = model_of(job, architecture, args, layout)
        assert adapters is not None, "the job's rules ask for lora_rank"
        self._adapters = adapters
        self._runner = Runner(model.config, model.stages, layout, model.packing, Stopwatch(layout.device))
        self._head = TokenHead(model.stages[-1], layout)
        self._layout = layout
        self._packing = model.packing
        self._max_tokens = job.train.max_tokens_per_gpu or _MICRO_BATCH_TOKENS
        self._models: dict[str, _Model] = {}
        self._on_base: str | None = None

    @command
    def create(self, name: str, spec: LoraSpec) -> None:
        """A new model. The same spec gives the same matrices under every layout; B is 0."""
        initial = InitialPairs(spec.rank, "kaiming", spec.seed)

        def start(shard: ModelShard) -> Tensor:
            matrix = torch.zeros(shard.whole_shape)
            layer, _, part = shard.key.rpartition(".lora_")
            if part.startswith("A"):
                matrix[: spec.rank] = initial(HfTensor(layer, (1, shard.whole_shape[1]))).a
            return self._cut(shard, matrix)

        self._models[name] = _Model(spec, {shard.key: start(shard) for shard in self._adapters.shards})

    @command
    def drop(self, name: str) -> None:
        self._models.pop(name, None)
        if self._on_base == name:
            self._on_base = None

    @command
    def compute(
        self, name: str, data: Sequence[Datum], loss_fn: str, settings: Mapping[str, float], backward: bool
    ) -> LossShare | None:
        """Log-probs of the targets and the loss; with `backward` its gradients are added to the model's.

        None on ranks that do not report.
        """
        model, loss = self._use(name), LOSSES[loss_fn]
        shares = [self._micro_batches(data, rank) for rank in range(self._layout.data_size)]
        multiple = self._layout.micro_batch_multiple
        number = -(-max(map(len, shares)) // multiple) * multiple
        own = shares[self._layout.data_rank]
        inputs = [inputs_of(data, rows, self._packing, self._layout) for rows in own]
        inputs += [inference_inputs(empty_micro_batch(), self._layout)] * (number - len(own))
        columns = [
            columns_of(data, own[index] if index < len(own) else (), loss.columns, micro)
            for index, micro in enumerate(inputs)
        ]

        def step(index: int, hidden: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            log_probs = self._head(hidden, inputs[index], 1.0)[0]
            found = (loss.per_token(log_probs, columns[index], settings) * inputs[index].mask).sum()
            return found, (log_probs.detach(), found.detach())

        if backward:
            results = self._runner.train(inputs, step)
            self._collect(model)
        else:
            results = self._inferred(inputs, step)
        if not (self._layout.is_last_stage and self._layout.is_reporting_rank):
            return None
        log_probs = {
            row.number: values[index, : data[row.number].num_tokens].float().cpu().numpy().tobytes()
            for rows, (values, _) in zip(own, results, strict=False)
            for index, row in enumerate(rows)
        }
        return LossShare(log_probs, float(sum(found for _, found in results)))

    @command
    def step(self, name: str, params: AdamParams) -> float:
        """One step of Adam with the gradients so far, which are 0 afterwards; returns their norm before it is clipped.

        Where that is not finite, the matrices stay as they are.
        """
        model = self._models[name]
        self._reduce(model)
        norm = self._norm(model)
        if math.isfinite(norm):
            clip = min(1.0, params.grad_clip_norm / (norm + 1e-6)) if params.grad_clip_norm > 0 else 1.0
            for key, weight in model.weights.items():
                weight.grad = model.gradients[key] * clip if model.trains(key) else None
            model.optimizer.param_groups[0].update(
                lr=params.learning_rate,
                betas=(params.beta1, params.beta2),
                eps=params.eps,
                weight_decay=params.weight_decay,
            )
            model.optimizer.step()
            if self._on_base == name:
                self._on_base = None
        for gradient in model.gradients.values():
            gradient.zero_()
        return norm

    @command
    def save(self, name: str, file: str) -> str | None:
        """Collective: writes the matrices and Adam's state, whole; returns why it could not."""
        model = self._models[name]
        tensors: dict[str, Tensor] = {}
        for shard in self._adapters.shards:
            weight = model.weights[shard.key]
            state = model.optimizer.state.get(weight, {})
            own = {"weight": weight, **{part: state[part] for part in _MOMENTS if part in state}}
            for part, value in own.items():
                tensors[f"{part}:{shard.key}"] = whole_of(shard, value, self._layout).cpu()
            if "step" in state:
                tensors[f"step:{shard.key}"] = state["step"].clone()
        return _refusal(lambda: _write_state(Path(file), tensors)) if self._layout.rank == 0 else None

    @command
    def load(self, name: str, spec: LoraSpec, file: str, optimizer: bool) -> None:
        """A new model as it was saved; without `optimizer` Adam begins anew."""
        tensors = load_file(file)
        model = _Model(spec, {s.key: self._cut(s, tensors[f"weight:{s.key}"]) for s in self._adapters.shards})
        for shard in self._adapters.shards if optimizer else ():
            if f"step:{shard.key}" in tensors:
                state = {part: self._cut(shard, tensors[f"{part}:{shard.key}"]) for part in _MOMENTS}
                model.optimizer.state[model.weights[shard.key]] = state | {"step": tensors[f"step:{shard.key}"]}
        self._models[name] = model

    @command
    def refusal(self, file: str) -> str | None:
        """Why `load` cannot use a file; None if it can."""
        return _refusal(lambda: self._require_fits(file))

    @command
    def save_adapter(self, name: str, folder: str) -> str | None:
        """Collective: writes the model as peft does, of its own rank, in the base's dtype. Returns why it could not."""
        model = self._models[name]
        rank = model.spec.rank
        matrices = {}
        for shard in self._adapters.shards:
            matrix = whole_of(shard, model.weights[shard.key].to(shard.parameter.dtype), self._layout)
            own = matrix[:rank] if ".lora_A." in shard.key else matrix[:, :rank]
            matrices[self._adapters.peft_name(shard.key)] = own.contiguous().cpu()
        config = {**self._adapters.served, "r": rank, "lora_alpha": ALPHA, "use_rslora": False}
        return _refusal(lambda: _write_peft(Path(folder), matrices, config)) if self._layout.rank == 0 else None

    @command
    def leave(self) -> None: ...

    def _require_fits(self, file: str) -> None:
        with safe_open(file, framework="pt") as saved:
            shapes = {key: tuple(saved.get_slice(key).get_shape()) for key in saved.keys()}  # noqa: SIM118  # it is no dict
        for shard in self._adapters.shards:
            if shapes.get(f"weight:{shard.key}") != shard.whole_shape:
                raise DataLoss(f"{file} is of another base, or of other --lora-* options: {shard.key} does not fit")

    def _micro_batches(self, data: Sequence[Datum], rank: int) -> list[Sequence[Row]]:
        shares = self._packing == "shared_prompts"
        return micro_batches(data, rank, self._layout.data_size, self._max_tokens, shares=shares)

    def _cut(self, shard: ModelShard, matrix: Tensor) -> Tensor:
        dtype = torch.promote_types(shard.parameter.dtype, torch.float32)
        own = cut(shard.sharding, [matrix], shard.shard, shard.num_shards)
        return own.to(device=self._layout.device, dtype=dtype, copy=True).contiguous()

    def _use(self, name: str) -> _Model:
        """Puts the model's matrices into the adapters."""
        model = self._models[name]
        if self._on_base != name:
            with torch.no_grad():
                for shard in self._adapters.shards:
                    shard.parameter.copy_(model.weights[shard.key])
            for adapter in self._adapters.by_weight.values():
                adapter.scale = ALPHA / model.spec.rank
            self._on_base = name
        return model

    def _inferred(
        self, inputs: Sequence[MicroInputs], step: Callable[[int, Tensor], tuple[Tensor, tuple[Tensor, Tensor]]]
    ) -> list[tuple[Tensor, Tensor]]:
        results: list[tuple[Tensor, Tensor]] = []
        numbers: Iterator[int] = iter(range(len(inputs)))

        def read(micro: MicroInputs, hidden: Tensor) -> Tensor:
            results.append(step(next(numbers), hidden)[1])
            return hidden.new_zeros(())

        self._runner.infer(inputs, read)
        return results

    def _collect(self, model: _Model) -> None:
        for shard in self._adapters.shards:
            if (gradient := shard.parameter.grad) is not None:
                model.gradients[shard.key] += gradient
                shard.parameter.grad = None

    def _reduce(self, model: _Model) -> None:
        """Sums gradients over ranks that saw other samples or, with sequence parallelism, other positions."""
        for shard in self._adapters.shards:
            gradient = model.gradients[shard.key]
            if self._layout.data_size > 1:
                dist.all_reduce(gradient, group=self._layout.data_group)
            if self._layout.tp_size > 1 and getattr(shard.parameter, "sequence_parallel", False):
                dist.all_reduce(gradient, group=self._layout.tp_group)

    def _norm(self, model: _Model) -> float:
        total = torch.zeros(1, dtype=torch.float64, device=self._layout.device)
        for shard in self._adapters.shards:
            if shard.is_reporting and model.trains(shard.key):
                total += model.gradients[shard.key].double().square().sum()
        if self._layout.tp_size > 1:
            dist.all_reduce(total, group=self._layout.tp_group)
        return float(total.sqrt())


def _write_state(file: Path, tensors: Mapping[str, Tensor]) -> None:
    draft = file.with_name(f".{file.name}.draft")
    write_tensors(draft, tensors)
    sync(draft)
    put_in_place(draft, file)


def _write_peft(folder: Path, matrices: Mapping[str, Tensor], config: Mapping[str, object]) -> None:
    with new_folder(folder) as draft:
        write_tensors(draft / WEIGHTS, matrices, {"format": "pt"})
        (draft / CONFIG).write_text(json.dumps(config, indent=2))


def _refusal(work: Callable[[], None]) -> str | None:
    try:
        work()
    except HeadraceError as error:
        return error.message
    except (OSError, SafetensorError) as error:
        return f"the disk refuses: {error}"
    return None
