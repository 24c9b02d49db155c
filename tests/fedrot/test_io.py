"""Files are replaced as a whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedrot._io import replacing


def test_a_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for text in ("one", "two"):
        with replacing(path) as temporary:
            temporary.write_text(text)
            assert temporary.parent == tmp_path
            assert path.exists() == (text == "two")
        assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_replacement_leaves_the_file(tmp_path: Path) -> None:
    def half(path: Path) -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise OSError("disk full")

    path = tmp_path / "a.json"
    path.write_text("one")
    with pytest.raises(OSError, match="disk full"):
        half(path)
    assert path.read_text() == "one"
    assert list(tmp_path.iterdir()) == [path]
