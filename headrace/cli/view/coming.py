"""Says in lines how engines come and go after `headrace rollout scale`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.limits import one_line

_SENTENCES: Mapping[int, str] = {
    pb.ENGINE_STATE_STARTING: "starts and loads the model",
    pb.ENGINE_STATE_STALE: "has started and waits for weights: the trainer gives it those that are served when it next "
    "waits for a batch, or its next version",
    pb.ENGINE_STATE_UPDATING: "is being given weights and serves once they are committed",
    pb.ENGINE_STATE_RELEASED: "has given its memory to the trainer, which has the devices now",
    pb.ENGINE_STATE_LEAVING: "leaves: what it generates finishes, or is continued by the others",
}


@dataclass(frozen=True, slots=True)
class End:
    """The sentence and the exit code with which the watching ends."""

    sentence: str
    exit_code: int


class Coming:
    """Remembers the engines as they were seen last."""

    def __init__(self, engines: Sequence[pb.Engine]) -> None:
        self._seen: Mapping[str, int] = {}
        self._seen = self._states(engines)

    def news(self, engines: Sequence[pb.Engine]) -> Iterator[str]:
        """Yields a line for each engine that is in another state than before."""
        states = self._states(engines)
        for gone in self._seen.keys() - states.keys():
            yield f"{gone} has ended"
        for engine in engines:
            state = states[engine.engine_id]
            if self._seen.get(engine.engine_id) != state:
                yield f"{engine.engine_id} {_sentence(engine, state)}"
        self._seen = states

    def end(self, engines: Sequence[pb.Engine]) -> End | None:
        """Returns None while some still come or go."""
        states = self._states(engines)
        if pb.ENGINE_STATE_LEAVING in states.values():
            return None
        down = [name for name, state in states.items() if state == pb.ENGINE_STATE_QUARANTINED]
        num_serving = sum(state == pb.ENGINE_STATE_READY for state in states.values())
        if len(down) + num_serving < len(engines):
            return None
        if down:
            return End(f"{num_serving} of {len(engines)} engines serve: see the log of {down[0]}", 1)
        engines_serve = "1 engine serves" if len(engines) == 1 else f"{len(engines)} engines serve"
        return End(f"{engines_serve}, until the rollout service starts again: then it has the job's number", 0)

    def _states(self, engines: Sequence[pb.Engine]) -> dict[str, int]:
        """The states by id. An engine that served before a publication serves its version while it takes part.

        One that had not joined yet serves nothing before the commit, and its `policy_version` means nothing.
        """
        return {
            engine.engine_id: pb.ENGINE_STATE_READY
            if engine.state == pb.ENGINE_STATE_UPDATING and self._has_served(engine)
            else engine.state
            for engine in engines
        }

    def _has_served(self, engine: pb.Engine) -> bool:
        return self._seen.get(engine.engine_id) == pb.ENGINE_STATE_READY


def _sentence(engine: pb.Engine, state: int) -> str:
    if state == pb.ENGINE_STATE_READY:
        return f"serves version {engine.policy_version}"
    if state == pb.ENGINE_STATE_DOWN:
        return f"ended and is started again: {one_line(engine.trouble)}"
    if state == pb.ENGINE_STATE_QUARANTINED:
        return f"ended too often and stays down: {one_line(engine.trouble)}"
    return _SENTENCES[state]
