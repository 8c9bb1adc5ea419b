"""Says in lines how engines come and go after `headrace rollout scale`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.wire.checks import one_line

_SERVING = (pb.ENGINE_STATE_READY, pb.ENGINE_STATE_UPDATING)
_SENTENCES = {
    pb.ENGINE_STATE_STARTING: "starts and loads the model",
    pb.ENGINE_STATE_STALE: "has started and waits for weights: the trainer gives it those that are served when it next "
    "waits for a batch, or its next version",
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
        self._seen = {engine.engine_id: _state(engine) for engine in engines}

    def news(self, engines: Sequence[pb.Engine]) -> Iterator[str]:
        """Yields a line for each engine that is in another state than before."""
        for gone in self._seen.keys() - {engine.engine_id for engine in engines}:
            yield f"{gone} has ended"
        for engine in engines:
            if self._seen.get(engine.engine_id) != _state(engine):
                yield f"{engine.engine_id} {_sentence(engine)}"
        self._seen = {engine.engine_id: _state(engine) for engine in engines}

    def end(self, engines: Sequence[pb.Engine]) -> End | None:
        """Returns None while some still come or go."""
        if any(engine.state == pb.ENGINE_STATE_LEAVING for engine in engines):
            return None
        down = [engine for engine in engines if engine.state == pb.ENGINE_STATE_QUARANTINED]
        serving = [engine for engine in engines if engine.state in _SERVING]
        if len(down) + len(serving) < len(engines):
            return None
        if down:
            return End(f"{len(serving)} of {len(engines)} engines serve: see the log of {down[0].engine_id}", 1)
        engines_serve = "1 engine serves" if len(engines) == 1 else f"{len(engines)} engines serve"
        return End(f"{engines_serve}, until the rollout service starts again: then it has the job's number", 0)


def _state(engine: pb.Engine) -> int:
    """An engine that takes part in a publication serves as before."""
    return pb.ENGINE_STATE_READY if engine.state in _SERVING else engine.state


def _sentence(engine: pb.Engine) -> str:
    if engine.state in _SERVING:
        return f"serves version {engine.policy_version}"
    if engine.state == pb.ENGINE_STATE_DOWN:
        return f"ended and is started again: {one_line(engine.trouble)}"
    if engine.state == pb.ENGINE_STATE_QUARANTINED:
        return f"ended too often and stays down: {one_line(engine.trouble)}"
    return _SENTENCES[engine.state]
