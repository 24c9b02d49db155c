"""Data sets: sources, texts, images, encodings, and partitions among clients."""

#: Names of the texts in the package, and of scikit-learn's images.
BUNDLED = "goemotions_ekman"
DIGITS = "digits"
#: Label of tokens that are not predicted.
IGNORED = -100
