"""What client and server derive from a configuration: data, encodings, partitions; once per process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.data import TextData, load_text_data
from fedrot.simulations.models import Encoded, encode, model_config, tokenizer_for
from fedrot.simulations.objectives import OBJECTIVES, Objective
from fedrot.simulations.partition import parse_partition, split_clients


@dataclass(frozen=True)
class Task:
    """The data of one configuration, encoded, and what models are trained for on it."""

    config: SimulationConfig
    data: TextData
    objective: Objective
    train: Encoded
    test: Encoded

    def clients(self, seed: int) -> list[np.ndarray]:
        """Return each client's rows of the training split."""
        return _clients(self.config.to_json(), seed)

    def client_rows(self, seed: int, client: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a client's training rows and its own held-out rows."""
        rows = np.random.default_rng([seed, client]).permutation(self.clients(seed)[client])
        held = int(len(rows) * self.config.holdout)
        return np.sort(rows[held:]), np.sort(rows[:held])


@lru_cache(maxsize=2)
def task_of(config_json: str) -> Task:
    """Load and encode the data of a configuration.

    Raises:
        DataError: the data cannot be used, or the tokenizer cannot serve the task.
    """
    config = SimulationConfig.model_validate_json(config_json)
    data = load_text_data(
        config.data,
        config.data_dir,
        text_column=config.text_column,
        label_column=config.label_column,
        train_limit=config.train_limit,
        test_limit=config.test_limit,
    )
    tokenizer = tokenizer_for(config)
    pad = model_config(config, data).pad_token_id or 0
    train, test = (encode(s, tokenizer, config.max_length, pad) for s in (data.train, data.test))
    return Task(config, data, OBJECTIVES[config.task].of(data, tokenizer), train, test)


@lru_cache(maxsize=16)
def _clients(config_json: str, seed: int) -> list[np.ndarray]:
    task = task_of(config_json)
    return split_clients(
        task.data.train.labels,
        task.data.train.columns,
        parse_partition(task.config.partition),
        task.config.clients,
        seed,
    )
