"""The lines of a soak as verdicts, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.soak.sampling import Lines
from tests.soak.verdict import BOUNDS, MIB, Verdict, judge

_LATEST_BEGIN_SHARE = 0.6
"""Of the time: a process that began later has no verdict."""
_WARM_UP_SECONDS = 60.0
_WARM_UP_SHARE = 0.2
"""A process's first minute, or this share of a shorter time, says nothing: it has not yet done everything once. The
trainer, e.g., draws its first pictures after half of it."""
_UNITS = {"memory": ("MiB", MIB), "disk": ("MiB", MIB), "descriptors": ("", 1), "threads": ("", 1)}


@dataclass(frozen=True, slots=True)
class Judged:
    """One line and what is said of it."""

    name: str
    quantity: str
    points: Sequence[tuple[float, float]]
    verdict: Verdict


def judged(lines: Mapping[tuple[str, int], Lines], seconds: float, caps: Mapping[str, float] = {}) -> list[Judged]:
    """Of what was there for the second half; a folder of `caps` (name → bytes) may fill to its cap."""
    found = []
    for (name, _), line in sorted(lines.items()):
        for quantity, points in line.points.items():
            warm_at = points[0][0] + min(_WARM_UP_SECONDS, seconds * _WARM_UP_SHARE)
            late = [point for point in points if point[0] >= max(seconds / 2, warm_at)]
            if not late or points[0][0] > seconds * _LATEST_BEGIN_SHARE or late[-1][0] < seconds * 0.9:
                continue
            whole = [(2 * late[0][0] - late[-1][0], late[0][1]), *late]  # so that its second half is what is late
            if verdict := judge(whole, BOUNDS[quantity]):
                if name in caps:
                    verdict = replace(verdict, grows=max(value for _, value in points) > caps[name])
                found.append(Judged(name, quantity, points, verdict))
    return found


def table(found: Sequence[Judged]) -> str:
    """One line for each process and quantity."""
    rows = [f"{'process':<18}{'quantity':<13}{'level':>10}{'an hour':>12}{'at least':>12}  verdict"]
    for each in found:
        unit, size = _UNITS[each.quantity]
        of = each.verdict
        numbers = f"{of.level / size:>10.1f}{of.slope / size:>+12.2f}{of.least_slope / size:>+12.2f}"
        rows.append(f"{each.name:<18}{each.quantity:<13}{numbers}  {'GROWS' if of.grows else 'flat'} {unit}".rstrip())
    return "\n".join(rows)


def draw(lines: Mapping[tuple[str, int], Lines], path: Path) -> None:
    """All lines by quantity, over minutes."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 2, figsize=(10, 6), layout="constrained")
    names = sorted({name for name, _ in lines})
    colours = {name: f"C{i % 10}" for i, name in enumerate(names)}
    for panel, (quantity, (unit, size)) in zip(panels.flat, _UNITS.items(), strict=True):
        labelled = set[str]()
        for (name, _), line in sorted(lines.items()):
            if points := line.points.get(quantity):
                minutes, values = zip(*((seconds / 60, value / size) for seconds, value in points), strict=True)
                label = None if name in labelled else name
                panel.plot(minutes, values, color=colours[name], linewidth=1, label=label)
                labelled.add(name)
        panel.set(title=f"{quantity} {unit}".strip(), xlabel="minutes", ylim=(0, None))
        panel.grid(alpha=0.3)
        panel.legend(fontsize=6)
    figure.savefig(path)
    pyplot.close(figure)
