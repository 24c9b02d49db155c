"""The choice of hidden tokens in masked language modelling, for training and for evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fedrot.simulations.data.encoding import IGNORED
from fedrot.simulations.data.sources import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Array: TypeAlias = npt.NDArray[Any]

#: Share of a row's ordinary tokens that is predicted, at least one of them.
SHARE = 0.15
#: Shares of the predicted tokens that training shows as the mask, and as a random token.
MASKED, RANDOM = 0.8, 0.1
MASK_TOKENS = ("[MASK]", "<mask>")
_EVALUATION_SEED = 15


@dataclass(frozen=True)
class Vocabulary:
    """Token ids of a tokenizer: the mask, the special and the ordinary ones."""

    mask: int
    special: Array
    ordinary: Array

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Vocabulary:
        """Read a tokenizer; raises ``DataError`` if it has no mask token."""
        vocabulary = tokenizer.get_vocab()
        mask = next((vocabulary[token] for token in MASK_TOKENS if token in vocabulary), None)
        if mask is None:
            raise DataError(
                f"the model's tokenizer has no mask token ({' or '.join(MASK_TOKENS)}), which task "
                "'mlm' needs; choose another model, or task 'classification'"
            )
        added = tokenizer.get_added_tokens_decoder()
        special = np.array(sorted({mask, *(id_ for id_, token in added.items() if token.special)}))
        return cls(mask, special, np.setdiff1d(list(vocabulary.values()), special))

    def maskable(self, ids: Array) -> npt.NDArray[np.bool_]:
        """Return where ``ids`` are ordinary tokens; padding is a special one."""
        return ~np.isin(ids, self.special)


def for_training(
    ids: Array, attended: Array, vocabulary: Vocabulary, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Hide tokens as BERT does: 80 % become the mask, 10 % a random ordinary token, 10 % stay.

    Args:
        ids: token ids ``[rows, tokens]``; not changed.
        attended: 1 where ``ids`` is text and 0 where it is padding, of the same shape.

    Returns:
        The shown ids, and the labels: ``IGNORED`` at tokens that are not predicted.
    """
    chosen = _chosen(vocabulary.maskable(ids) & (attended == 1), rng.random(ids.shape))
    fate = rng.random(ids.shape)
    shown = np.select(
        [chosen & (fate < MASKED), chosen & (fate < MASKED + RANDOM)],
        [vocabulary.mask, rng.choice(vocabulary.ordinary, ids.shape)],
        ids,
    )
    return shown, np.where(chosen, ids, IGNORED)


def for_evaluation(
    ids: Array, attended: Array, vocabulary: Vocabulary, rows: Array
) -> tuple[Array, Array]:
    """Replace tokens by the mask, the same ones of a row of the data set at every call.

    Args:
        rows: places of the rows of ``ids`` in the data set. They decide, with the ids.

    The other arguments and the result are those of ``for_training``.
    """
    scores = np.stack(
        [np.random.default_rng([_EVALUATION_SEED, int(row)]).random(ids.shape[1]) for row in rows]
    )
    chosen = _chosen(vocabulary.maskable(ids) & (attended == 1), scores)
    return np.where(chosen, vocabulary.mask, ids), np.where(chosen, ids, IGNORED)


def _chosen(maskable: Array, scores: Array) -> Array:
    """The ``SHARE`` of every row's maskable tokens with the lowest scores, at least one if any."""
    counts = maskable.sum(axis=1)
    wanted = np.minimum(counts, np.maximum(1, np.rint(SHARE * counts)))
    ranks = np.where(maskable, scores, np.inf).argsort(axis=1, kind="stable").argsort(axis=1)
    return ranks < wanted[:, None]
