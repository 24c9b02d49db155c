"""Classifiers on sentence-transformers models, with the model's own pooling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from fedrot._io import read_json, shallow
from fedrot.errors import FedrotError
from fedrot.simulations.pretrained import (
    inner,
    loading,
    optional_file,
    source_of,
)

#: The saved models' keys of these and other poolings, before version 6 of
#: sentence-transformers.
_KEYS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}


def pooling_of(model: str, settings: Any) -> str:
    """Return a sentence-transformers model's pooling, mean or cls.

    It is empty for other models, and with a saved task head.

    Raises ``FedrotError`` if a file is damaged, or the model is pooled in another way
    than mean or cls.
    """
    source = source_of(model)
    saved = settings.architectures or ()
    with loading(model):
        file = optional_file(source, "modules.json")
        if file is None or any(
            name.endswith("ForSequenceClassification") for name in saved
        ):
            return ""
        modules: Any = json.loads(shallow(Path(file).read_bytes()))
        kinds = [entry["type"].rpartition(".")[2] for entry in modules]
        file = None
        pooling = {}
        if len(modules) > 1:
            path = f"{modules[1]['path']}/config.json"
            file = optional_file(source, inner(path, f"{model}/modules.json"))
        if file:
            pooling = read_json(Path(file))
    modes = _modes(pooling)
    usual = kinds[:2] == ["Transformer", "Pooling"] and not settings.is_encoder_decoder
    if not (file and usual and modes in (["mean"], ["cls"])):
        raise FedrotError(
            f"'{model}' is a {settings.model_type} with modules {', '.join(kinds)} and "
            f"pooling {' and '.join(modes)}; a classifier reads an encoder that is "
            "pooled by mean or cls. Give such a model; or copy the folder without "
            "modules.json, and it is classified as transformers does it."
        )
    return modes[0]


def _modes(pooling: Any) -> list[str]:
    """Return the modes of a saved pooling, of old and new versions; by default mean."""
    switched = [
        _KEYS.get(key, key)
        for key, on in pooling.items()
        if key.startswith("pooling_mode_") and on
    ]
    mode = pooling.get("pooling_mode", switched)
    if not isinstance(mode, list):
        mode = [mode]
    return [*map(str, mode)] or ["mean"]


class PooledForSequenceClassification(PreTrainedModel):
    """An encoder without its pooler, a pooling, dropout, and a linear ``classifier``.

    The classifier is random.

    Tensors have the names of the family's own classifiers, so that
    ``fedrot.symmetry_of`` and ``fedrot.task_head_of`` know them. Features are not
    normalised. ``mode`` is ``mean`` or ``cls``. The encoder becomes a part of the
    classifier.
    """

    # The encoder has its implementation of attention, which its configuration keeps.
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = (
        _supports_attention_backend
    ) = True

    def __init__(self, encoder: Any, mode: str) -> None:
        super().__init__(encoder.config)
        self.base_model_prefix = encoder.base_model_prefix
        self.mode = mode
        if hasattr(encoder, "pooler"):
            encoder.pooler = None
        setattr(self, self.base_model_prefix, encoder)
        names = ("classifier_dropout", "seq_classif_dropout", "hidden_dropout_prob")
        rates = (getattr(self.config, name, None) for name in names)
        rate = next((rate for rate in rates if rate is not None), 0.0)
        self.dropout = nn.Dropout(rate)
        labels = self.config.num_labels or 0
        self.classifier = nn.Linear(self.config.hidden_size, labels)
        deviation = getattr(self.config, "initializer_range", 0.02)
        nn.init.normal_(self.classifier.weight, std=deviation)
        nn.init.zeros_(self.classifier.bias)

    def forward(
        self,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **inputs: Any,
    ) -> SequenceClassifierOutput:
        """Return ``logits`` ``[rows, labels]``, and with ``labels`` the ``loss``.

        ``inputs`` are those of the encoder, such as ``input_ids`` and
        ``token_type_ids``.
        """
        output = self.base_model(
            **{"attention_mask": attention_mask, **inputs, "return_dict": True}
        )
        tokens = output.last_hidden_state
        features = tokens[:, 0]
        if self.mode == "mean":
            if attention_mask is None:
                attention_mask = torch.ones(tokens.shape[:2])
            shares = attention_mask.unsqueeze(-1).to(tokens)
            features = (tokens * shares).sum(1) / shares.sum(1).clamp_min(1e-9)
        logits = self.classifier(self.dropout(features))
        loss = None
        if labels is not None:
            loss = self.loss_function(
                labels=labels,
                pooled_logits=logits,
                config=self.config,
            )
        return SequenceClassifierOutput(loss=loss, logits=logits)
