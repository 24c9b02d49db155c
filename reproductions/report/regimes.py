"""The map of a grid over local epochs, partitions and starts: where alignment pays."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedrot.simulations.report.plots import as_label, new_figure, save_figure
from fedrot.simulations.report.summaries import BASELINE, Paired, Row, compare_seeds, final_values
from fedrot.simulations.report.tables import number_style, pipe_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Level of the corrected p-values.
LEVEL = 0.05
METRIC = "loss"
BETTER, WORSE, NOTHING, SAME = "better", "worse", "within noise", "plain averaging"
#: Differences without a test: a model diverged, or there are no two seeds.
UNKNOWN = "not known"
#: Colours of verdicts that colour-blind readers can tell apart.
COLOURS = {BETTER: "#56B4E9", WORSE: "#E69F00", NOTHING: "0.85", SAME: "white", UNKNOWN: "#F0E442"}
#: What a setting's name ends in, see ``read_grid``.
_MATRIX = ("local_epochs", "partition")


@dataclass(frozen=True)
class Regime:
    """One cell of the map: an arm's loss minus plain averaging's, with one start of one setting.

    ``p`` is corrected for all cells of the map (Holm). ``verdict`` is "better" or "worse" if ``p`` is
    below ``LEVEL``, "plain averaging" if nothing above rounding differs, "not known" if a model diverged
    or there are no two seeds, else "within noise".
    """

    model: str
    partition: str
    local_epochs: float
    start: str
    difference: Paired
    p: float

    @property
    def verdict(self) -> str:
        if self.difference.verdict in ("identical", "equal but for rounding"):
            return SAME
        if math.isnan(self.p):
            return UNKNOWN
        if self.p >= LEVEL:
            return NOTHING
        return BETTER if self.difference.mean < 0 else WORSE


def regimes(
    rows: Sequence[Row],
    settings: Sequence[Mapping[str, Any]],
    arm: str = "aligned",
    server_round: int | None = None,
) -> list[Regime]:
    """Return the map of a run's rows; empty if its grid has no matrix of local epochs and partitions.

    Args:
        rows: of a run folder.
        settings: the configurations in its ``config.json``.
        arm: compared with plain averaging.
        server_round: at the end of this round, or of the last one.
    """
    models = {setting["setting"]: _model_of(setting) for setting in settings}
    chosen = [
        row for row in rows if models.get(row["setting"]) and row["round"] <= (server_round or math.inf)
    ]
    by_name = {setting["setting"]: setting for setting in settings}
    values, found = final_values(chosen), []
    for place, ours in values.items():
        if place.arm == arm and place.metric == METRIC:
            plain = values.get(place._replace(arm=BASELINE), {})
            setting = by_name[place.setting]
            about = models[place.setting], setting["partition"], setting["local_epochs"], place.start
            found.append((about, compare_seeds(ours, plain, METRIC)))
    adjusted = holm([difference.p for _, difference in found])
    return [
        Regime(*about, difference, p) for (about, difference), p in zip(found, adjusted, strict=True)
    ]


def _model_of(setting: Mapping[str, Any]) -> str:
    """Return the name of a setting without the values of the matrix; empty if it has none."""
    parts = str(setting["setting"]).split(", ")
    for key in _MATRIX:
        value = setting.get(key)
        written = {f"{key.replace('_', ' ')} {value}"}
        written |= {f"{key.replace('_', ' ')} {value:g}"} if isinstance(value, float) else set()
        kept = [part for part in parts if part not in written]
        if len(kept) == len(parts):
            return ""
        parts = kept
    return ", ".join(parts)


def summary(found: Sequence[Regime]) -> str:
    """Return one sentence on how many cells are better, worse and within noise."""
    counts = Counter(regime.verdict for regime in found)
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in COLOURS if counts[verdict])
    return (
        f"Of {len(found)} cells: {said}. Differences are paired by seed; p-values are corrected for the "
        f"number of cells by Holm (level {LEVEL})."
    )


def markdown(found: Sequence[Regime]) -> str:
    """Return the map as a Markdown table, a line per cell."""
    header = ("model", "start", "partition", "local epochs", "loss - plain", "p (Holm)", "verdict")
    lines = [
        (
            regime.model,
            regime.start,
            regime.partition,
            f"{regime.local_epochs:g}",
            _number(regime.difference.mean),
            f"{regime.p:.2g}",
            regime.verdict,
        )
        for regime in found
    ]
    return pipe_table(header, lines, texts={"model", "start", "partition", "verdict"})


def regime_plot(path: Path, found: Sequence[Regime]) -> Path:
    """Draw a panel per model and partition: starts by local epochs, the difference in every cell."""
    models, partitions, starts = (
        list(dict.fromkeys(getattr(regime, name) for regime in found))
        for name in ("model", "partition", "start")
    )
    epochs = {
        model: list(dict.fromkeys(r.local_epochs for r in found if r.model == model)) for model in models
    }
    columns = max(map(len, epochs.values()))
    width = 1.6 + len(partitions) * (0.9 + 0.75 * columns)
    figure, axes = new_figure(
        len(models), len(partitions), width=width, height=0.9 + 0.45 * len(starts), sharey=True
    )
    for line, model in zip(axes, models, strict=True):
        for ax, partition in zip(line, partitions, strict=True):
            own = [r for r in found if (r.model, r.partition) == (model, partition)]
            _panel(ax, own, epochs[model], starts)
            ax.set_xlim(-0.5, columns - 0.5)
            ax.set_title(as_label(f"{model}, {partition}"), loc="left", fontsize="small")
    for ax in axes[-1]:
        ax.set_xlabel("local epochs")
    _legend(figure)
    return save_figure(figure, path)


def _panel(ax: Axes, own: Sequence[Regime], epochs: list[float], starts: list[str]) -> None:
    from matplotlib.patches import Rectangle

    for regime in own:
        x, y = epochs.index(regime.local_epochs), starts.index(regime.start)
        colour = COLOURS[regime.verdict]
        ax.add_patch(Rectangle((x - 0.48, y - 0.45), 0.96, 0.9, fc=colour, ec="0.6", lw=0.6))
        said = "=" if regime.verdict == SAME else _number(regime.difference.mean)
        ax.text(x, y, said, ha="center", va="center", fontsize="small")
    ax.set_xticks(range(len(epochs)), [f"{value:g}" for value in epochs])
    ax.set_yticks(range(len(starts)), list(map(as_label, starts)))
    ax.set_ylim(len(starts) - 0.5, -0.5)
    ax.grid(visible=False)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def _legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(fc=colour, ec="0.6", label=verdict) for verdict, colour in COLOURS.items()]
    place: Any = {"loc": "upper center", "bbox_to_anchor": (0.5, 0)}
    figure.legend(handles=patches, ncols=len(patches), frameon=False, fontsize="small", **place)


def _number(value: float) -> str:
    if math.isnan(value):
        return "nan"
    return "0.000" if abs(value) < 0.0005 else f"{value:+{number_style(value)}}"


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for their number (Holm 1979); NaN stays and is not counted.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    known = sorted((p, place) for place, p in enumerate(p_values) if not math.isnan(p))
    adjusted, largest = list(p_values), 0.0
    for rank, (p, place) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        adjusted[place] = largest
    return adjusted
