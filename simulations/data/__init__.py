"""Data sets: sources, texts, images, encodings, and partitions among clients."""

#: Names of the texts in the package, and of scikit-learn's images.
BUNDLED, DIGITS = "goemotions_ekman", "digits"
