"""Whether this Python has the services: they are a distribution of their own, headrace-services."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

EXTRAS = {"buffer": "buffer", "reward": "reward", "rollout": "rollout-cpu", "trainer": "trainer-cpu"}
"""What brings a service and all that it needs; on GPUs it is -cuda."""


def has_services() -> bool:
    """False also where another project's package has the name."""
    try:
        return find_spec("services.trainer.hugging_face") is not None
    except ModuleNotFoundError:
        return False


def how_to_install(services: Iterable[str]) -> str:
    """The second half of a sentence."""
    extras = ",".join(EXTRAS[service] for service in services)
    cuda = ", on GPUs -cuda instead of -cpu" if "-cpu" in extras else ""
    return f"headrace-services is not installed with this Python: pip install 'headrace[{extras}]'{cuda}"
