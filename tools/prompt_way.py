"""Prints the product files on one prompt's way, and how many processes run each: `python -m tools.prompt_way [TREE]`.

A tiny run waits for prompts, gets some by `SubmitPrompts`, trains one step and commits it. A file counts when one of
its functions runs in any of the run's processes between the submission and the commit. With `--publication` it counts
from `BeginPublish` to `CommitPublish` instead. TREE is a checkout with a `.venv` of its own, this one if not given.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tests.golden.jobs import engine as scripted_engine
from tests.support.models.tiny_model import make_tiny_qwen3

# Each process writes a file's name once, when a function of it first runs while the window is open. The window is two
# files, because the processes share nothing else; a process looks at them at most every 20 ms.
_SITE = """
import os, sys, threading, time
_root, _way, _first, _last = (os.environ["WAY_" + name] for name in ("ROOT", "FOLDER", "FIRST", "LAST"))
_seen, _state = set(), {"open": False, "next": 0.0, "pid": 0}


def _is_open():
    now = time.monotonic()
    if now >= _state["next"] or _state["pid"] != os.getpid():
        if _state["pid"] != os.getpid():
            _seen.clear()
        _state["pid"], _state["next"] = os.getpid(), now + 0.02
        _state["open"] = os.path.exists(_way + "/open") and not os.path.exists(_way + "/closed")
    return _state["open"]


def _profile(frame, event, arg):
    code = frame.f_code
    if event != "call" or not code.co_flags & 1 or not code.co_filename.startswith(_root):
        return
    if code.co_name == _first and not os.path.exists(_way + "/open"):
        open(_way + "/open", "w").close()
        _state["next"] = 0.0
    if code.co_name == _last and os.path.exists(_way + "/open"):
        open(_way + "/closed", "w").close()
    name = code.co_filename[len(_root):]
    if name not in _seen and name.startswith(("headrace/", "services/")) and _is_open():
        _seen.add(name)
        with open(f"{_way}/{os.getpid()}", "a") as out:
            out.write(name + "\\n")


threading.setprofile(_profile)
sys.setprofile(_profile)
"""
_SUBMIT = """
import asyncio, sys
from headrace.client.open import open_buffer
from headrace.api.sample.v1.sample_pb2 import Prompt


async def submit():
    prompts = [Prompt(prompt_id=f"p{i}", text=f"What is {i} + 3?", label=str(i + 3)) for i in range(4)]
    prompts = [Prompt(prompt_id=f"p{i}", text=f"What is {i} + 3?", label=str(i + 3)) for i in range(4)]
    async with open_buffer(sys.argv[1]) as buffer:
        await buffer.submit_prompts("train", prompts)


asyncio.run(submit())
"""


def files_on_the_way(tree: Path, first: str, last: str) -> dict[str, set[str]]:
    """Returns file → the processes in which a function of it ran. Raises RuntimeError where the run fails."""
    with tempfile.TemporaryDirectory(prefix="way-") as name:
        folder = Path(name)
        (folder / "site").mkdir()
        (folder / "way").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(_SITE)
        model = make_tiny_qwen3(folder / "model", seed=3)
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{folder / 'site'}:{tree}",
            "WAY_ROOT": f"{tree}/",
            "WAY_FOLDER": str(folder / "way"),
            "WAY_FIRST": first,
            "WAY_LAST": last,
        }
        with scripted_engine(model, ()) as engine:
            words = (
                f"train --run-name way --run-dir {folder / 'runs'} --hf-checkpoint {model} --rm-type math "
                f"--rollout-external-engine-addrs {engine} --num-rollout 1 --rollout-batch-size 2 "
                "--n-samples-per-prompt 2 --micro-batch-size 2 --rollout-max-response-len 8 "
                "--actor-num-gpus-per-node 1 --rollout-num-gpus 1 --update-weight-probe-tolerance 1e6 "
                "--no-use-tensorboard"
            )
            with (folder / "log").open("w+") as log:
                run = subprocess.Popen(
                    [tree / ".venv/bin/headrace", *words.split()], cwd=tree, env=env, stdout=log, stderr=log
                )
                try:
                    _submit(tree, folder, run, env)
                    if run.wait(600) != 0:
                        raise RuntimeError((folder / "log").read_text()[-4000:])
                finally:
                    if run.poll() is None:
                        run.terminate()
                        run.wait(60)
        files: dict[str, set[str]] = {}
        for process in (folder / "way").iterdir():
            for file in process.read_text().split():
                files.setdefault(file, set()).add(process.name)
        return files


def _submit(tree: Path, folder: Path, run: subprocess.Popen[bytes], env: Mapping[str, str]) -> None:
    services = folder / "runs" / "way" / "services.json"
    deadline = time.monotonic() + 300
    while not (services.exists() and "buffer" in (entries := json.loads(services.read_text() or "{}"))):
        if run.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the run has no buffer:\n{(folder / 'log').read_text()[-4000:]}")
        time.sleep(0.1)
    address = entries["buffer"]["address"]
    subprocess.run([tree / ".venv/bin/python", "-c", _SUBMIT, address], cwd=tree, env=env, check=True, timeout=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tree", nargs="?", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--publication", action="store_true", help="from BeginPublish to CommitPublish")
    options = parser.parse_args()
    window = ("BeginPublish", "CommitPublish") if options.publication else ("SubmitPrompts", "CommitStep")
    files = files_on_the_way(options.tree.resolve(), *window)
    for file, processes in sorted(files.items()):
        print(f"{len(processes):3} {file}")
    print(f"{len(files)} files from {window[0]} to {window[1]}")


if __name__ == "__main__":
    main()
