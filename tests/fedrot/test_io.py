"""Files are written whole or not at all, in the folder that was given."""

import errno
import io
import os

import pytest
import torch

from fedrot._io import append_rows, read_json, replacing, write_tensors, write_text
from fedrot.errors import FedrotError


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.json"

    def half():
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise OSError("disk full")

    for text in ("one", "two"):
        with replacing(path) as temporary:
            temporary.write_text(text)
            assert temporary.parent == tmp_path
            assert path.exists() == (text == "two")
        with pytest.raises(OSError, match="disk full"):
            half()
        assert path.read_text() == text
        assert list(tmp_path.iterdir()) == [path]


@pytest.fixture
def full(monkeypatch):
    """A disk with room for ten bytes of every file, as ``open`` meets it."""

    class Full(io.FileIO):
        def write(self, data):
            room = 10 - self.tell() % 1000
            if room <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(bytes(data)[:room])

    real = io.open

    def opened(file, mode="r", buffering=-1, *args, **kwargs):
        if not {*mode} & {"w", "a"}:
            return real(file, mode, buffering, *args, **kwargs)
        raw = Full(file, mode.replace("b", ""))
        return (
            raw
            if buffering == 0
            else io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8")
        )

    monkeypatch.setattr(io, "open", opened)


def test_a_full_disk_leaves_what_was_there_and_is_named(tmp_path, full):
    rows = tmp_path / "rows.jsonl"
    page = tmp_path / "page.html"
    append_rows(rows, [{"a": 1}])
    page.symlink_to(tmp_path / "elsewhere")
    writes = [
        (rows, lambda: append_rows(rows, [{"a": 2}])),
        (page, lambda: write_text(page, 20 * "x")),
    ]
    for path, write in writes:
        with pytest.raises(OSError, match="No space") as caught:
            write()
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    assert rows.read_text() == '{"a": 1}\n'
    assert {*tmp_path.iterdir()} == {rows, page}


def test_the_error_of_a_file_in_a_new_folder_names_the_place_that_was_asked_for(
    tmp_path,
):
    def write():
        with replacing(tmp_path / "model") as folder:
            folder.mkdir()
            write_tensors(
                folder / "no folder" / "model.safetensors", {"a": torch.zeros(1)}
            )

    with pytest.raises(FileNotFoundError) as caught:
        write()
    assert caught.value.filename == str(tmp_path / "model/no folder/model.safetensors")
    assert not [*tmp_path.iterdir()]


def test_a_link_is_replaced_and_not_followed(tmp_path):
    precious = tmp_path / "precious"
    link = tmp_path / "link"
    precious.write_text("one")
    link.symlink_to(precious)
    write_text(link, "two")
    assert (precious.read_text(), link.read_text(), link.is_symlink()) == (
        "one",
        "two",
        False,
    )


@pytest.mark.parametrize(
    "text", [b"", b'{"a"', b"[]", b"null", b"\xff\xfe", 100_000 * b"["]
)
def test_what_is_no_json_object_is_named(text, tmp_path):
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(FedrotError, match=r"config\.json"):
        read_json(tmp_path / "config.json")
