"""Writes a checkpoint's weights as a Hugging Face folder, or as one that Megatron-core or peft loads.

`python -m services.trainer.export_checkpoint --config RUN/job.json STEP_FOLDER FOLDER` is one process on CPUs, whatever
layout wrote the checkpoint. No other part of the run has to live.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from headrace.errors import FailedPrecondition, HeadraceError
from headrace.job.megatron import megatron
from headrace.job.schema.job import Job, read_job
from headrace.models.folders import HUGGING_FACE, PEFT
from headrace.models.registry import read_architecture
from headrace.models.torch_dist import FORMAT
from headrace.rpc.log import configure_logging
from services.trainer.checkpoint.resharding import ModelState, opened
from services.trainer.hugging_face.export import export
from services.trainer.hugging_face.rank_model import RankModel
from services.trainer.hugging_face.shards import weights_of
from services.trainer.hugging_face.torch_dist import write_torch_dist
from services.trainer.model.build import join_ranks
from services.trainer.model.lora import attach, write_peft
from services.trainer.model.policy import POLICY, model_facts, require_same_model

_PRECISION = ("bf16", "fp16")


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 1 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m services.trainer.export_checkpoint", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the run's job.json")
    parser.add_argument("checkpoint", type=Path, help="a step-… folder")
    parser.add_argument("folder", type=Path, help="must not exist or be empty")
    parser.add_argument("--format", choices=(HUGGING_FACE, FORMAT, PEFT), default=HUGGING_FACE)
    args = parser.parse_args(argv)
    configure_logging("export")
    try:
        export_checkpoint(read_job(args.config), args.checkpoint, args.folder, args.format)
    except HeadraceError as error:
        print(error.message, file=sys.stderr)  # noqa: T201  # one line to a person
        return 1
    return 0


def export_checkpoint(job: Job, checkpoint: Path, folder: Path, into: str = HUGGING_FACE) -> None:
    """Raises DataLoss for a checkpoint that is damaged or of another model, AlreadyExists for a folder in use."""
    job = job.model_copy(update={"megatron": {k: v for k, v in job.megatron.items() if k in _PRECISION}})
    layout = join_ranks(job)
    architecture = read_architecture(job.model.hf_checkpoint)
    reader = opened(checkpoint, layout)
    model = RankModel.of(architecture, megatron(job.megatron), layout, job.train.packing)
    converter, lora = model.converter, job.lora.model_copy(update={"lora_load": None})
    weights = weights_of(model.stages)
    adapters = attach(model, architecture, layout, lora, 0) if lora.lora_rank else None
    require_same_model(reader, model_facts(architecture, adapters))
    ModelState(POLICY, [*converter.shards(), *(adapters.shards if adapters else [])], None).restore_weights(reader)
    if into == PEFT:
        if adapters is None:
            raise FailedPrecondition("this run has no adapters: it trained without --lora-rank, so leave --format out")
        write_peft(folder, job.model.hf_checkpoint, architecture, lora, adapters.weights())
        return
    if adapters is not None:
        adapters.fold_into(weights)
    if into == FORMAT:
        write_torch_dist(folder, architecture, {shard.key: shard.parameter for shard in converter.shards()})
        return
    export(converter.hf_tensors(), converter.hf_tensor_specs(), job.model.hf_checkpoint, folder, layout)


if __name__ == "__main__":
    sys.exit(main())
