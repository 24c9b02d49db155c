"""Task heads that several families share: the spaces that each tensor reads and
writes.
"""

from __future__ import annotations

from fedrot.symmetry.describe.spaces import RESIDUAL, Axes, linear, merged, norm


def read_out(
    space: str = RESIDUAL, modules: str = "lm_head score classifier qa_outputs"
) -> Axes:
    """Return linear task heads (language model, sequences, tokens, spans) that read
    ``space``.
    """
    return merged(*(linear(module, None, space) for module in modules.split()))


def two_layers(module: str, hidden: str, last: str = "out_proj") -> Axes:
    """Return a classifier with a layer of hidden units: ``module.dense`` and
    ``module.<last>``.
    """
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
    return merged(
        linear(f"{module}.dense", space, RESIDUAL),
        norm(f"{module}.{last_norm}", space),
        linear(decoder, None, space),
        {f"{outer}.bias": (None,)} if outer else {},
    )


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

#: RoBERTa's task heads.
ROBERTA = merged(
    two_layers("classifier", "classifier"),
    masked_lm("lm_head", "layer_norm", "lm_head.decoder"),
)
