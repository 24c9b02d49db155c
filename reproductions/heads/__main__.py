"""``python -m reproductions.heads``: repeats a cell, and prints the tables of
docs/results/heads.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reproductions.heads.arms import ARMS, RIVALS, Arm

if TYPE_CHECKING:
    from reproductions.heads.federation import Federation

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
OURS, METRICS = "ours-lowest", ("accuracy", "macro_f1", "loss", "ece", "worst")
#: Parameters of a layer, and numbers of a triangle of sums for width 384 and seven
#: classes.
LAYER, SUMS = 1_774_464, 384 * 385 // 2 + 7 * 385


@app.command()
def run(
    data: str,
    skew: float,
    seed: int,
    data_dir: Annotated[Path, typer.Option(help="Folder of the data card.")],
    out: Annotated[
        Path,
        typer.Option(help="File of rows, one JSON object a line; it is continued."),
    ],
    arms: Annotated[
        str, typer.Option(help="Names in arms.py, separated by commas.")
    ] = ",".join(ARMS),
    rounds: int = 5,
    layers: int = 3,
    pooling: str = "mean",
) -> None:
    """Repeat a cell: DATA (a name in cell.py), SKEW (Dirichlet's concentration, 0 for
    IID) and SEED.

    The upper LAYERS of MiniLM are trained; POOLING is mean or pooler.
    """
    from reproductions.heads.rounds import play

    federation = federation_of(data, skew, seed, data_dir, layers, pooling)
    place = {
        "data": data,
        "skew": skew,
        "seed": seed,
        "pooling": pooling,
        "layers": layers,
    }
    for name in arms.split(","):
        arm = ARMS[name]
        told = place | {"rounds": rounds, "arm": name, "rate": arm.rate}
        found = [told | row for row in play(federation, arm, rounds)]
        with out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in found)
        typer.echo(found[-1])


def federation_of(
    data: str,
    skew: float,
    seed: int,
    data_dir: Path,
    layers: int = 3,
    pooling: str = "mean",
    bfloat16: bool = False,
) -> Federation:
    """Return a cell with MiniLM, of which the upper layers are trained."""
    from transformers import BertModel

    from fedrot.simulations.pretrained import loading, source_of
    from reproductions.heads.cell import load
    from reproductions.heads.federation import Federation

    model = Path(source_of("minilm"))
    cell = load(data, skew, seed, data_dir, model / "tokenizer.json")
    with loading(source_of("minilm")):
        # Fused attention is slow at such lengths, above all backwards.
        bert = BertModel.from_pretrained(model, attn_implementation="eager")
    return Federation(cell, bert.half().float(), layers, pooling, bfloat16)


@app.command()
def sites(
    data: str,
    skew: float,
    seed: int,
    data_dir: Annotated[Path, typer.Option(help="Folder of the data card.")],
    out: Annotated[Path, typer.Option(help="File of rows, which is continued.")],
    arms: Annotated[str, typer.Option(help="Names in sites.py.")] = "",
    rates: Annotated[str, typer.Option(help="In place of RATES: alone=1e-4,...")] = "",
    rounds: int = 5,
) -> None:
    """Repeat a cell on the sites' own rows, see `run`, in bfloat16."""
    from reproductions.heads.sites import RATES, SITE_ARMS, site_rows

    federation = federation_of(data, skew, seed, data_dir, bfloat16=True)
    place = {"data": data, "skew": skew, "seed": seed}
    pairs = [pair.split("=") for pair in rates.split(",") if pair]
    chosen = RATES | {name: float(rate) for name, rate in pairs}
    names = arms.split(",") if arms else SITE_ARMS
    for row in site_rows(federation, names, rounds, chosen):
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(place | row) + "\n")


@app.command()
def sites_gains(
    rows: Path,
    out: Path,
    data_dir: Annotated[Path, typer.Option(help="Folder of the data card.")],
) -> None:
    """Write OUT, a Parquet file: ROWS of `sites` with gains over each site alone."""
    import pandas

    from fedrot.simulations.pretrained import source_of
    from reproductions.heads.cell import load
    from reproductions.heads.sites import add_gains

    tokenizer = Path(source_of("minilm")) / "tokenizer.json"
    frame = pandas.read_json(rows, lines=True)
    gains = add_gains(
        frame, lambda *place: load(*place, folder=data_dir, tokenizer=tokenizer)
    )
    small = gains.select_dtypes("float64").astype("float32")
    names = gains[["data", "arm"]].astype("category")
    gains.assign(**small, **names).to_parquet(out, index=False)


