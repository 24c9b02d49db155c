"""Cells of the table: rows of a data set, and their division among clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedrot.simulations.data.partition import PartitionError, split_clients

Array = npt.NDArray[np.int64]

CLIENTS, ROWS, TEST_ROWS, LENGTH, HELD_OUT = 8, 1600, 1000, 48, 0.25
#: Rows of a client whose accuracy is counted: the worst of tiny clients would be one
#: class's recall.
FEWEST = 20
#: Files of training and of test rows, the column of texts; splits of the test, if the
#: files are one.
SETS = {
    "dair_emotion": ("emotion/dair_emotion", "emotion/dair_emotion", "text", ["test"]),
    "crowdflower": ("emotion/crowdflower", "emotion/crowdflower", "text", ["test"]),
    "isear": ("emotion/isear", "emotion/isear", "text", ["validation", "test"]),
    "sst2": ("glue/sst2/train", "glue/sst2/validation", "sentence", []),
    "goemotions": (
        "embedded/goemotions_ekman_train",
        "embedded/goemotions_ekman_test",
        "text",
        [],
    ),
}
#: Of the cell "corpora": each corpus is two clients, with its rows of these classes.
CORPORA = ("dair_emotion", "isear", "crowdflower", "goemotions")
EMOTIONS = ["anger", "fear", "joy", "sadness"]


class Cell:
    """One division of rows among clients; a quarter of a client's rows, never its only
    one, is held out.

    Attributes:
        ids: token numbers with padding at the end, ``[rows, tokens]``.
        lengths: tokens of each row, without padding.
        labels: classes of the rows.
        client: the client of each of the first rows; the others are test rows.
        seed: of the division, the batches and the first head.
        corpus: of each row.
        clients: their number.
        training, held_out, test: numbers of rows.
        counts: training rows by client and class, ``[clients, classes]``.
    """

    def __init__(
        self,
        ids: Array,
        lengths: Array,
        labels: Array,
        client: Array,
        seed: int,
        corpus: Array | None = None,
    ) -> None:
        self.ids, self.lengths, self.labels = ids, lengths, labels
        self.client, self.seed, self.clients = client, seed, int(client.max()) + 1
        self.corpus = np.zeros_like(labels) if corpus is None else corpus
        rng, rows = np.random.default_rng([seed, 1]), np.arange(len(client))
        mixed = [
            rng.permutation(rows[client == number]) for number in range(self.clients)
        ]
        self.held_out = np.sort(
            np.concatenate([own[: round(HELD_OUT * len(own))] for own in mixed])
        )
        self.training = np.setdiff1d(rows, self.held_out)
        self.test = np.arange(len(client), len(labels))
        self.classes = int(labels.max()) + 1
        self.counts = self.counted(self.training)

    def of_client(self, rows: Array, number: int) -> Array:
        """Return those of some rows that a client has."""
        return rows[self.client[rows] == number]

    def counted(self, rows: Array) -> Array:
        """Return the numbers of some rows by client and class, ``[clients,
        classes]``.
        """
        counts = np.zeros((self.clients, self.classes), np.int64)
        np.add.at(counts, (self.client[rows], self.labels[rows]), 1)
        return counts

    def batches(self, number: int) -> list[Array]:
        """Return each client's training rows in the order of a round."""
        rng = np.random.default_rng([self.seed, 2, number + 100])
        rows = rng.permutation(self.training)
        return [self.of_client(rows, client) for client in range(self.clients)]

    def worst(self, guess: Array) -> float:
        """Return the worst client's accuracy: recalls of test rows, weighted by its own
        rows.
        """
        from sklearn.metrics import recall_score

        truth, classes = self.labels[self.test], range(self.classes)
        recall = recall_score(
            truth, guess, labels=classes, average=None, zero_division=0
        )
        counts = self.counted(np.arange(len(self.client)))
        sizes = counts.sum(1)
        counts = counts[sizes >= min(FEWEST, sizes.max())]
        return float((counts @ recall / counts.sum(1)).min())


