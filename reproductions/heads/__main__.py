"""``python -m reproductions.heads``: repeats a cell, and prints the tables of
docs/results/heads.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reproductions.heads.arms import ARMS, RIVALS, Arm

if TYPE_CHECKING:
    from pandas import DataFrame

    from reproductions.heads.federation import Federation

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
OURS, METRICS = "ours-lowest", ("accuracy", "macro_f1", "loss", "ece", "worst")
#: Parameters of a layer, and numbers of a triangle of sums for width 384 and seven
#: classes.
LAYER, SUMS = 1_774_464, 384 * 385 // 2 + 7 * 385
#: What identifies a run of a cell.
RUN = ["data", "skew", "seed"]
#: The setting of rows that do not name it, by the names of the commands' options; 0
#: rows are the numbers in cell.py.
SETTING = {
    "encoder": "minilm",
    "pooling": "mean",
    "read": "last",
    "layers": 3,
    "size": 0,
    "tests": 0,
    "clients": 8,
    "bfloat16": False,
}

DataDir = Annotated[Path, typer.Option(help="Folder of the data card.")]
Out = Annotated[
    Path, typer.Option(help="File of rows, one JSON object a line; it is continued.")
]
Encoder = Annotated[str, typer.Option(help="minilm, or a folder of transformers.")]
Pooling = Annotated[str, typer.Option(help="mean, last (token) or pooler (BERT's).")]
Read = Annotated[str, typer.Option(help="Layers: last, all or numbers as 4,5,6.")]
Layers = Annotated[int, typer.Option(help="How many upper layers are trained.")]
Size = Annotated[int, typer.Option(help="Rows of the clients; 0: 1,600.")]
Tests = Annotated[int, typer.Option(help="Test rows; 0: 1,000.")]
Clients = Annotated[int, typer.Option(min=2, help="Half of them train in a round.")]
Rates = Annotated[
    str, typer.Option(help="In place of the arms' own: fedavg=1e-4,ccvr=5e-4.")
]


@app.command()
def run(
    context: typer.Context,
    data: str,
    skew: float,
    seed: int,
    data_dir: DataDir,
    out: Out,
    arms: Annotated[
        str, typer.Option(help="Names in arms.py, separated by commas.")
    ] = ",".join(ARMS),
    rates: Rates = "",
    rounds: int = 5,
    encoder: Encoder = "minilm",
    pooling: Pooling = "mean",
    read: Read = "last",
    layers: Layers = 3,
    size: Size = 0,
    tests: Tests = 0,
    clients: Clients = 8,
    bfloat16: bool = False,
) -> None:
    """Repeat a cell: DATA (a name in cell.py), SKEW (Dirichlet's concentration, 0 for
    IID) and SEED.

    Arms in succession that differ only in a head fitted at the end share their rounds.
    """
    from reproductions.heads.rounds import play

    setting = setting_of(context)
    federation = federation_of(data, skew, seed, data_dir, **setting)
    place = dict(zip(RUN, (data, skew, seed), strict=True)) | setting
    place |= {"encoder": Path(encoder).name, "rounds": rounds}
    chosen = rates_of(rates)
    for name in arms.split(","):
        arm = ARMS[name]
        arm = replace(arm, rate=chosen.get(name, arm.rate))
        told = place | {"arm": name, "rate": arm.rate}
        # An arm is written as a whole or not at all.
        rows = [told | row for row in play(federation, arm, rounds)]
        append(out, rows)
        typer.echo(rows[-1])


def setting_of(context: typer.Context) -> dict[str, Any]:
    """Return the options of a command that are in ``SETTING``."""
    options = context.params
    return {name: options[name] for name in SETTING if name in options}


def rates_of(text: str) -> dict[str, float]:
    """Return the rates of an option, by arm."""
    pairs = [pair.split("=") for pair in text.split(",") if pair]
    return {name: float(rate) for name, rate in pairs}


def append(out: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write each row to the end of a file as soon as it is there."""
    with out.open("a", buffering=1, encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def federation_of(
    data: str,
    skew: float,
    seed: int,
    data_dir: Path,
    encoder: str = "minilm",
    pooling: str = "mean",
    read: str = "last",
    layers: int = 3,
    size: int = 0,
    tests: int = 0,
    clients: int = 8,
    bfloat16: bool = False,
) -> Federation:
    """Return a cell with an encoder, of which the upper layers are trained."""
    from transformers import AutoModel

    from fedrot.simulations.pretrained import loading, source_of
    from reproductions.heads.cell import load
    from reproductions.heads.federation import Federation

    folder = Path(source_of(encoder))
    tokenizer = folder / "tokenizer.json"
    cell = load(data, skew, seed, data_dir, tokenizer, size, tests, clients)
    with loading(encoder):
        # Fused attention is slow at such lengths, above all backwards.
        model = AutoModel.from_pretrained(folder, attn_implementation="eager")
    return Federation(cell, model.half().float(), layers, pooling, bfloat16, read)


@app.command()
def sites(
    context: typer.Context,
    data: str,
    skew: float,
    seed: int,
    data_dir: DataDir,
    out: Out,
    arms: Annotated[str, typer.Option(help="Names in sites.py.")] = "",
    rates: Rates = "",
    rounds: int = 5,
    encoder: Encoder = "minilm",
    pooling: Pooling = "mean",
    read: Read = "last",
    layers: Layers = 3,
    size: Size = 0,
    tests: Tests = 0,
    clients: Clients = 8,
) -> None:
    """Repeat a cell on the sites' own rows, see `run`, in bfloat16."""
    from reproductions.heads.sites import RATES, SITE_ARMS, site_rows

    setting = setting_of(context) | {"bfloat16": True}
    federation = federation_of(data, skew, seed, data_dir, **setting)
    place = dict(zip(RUN, (data, skew, seed), strict=True)) | setting
    place |= {"encoder": Path(encoder).name}
    names = arms.split(",") if arms else SITE_ARMS
    rows = site_rows(federation, names, rounds, RATES | rates_of(rates))
    append(out, (place | row for row in rows))


@app.command()
def sites_gains(rows: Path, out: Path, data_dir: DataDir) -> None:
    """Write OUT, a Parquet file: ROWS of `sites`, all of one setting, with gains over
    each site alone.
    """
    import pandas

    from fedrot.simulations.pretrained import source_of
    from reproductions.heads.cell import load
    from reproductions.heads.sites import add_gains

    tokenizer = Path(source_of("minilm")) / "tokenizer.json"
    frame = pandas.read_json(rows, lines=True, precise_float=True)
    sizes = frame.filter(["size", "tests", "clients"]).iloc[0]
    cell_of = partial(load, folder=data_dir, tokenizer=tokenizer, **sizes)
    gains = add_gains(frame, cell_of)
    small = gains.select_dtypes("float64").astype("float32")
    names = gains[["data", "arm", "than"]].astype("category")
    gains.assign(**small, **names).to_parquet(out, index=False)


@app.command()
def sites_table(rows: Path, ours: str = "ours-lowest/own") -> None:
    """Print means over the runs in ROWS of `sites-gains`, the best rival of every cell,
    and the measures of global models on all test rows.

    Sites with fewer than 20 training rows count in the means, not as worst site. Rows
    without a gain, because answers to single test rows are lacking, have accuracies.
    """
    import pandas

    from reproductions.heads.cell import FEWEST
    from reproductions.heads.sites import PERSONAL

    every = pandas.read_parquet(rows)
    frame = every[every["site"] >= 0]
    large = frame[frame["rows"] >= FEWEST]
    half = 1.96 * frame["error"]
    known = frame["gain"].notna()
    frame["not worse"] = (frame["gain"] + half >= 0).astype(float).where(known)
    frame["better"] = (frame["gain"] - half > 0).astype(float).where(known)
    measures = ["accuracy", "balanced", "loss", "ece", "not worse", "better"]
    means = frame.groupby(["arm", *RUN], observed=True)[measures].mean()
    worst = large.groupby(["arm", *RUN], observed=True)["accuracy"].min()
    means["worst site"] = worst
    accuracy = means["accuracy"].unstack("arm")
    pooled = means.groupby("arm", observed=True).mean()
    lines = []
    for arm, of_arm in pooled.sort_values("accuracy", ascending=False).iterrows():
        figures = [f"{value:.3f}" for value in of_arm]
        runs = str(accuracy[arm].count())
        lines.append((str(arm), runs, *figures, ahead(accuracy, ours, str(arm))))
    show(("arm", "runs", *means, "ours above"), lines, texts=1)
    header = ("data", "skew", "best personal rival", "accuracy", "ours", "ours above")
    show(header, lines_of_cells(accuracy, PERSONAL, ours), texts=3)
    of_all = every[every["site"] < 0]
    models = of_all.groupby("arm", observed=True)[[*METRICS]].mean()
    figures = models.map("{:.3f}".format).reset_index()
    show(("global model", *METRICS), figures.to_numpy().tolist(), texts=1)


def show(header: Sequence[str], lines: Sequence[Sequence[str]], texts: int) -> None:
    """Print a table whose first columns are texts, the others numbers."""
    from fedrot.simulations.cli.commands import console
    from fedrot.simulations.report.tables import Table

    console.print(Table("", header, lines, header[:texts]))


def lines_of_cells(
    measure: DataFrame, rivals: Iterable[str], ours: str, *others: str
) -> list[tuple[str, ...]]:
    """Return for each cell its best rival, the means of this and of ours, and by how
    much ours is ahead of it and of others.

    Args:
        measure: a row for each run, a column for each arm.
    """
    lines = []
    for (data, skew), runs in measure.groupby(["data", "skew"], observed=True):
        mean = runs.mean()
        best = mean[[arm for arm in rivals if arm in runs]].idxmax()
        means = [f"{mean.get(arm, float('nan')):.3f}" for arm in (best, ours)]
        by = [ahead(runs, ours, arm) for arm in (best, *others)]
        division = f"{skew:g}" if skew else "IID"
        lines.append((str(data), division, best, *means, *by))
    return lines


def cost(arm: Arm, layers: int, rounds: int) -> tuple[str, str]:
    """Return gigabytes (float32) between server and clients, and a client's passes over
    rows for sums, with MiniLM's last layer.

    Four of eight clients train in a round; a fit asks all, and they keep the body that
    it sends for the next round. SCAFFOLD's variates are as large as the body.
    """
    if arm.everyone:
        return "-", "-"
    trained = rounds if arm.rate else 0
    first = int(arm.start != "")
    fits = {"never": 0, "last": min(1, trained), "every": trained}[arm.fit]
    passes = first + fits * len(arm.steps)
    sent = trained + max(0, trained - first - max(0, fits - 1))
    bodies = (8 * (first + fits) + 4 * sent) * (1 + arm.scaffold)
    numbers = bodies * layers * LAYER + 8 * passes * SUMS
    return f"{4e-9 * numbers:.2f}", str(passes)


def ahead(measure: DataFrame, ours: str, arm: str) -> str:
    """Return the mean by which ours is ahead of an arm, with half of its paired 95 %
    interval; a dash if a file has not both.
    """
    from fedrot.simulations.comparison.paired import paired_difference

    if arm == ours or not {arm, ours} <= {*measure}:
        return "-"
    differences = (measure[ours] - measure[arm]).dropna()
    paired = paired_difference(differences.tolist())
    return f"{paired.mean:+.3f} ± {paired.smallest:.3f}"


@app.command()
def table(
    context: typer.Context,
    rows: Path,
    rounds: int = 5,
    encoder: Annotated[str, typer.Option(help="Name of its folder.")] = "minilm",
    pooling: Pooling = "mean",
    read: Read = "last",
    layers: Layers = 3,
    size: Size = 0,
    tests: Tests = 0,
    clients: Clients = 8,
    bfloat16: bool = False,
    ours: str = OURS,
) -> None:
    """Print the best rival of every cell beside ours, and the means of all arms, from
    those ROWS of `run` that have this setting.
    """
    import pandas

    lines = rows.suffix != ".parquet"
    frame = pandas.read_json(rows, lines=True) if lines else pandas.read_parquet(rows)
    usual = SETTING | {"rounds": 5}
    wanted = pandas.Series(True, frame.index)
    for name, value in (setting_of(context) | {"rounds": rounds}).items():
        found = frame[name].fillna(usual[name]) if name in frame else usual[name]
        wanted &= found == value
    if not wanted.any():
        raise typer.BadParameter(f"{rows} has no rows with this setting.")
    # Rounds before the last have no measures.
    final = frame[wanted].dropna(subset="macro_f1")
    wide = final.pivot_table([*METRICS], RUN, "arm", observed=True)
    f1, accuracy = wide["macro_f1"], wide["accuracy"]
    every = accuracy.get("central", float("nan"))
    priced = (encoder, read, clients) == ("minilm", "last", 8)
    pooled = []
    for arm in f1.mean().sort_values(ascending=False).index:
        figures = [f"{wide[metric, arm].mean():.3f}" for metric in METRICS]
        share = f"{(accuracy[arm] / every).mean():.3f}"
        paid = cost(ARMS[arm], layers, rounds) if arm in ARMS and priced else ("", "")
        pooled.append((arm, *figures, share, *paid, ahead(f1, ours, arm)))
    header = ("data", "skew", "best rival", "macro F1", "ours", "ahead of it")
    cells = lines_of_cells(f1, RIVALS, ours, "fedavg+fit")
    show((*header, "ahead of FedAvg + fit"), cells, texts=3)
    more = ("share of central", "GB", "passes", "F1 of ours above")
    show(("arm", *METRICS, *more), pooled, texts=1)


if __name__ == "__main__":
    app()
