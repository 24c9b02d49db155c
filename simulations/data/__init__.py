"""Data sets: sources, texts, images, encodings, and partitions among clients."""

#: Names of the texts in the package, and of the images in scikit-learn.
BUNDLED, DIGITS = "goemotions_ekman", "digits"
