"""Classifiers on sentence-transformers models: the head reads the tokens as the model's pooling does."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils.hub import cached_file

from fedrot._io import read_json, shallow
from fedrot.errors import FedrotError
from fedrot.simulations.packaged import loading, source_of

#: Poolings that a classifier can have, and what they are called in messages.
POOLINGS = {"mean": "the mean of its tokens", "cls": "its first token"}
#: The saved models' keys of these and other poolings, before version 6 of sentence-transformers.
_KEYS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
#: Where dropout before a classifier is in a configuration.
_DROPOUTS = ("classifier_dropout", "seq_classif_dropout", "hidden_dropout_prob")


@dataclass(frozen=True)
class Pooling:
    """A pooling of tokens, a key of ``POOLINGS``, and the names of the modules after it."""

    mode: str
    after: tuple[str, ...] = ()

    @property
    def says(self) -> str:
        """What a classifier reads, for messages."""
        later = f", before its module {' and '.join(self.after)}" if self.after else ""
        return f"{POOLINGS[self.mode]}{later}"


def pooling_of(model: str, settings: Any) -> Pooling | None:
    """Return the pooling of a sentence-transformers model; None for others, and with a saved task head.

    Args:
        model: folder or name of the model.
        settings: its transformers configuration.

    Raises:
        FedrotError: a file is damaged, or the model has no Transformer with a pooling of ``POOLINGS``.
    """
    with loading(model):
        file = _file(model, "modules.json")
        saved = settings.architectures or ()
        if file is None or any(name.endswith("ForSequenceClassification") for name in saved):
            return None
        try:
            listed: Any = json.loads(shallow(file.read_bytes()))
            modules = [(entry["type"].rpartition(".")[2], entry["path"]) for entry in listed]
            own = _file(model, f"{modules[1][1]}/config.json") if len(modules) > 1 else None
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise FedrotError(
                f"'{file}' is damaged: it is no list of modules with types and paths. Save it again."
            ) from error
        kinds = [kind for kind, _ in modules]
        given = read_json(own) if own else {}
    advice = (
        "Give a model that pools by mean or cls; or copy the folder without modules.json, and it is "
        "classified as transformers does it."
    )
    two = getattr(settings, "is_encoder_decoder", False)
    if own is None or kinds[:2] != ["Transformer", "Pooling"] or two:
        what = "an encoder and a decoder" if two else f"modules {', '.join(kinds)}"
        raise FedrotError(
            f"'{model}' consists of {what}; a classifier reads a Transformer with Pooling. {advice}"
        )
    switches = (key for key, on in given.items() if key.startswith("pooling_mode_") and on)
    mode = given.get("pooling_mode", [_KEYS.get(key, key) for key in switches])
    modes = [*map(str, mode if isinstance(mode, list) else [mode])] or ["mean"]
    if len(modes) > 1 or modes[0] not in POOLINGS:
        raise FedrotError(f"'{model}' pools its tokens by {' and '.join(modes)}. {advice}")
    return Pooling(modes[0], tuple(kinds[2:]))


def _file(model: str, name: str) -> Path | None:
    """Return a file of a model in a folder or on the hub; None if the model has no such file."""
    missing_is_none = {"_raise_exceptions_for_missing_entries": False}
    found = cached_file(source_of(model), name, **missing_is_none)
    return Path(found) if found else None


class PooledForSequenceClassification(PreTrainedModel):
    """An encoder without its pooler, a pooling of tokens, dropout, and a random linear ``classifier``.

    Tensors have the names of the family's own classifiers, so that ``fedrot.symmetry_of`` and
    ``fedrot.head_of`` know them. Features are not normalised.

    Args:
        encoder: a model of transformers; it becomes a part of the classifier.
        mode: a key of ``POOLINGS``.
    """

    # The encoder has its implementation of attention, which its configuration keeps.
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True

    def __init__(self, encoder: Any, mode: str) -> None:
        super().__init__(encoder.config)
        self.base_model_prefix, self.mode = encoder.base_model_prefix, mode
        if hasattr(encoder, "pooler"):
            encoder.pooler = None
        setattr(self, self.base_model_prefix, encoder)
        rates = (getattr(self.config, name, None) for name in _DROPOUTS)
        self.dropout = nn.Dropout(next((rate for rate in rates if rate is not None), 0.0))
        self.classifier = nn.Linear(self.config.hidden_size, int(self.config.num_labels or 0))
        nn.init.normal_(self.classifier.weight, std=getattr(self.config, "initializer_range", 0.02))
        nn.init.zeros_(self.classifier.bias)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **others: Any,
    ) -> SequenceClassifierOutput:
        """Return ``logits`` ``[rows, labels]``, and the ``loss`` if there are ``labels``.

        ``others`` are inputs of the encoder, such as ``token_type_ids``.
        """
        given = {"input_ids": input_ids, "attention_mask": attention_mask, **others, "return_dict": True}
        tokens = self.base_model(**given).last_hidden_state
        features = tokens[:, 0]
        if self.mode == "mean":
            mask = torch.ones(tokens.shape[:2]) if attention_mask is None else attention_mask
            shares = mask.unsqueeze(-1).to(tokens)
            features = (tokens * shares).sum(1) / shares.sum(1).clamp_min(1e-9)
        logits = self.classifier(self.dropout(features))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits)
