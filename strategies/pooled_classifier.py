"""``PooledClassifier``: an encoder, a pooling of its tokens, and a linear task head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.loss.loss_utils import ForSequenceClassificationLoss
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from fedrot.errors import FedrotError
from fedrot.strategies.stored_model import (
    POOLINGS,
    refuse_random,
    saved_pooling,
    stored_settings,
)
from fedrot.symmetry.resolve import LAST_LAYER, POOLED_CLASSIFIER

#: Settings of a classifier that are not those of its encoder.
_LABELS = ("num_labels", "id2label", "label2id", "problem_type")
#: Options of ``from_pretrained`` that say where files are.
_PLACES = ("cache_dir", "local_files_only", "revision", "subfolder", "token")


class PooledClassifierConfig(PretrainedConfig):
    """The configuration of a ``PooledClassifier``.

    Args:
        text_config: the encoder's configuration, or its dictionary.
        pooling: ``mean``, ``cls`` or ``last``.
        layers: whose tokens are read: ``last``, ``all``, or a list of numbers from 1;
            -1 is the last layer. The attribute is a list, counted from the last layer.
        settings: as in every configuration, such as ``num_labels``.

    Raises:
        FedrotError: ``text_config`` is missing, as in the folder of an encoder; the
            pooling or a layer is unknown; or the model has both encoder and decoder.
    """

    model_type = POOLED_CLASSIFIER
    sub_configs = {"text_config": AutoConfig}  # noqa: RUF012  # transformers' attribute
    has_no_defaults_at_init = True

    def __init__(
        self,
        text_config: Any = None,
        pooling: str = "mean",
        layers: str | Sequence[int] = "last",
        **settings: Any,
    ) -> None:
        if text_config is None:
            raise FedrotError(
                "This is not the configuration of a PooledClassifier: it has no "
                "'text_config'. For the folder of an encoder, use "
                "PooledClassifier.from_encoder."
            )
        if isinstance(text_config, Mapping):
            text_config = AutoConfig.for_model(**text_config)
        if text_config.is_encoder_decoder:
            raise FedrotError(
                f"A {text_config.model_type} has an encoder and a decoder; a "
                "PooledClassifier needs one stack of layers. Give another model."
            )
        if hasattr(text_config, "use_cache"):
            # Decoders would keep keys and values for a next token.
            text_config.use_cache = False
        super().__init__(
            **{"pad_token_id": getattr(text_config, "pad_token_id", None), **settings}
        )
        # Not earlier: the base class would reset the encoder's attention.
        self.text_config = text_config
        self.pooling = pooling
        self.layers: Any = layers
        self.check()
        if attention := settings.get("attn_implementation"):
            self._attn_implementation = attention

    def check(self) -> None:
        """Check ``pooling``, and count ``layers`` from the last one.

        Raises:
            FedrotError: the pooling or a layer is unknown.
        """
        if self.pooling not in POOLINGS:
            raise FedrotError(
                f"The pooling is {self.pooling!r:.60}; use one of "
                f"{', '.join(POOLINGS)}."
            )
        self.layers = _from_the_last(self.layers, self.text_config)


class PooledClassifier(PreTrainedModel):
    """A classifier that reads what its encoder was trained to give.

    An encoder or decoder without its pooler, a pooling of its tokens, dropout, and a
    linear ``classifier``. Features are not normalised. Those of several layers stand
    side by side, in the order of ``layers``: the states after each layer, and after the
    model's last norm for the last layer. Importing the class registers it:
    ``AutoModelForSequenceClassification`` and ``pipeline`` load saved folders. Without
    the import they raise an error.

    Args:
        config: a ``PooledClassifierConfig``.
        encoder: the transformers model that becomes a part of this one; None: a random
            one.

    Example: ``PooledClassifier.from_encoder("my-encoder", num_labels=6)``
    """

    config_class = PooledClassifierConfig
    base_model_prefix = "encoder"
    supports_gradient_checkpointing = True
    #: transformers' Trainer: the loss takes no number of items.
    accepts_loss_kwargs = False
    # The encoder has its implementation of attention, which its configuration keeps.
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = (
        _supports_attention_backend
    ) = _supports_flash_attn_2 = True

    def __init__(
        self, config: PooledClassifierConfig, encoder: PreTrainedModel | None = None
    ) -> None:
        # from_pretrained sets pooling and layers without a check.
        config.check()
        super().__init__(config)
        inner = config.text_config
        self.encoder: Any = encoder
        if encoder is None:
            self.encoder = AutoModel.from_config(inner)
        if hasattr(self.encoder, "pooler"):
            self.encoder.pooler = None
        names = ("classifier_dropout", "seq_classif_dropout", "hidden_dropout_prob")
        rates = (getattr(inner, name, None) for name in names)
        self.dropout = nn.Dropout(next((p for p in rates if p is not None), 0.0))
        inputs = _last_width(inner) * len(config.layers)
        self.classifier = nn.Linear(inputs, config.num_labels or 0)
        self.post_init()

    @classmethod
    def from_encoder(
        cls,
        encoder: str | Path,
        pooling: str | None = None,
        layers: str | Sequence[int] = "last",
        **options: Any,
    ) -> PooledClassifier:
        """Return a classifier on a saved encoder, with a random task head.

        Args:
            encoder: a folder or a name on the hub.
            pooling: ``mean``, ``cls`` or ``last``. None: that of ``1_Pooling`` in a
                folder of sentence-transformers; else the last token of decoders, and
                the mean of other models' tokens.
            layers: ``last``, ``all``, or a list of numbers, see
                ``PooledClassifierConfig``.
            options: ``num_labels``, ``id2label``, ``label2id`` and ``problem_type``;
                all others are those of ``AutoModel.from_pretrained``, such as
                ``dtype``.

        Raises:
            FedrotError: the folder's pooling is another one, the model has no such
                layer, a tensor is missing, or the folder is an adapter, needs code of
                its own, or names files outside of it.
        """
        labels = {key: options.pop(key) for key in _LABELS if key in options}
        places = {key: options[key] for key in _PLACES if key in options}
        stored_settings(encoder, **places)
        if pooling is None:
            pooling = saved_pooling(encoder, **places)
        model, info = AutoModel.from_pretrained(
            encoder,
            output_loading_info=True,
            **{"trust_remote_code": False, **options},
        )
        refuse_random(encoder, model, info["missing_keys"])
        settings = model.config
        if pooling is None:
            pooling = usual_pooling(settings)
        config = PooledClassifierConfig(settings, pooling, layers, **labels)
        classifier = cls(config, model)
        classifier.classifier.to(model.device, model.dtype)
        return classifier.eval()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **inputs: Any,
    ) -> SequenceClassifierOutput:
        """Return ``logits`` ``[rows, labels]``, and with ``labels`` the ``loss``.

        Texts may be padded at either end. ``token_type_ids`` are left out if the
        encoder has no segments. ``inputs`` are those of the encoder.
        """
        inputs |= {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "return_dict": True,
        }
        if getattr(self.config.text_config, "type_vocab_size", 0) > 1:
            inputs["token_type_ids"] = token_type_ids
        layers = self.config.layers
        usual = self.encoder.config.output_hidden_states
        asked = inputs.get("output_hidden_states", usual)
        if layers != LAST_LAYER:
            inputs["output_hidden_states"] = True
        output = self.encoder(**inputs)
        states = (
            # The last entry of hidden_states may lack the model's last norm.
            output.last_hidden_state if layer == -1 else output.hidden_states[layer]
            for layer in layers
        )
        pooling = self.config.pooling
        features = torch.cat(
            [pooled(tokens, attention_mask, pooling) for tokens in states], -1
        )
        logits = self.classifier(self.dropout(features))
        loss = None
        if labels is not None:
            loss = ForSequenceClassificationLoss(labels, logits, self.config)
        return SequenceClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=output.hidden_states if asked else None,
            attentions=output.attentions,
        )

    def _init_weights(self, module: nn.Module) -> None:
        """Draw the task head; the encoder draws its own weights."""
        if module is self.classifier:
            nn.init.normal_(
                self.classifier.weight,
                std=getattr(self.config.text_config, "initializer_range", 0.02),
            )
            nn.init.zeros_(self.classifier.bias)


def usual_pooling(settings: PretrainedConfig) -> str:
    """Return the pooling of a model that was saved without one."""
    is_encoder = settings.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return "mean" if is_encoder else "last"


def _last_width(settings: Any) -> int:
    """Return the width of the last states; only OPT's may differ from its layers'."""
    width: int = getattr(settings, "word_embed_proj_dim", settings.hidden_size)
    return width


def _from_the_last(layers: str | Sequence[int], settings: Any) -> list[int]:
    """Return the numbers of layers, counted from the last one, -1, in rising order.

    Raises:
        FedrotError: the model has no such layer, or its layers have other widths.
    """
    # A layer of ALBERT may be a group of layers.
    count = settings.num_hidden_layers * getattr(settings, "inner_group_num", 1)
    numbers: Any = layers
    if isinstance(layers, str):
        numbers = {"last": LAST_LAYER, "all": range(1, count + 1)}.get(layers)
    places = set[int]()
    for number in numbers if isinstance(numbers, Sequence) else [numbers]:
        if type(number) is not int or not 1 <= abs(number) <= count:
            raise FedrotError(
                f"layers is {layers!r:.60}; use last, all, or a list of int from 1 to "
                f"{count}, the number of layers of this model."
            )
        places.add(number - count - 1 if number > 0 else number)
    if not places:
        raise FedrotError("layers is empty; use last, all, or a list of numbers.")
    width = _last_width(settings)
    if width != settings.hidden_size and places != {-1}:
        raise FedrotError(
            f"The last states of this model have the width {width}, other layers "
            f"{settings.hidden_size}. Read its last layer: layers='last'."
        )
    return sorted(places)


def pooled(tokens: Tensor, mask: Tensor | None, pooling: str) -> Tensor:
    """Return one vector a text, ``[rows, width]``, of ``tokens`` ``[rows, n, width]``.

    ``mask`` ``[rows, n]`` is 0 for padding; None: there is none. The first and the last
    token are those that are no padding.
    """
    rows, length = tokens.shape[:2]
    places = torch.arange(1, length + 1, device=tokens.device)
    if mask is None:
        mask = torch.ones_like(places).expand(rows, length)
    if pooling == "mean":
        shares = mask.unsqueeze(-1).to(tokens)
        return (tokens * shares).sum(1) / shares.sum(1).clamp_min(1)
    if pooling == "cls":
        places = places.flip(0)
    chosen = (mask.long() * places).argmax(1)
    return tokens[torch.arange(rows), chosen]


AutoConfig.register(POOLED_CLASSIFIER, PooledClassifierConfig)
AutoModelForSequenceClassification.register(PooledClassifierConfig, PooledClassifier)
# Pipelines read this table alone, and log an error about classes that it lacks.
MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[POOLED_CLASSIFIER] = "PooledClassifier"
