"""``Ensemble``: the average prediction of several classifiers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedrot.simulations.models import load_tensors
from fedrot.tensors import Tensors


class Ensemble(nn.Module):
    """The average prediction of ``transformers`` classifiers (Jin et al. 2023, section
    4.2).

    With ``probabilities``, these are averaged instead of logits; ``logits`` of the
    output are then their logarithms (log odds of several labels). Regressions always
    average their outputs.
    """

    def __init__(self, models: Sequence[Any], probabilities: bool = False) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)
        self.config = models[0].config
        self.probabilities = probabilities and self.config.problem_type != "regression"

    def forward(self, **inputs: Tensor) -> SimpleNamespace:
        """Return an object with the ``logits`` ``[rows, labels]`` of all models
        together.
        """
        logits = torch.stack([model(**inputs).logits for model in self.models])
        if not self.probabilities:
            return SimpleNamespace(logits=logits.mean(0))
        if self.config.problem_type == "multi_label_classification":
            return SimpleNamespace(logits=logits.sigmoid().mean(0).logit(eps=1e-7))
        return SimpleNamespace(
            logits=logits.log_softmax(-1).logsumexp(0) - np.log(len(logits))
        )


def with_state(shell: nn.Module, state: Tensors) -> nn.Module:
    """Return a copy of a model with other tensors."""
    model = copy.deepcopy(shell)
    load_tensors(model, state)
    return model
