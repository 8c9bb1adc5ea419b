"""The engines in a line: how many are ready, and which stay down."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.api.rollout.v1 import rollout_pb2
from headrace.limits import one_line


def engines_line(engines: Sequence[rollout_pb2.Engine]) -> str:
    """`3/4 engines ready, engine-2 ended too often and stays down: …, engine-4 leaves`."""
    if not engines:
        return "no engines"
    staying = [engine for engine in engines if engine.state != rollout_pb2.ENGINE_STATE_LEAVING]
    leaving = [f", {engine.engine_id} leaves" for engine in engines if engine not in staying]
    ready = sum(engine.state == rollout_pb2.ENGINE_STATE_READY for engine in engines)
    down = [
        f", {engine.engine_id} ended too often and stays down: {one_line(engine.trouble)}"
        for engine in engines
        if engine.state == rollout_pb2.ENGINE_STATE_QUARANTINED
    ]
    return f"{ready}/{len(staying)} engines ready{''.join(down + leaving)}"
