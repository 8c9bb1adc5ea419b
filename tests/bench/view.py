"""How long the page of a large run takes to answer, measured in the browser: `python -m tests.bench.view [STEPS]`.

Data of 1,000 steps with 64 groups of 8 samples are written, as `headrace view` writes them. Each interaction is
repeated and timed from its event to the end of the second frame behind it. Beside the time stands what it cost the
processor: other programs of a busy machine lengthen the first number alone.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import CDPSession, Page

from tests.support.browser import chromium, visit
from tests.support.view_folder import Sizes, write_view_folder

_GROUPS, _SAMPLES = 64, 8
_LONG = Sizes(steps=1, groups=1, samples=8, tokens=16_000, characters=60_000)
_QUIET_MILLISECONDS = 300
_TIMED = """async () => {
    const frame = () => new Promise(requestAnimationFrame);
    const started = performance.now();
    ACT;
    while (!(READY)) await frame();
    await frame();
    await frame();
    return performance.now() - started;
}"""


@dataclass(frozen=True)
class Interaction:
    """`act` and `ready` are JavaScript; {n} in it is the number of the repetition. `before` brings the page there."""

    name: str
    act: str
    ready: str = "true"
    before: str = ""
    times: int = 10


def _opened(route: str, title: str) -> tuple[str, str]:
    return f"location.hash = '#/{route}'", f"document.querySelector('#content h1')?.textContent === '{title}'"


def _typed(text: str) -> str:
    field = "const field = document.querySelector('#query')"
    return f"{field}; field.value = '{text}'.slice(0, {{n}} + 1); field.dispatchEvent(new Event('input'))"


def _scrolled(selector: str, to: str) -> str:
    return f"document.querySelector('{selector}').scrollTop = {to}"


_PRESSED = "document.body.dispatchEvent(new KeyboardEvent('keydown', {key: 'j', bubbles: true}))"
_COLOURED = "document.querySelectorAll('.token-tools input')[{n} % 5].click()"
_SAMPLE = "location.hash = '#/step/{step}/sample/train%2F{step}-{{n}}%2F1%2F1'"
_PROMPTS = "location.hash = '#/prompts'"


def _of_the_run(steps: int) -> list[Interaction]:
    apart = max(1, steps // 12)
    near = steps // 2
    return [
        Interaction("open the run", *_opened("run", "Run sums-20261127"), before="location.hash = '#/ledger'"),
        Interaction(
            "open a step",
            f"location.hash = '#/step/' + (1 + {{n}} * {apart})",
            f"document.querySelector('#content h1')?.textContent === 'Step ' + (1 + {{n}} * {apart})",
        ),
        Interaction("first of some steps", *_opened(f"step/{near}", f"Step {near}"), times=1),
        Interaction(
            "next step",
            _PRESSED,
            f"document.querySelector('#content h1')?.textContent === 'Step ' + ({near} + 1 + {{n}})",
        ),
        Interaction("scroll its groups", _scrolled("#content", "300 + {n} % 4 * 700")),
        Interaction("scroll the list of steps", _scrolled(".scroller", "{n} * 7919 % 29000")),
        Interaction("open a group", *_opened("step/1/group/{n}", "Group {n}"), before="location.hash = '#/step/1'"),
        Interaction("open a sample", _SAMPLE.format(step=1), "document.querySelector('#content .tokens')"),
        Interaction("colour its tokens", _COLOURED),
        Interaction("load the prompts", _PROMPTS, "document.querySelector('.row.prompts')", times=1),
        Interaction(
            "open the prompts", _PROMPTS, "document.querySelector('.row.prompts')", before="location.hash = '#/ledger'"
        ),
        Interaction("order the prompts", "document.querySelectorAll('.choice input')[({n} + 1) % 5].click()"),
        Interaction("scroll the prompts", _scrolled("#content", "{n} * 79190 % 600000")),
        Interaction("open a prompt", *_opened("prompt/{n}", "Prompt {n}"), before=_PROMPTS),
        Interaction("open the search", *_opened("search", "Search"), before="location.hash = '#/ledger'"),
        Interaction("search: type a letter", _typed("what is 12")),
    ]


def _of_a_long_sample() -> list[Interaction]:
    return [
        Interaction(
            "open 16,000 tokens",
            "location.hash = '#/step/1/sample/train%2F1-0%2F1%2F{n}'",
            "document.querySelector('#content h1')?.textContent === 'Sample #{n}'",
            times=8,
        ),
        Interaction("colour 16,000 tokens", _COLOURED),
        Interaction("scroll 16,000 tokens", _scrolled(".tokens", "{n} * 7919 % 20000")),
        Interaction(
            "open 8 × 60,000 characters",
            *_opened("step/1/group/0", "Group 0"),
            before="location.hash = '#/step/1'",
        ),
    ]


def _measure(page: Page, devtools: CDPSession, interaction: Interaction) -> None:
    def busy_seconds() -> float:
        metrics = devtools.send("Performance.getMetrics")["metrics"]
        return float(next(each["value"] for each in metrics if each["name"] == "TaskDuration"))

    times, costs = list[float](), list[float]()
    for number in range(interaction.times):
        if interaction.before:
            page.evaluate(interaction.before)
        page.wait_for_timeout(_QUIET_MILLISECONDS)
        script = _TIMED.replace("ACT", interaction.act).replace("READY", interaction.ready).replace("{n}", str(number))
        start = busy_seconds()
        times.append(float(page.evaluate(script)))
        costs.append((busy_seconds() - start) * 1000)
    both = ((statistics.median(each), max(each)) for each in (times, costs))
    print(interaction.name.ljust(28), *(f"{value:10,.0f}" for pair in both for value in pair), flush=True)


def main(steps: int) -> None:
    """Prints the median and the longest time of each interaction, and of the processor's time, in milliseconds."""
    with tempfile.TemporaryDirectory() as name, chromium() as browser:
        run = Sizes(steps=steps, groups=_GROUPS, samples=_SAMPLES, characters=150, tokens=500, is_hostile=False)
        print(f"{steps} steps × {_GROUPS * _SAMPLES} samples".ljust(32), "median", "longest", "processor", "longest")
        for sizes, interactions in ((run, _of_the_run(steps)), (_LONG, _of_a_long_sample())):
            index = write_view_folder(Path(name) / str(sizes.steps), sizes)
            with visit(browser, index.as_uri()) as found:
                devtools = found.page.context.new_cdp_session(found.page)
                devtools.send("Performance.enable", {"timeDomain": "threadTicks"})
                for interaction in interactions:
                    _measure(found.page, devtools, interaction)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
