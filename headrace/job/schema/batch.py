"""The batch arithmetic: rollout_batch_size x n_samples_per_prompt = global_batch_size x num_steps_per_rollout."""

from __future__ import annotations

from headrace.errors import ConfigError
from headrace.job.schema.job import Job

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
            "num_steps_per_rollout only one can be derived",
            field=absent[0],
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
            f"which {partner} {four[partner]} does not divide",
            field=name,
        )
    return samples // four[partner]


def _require_equal(four: dict[str, int]) -> None:
    left, right = (four[first] * four[second] for first, second in _PARTNERS)
    if left != right:
        sides = [f"{a} {four[a]} x {b} {four[b]} = {four[a] * four[b]} samples" for a, b in _PARTNERS]
        raise ConfigError(
            f"the batch does not add up: {sides[0]}, but {sides[1]}: change one, or leave one of the four out",
            field="global_batch_size",
        )
