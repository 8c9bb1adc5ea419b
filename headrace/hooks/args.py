"""`args`, the first argument of every hook: all options of the job by their flags' names, read-only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from headrace.limits import nearest

if TYPE_CHECKING:  # the processes of user code do without: a job's schema is most of what they would import
    from headrace.job.schema.job import Job
    from headrace.job.schema.section import Section


class HookArgs(Mapping[str, Any]):
    """A namespace: `args.rollout_temperature`. A wrong name raises AttributeError with the nearest right one."""

    __slots__ = ("_options",)

    def __init__(self, options: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_options", dict(options))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # pickle and copy look for hooks of their own
            raise AttributeError(name)
        if name not in self._options:
            near = nearest(name, self._options)
            raise AttributeError(f"args has no {name!r}" + (f"; did you mean {near!r}?" if near else ""))
        return self._options[name]

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"args is read-only: keep {name!r} on the sample's metadata or in your own module")

    def __reduce__(self) -> tuple[type[HookArgs], tuple[dict[str, Any]]]:
        return HookArgs, (self._options,)

    def __getitem__(self, name: str) -> Any:
        return self._options[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._options)

    def __len__(self) -> int:
        return len(self._options)


def hook_args(job: Job) -> HookArgs:
    """The job's options, Megatron's by their own names, SGLang's with `sglang_` in front.

    Paths are strings, as hooks pass them to `from_pretrained` and friends.
    """
    from headrace.job.schema.section import Section

    options = dict(job.megatron) | {f"sglang_{name}": value for name, value in job.sglang.items()}
    for section in job.__dict__.values():
        if isinstance(section, Section):
            options.update(section_args(section))
    return HookArgs(options)


def default_args() -> HookArgs:
    from headrace.job.schema.job import Job
    from headrace.job.schema.run import ModelSection

    return hook_args(Job(model=ModelSection(hf_checkpoint=Path("model"))))


def section_args(section: Section) -> HookArgs:
    return HookArgs({name: _for_hooks(option) for name, option in section.__dict__.items()})


def _for_hooks(option: object) -> object:
    """Returns the value as hooks get it: of no class that the processes of user code would have to import."""
    from headrace.job.schema.section import Section

    match option:
        case Path():
            return str(option)
        case Section():
            return option.model_dump()
        case tuple():
            return tuple(_for_hooks(each) if isinstance(each, Section) else each for each in option)
    return option
