"""A job: all options of a run, typed and frozen. An option's name is its flag (`save_hf` is `--save-hf`).

Names are unique over all sections, and every option has an effect. `headrace.job.load` reads TOML, environment and
flags into a job; rules over several options are in `headrace.job.rules.rules`. Parts take a section or values, not the
job.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tomli_w
from pydantic import AfterValidator, Field

from headrace.errors import ConfigError
from headrace.job.names import EARLIER
from headrace.job.schema.placement import PlacementSection
from headrace.job.schema.production import DataSection, EvalSection, RolloutSection
from headrace.job.schema.run import (
    CheckpointSection,
    DebugSection,
    ModelSection,
    PublishSection,
    RunSection,
    TrackingSection,
    without_secrets,
)
from headrace.job.schema.section import Section, normalize
from headrace.job.schema.services import BufferSection, RewardSection, ServicesSection, TinkerSection
from headrace.job.schema.training import CriticSection, DistillationSection, HooksSection, LoraSection, TrainSection

Arguments = Annotated[dict[str, Any], AfterValidator(normalize)]


CONSTANTS: Sequence[str] = tuple(EARLIER["constants"])
"""Options of earlier releases that are constants now."""

MERGED: Mapping[str, str] = EARLIER["merged"]
"""Options of earlier releases that another one is now, and which."""


def without_constants(tree: Any) -> Any:
    """Leaves out of a resolved job what an earlier release wrote into it and is a constant now."""
    if not isinstance(tree, dict):
        return tree
    return {
        name: {key: value for key, value in table.items() if key not in CONSTANTS and key not in MERGED}
        if isinstance(table, dict)
        else table
        for name, table in tree.items()
    }


class Job(Section):
    """The root of the tree: one field for each section."""

    run: RunSection = RunSection()
    model: ModelSection
    data: DataSection = DataSection()
    rollout: RolloutSection = RolloutSection()
    reward: RewardSection = RewardSection()
    train: TrainSection = TrainSection()
    lora: LoraSection = LoraSection()
    critic: CriticSection = CriticSection()
    distillation: DistillationSection = DistillationSection()
    hooks: HooksSection = HooksSection()
    buffer: BufferSection = BufferSection()
    publish: PublishSection = PublishSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    debug: DebugSection = DebugSection()
    services: ServicesSection = ServicesSection()
    tinker: TinkerSection = TinkerSection()
    placement: PlacementSection = PlacementSection()
    tracking: TrackingSection = TrackingSection()
    megatron: Arguments = Field({})
    """Megatron-core's own fields, by name; checked by the trainer."""
    sglang: Arguments = Field({})
    """SGLang's ServerArgs, by name; checked by rollout."""

    @property
    def needs_reward(self) -> bool:
        """True when the loss is made of rewards, so that a sample without one cannot be trained.

        Supervised fine-tuning and distillation train without rewards, and a conversion to train data brings its own.
        """
        brings_rewards = self.hooks.custom_convert_samples_to_train_data_path is not None
        return self.train.loss_type != "sft_loss" and not self.distillation.use_opd and not brings_rewards

    @property
    def scores(self) -> bool:
        """True where a reward service scores samples."""
        return self.asks_engines and not self.serves_tinker

    @property
    def serves_tinker(self) -> bool:
        """True where clients say what is trained."""
        return self.tinker.tinker_port is not None

    @property
    def num_shards(self) -> int:
        """The number of buffers that share the ledger, wherever they are started."""
        return (
            len(self.services.buffer_address.split(",")) if self.services.buffer_address else self.buffer.buffer_shards
        )

    @property
    def asks_engines(self) -> bool:
        """False where given conversations are trained and nothing else wants a response: then nothing is scored too."""
        return (
            self.train.loss_mask_type is None
            or self.eval.is_asked_for
            or self.eval.eval_function_path is not None
            or self.rollout.openai_port is not None
            or bool(self.placement.rollout_external_engine_addrs)
        )


_PARTNERS = (
    ("rollout_batch_size", "n_samples_per_prompt"),
    ("global_batch_size", "num_steps_per_rollout"),
)


