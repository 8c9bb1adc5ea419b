"""`headrace generate | export | models`: the policy's text and weights, and the models that --model knows."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from headrace.api.rollout.v1 import rollout_pb2
from headrace.api.sample.v1 import sample_pb2
from headrace.api.trainer.v1 import trainer_pb2
from headrace.cli.arg_types import (
    COUNT,
    PATH,
    TEXT,
    Finite,
    json_option,
    print_json,
    rollout_address_option,
    run_argument,
)
from headrace.cli.runs import address_of, find_run
from headrace.cli.view.lines import print_no_wrap
from headrace.client.open import open_rollout
from headrace.client.trainer import TrainerClient
from headrace.errors import FailedPrecondition, NotFound
from headrace.launch.previous_run import checkpoints_of, has_ended
from headrace.limits import MAX_SCHEMA_BYTES
from headrace.models.family import Preset
from headrace.models.folders import HUGGING_FACE, PEFT
from headrace.models.registry import PRESETS, architecture, table
from headrace.models.torch_dist import FORMAT
from headrace.process.child import run_once
from headrace.run_folder import RunFolder


def _schema(ctx: click.Context, param: click.Parameter, path: str | None) -> str | None:
    """Reads a file of a JSON schema."""
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_SCHEMA_BYTES + 1)
        if len(content) > MAX_SCHEMA_BYTES:
            raise ValueError(f"it has more than {MAX_SCHEMA_BYTES} bytes")
        return content.decode()
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"{path[:80]}: {error}") from None


@click.command()
@click.argument("text", type=TEXT)
@run_argument
@rollout_address_option
@click.option("--temperature", type=Finite(1000), default=0.0)
@click.option("--max-new-tokens", type=COUNT, default=256, show_default=True)
@click.option("-n", type=COUNT, default=1, help="Responses; several are printed as they end.")
@click.option("--stop", type=TEXT, multiple=True, help="Ends a response, which holds it; repeatable.")
@click.option("--json-schema", callback=_schema, metavar="FILE", help="A JSON schema that the response must fit.")
@click.option("--regex", type=TEXT, help="A regular expression that the response must fit as a whole.")
@click.option("--raw", is_flag=True, help="Give the text to the tokenizer without the chat template.")
@json_option
def generate(
    text: str,
    run: str | None,
    rollout_address: str | None,
    temperature: float,
    max_new_tokens: int,
    n: int,
    stop: Sequence[str],
    json_schema: str | None,
    regex: str | None,
    raw: bool,
    as_json: bool,
) -> int:
    """Asks the policy that the engines serve now, with TEXT as the user's message.

    Prints the response as it is generated, then the policy versions that sampled it.
    """
    sampling = sample_pb2.SamplingParams(
        temperature=temperature, max_new_tokens=max_new_tokens, stop=stop, json_schema=json_schema, regex=regex
    )
    request = rollout_pb2.GenerateRequest(sampling=sampling, n=n)
    if raw:
        request.text = text
    else:
        request.messages.messages.append(sample_pb2.ChatMessage(role="user", content=text))
    address, of_run = address_of(run, "rollout", rollout_address), "" if rollout_address else find_run(run).path.name
    asyncio.run(_generate(address, of_run, request, as_json=as_json))
    return 0


async def _generate(address: str, run: str, request: rollout_pb2.GenerateRequest, *, as_json: bool) -> None:
    versions: set[int] = set()
    texts: dict[int, str] = {}
    responses: list[dict[str, object]] = []
    async with open_rollout(address, run=run) as rollout:
        async for reply in rollout.generate(request):
            texts[reply.index] = texts.get(reply.index, "") + reply.text
            if as_json:
                responses += [_response(reply, texts[reply.index])] if reply.status else []
            elif request.n == 1:
                print(reply.text, end="", flush=True)
            elif reply.status:
                print(f"── {reply.index + 1} of {request.n}\n{texts[reply.index]}", flush=True)
            versions |= {each.policy_version for each in reply.policy_ranges}
    if as_json:
        print_json(responses)
        return
    print(f"\n(policy version {', '.join(str(version) for version in sorted(versions)) or 'unknown'})")


def _response(last: rollout_pb2.GenerateResponse, text: str) -> dict[str, object]:
    return {
        "index": last.index,
        "text": text,
        "status": sample_pb2.SampleStatus.Name(last.status),
        "prompt_tokens": last.prompt_tokens,
        "policy_ranges": list(last.policy_ranges),
    }


@click.command()
@click.argument("folder", type=PATH)
@run_argument
@click.option("--step", type=COUNT, help="Export this step's checkpoint (default: the current or newest weights).")
@click.option(
    "--format",
    "into",
    type=click.Choice([HUGGING_FACE, FORMAT, PEFT]),
    default=HUGGING_FACE,
    show_default=True,
    help="A Hugging Face folder; or from a checkpoint of the run a checkpoint folder of Megatron-core, or the adapters "
    "of LoRA as a folder of peft.",
)
@click.option("--trainer-address", help="host:port of the trainer, instead of a run.")
def export(folder: Path, run: str | None, step: int | None, into: str, trainer_address: str | None) -> int:
    """Writes weights into FOLDER, which must not exist or be empty.

    Exports the current weights of a live run after its step, and a checkpoint's of a run that has ended.
    """
    if trainer_address and into != HUGGING_FACE:
        raise click.UsageError(
            f"--format {into} is written from a run's checkpoint: name the run, not --trainer-address"
        )
    if not trainer_address:
        found = find_run(run)
        if step is not None or into != HUGGING_FACE or has_ended(found):
            wanted = export_step(found, step, folder.absolute(), into)
            checkpoint = checkpoints_of(found, found.job())[wanted]
            print(f"{folder.absolute()}: weights of step {wanted}, from {checkpoint}")
            return 0
    address = address_of(run, "trainer", trainer_address)
    with Console().status("exporting after the current step"):
        reply = asyncio.run(_export(address, folder.absolute()))
    print(f"{reply.path}: weights of step {reply.step}")
    return 0


async def _export(address: str, folder: Path) -> trainer_pb2.ExportModelResponse:
    async with TrainerClient(address) as trainer:
        return await trainer.export_model(folder)


def export_step(run: RunFolder, step: int | None, folder: Path, into: str = HUGGING_FACE) -> int:
    """Writes the weights of this step's checkpoint, or of the newest one, and returns its step.

    One process reads the checkpoint on CPUs: it needs no GPU and none of the run's services. Raises NotFound for a step
    without a checkpoint, FailedPrecondition for one that cannot be exported.
    """
    found = checkpoints_of(run, run.job())
    if not found:
        raise NotFound(f"{run.path} has no checkpoint: nothing was saved before it ended")
    wanted = max(found) if step is None else step
    if wanted not in found:
        raise NotFound(f"{run.path} has no checkpoint of step {wanted}; it has {', '.join(map(str, sorted(found)))}")
    with Console().status(f"exporting the checkpoint of step {wanted}"):
        program = [sys.executable, "-m", "services.trainer.export_checkpoint", "--config", str(run.job_file)]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
        done = asyncio.run(run_once([*program, "--format", into, str(found[wanted]), str(folder)], environment))
    if done.exit_code:
        said = [line for line in done.last_lines if line.strip()]
        raise FailedPrecondition(said[-1] if said else "the export ended with an error and wrote no message")
    return wanted


_SHORT = {
    "tensor_model_parallel_size": "tensor",
    "pipeline_model_parallel_size": "pipeline",
    "num_layers_in_last_pipeline_stage": "layers in the last",
    "expert_model_parallel_size": "experts",
}


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A preset of --model. `layout` has the Megatron options that it sets: arithmetic, not run."""

    name: str
    model_type: str
    parameters: int
    layers: int
    layout: Mapping[str, int]

    @classmethod
    def of(cls, preset: Preset) -> ListedModel:
        found = architecture(preset.config)
        return cls(preset.name, found.family, table(found).num_parameters, found.num_layers, dict(preset.layout))


@click.command()
@json_option
def models(as_json: bool) -> int:
    """Prints a line for each preset of --model: name, model_type, parameters, layers, layout."""
    found = [ListedModel.of(preset) for preset in PRESETS.values()]
    if as_json:
        print_json(found)
        return 0
    listing = Table("model", "model_type", "parameters", "layers", "layout (arithmetic, not run)", box=None)
    for each in found:
        listing.add_row(each.name, each.model_type, _billions(each.parameters), str(each.layers), _layout(each.layout))
    print_no_wrap(Console(), listing)
    return 0


def _billions(parameters: int) -> str:
    return f"{parameters / 1e9:,.2f} B" if parameters < 1e11 else f"{parameters / 1e9:,.0f} B"


def _layout(layout: Mapping[str, int]) -> str:
    return ", ".join(f"{short} {layout[name]}" for name, short in _SHORT.items() if name in layout) or "one rank"
