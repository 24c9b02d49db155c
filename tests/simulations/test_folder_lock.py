"""A folder that one process at a time writes to."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedrot._io import refuse_links
from fedrot.errors import FedrotError
from fedrot.simulations.folder_lock import only_writer


@pytest.mark.parametrize("name", ["rows.jsonl", "cells", "plots/map.png"])
def test_a_link_out_of_a_folder_is_refused(name: str, tmp_path: Path) -> None:
    folder, outside = tmp_path / "run", tmp_path / "outside"
    (folder / "plots").mkdir(parents=True)
    (folder / name).symlink_to(outside)
    with pytest.raises(FedrotError, match="outside"), only_writer(folder):
        pass
    assert not outside.exists()


def test_a_folder_may_be_a_link_and_hold_links_to_itself(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    (tmp_path / "run/latest").symlink_to("plots")
    refuse_links(tmp_path / "run")
    with only_writer(tmp_path / "run"):
        pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_locks_is_written_to(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(*args: Any) -> None:
        raise OSError(number, "No locks available")

    monkeypatch.setattr("fcntl.flock", without)
    with only_writer(tmp_path):
        (tmp_path / "rows").write_text("1")
        with only_writer(tmp_path):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]


def test_a_folder_is_made_with_those_above_it_and_its_lock_may_be_gone(tmp_path: Path) -> None:
    with only_writer(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / ".lock").unlink()
    assert (tmp_path / "a" / "b").is_dir()


def test_a_lock_that_fails_otherwise_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("fcntl.flock", refused)
    with pytest.raises(OSError, match="Input/output"), only_writer(tmp_path):
        pytest.fail("The folder is not locked.")


def test_a_second_process_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from fedrot.simulations.folder_lock import only_writer\n"
        f"with only_writer(Path({str(tmp_path)!r})): print('held', flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with (
            pytest.raises(FedrotError, match=f"Another run is writing to '{tmp_path}'"),
            only_writer(tmp_path),
        ):
            pass
        other.kill()
    with only_writer(tmp_path):
        pass
    assert not [*tmp_path.iterdir()]
