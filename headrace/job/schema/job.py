"""A job: all options of a run, typed and frozen. An option's name is its flag (`save_hf` is `--save-hf`).

Names are unique over all sections, and every option has an effect. `headrace.job.load` reads TOML, environment and
flags into a job; rules over several options are in `headrace.job.rules.rules`. Parts take a section or values, not the
job.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from headrace.job.schema.buffer import BufferSection
from headrace.job.schema.debug import DebugSection
from headrace.job.schema.lora import LoraSection
from headrace.job.schema.placement import PlacementSection
from headrace.job.schema.production import DataSection, EvalSection, RolloutSection
from headrace.job.schema.reward import RewardSection
from headrace.job.schema.run import CheckpointSection, ModelSection, PublishSection, RunSection, TrackingSection
from headrace.job.schema.section import Section
from headrace.job.schema.services import ServicesSection
from headrace.job.schema.sound import plain
from headrace.job.schema.training import CriticSection, DistillationSection, HooksSection, TrainSection

Arguments = Annotated[dict[str, Any], AfterValidator(plain)]


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
    placement: PlacementSection = PlacementSection()
    tracking: TrackingSection = TrackingSection()
    megatron: Arguments = Field({}, description="Megatron-core's own fields, by name; checked by the trainer.")
    sglang: Arguments = Field({}, description="SGLang's ServerArgs, by name; checked by rollout.")

    @property
    def needs_reward(self) -> bool:
        """True when the loss is made of rewards, so that a sample without one cannot be trained.

        Supervised fine-tuning and distillation train without rewards, and a conversion to train data brings its own.
        """
        brings_rewards = self.hooks.custom_convert_samples_to_train_data_path is not None
        return self.train.loss_type != "sft_loss" and not self.distillation.use_opd and not brings_rewards

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
