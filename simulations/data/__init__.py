"""Data sets: sources, texts, images, encodings, and partitions among clients."""

from collections.abc import Mapping, Sequence

#: Names in order: of columns, classes, metrics, tags or words.
Names = tuple[str, ...]
#: One value for each row, by column.
Columns = Mapping[str, Sequence[object]]

#: Names of the texts in the package, and of scikit-learn's images.
BUNDLED = "goemotions_ekman"
DIGITS = "digits"
#: Label of tokens that are not predicted.
IGNORED = -100
