"""slime's modules for hooks that import them, where the job says --slime-imports: each name is headrace's own."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

SLIME_IMPORTS = "HEADRACE_SLIME_IMPORTS"
"""The environment variable of --slime-imports: processes that load hooks inherit it."""


def slime_environment(slime_imports: bool) -> dict[str, str]:
    """The variables that tell a started process of --slime-imports."""
    return {SLIME_IMPORTS: "true"} if slime_imports else {}


_SAMPLE = {"Sample": "headrace.hooks.sample"}
_HTTP = {"post": "headrace.hooks.slime_state", "get": "headrace.hooks.slime_state"}
_SOURCES = dict.fromkeys(("RolloutDataSource", "RolloutDataSourceWithBuffer"), "headrace.hooks.data_source")
_STATE = dict.fromkeys(("GenerateState", "generate", "get_model_url"), "headrace.hooks.slime_state")
_OUTPUTS = dict.fromkeys(("RolloutFnTrainOutput", "RolloutFnEvalOutput"), "headrace.hooks.rollout")
_PROCESSING = dict.fromkeys(
    ("load_tokenizer", "load_processor", "encode_image_for_rollout_engine", "build_processor_kwargs"),
    "headrace.hooks.slime_state",
)
_NAMES: Mapping[str, Mapping[str, str]] = {
    "slime": {},
    "slime.data": {**_SAMPLE, **_SOURCES},
    "slime.rollout": {},
    "slime.rollout.base_types": _OUTPUTS,
    "slime.rollout.data_source": _SOURCES,
    "slime.rollout.filter_hub": {},
    "slime.rollout.filter_hub.base_types": {"DynamicFilterOutput": "headrace.hooks.filter"},
    "slime.rollout.filter_hub.dynamic_sampling_filters": {"check_reward_nonzero_std": "headrace.hooks.filter"},
    "slime.rollout.sglang_rollout": {**_STATE, **_SAMPLE, **_HTTP},
    "slime.utils": {},
    "slime.utils.async_utils": {"run": "headrace.hooks.slime_state"},
    "slime.utils.core": {},
    "slime.utils.core.types": _SAMPLE,
    "slime.utils.http_utils": _HTTP,
    "slime.utils.misc": {"load_function": "headrace.hooks.slime_state"},
    "slime.utils.network": {},
    "slime.utils.network.http_utils": _HTTP,
    "slime.utils.processing_utils": _PROCESSING,
    "slime.utils.types": _SAMPLE,
}
"""For each module of slime: its names, and headrace's module that has them."""

_ELSEWHERE: Mapping[str, str] = {
    "async_rm": "leave the reward out: the job's scorer gives it (--rm-type, --custom-rm-path)",
    "batched_async_rm": "leave the rewards out: the job's scorer gives them (--rm-type, --custom-rm-path)",
    "generate_and_rm": "call generate, and leave the reward to the job's scorer",
    "generate_and_rm_group": "call generate for each sample, and leave the rewards to the job's scorer",
    "MultiTurnLossMaskGenerator": "use headrace.hooks.kit, which keeps the masks of a conversation",
}


def provide_slimes_names() -> None:
    """Imports of `slime` find headrace's names from now on, in this process. A slime that is installed is hidden."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of `_NAMES`; others below `slime` do not exist."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in _NAMES:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        if fullname.partition(".")[0] == "slime":
            known = ", ".join(name for name, names in _NAMES.items() if names)
            raise ModuleNotFoundError(f"headrace has no {fullname}; of slime there are {known}", name=fullname)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        names = _NAMES[module.__name__]

        def attribute(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            if name in names:
                return getattr(importlib.import_module(names[name]), name)
            if f"{module.__name__}.{name}" in _NAMES:
                return importlib.import_module(f"{module.__name__}.{name}")
            way = _ELSEWHERE.get(name, f"it has {', '.join(names) or 'no names'}")
            raise ImportError(f"headrace has no {module.__name__}.{name}: {way}", name=module.__name__)

        module.__dict__["__getattr__"] = attribute