def derive(job: Job) -> Job:
    """Derives the one of the four that is left out; with both right-hand ones left out it takes one optimizer step.

    Raises ConfigError when more are left out, or when the sides differ.
    """
    given = {
        "rollout_batch_size": job.rollout.rollout_batch_size,
        "n_samples_per_prompt": job.rollout.n_samples_per_prompt,
        "global_batch_size": job.train.global_batch_size,
        "num_steps_per_rollout": job.train.num_steps_per_rollout,
    }
    if given["global_batch_size"] is None and given["num_steps_per_rollout"] is None:
        given["num_steps_per_rollout"] = 1  # the whole rollout in one optimizer step: on-policy
    absent = [name for name, value in given.items() if value is None]
    if len(absent) > 1:
        raise ConfigError(
            f"{' and '.join(absent)} are not given: of rollout_batch_size, n_samples_per_prompt, global_batch_size and "
            "num_steps_per_rollout only one can be derived"
        )
    four = {name: value for name, value in given.items() if value is not None}
    if absent:
        four |= {absent[0]: _derived(absent[0], four)}
    _require_equal(four)
    return job.model_copy(
        update={
            "rollout": job.rollout.model_copy(update={name: four[name] for name in _PARTNERS[0]}),
            "train": job.train.model_copy(update={name: four[name] for name in _PARTNERS[1]}),
        }
    )


def _derived(name: str, four: dict[str, int]) -> int:
    same, other = _PARTNERS if name in _PARTNERS[0] else reversed(_PARTNERS)
    partner = next(each for each in same if each != name)
    samples = four[other[0]] * four[other[1]]
    if samples % four[partner]:
        raise ConfigError(
            f"{name} cannot be derived: {other[0]} {four[other[0]]} x {other[1]} {four[other[1]]} = {samples} samples, "
            f"which {partner} {four[partner]} does not divide"
        )
    return samples // four[partner]


def _require_equal(four: dict[str, int]) -> None:
    left, right = (four[first] * four[second] for first, second in _PARTNERS)
    if left != right:
        sides = [f"{a} {four[a]} x {b} {four[b]} = {four[a] * four[b]} samples" for a, b in _PARTNERS]
        raise ConfigError(
            f"the batch does not add up: {sides[0]}, but {sides[1]}: change one, or leave one of the four out"
        )


def read_job(path: Path) -> Job:
    """Raises OSError, and pydantic's ValidationError for a file that no launcher of this version wrote."""
    content = path.read_bytes()
    try:
        tree = without_constants(json.loads(content))
    except (ValueError, RecursionError):
        tree = None
    return Job.model_validate_json(content) if tree is None else Job.model_validate(tree)


def to_toml(job: Job) -> str:
    """Every option that has a value, by section. Reading it back gives the same job."""
    tree = job.model_dump(exclude_none=True)
    return tomli_w.dumps({section: toml_value(table) for section, table in tree.items() if table})


def toml_value(value: Any) -> Any:
    """Converts paths to text, because TOML has no type for them."""
    match value:
        case dict():
            return {key: toml_value(inner) for key, inner in value.items()}
        case list() | tuple():
            return [toml_value(inner) for inner in value]
        case Path():
            return str(value)
    return value


# The jobs of two starts of a run, compared option by option.


_UNTOLD = ("services", "run", "tracking", "placement")
"""Sections that change nothing of what is trained."""


@dataclass(frozen=True, slots=True)
class Change:
    """An option with its value in both jobs, as a person would write it."""

    section: str
    name: str
    old: str
    new: str

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def is_told(self) -> bool:
        """False for what changes nothing of what is trained."""
        return self.section not in _UNTOLD


def changed_options(old: Job, new: Job) -> list[str]:
    """The options that decide what is trained and that differ: `lr 1e-06 -> 2e-06`."""
    return [f"{each.name} {each.old} -> {each.new}" for each in changes(old, new) if each.is_told]


def changes(old: Job, new: Job) -> Iterator[Change]:
    before, after = old.model_dump(), new.model_dump()
    for section, options in after.items():
        for name in {**before[section], **options}:
            was, now = before[section].get(name), options.get(name)
            if was != now:
                yield Change(section, name, *(_said(without_secrets({name: value})[name]) for value in (was, now)))


def _said(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, float):
        return f"{value:g}".replace("e-0", "e-").replace("e+0", "e")
    if isinstance(value, tuple | list):
        return " ".join(map(_said, value)) or "none"
    return str(value) if isinstance(value, bool | int | Path) else str(value)[:200]
