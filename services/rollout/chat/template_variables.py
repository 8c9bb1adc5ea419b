"""The variables that a chat template reads beyond messages and tools, as Qwen3's `enable_thinking`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from jinja2 import meta, nodes

from headrace.errors import ConfigError
from headrace.suggest import did_you_mean

_GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_FIELD = "data.apply_chat_template_kwargs"


def require_read(readable: Collection[str], names: Iterable[str], source: str = "apply_chat_template_kwargs") -> None:
    """Raises ConfigError for a name that the template does not read, or that headrace gives itself.

    `source`: the flag or parameter that has the names.
    """
    for name in names:
        if name in _GIVEN:
            raise ConfigError(f"{source}: {name} comes from the prompt: leave it out", field=_FIELD)
        if name not in readable:
            known = f"it reads {', '.join(sorted(readable))}" if readable else "it reads none of its own"
            raise ConfigError(
                f"{source}: the chat template never reads {name}; {known}{did_you_mean(name, readable)}", field=_FIELD
            )


def readable(tokenizer: Any) -> frozenset[str]:
    """Returns the template's own variables. Raises ConfigError where the tokenizer has no template."""
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
        tests = (test for test in tree.find_all(nodes.Test) if test.name in ("defined", "undefined"))
        asked = {test.node.name for test in tests if isinstance(test.node, nodes.Name)}  # assigned where it is absent
        found |= (meta.find_undeclared_variables(tree) - assigned | asked) - set(environment.globals)
    return frozenset(found - _GIVEN - set(tokenizer.special_tokens_map))