def load(
    name: str,
    skew: float,
    seed: int,
    folder: Path,
    tokenizer: Path,
    size: int = 0,
    tests: int = 0,
    clients: int = CLIENTS,
) -> Cell:
    """Return a cell of the data card's Parquet files; all seeds have the same test
    rows.

    ``size`` and ``tests`` are other numbers of rows than ``ROWS`` and ``TEST_ROWS``.
    The cell ``corpora`` has none of the three.
    """
    if name == "corpora":
        return _load_corpora(seed, folder / "emotion", tokenizer)
    train_file, test_file, column, splits = SETS[name]
    texts, labels = _read(folder / f"{train_file}.parquet", column, ["train"])
    test, test_labels = _read(folder / f"{test_file}.parquet", column, splits)
    random = np.random.default_rng([seed, 0])
    rows = random.choice(len(texts), min(size or ROWS, len(texts)), replace=False)
    chosen = np.random.default_rng(0).permutation(len(test))[: tests or TEST_ROWS]
    tokens = _encoded([*texts[rows], *test[chosen]], tokenizer)
    every = np.concatenate([labels[rows], test_labels[chosen]])
    client = divided(labels[rows], skew, seed, clients)
    return Cell(*tokens, every, client, seed)


def _load_corpora(seed: int, folder: Path, tokenizer: Path) -> Cell:
    """Return a cell whose clients have rows of different corpora."""
    import pandas

    size = ROWS // len(CORPORA)
    training = []
    test = []
    for name in CORPORA:
        table = pandas.read_parquet(folder / f"{name}.parquet")
        single = table.select_dtypes("bool").sum(axis=1) == 1
        table = table[single & table[EMOTIONS].any(axis=1)]
        in_training = table["split"] == "train"
        training.append(table[in_training].sample(size, random_state=seed))
        tested = table[~in_training].sample(TEST_ROWS // len(CORPORA), random_state=0)
        test.append(tested)
    every = pandas.concat(training + test)
    tokens = _encoded([*every["text"]], tokenizer)
    labels = every[EMOTIONS].to_numpy().argmax(1)
    sizes = [len(table) for table in training + test]
    corpus = np.repeat([*range(len(CORPORA))] * 2, sizes)
    rows = np.arange(ROWS)
    client = 2 * corpus[:ROWS] + rows % 2
    return Cell(*tokens, labels, client, seed, corpus)


def _encoded(texts: list[str], tokenizer: Path) -> tuple[Array, Array]:
    """Return the token numbers of texts, ``[rows, LENGTH]``, and how many each
    has.
    """
    from tokenizers import Tokenizer

    reader = Tokenizer.from_file(str(tokenizer))
    reader.enable_truncation(LENGTH)
    reader.enable_padding(length=LENGTH)
    rows = reader.encode_batch(texts)
    lengths = np.array([row.attention_mask for row in rows]).sum(1)
    # A text without tokens has one of padding: means need one.
    return np.array([row.ids for row in rows]), lengths.clip(1)


def _read(path: Path, column: str, splits: list[str]) -> tuple[npt.NDArray[Any], Array]:
    """Return texts and classes; rows of several classes are left out."""
    import pandas

    table = pandas.read_parquet(path)
    table = table[table["split"].isin(splits)] if "split" in table else table
    if "label" not in table:
        flags = table.select_dtypes("bool").to_numpy()
        table = table.assign(label=flags.argmax(1))[flags.sum(1) == 1]
    return table[column].to_numpy(object), table["label"].to_numpy(np.int64)


def divided(labels: Array, skew: float, seed: int, clients: int = CLIENTS) -> Array:
    """Return each row's client, by Dirichlet(skew) or, if 0, in equal parts; every
    client has rows.
    """
    division, client = f"dirichlet:{skew}" if skew else "iid", np.zeros_like(labels)
    while True:
        try:
            for number, part in enumerate(
                split_clients(labels, {}, division, clients, seed)
            ):
                client[part] = number
            return client
        except PartitionError:
            seed += 1000
