"""``python -m reproductions.private``: measures what clients' answers tell."""

from __future__ import annotations

import typer

from reproductions.heads.__main__ import DataDir, Out, Read, append

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def private() -> None:
    """Measure what clients' answers tell about their rows."""


@app.command()
def membership(data_dir: DataDir, out: Out) -> None:
    """Test which rows are in the data of a client, for numbers of rows and seeds."""
    from reproductions.private.membership import ROWS, SEEDS, areas, texts_features

    features, labels, _ = texts_features(data_dir)
    append(
        out, (areas(features, labels, rows, seed) for rows in ROWS for seed in SEEDS)
    )


@app.command()
def noise(data_dir: DataDir, out: Out, read: Read = "last") -> None:
    """Compare heads from sums with noise, by data set, sites, seed and epsilon."""
    from reproductions.private.noise import rows_of

    append(out, rows_of(data_dir, read))


if __name__ == "__main__":
    app()
