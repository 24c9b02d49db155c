"""Training of the bundled tokenizer."""

from collections import Counter

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers.processors import TemplateProcessing

#: In the order of their ids, from 0.
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# Rarer characters would fill a sixth of a small vocabulary, because each is in it as
# "x" and "##x".
ALPHABET_SIZE, VOCABULARY = 200, 6000


def train_wordpiece(texts):
    """Train a lower-casing BERT WordPiece tokenizer; the same texts give the same
    vocabulary.
    """
    texts = list(texts)
    normalizer = normalizers.BertNormalizer(lowercase=True)
    characters = Counter(
        c for text in texts for c in normalizer.normalize_str(text) if not c.isspace()
    )
    ranked = sorted(
        characters, key=lambda character: (-characters[character], character)
    )
    alphabet = sorted(ranked[:ALPHABET_SIZE])
    trainer = trainers.WordPieceTrainer(
        vocab_size=VOCABULARY,
        # Others are numbered in hash order, and these numbers break ties between
        # merges.
        special_tokens=[
            *SPECIAL_TOKENS,
            *alphabet,
            *(f"##{symbol}" for symbol in alphabet),
        ],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    draft = _tokenizer(models.WordPiece(unk_token="[UNK]"))
    draft.train_from_iterator(texts, trainer)
    vocabulary = draft.get_vocab()
    tokenizer = _tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
    )
    return tokenizer


def _tokenizer(model):
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer
