"""Parts of a run for themselves: generation without training, training without engines, and the steps between them."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from headrace.job.schema.section import Section

_NUMBER = "{rollout_id}"


def _numbered(path: str) -> str:
    if _NUMBER not in path:
        raise ValueError(f"each rollout step has a file of its own: write {_NUMBER} where its number belongs")
    return path


StepFiles = Annotated[str, AfterValidator(_numbered)]
"""Files by rollout step: `{rollout_id}` in it is the step's number, from 0."""


class DebugSection(Section):
    save_debug_rollout_data: StepFiles | None = Field(
        None, description="Keep what each rollout step is trained on, as files: recorded/{rollout_id}.samples, say."
    )
    load_debug_rollout_data: StepFiles | None = Field(
        None, description="Train on the rollout steps kept in these files, without engines, rewards and a buffer."
    )
    debug_train_only: bool = Field(
        False, description="Train without engines, on load_debug_rollout_data, which says so by itself."
    )
    debug_rollout_only: bool = Field(
        False, description="Generate and score num_rollout steps with the weights of hf_checkpoint, and train nothing."
    )

    @property
    def trains_alone(self) -> bool:
        """The trainer is the only service."""
        return self.load_debug_rollout_data is not None


STEP_FILES = ("save_debug_rollout_data", "load_debug_rollout_data")
"""Options that name files by step."""
