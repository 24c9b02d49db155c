"""``python -m reproductions.private``: measures what clients' answers tell."""

from __future__ import annotations

import typer

from reproductions.heads.__main__ import DataDir, Out, append

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def private() -> None:
    """Measure what clients' answers tell about their rows."""


@app.command()
def membership(data_dir: DataDir, out: Out) -> None:
    """Test which rows are in the data of a client, for numbers of rows and seeds."""
    from reproductions.private.membership import ROWS, SEEDS, areas, texts_features

    read = texts_features(data_dir)
    append(out, (areas(*read, rows, seed) for rows in ROWS for seed in SEEDS))


@app.command()
def noise(data_dir: DataDir, out: Out) -> None:
    """Compare heads with noise, and rivals, by epsilon, data set, sites and seed."""
    from reproductions.private.noise import SETS, public_of, rows_of, texts_of

    texts = {name: texts_of(name, data_dir) for name in SETS}
    for name, other in SETS.items():
        append(out, rows_of(name, texts[name], public_of(texts[other][0])))


@app.command()
def noise_membership(data_dir: DataDir, out: Out) -> None:
    """Test which rows are in a site's sums with noise, by epsilon and seed."""
    from reproductions.private.noise import ASKED, SEEDS, areas, public_of, texts_of

    texts, other = (
        texts_of(name, data_dir) for name in ("dair_emotion", "crowdflower")
    )
    public = public_of(other[0])
    append(out, (areas(texts, public, e, s) for e in ASKED for s in SEEDS))


if __name__ == "__main__":
    app()
