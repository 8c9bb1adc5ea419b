"""How long the page of a large run takes to answer, measured in the browser: `python -m tests.bench.view [STEPS]`.

A run of 1,000 steps with 64 groups of 8 samples is written, then its page. Each interaction is timed from the event to
the second frame behind it, 20 times.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from headrace.sample_log import Answer, SampleLog, TokenColumns
from headrace.view.data import RunData
from headrace.view.folder import write_page
from tests.support.browser import Visit, chromium, visit
from tests.support.ledgers.answers import answered
from tests.support.models.tiny_model import make_tiny_tokenizer
from tests.support.viewed_run import viewed_run

_GROUPS, _SAMPLES, _TOKENS = 64, 8, 500
_TIMES = 20
_SIZE = 1 << 40
_TIMED = """async ([act, ready]) => {
    const started = performance.now();
    eval(act);
    while (!document.querySelector(ready)) await new Promise(requestAnimationFrame);
    await new Promise(requestAnimationFrame);
    await new Promise(requestAnimationFrame);
    return performance.now() - started;
}"""


def main(steps: int) -> None:
    """Prints the median and the longest time of each interaction, in milliseconds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        started = time.monotonic()
        data = _run(folder, steps)
        written = time.monotonic()
        num_bytes = write_page(data, None, folder / "page")
        print(
            f"{steps} steps × {_GROUPS * _SAMPLES} samples: {num_bytes / 1e6:,.0f} MB; run {written - started:.0f} s, ",
            end="",
        )
        print(f"page {time.monotonic() - written:.0f} s")
        with chromium() as browser, visit(browser, (folder / "page" / "index.html").as_uri()) as found:
            for what, times in _interactions(found, steps).items():
                print(f"{what:28} median {statistics.median(times):5.0f} ms, longest {max(times):5.0f} ms")


def _run(folder: Path, steps: int) -> RunData:
    make_tiny_tokenizer().save_pretrained(folder / "model")
    run = viewed_run(folder, folder / "model")
    log = SampleLog(run.samples)
    for step in range(1, steps + 1):
        names = [(f"train/{step * _GROUPS + group}", index) for group in range(_GROUPS) for index in range(_SAMPLES)]
        answers = [
            Answer.of(
                answered(f"{group}/1/{index}", f"what is {group} times 7?", "because " * 18, group_id=group), step
            )
            for group, index in names
        ]
        log.write_step(step, 0, answers, _SIZE)
        columns = [_columns(f"{group}/1/{index}") for group, index in names[:16]]
        log.write_tokens(step, 0, columns, _SIZE)
    return RunData(run)


def _columns(sample_id: str) -> TokenColumns:
    values = [-(number % 50) / 10 for number in range(_TOKENS)]
    return TokenColumns(
        sample_id, [number % 250 for number in range(_TOKENS + 1)], [1] * _TOKENS, values, values, values
    )


def _interactions(found: Visit, steps: int) -> dict[str, list[float]]:
    def timed(act: str, ready: str = "main h1") -> float:
        return float(found.page.evaluate(_TIMED, [act, ready]))

    found.page.wait_for_selector("main h1")
    chosen = [1 + number * (steps // _TIMES) for number in range(_TIMES)]
    times: dict[str, list[float]] = {}
    for number, step in enumerate(chosen):
        first = f"train%2F{step * _GROUPS}%2F1%2F0"
        acts = {
            "open a step": (f"location.hash = '#/step/{step}'", "main .row.groups"),
            "scroll its groups": ("document.querySelector('main').scrollTop += 900", "main .row.groups"),
            "open a group": (f"location.hash = '#/step/{step}/group/{number}'", "main .card"),
            "open a sample with tokens": (f"location.hash = '#/step/{step}/sample/{first}'", "main .tokens"),
            "colour tokens otherwise": (
                f"document.querySelectorAll('.token-tools input')[{number % 5}].click()",
                "main .tokens",
            ),
            "scroll the list of steps": ("document.querySelector('.scroller').scrollTop += 3000", "#side .row.steps"),
        }
        for what, (act, ready) in acts.items():
            times.setdefault(what, []).append(timed(act, ready))
    times["open the prompts (first: loads)"] = [
        timed("location.hash = '#/prompts'", "main .row.prompts") for _ in range(2)
    ]
    times["search prompts"] = [
        timed(f"location.hash = '#/search?q={n} times'", "main .row.hits") for n in range(_TIMES)
    ]
    return times


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