@app.command()
def sites_table(rows: Path, ours: str = "ours-lowest/own") -> None:
    """Print means over the runs in ROWS of `sites-gains`, and the best rival of every
    cell.

    Sites with fewer than 20 training rows count in the means, not as worst site.
    """
    import pandas

    from fedrot.simulations.cli.commands import console
    from fedrot.simulations.report.tables import Table
    from reproductions.heads.cell import FEWEST
    from reproductions.heads.sites import PERSONAL

    frame = pandas.read_parquet(rows)
    frame = frame[frame["site"] >= 0]
    run = ["data", "skew", "seed"]
    large = frame[frame["rows"] >= FEWEST]
    frame["not worse"] = frame["gain"] + 1.96 * frame["error"] >= 0
    frame["better"] = frame["gain"] - 1.96 * frame["error"] > 0
    measures = ["accuracy", "balanced", "loss", "ece", "not worse", "better"]
    means = frame.groupby(["arm", *run], observed=True)[measures].mean()
    means["worst"] = large.groupby(["arm", *run], observed=True)["accuracy"].min()
    accuracy = means["accuracy"].unstack("arm")
    table = []
    for arm, own in means.groupby("arm", observed=True).mean().iterrows():
        figures = [f"{own[name]:.3f}" for name in (*measures, "worst")]
        by = ahead(accuracy, ours, str(arm))
        table.append((str(arm), str(accuracy[arm].count()), *figures, by))
    table.sort(key=lambda line: line[2], reverse=True)
    cells = []
    for (data, skew), own in accuracy.groupby(["data", "skew"], observed=True):
        best = own[[arm for arm in PERSONAL if arm in own]].mean().idxmax()
        figures = [f"{own[arm].mean():.3f}" for arm in (best, ours)]
        cells.append((str(data), f"{skew:g}", best, *figures, ahead(own, ours, best)))
    header = ("arm", "runs", *measures, "worst site", "ours above")
    console.print(Table("", header, table, header[:1]))
    header = ("data", "skew", "best personal rival", "accuracy", "ours", "ours above")
    console.print(Table("", header, cells, header[:3]))


def cost(arm: Arm, layers: int, rounds: int) -> tuple[str, str]:
    """Return gigabytes (float32) between server and clients, and a client's passes over
    rows for sums.

    Four of eight clients train in a round; a fit asks all, and they keep the body that
    it sends for the next round. SCAFFOLD's variates are as large as the body.
    """
    first, rounds = int(arm.start != ""), rounds if arm.rate else 0
    fits = {"never": 0, "last": min(1, rounds), "every": rounds}[arm.fit]
    passes, sent = (
        first + fits * len(arm.steps),
        rounds + max(0, rounds - first - max(0, fits - 1)),
    )
    bodies = (8 * (first + fits) + 4 * sent) * layers * LAYER * (1 + arm.scaffold)
    return (
        ("-", "-")
        if arm.everyone
        else (f"{4e-9 * (bodies + 8 * passes * SUMS):.2f}", str(passes))
    )


def ahead(f1: Any, ours: str, arm: str) -> str:
    """Return the mean by which ours is ahead of an arm, with half of its paired 95 %
    interval.
    """
    from fedrot.simulations.paired import paired_difference

    found = paired_difference((f1[ours] - f1[arm]).dropna().tolist())
    return "-" if arm == ours else f"{found.mean:+.3f} ± {found.smallest:.3f}"


@app.command()
def table(
    rows: Path,
    rounds: int = 5,
    layers: int = 3,
    pooling: str = "mean",
    ours: str = OURS,
) -> None:
    """Print the best rival of every cell beside ours, and the means of all arms, from
    ROWS of `run`.
    """
    import pandas

    from fedrot.simulations.cli.commands import console
    from fedrot.simulations.report.tables import Table

    lines = rows.suffix != ".parquet"
    frame = pandas.read_json(rows, lines=True) if lines else pandas.read_parquet(rows)
    wanted = (
        (frame["pooling"] == pooling)
        & (frame["layers"] == layers)
        & (frame["rounds"] == rounds)
    )
    final = frame[wanted & frame["macro_f1"].notna()]
    wide = {
        m: final.pivot_table(m, ["data", "skew", "seed"], "arm", observed=True)
        for m in METRICS
    }
    f1, accuracy, cells, pooled = wide["macro_f1"], wide["accuracy"], [], []
    for (data, skew), own in f1.groupby(["data", "skew"]):
        mean = own.mean()
        best = mean[[arm for arm in RIVALS if arm in own]].idxmax()
        means = (f"{mean[arm]:.3f}" for arm in (best, ours))
        by = (ahead(own, ours, arm) for arm in (best, "fedavg+fit"))
        cells.append((data, f"{skew:g}" if skew else "IID", best, *means, *by))
    for arm in f1.mean().sort_values(ascending=False).index:
        values = tuple(f"{wide[metric][arm].mean():.3f}" for metric in METRICS)
        kept = f"{(accuracy[arm] / accuracy.get('central', float('nan'))).mean():.3f}"
        paid = cost(ARMS[arm], layers, rounds) if arm in ARMS else ("", "")
        pooled.append((arm, *values, kept, *paid, ahead(f1, ours, arm)))
    header = (
        "data",
        "skew",
        "best rival",
        "macro F1",
        "ours",
        "ahead of it",
        "ahead of FedAvg + fit",
    )
    console.print(Table("", header, cells, header[:3]))
    more = ("share of central", "GB", "passes", "F1 of ours above")
    console.print(Table("", ("arm", *METRICS, *more), pooled, ("arm",)))


if __name__ == "__main__":
    app()
