"""The picture of a run: reward, evaluation, response length, loss and the distance between trainer and engines.

The policy's loss is left out while it is 0 by construction: with one optimizer step a batch the ratio is 1, and the
loss is minus the mean advantage, which is 0 whatever the gradient is. The gradient's norm shows the training then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from services.trainer.serving.pictures.panels import (
    COLOURS,
    draw_evaluations,
    draw_line,
    draw_marks,
    finish,
    line,
    new_figure,
    save,
    use_log_axis,
)
from services.trainer.serving.pictures.points import Point

_EVALUATION = "eval/"
_POLICY_LOSS, _RATIO = "loss/policy", "ratio/std"
_PANELS: Mapping[str, Mapping[str, str]] = {
    "reward": {"reward/all/mean": "all scored samples", "reward/mean": "trained samples"},
    "response tokens": {"response_length/mean": "mean"},
    "loss": {_POLICY_LOSS: "policy", "loss/sft": "negative log-likelihood", "loss/kl": "KL to the start"},
    "gradient norm": {"grad_norm": "before clipping"},
    "|log-prob trainer − engine|": {"log_prob_diff/mean": "mean", "log_prob_diff/max": "max"},
}
"""Title → metric → label, the main line first."""
_ON_LOG_AXES = ("loss", "gradient norm", "|log-prob trainer − engine|")
_TINY = 1e-6
DRAWN = (
    *(metric for metrics in _PANELS.values() for metric in metrics),
    _RATIO,
    _EVALUATION,
    "eval_low/",
    "eval_high/",
)
"""Beginnings of the names of the metrics in the picture."""


def draw_curves(points: Sequence[Point], path: Path) -> None:
    """Writes a PNG with a panel for each group of metrics that the run has."""
    names = {name for point in points for name in point.sums}
    if _is_zero_by_construction(points):
        names.discard(_POLICY_LOSS)
    sets = sorted(name.removeprefix(_EVALUATION) for name in names if name.startswith(_EVALUATION))
    panels: dict[str, Sequence[str]] = {
        title: [metric for metric in metrics if metric in names] for title, metrics in _PANELS.items()
    }
    panels = {title: metrics for title, metrics in panels.items() if metrics}
    titles = [*(["reward"] if "reward" in panels else []), *(["evaluation"] if sets else [])]
    titles += [title for title in panels if title != "reward"]
    num_rows = max((len(titles) + 1) // 2, 1)
    figure = new_figure(points, path, (12, 0.5 + 3.0 * num_rows))
    grid = figure.add_gridspec(num_rows, 2)
    drawn: list[Axes] = []
    is_odd = len(titles) % 2  # then the first panel has a row to itself
    for number, title in enumerate(titles):
        place = number + is_odd
        axes = figure.add_subplot(grid[0, :] if is_odd and number == 0 else grid[place // 2, place % 2])
        if title == "evaluation":
            draw_evaluations(axes, sorted(points, key=lambda point: point.step), sets)
            finish(axes, "evaluation: mean reward with its 95 % interval", points, legend="inside")
        else:
            _draw(axes, points, title, panels[title])
            finish(axes, title, points)
        drawn.append(axes)
    if drawn:
        draw_marks(drawn, points)
    save(figure, path)


def _draw(axes: Axes, points: Sequence[Point], title: str, metrics: Sequence[str]) -> None:
    for number, metric in enumerate(metrics):
        draw_line(axes, points, metric, _PANELS[title][metric], COLOURS[number], is_main=number == 0)
    if title in _ON_LOG_AXES:
        use_log_axis(axes)


def _is_zero_by_construction(points: Sequence[Point]) -> bool:
    """True where every loss is 0, and where no policy moved away from the one that its batch was sampled with."""
    losses, ratios = line(points, _POLICY_LOSS)[1], line(points, _RATIO)[1]
    return all(abs(loss) <= _TINY for loss in losses) or (bool(ratios) and max(ratios) <= _TINY)
