"""Training of the bundled tokenizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

#: In the order of their ids, from 0.
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

# Rarer characters would fill a sixth of a small vocabulary, because each is in it as "x" and "##x".
ALPHABET_SIZE = 200


def train_wordpiece(texts: Iterable[str], vocab_size: int = 6000) -> Tokenizer:
    """Train a lower-casing BERT WordPiece tokenizer; the same texts give the same vocabulary.

    Special tokens have the first ids in the order of ``SPECIAL_TOKENS`` (``[PAD]`` is 0). Single
    texts become ``[CLS] A [SEP]``, pairs ``[CLS] A [SEP] B [SEP]`` with type ids 0 and 1.

    Args:
        texts: training texts; use the training split only.
        vocab_size: upper bound for the number of entries, special tokens included.

    Raises:
        ValueError: if ``vocab_size`` leaves no room beside the special tokens and characters.
    """
    texts = list(texts)
    normalizer = normalizers.BertNormalizer(lowercase=True)
    alphabet = _alphabet(normalizer.normalize_str(text) for text in texts)
    # The trainer numbers "##x" symbols in hash order and breaks ties between merges by these numbers.
    # Symbols named up front have fixed numbers.
    first = [*SPECIAL_TOKENS, *alphabet, *(f"##{symbol}" for symbol in alphabet)]
    if vocab_size <= len(first):
        raise ValueError(
            f"vocab_size is {vocab_size}, but {len(first)} entries are needed for the special "
            "tokens and single characters of these texts; choose a larger vocabulary"
        )
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=first,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    draft = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    draft.normalizer = normalizer
    draft.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    draft.train_from_iterator(texts, trainer)
    return _assemble(draft.get_vocab())


def _alphabet(texts: Iterable[str]) -> list[str]:
    """Return the ``ALPHABET_SIZE`` most frequent characters; ties are broken by code point."""
    counts = Counter(character for text in texts for character in text if not character.isspace())
    ranked = sorted(counts, key=lambda character: (-counts[character], character))
    return sorted(ranked[:ALPHABET_SIZE])


def _assemble(vocab: dict[str, int]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])],
    )
    return tokenizer
