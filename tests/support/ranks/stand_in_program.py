"""Ranks whose layers are Transformer Engine's: Megatron-core's own wrappers around stand-ins in plain torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

from headrace.rpc.net import free_port
from tests.support.ranks.lora_cases import LoraCase

_STAND_INS = Path(__file__).parents[1] / "stand_ins"
_ROOT = Path(__file__).parents[3]


def run_on_stand_ins(case: LoraCase, timeout_seconds: float = 600.0) -> None:
    """Raises AssertionError with a rank's last lines when one fails."""
    file = Path(case.folder) / f"{case.name}.json"
    file.write_text(json.dumps(asdict(case)))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (_STAND_INS, _ROOT))),
        "WORLD_SIZE": str(case.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", __name__, str(file)]
    logs = [file.with_suffix(f".{rank}.log") for rank in range(case.ranks or 1)]
    ranks = []
    for number, log in enumerate(logs):
        with log.open("w") as written:
            ranks.append(subprocess.Popen(command, env=environment | {"RANK": str(number)}, stderr=written))
    try:
        codes = [rank.wait(timeout_seconds) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert set(codes) == {0}, "\n".join(log.read_text()[-3000:] for log in logs)


def main(case: Path) -> None:
    """In a rank, where the stand-ins come first on the path."""
    from services.trainer.hugging_face import rank_model
    from services.trainer.megatron import gpt, layers

    config = gpt.transformer_config

    def grouped(*given: Any) -> Any:
        made = config(*given)
        made.moe_grouped_gemm = made.num_moe_experts is not None
        return made

    for module in (layers, gpt, rank_model):
        mock.patch.object(module, "has_transformer_engine", return_value=True).start()
    mock.patch.object(gpt, "transformer_config", grouped).start()
    LoraCase(**json.loads(case.read_text())).run()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
