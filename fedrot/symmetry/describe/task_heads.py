"""Task heads that several families share, and what bounds the features that they read.

A task head is described by the spaces that each of its tensors reads and writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedrot.symmetry.describe.spaces import RESIDUAL, Axes, linear, merged, norm


@dataclass(frozen=True)
class AfterTanh:
    """Features that are the output of tanh: at most 1.

    Attributes:
        layer: the end of the name of the layer before tanh.
    """

    layer: str


@dataclass(frozen=True)
class AfterNorm:
    """Features that are the output of a norm: its gain and bias bound them.

    Attributes:
        norm: the module's name with the model's prefix, ``transformer.ln_f``.
    """

    norm: str


@dataclass(frozen=True)
class Unbounded:
    """Features without a known bound, and the reason.

    Clients' sums of such features are accepted whatever their size.
    """

    reason: str


#: What bounds the features of a model, see ``Family.features``.
Features = AfterTanh | AfterNorm | Unbounded

#: The same for all models of a family, or by ``model_type``.
FeaturesByType = Features | Mapping[str, Features]

#: For classifiers whose layer before the task head has GELU or ReLU.
OPEN_ACTIVATION = Unbounded("the activation before the task head has no upper limit")

#: For models whose features may have a bound that no test has measured yet.
UNMEASURED = Unbounded("no test has measured these models' features")


def read_out(
    space: str = RESIDUAL, modules: str = "lm_head score classifier qa_outputs"
) -> Axes:
    """Return linear task heads that read ``space``.

    By default, those of language models, sequences, tokens and spans.
    """
    return merged(*(linear(module, None, space) for module in modules.split()))


def two_layers(module: str, hidden: str, last: str = "out_proj") -> Axes:
    """Return a classifier with hidden units: ``module.dense``, ``module.<last>``."""
    return merged(
        linear(f"{module}.dense", hidden, RESIDUAL),
        linear(f"{module}.{last}", None, hidden),
    )


def masked_lm(module: str, last_norm: str, decoder: str, space: str = RESIDUAL) -> Axes:
    """Return a masked language model's head: ``module.dense``, a norm, and a decoder.

    The decoder is tied to the table of the embeddings, so ``module.dense`` writes the
    embeddings' space. The decoder's bias may be inside the decoder or beside it.
    """
    outer = decoder.rpartition(".")[0]
    dense = linear(f"{module}.dense", space, RESIDUAL)
    beside = {f"{outer}.bias": (None,)} if outer else {}
    after = norm(f"{module}.{last_norm}", space)
    return merged(dense, after, linear(decoder, None, space), beside)


#: The linear task heads of most decoders.
PLAIN = read_out()

#: BERT's pooler, and classifiers with and without it. Families declare
#: ``Space(present=POOLER)``.
POOLED = merged(
    linear("pooler.dense", "pooler", RESIDUAL),
    linear("classifier", None, "pooler"),
    linear("qa_outputs", None, RESIDUAL),
)
POOLER = "pooler.dense.weight"
AFTER_POOLER = AfterTanh("pooler.dense")

#: RoBERTa's task heads.
ROBERTA = merged(
    two_layers("classifier", "classifier"),
    masked_lm("lm_head", "layer_norm", "lm_head.decoder"),
)
AFTER_DENSE = AfterTanh("classifier.dense")
