"""Checks before training: labels, held-out rows, task head, and a trial step of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from fedrot.errors import FedrotError
from fedrot.simulations.data.encode import EncodedText, tokenizer_for
from fedrot.simulations.data.read import DataError
from fedrot.simulations.models import model_config, pretrained_settings
from fedrot.simulations.tasks.classification import Classification
from fedrot.simulations.tasks.language import (
    CausalLanguageModelling,
    LanguageModelling,
    MaskedLanguageModelling,
)
from fedrot.simulations.tasks.task import Task

#: Number of tokens in the check for causal attention.
_SEEN = 4


def check_labels(task: Task) -> None:
    """Raise ``DataError`` if all labels are equal, or training and held-out rows share no class."""
    data = task.data
    if not isinstance(task.objective, Classification) or data.kind == "multi":
        return
    train, test = (np.unique(split.labels) for split in (data.train, data.test))
    every, score = np.union1d(train, test), data.kind == "regression"
    if len(every) == 1:
        one = (
            f"score is {every[0]:g}" if score else f"row is of class '{data.label_names[int(every[0])]}'"
        )
        raise DataError(
            f"{data.name}: every {one}, so there is nothing to learn; check the label column "
            "(--label-column)"
        )
    if not score and not np.intersect1d(train, test).size:
        ours, theirs = (", ".join(data.label_names[i] for i in found[:10]) for found in (train, test))
        raise DataError(
            f"{data.name}: training rows have the classes {ours}, and held-out rows only others "
            f"({theirs}); give both the same labels"
        )


def check_held_out(task: Task, clients: Sequence[int] = ()) -> None:
    """Raise ``FedrotError`` if these clients, all by default, hold out no row."""
    for seed in task.experiment.seeds:
        chosen = clients or range(task.experiment.clients)
        if not any(len(task.client_rows(seed, client)[1]) for client in chosen):
            raise FedrotError(
                f"it needs clients' held-out rows, but holdout {task.experiment.holdout:g} gives none "
                f"with seed {seed}; use a larger holdout, fewer clients, more rows or other --strategies"
            )


def check_head(task: Task) -> None:
    """Raise ``FedrotError`` if a pretrained model has no head for the task, or for other labels."""
    import transformers

    model, auto_model = task.experiment.model, task.objective.auto_model
    if model is None:
        return
    saved, wanted = pretrained_settings(model), model_config(task.experiment, task.data)
    if type(saved) not in getattr(transformers, auto_model)._model_mapping:
        raise FedrotError(
            f"model '{model}' of type '{saved.model_type}' does not fit task '{task.experiment.task}' "
            f"(there is no {auto_model} of this type); choose another task or model"
        )
    head, language = auto_model.removeprefix("AutoModel"), isinstance(task.objective, LanguageModelling)
    with_head = any(name.endswith(head) for name in saved.architectures or ())
    if with_head and saved.num_labels != wanted.num_labels and not language:
        raise FedrotError(
            f"model '{model}' was saved with a task head of {saved.num_labels} labels, but "
            f"'{task.data.name}' has {wanted.num_labels}; choose data with these labels, or save the "
            "model without its head: AutoModel.from_pretrained(...).save_pretrained(...)"
        )


def check_model(task: Task, model: nn.Module) -> None:
    """Raise ``FedrotError`` if a model cannot compute its loss and gradient on the rows of a task.

    The longest rows of each split are used, because some of the model's tables depend on the length.
    The gradient is computed, too, but nothing is trained.
    """
    experiment = task.experiment
    name = experiment.model or experiment.architecture
    texts = [row for one in (task.train, task.test) if isinstance(one, EncodedText) for row in one.ids]
    if texts:
        _check_embeddings(task, texts, model, name)
    model.eval()
    if isinstance(task.objective, CausalLanguageModelling):
        _check_causal(max(texts, key=len), model, name)
    for split, encoded in (("training", task.train), ("held-out", task.test)):
        rows = task.objective.usable(encoded, np.arange(len(encoded)))
        if not len(rows):
            raise DataError(f"{task.data.name}: no {split} row has anything to predict")
        longest = rows[np.argsort(encoded.lengths(rows), kind="stable")[-2:]]
        try:
            batch = task.objective.batch(encoded, longest, np.random.default_rng(0))
            task.objective.loss(model, batch).backward()
            model.zero_grad(set_to_none=True)
        except Exception as error:  # models raise many unrelated kinds
            said = " ".join(str(error).split())
            raise FedrotError(
                f"model '{name}' cannot be trained on '{task.data.name}' for task '{experiment.task}': "
                f"a trial step on {split} rows failed ({type(error).__name__}: {said:.300}); if texts "
                f"of {max(map(len, texts), default=0)} tokens are too long, --set max_length=N cuts them"
            ) from error


def _check_embeddings(task: Task, ids: Sequence[np.ndarray], model: Any, name: str) -> None:
    """Check that the model has an embedding for each token of the texts and of random masks."""
    size = model.get_input_embeddings().weight.shape[0]
    largest = max(int(row.max(initial=0)) for row in ids)
    if isinstance(task.objective, MaskedLanguageModelling):
        largest = max(largest, *tokenizer_for(task.experiment).get_vocab().values())
    if largest >= size:
        raise FedrotError(
            f"the tokenizer of model '{name}' has token {largest}, but the model has embeddings for "
            f"tokens 0 to {size - 1}; save the model's own tokenizer into its folder, or enlarge the "
            "model (resize_token_embeddings)"
        )


def _check_causal(text: np.ndarray, model: Any, name: str) -> None:
    """Check that the prediction after a text's first token does not depend on the tokens after it."""
    ids = torch.from_numpy(text[:_SEEN])[None]
    with torch.no_grad():
        whole, alone = (model(input_ids=part).logits[0, 0] for part in (ids, ids[:, :1]))
    rounding = 100 * torch.finfo(whole.dtype).eps * float(alone.abs().max())
    if float((whole - alone).abs().max()) > rounding:
        raise FedrotError(
            f"model '{name}' is an encoder: its outputs depend on the tokens that task 'clm' predicts; "
            "choose a decoder, or task 'mlm'"
        )
