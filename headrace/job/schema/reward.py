"""The section of a job that says what scores samples."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from headrace.job.schema.section import Above, Positive, Seconds, Section


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise ValueError("is not a URL: write http://host:port/path")
    return text


class RewardSection(Section):
    rm_type: str | None = Field(None, description="Scorer of samples whose metadata names none.")
    custom_rm_path: str | None = Field(None, description="pkg.mod.fn or file.py:fn that scores samples.")
    group_rm: bool = Field(False, description="custom_rm_path takes a whole group and returns a list.")
    reward_model_path: Path | None = Field(None, description="Folder given to a custom_rm_path that is a class.")
    reward_key: str | None = Field(None, description="The part of a dict reward that is trained on.")
    skip_label_check: bool = Field(
        False, description="Start although the labels that were tried score 0 as their own answers."
    )
    reward_timeout_seconds: Seconds = Field(30.0, description="Limit of scoring one sample.")
    reward_workers: Annotated[Positive, Field(le=1024)] = Field(
        2, description="Worker processes of the reward service."
    )
    insecure_sandbox: bool = Field(
        False,
        description="Where bubblewrap does not work, run the policy's programs (rm_type code, run_python) as processes "
        "with limits, which can read what their user can. Without it they are refused there. As root, each is a user "
        "of its own.",
    )
    rm_url: Annotated[str, AfterValidator(_url)] | None = Field(
        None,
        description="URL that scorer remote_rm sends prompt, response, label and metadata, for a reward.",
    )
    judge_url: Annotated[str, AfterValidator(_url)] | None = Field(
        None,
        description="Base URL, with /v1, of the OpenAI-compatible server that scorer judge asks; its key is in "
        "HEADRACE_JUDGE_KEY.",
    )
    judge_model: str | None = Field(None, description="The model that scorer judge asks for.")
    judge_prompt: Path | None = Field(
        None, description="File of what the judge is told, with {prompt}, {response}, {label}; absent: a plain one."
    )
    judge_scale: Above = Field(10.0, description="The highest grade that the judge gives; it is a reward of 1.")
    judge_json: bool = Field(
        False,
        description="Ask the judge for JSON with a grade, by response_format; its server must know that.",
    )
