"""The tables of ``results/explorer.md``, from published rows. ``assets/explorer.js``
draws them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from pandas import DataFrame, concat, read_parquet

from fedrot.simulations.comparison.summary import (
    CENTRAL,
    LOWER_IS_BETTER,
    OF_CLIENT,
    paired_difference,
)
from fedrot.simulations.report.tables import NONE, format_difference, format_interval

RESULTS = Path(__file__).parent / "results"
#: Pages with rows of several rounds or strategies, and the folders of their rows.
PAGES = {
    "heads": ["heads"],
    "regress-rounds": ["regress-rounds"],
    "guard": ["guard"],
    "one-shot": ["one-shot"],
    "rounds": ["rounds"],
    "different-one-shot": ["different-one-shot"],
    "different-rounds": ["different-rounds"],
    "different-short-rounds": ["different-short-rounds"],
    "stream-one-shot": ["stream-one-shot"],
    "stream-rounds": ["stream-rounds"],
    "lora": ["lora", "lora-llm"],
}
#: What strategies are in words. They stand first, in this order.
SAYS = {
    "ours-lowest": "fit_head=True",
    "plain+task-head-each-round": "fit_head=True",
    "aligned": "FedRot",
    "aligned:loss": 'guard="loss"',
    "attention+ffn@running": "FedRot",
    "fedavg": "FedAvg",
    "plain": "FedAvg",
    "fedavg+fit": "FedAvg, then fit_task_head",
    "step0": "fit_task_head without training",
    "central": "all rows in one place",
    "joined": "all rows in one place",
}
#: Differences are from the first of these that a table has.
REFERENCES = ("plain", "fedavg", "lora-pad")
#: Metrics in their order, by the names of columns.
METRICS = {
    "accuracy": "accuracy",
    "macro_f1": "macro F1",
    "worst": "worst client",
    "loss": "loss",
    "calibrated_loss": "calibrated loss",
    "held_loss": "held-out loss",
}
#: Folders of pages that judge by macro F1.
BY_F1 = ("heads", "regress-rounds")
COMPARED = ("accuracy", "loss")
PLACE = ["data", "skew", "strategy", "seed", "round"]


def rows_of(folder: str) -> DataFrame:
    """Return the rows of a folder with ``PLACE``, metric and value, those of several
    rounds in order.
    """
    frame = read_parquet(RESULTS / folder / "rows.parquet")
    if "scope" not in frame:  # the heads: a column per metric
        frame = frame[
            (frame["pooling"] == "mean")
            & (frame["layers"] == 3)
            & (frame["rounds"] == 5)
        ]
        skew = frame["skew"].map(
            lambda value: f"Dirichlet {value:g}" if value else "IID"
        )
        frame = (
            frame.astype({"arm": str, "data": str})
            .assign(skew=skew)
            .rename(columns={"arm": "strategy"})
        )
        return frame.melt(PLACE, [*{*METRICS} & {*frame}], "metric").dropna(
            subset="value"
        )
    config = json.loads((RESULTS / folder / "config.json").read_text(encoding="utf-8"))
    places = {own["setting"]: _place(own) for own in config["settings"]}
    frame = frame.rename(columns={"arm": "strategy"})
    frame[["data", "skew"]] = [places[setting] for setting in frame["setting"]]
    of_client = frame["scope"].str.startswith(OF_CLIENT) & (
        frame["metric"] == "accuracy"
    )
    worst = (
        frame[of_client]
        .groupby(PLACE, sort=False)["value"]
        .min()
        .reset_index()
        .assign(metric="worst")
    )
    metrics = {*METRICS} - ({"macro_f1"} if folder not in BY_F1 else set())
    return concat(
        [frame[(frame["scope"] == CENTRAL) & frame["metric"].isin(metrics)], worst]
    )


def _place(setting: dict[str, Any]) -> tuple[str, str]:
    """Return data with what the setting's name adds, and skew: ``("sst2, ten rounds",
    "IID")``.
    """
    kind, _, strength = setting["partition"].partition(":")
    skew = f"{kind.title()} {strength}" if strength else kind.upper()
    known = {setting["data"], "emotion", skew}
    said = re.sub(f",? {skew}$", "", setting["setting"]).split(", ")
    return ", ".join(
        [setting["data"], *(part for part in said if part not in known)]
    ), skew


def tables() -> str:
    """Return a heading per page, and under it a folded table per data and skew."""
    return "\n\n".join(text for page in PAGES for text in _of_page(page))


def _of_page(page: str) -> Iterator[str]:
    (file,) = RESULTS.rglob(f"{page}.md")  # some are in the archive
    first = file.read_text(encoding="utf-8").partition("\n")[0]
    title = first.removeprefix("# ").removeprefix("Results: ")
    title = title[0].upper() + title[1:]
    yield f"### [{title}]({file.relative_to(RESULTS).as_posix()})"
    for (data, skew), own in concat(map(rows_of, PAGES[page])).groupby(
        ["data", "skew"], sort=False
    ):
        told = {"page": page, "title": title, "data": data, "skew": skew}
        about = " ".join(f'data-{key}="{escape(value)}"' for key, value in told.items())
        summary = f"<summary>{escape(data)}, {skew}</summary>"
        yield f"<details data-search-exclude {about}>{summary}{_table(own)}</details>"


def _table(rows: DataFrame) -> str:
    """Return the table of one data set and skew: a body per strategy, a line per
    round.
    """
    if {*rows["round"]} == {0, 1}:  # nothing is trained before the one round
        rows = rows[rows["round"] == 1]
    values: dict[tuple[str, int, str], dict[int, float]] = {}
    columns = rows[["strategy", "round", "metric", "seed", "value"]]
    for *place, seed, value in columns.itertuples(index=False):
        values.setdefault(tuple(place), {})[seed] = value
    strategies = sorted(
        rows["strategy"].unique(), key=lambda name: [*SAYS, name].index(name)
    )
    reference = next(name for name in REFERENCES if name in strategies)
    metrics = [name for name in METRICS if name in {*rows["metric"]}]
    compared = [name for name in COMPARED if name in metrics]
    header = ["round", "seeds", *(METRICS[name] for name in metrics)]
    header += [f"{name}: difference from {reference}" for name in compared]
    made = f"<table><thead><tr>{_cells(header, 'th')}</tr></thead>"
    for name in strategies:
        told = escape(f"{name}: {SAYS[name]}" if name in SAYS else name)
        marked = " data-reference" if name == reference else ""
        made += f'<tbody data-strategy="{escape(name)}"{marked}>'
        made += f'<tr><th scope="rowgroup" colspan="{len(header)}">{told}</th></tr>'
        for number in sorted({n for strategy, n, _ in values if strategy == name}):
            own = {metric: values.get((name, number, metric), {}) for metric in metrics}
            cells = [str(number), str(max(map(len, own.values())))]
            cells += [_interval(own[metric]) for metric in metrics]
            for metric in compared:
                theirs = (
                    values.get((reference, number, metric), {})
                    if name != reference
                    else {}
                )
                cells.append(_difference(own[metric], theirs, metric))
            made += f"<tr>{_cells(cells, 'td')}</tr>"
        made += "</tbody>"
    return f"{made}</table>"


def _cells(texts: list[str], tag: str) -> str:
    return "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts)


def _interval(values: Mapping[int, float]) -> str:
    return format_interval(paired_difference([*values.values()])) if values else NONE


def _difference(
    ours: Mapping[int, float], theirs: Mapping[int, float], metric: str
) -> str:
    found = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    lower = metric in LOWER_IS_BETTER
    return (
        format_difference(paired_difference(found, lower_is_better=lower))
        if found
        else NONE
    )
