"""The variables that a chat template reads beyond messages and tools, as Qwen3's `enable_thinking`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jinja2 import meta, nodes

from headrace.errors import ConfigError
from headrace.suggest import did_you_mean

_GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_FIELD = "data.apply_chat_template_kwargs"


def require_read(tokenizer: Any, names: Iterable[str]) -> None:
    """Raises ConfigError for a name that the template does not read, or that headrace gives itself."""
    asked = list(names)
    if not asked:
        return
    own = _variables(tokenizer) - _GIVEN - set(tokenizer.special_tokens_map)
    for name in asked:
        if name in _GIVEN:
            raise ConfigError(f"apply_chat_template_kwargs: {name} comes from the prompt: leave it out", field=_FIELD)
        if name not in own:
            known = f"it reads {', '.join(sorted(own))}" if own else "it reads none of its own"
            raise ConfigError(
                f"apply_chat_template_kwargs: the chat template never reads {name}; {known}{did_you_mean(name, own)}",
                field=_FIELD,
            )


def _variables(tokenizer: Any) -> set[str]:
    from transformers.utils.chat_template_utils import _compile_jinja_template  # takes seconds

    found = set[str]()
    without, some = None, [dict[str, Any]()]
    for tools in (without, some):
        try:
            source = tokenizer.get_chat_template(tools=tools)
        except ValueError as error:
            message = "apply_chat_template_kwargs: the checkpoint's tokenizer has no chat template: leave it out"
            raise ConfigError(message, field=_FIELD) from error
        environment = _compile_jinja_template(source).environment
        tree = environment.parse(source)
        assigned = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"}  # in a branch, maybe
        found |= meta.find_undeclared_variables(tree) - assigned - set(environment.globals)
    return found
