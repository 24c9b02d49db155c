"""Checkpointing: equal bits after a round trip, and each is complete or absent."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import signal
import stat
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp.strategy import FedAvg, Result
from safetensors.torch import load_file

from fedrot.errors import FedrotError
from fedrot.strategies.resume.checkpoints import Checkpoint, Checkpointing, _json_digest
from fedrot.strategies.resume.state import RunState
from fedrot.strategies.resume.values import UnknownValueError, decode, encode
from fedrot.strategies.wire.arrays import to_arrays
from tests.strategies.classifier import build, state
from tests.strategies.runs import Server

FILES = ("model.safetensors", "state.safetensors", "checkpoint.json")


def run_state(strategy: FedAvg | None = None) -> RunState:
    return RunState(strategy or FedAvg(), ConfigRecord(), ConfigRecord())


def save(
    folder: Path,
    number: int,
    arrays: ArrayRecord | None = None,
    keep: int = 3,
    result: Result | None = None,
) -> Path:
    """Save one round; the model is the round's number if none is given."""
    if arrays is None:
        arrays = ArrayRecord({"weight": torch.full((50, 40), float(number))})
    checkpoints = Checkpointing(folder, keep)
    torch.rand(())  # As in a run: no two states are the same.
    with checkpoints.writing():
        return checkpoints.save(number, result or Result(arrays), run_state())


def round_of(found: Checkpoint) -> int:
    """Return which round a checkpoint of ``save`` is, by its model."""
    (value,) = set(found.result.arrays["weight"].numpy().flatten().tolist())
    assert value == found.round
    return found.round


def same(one: ArrayRecord, other: ArrayRecord) -> bool:
    """Return whether two records are the same bytes under the same names in the same order."""

    def parts(record: ArrayRecord) -> list[Any]:
        return [(name, a.dtype, a.shape, a.stype, a.data) for name, a in record.items()]

    return parts(one) == parts(other)


# Arrays

INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
NUMBERS = ["float16", "float32", "float64", "bool", *INTEGERS]
BYTES = np.arange(48, dtype=np.uint8)
ARRAYS: dict[str, ArrayRecord] = {
    **{name: ArrayRecord({"a": Array(BYTES.astype(name).reshape(6, 8))}) for name in NUMBERS},
    "bits of nan": ArrayRecord({"a": Array(np.array([0x7FC00001, 0xFFC12345], "u4").view("f4"))}),
    "bfloat16": to_arrays({"a": torch.randn(3, 5).bfloat16(), "b": torch.randn(4)}),
    "tied": to_arrays(dict.fromkeys("ab", torch.randn(3, 5)) | {"c": torch.randn(3)}),
    "tied bfloat16": to_arrays(dict.fromkeys("ab", torch.randn(3, 5).bfloat16())),
    "one array twice": ArrayRecord(dict.fromkeys("ab", Array(np.arange(6.0)))),
    "no dimensions": ArrayRecord({"a": Array(np.array(2.5)), "b": Array(np.array(3))}),
    "no elements": ArrayRecord({"a": Array(np.zeros((0, 3), "f4"))}),
    "empty": ArrayRecord(),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_come_back_byte_for_byte(tmp_path: Path, kind: str) -> None:
    saved = ARRAYS[kind]
    save(tmp_path, 1, saved)
    assert same(Checkpointing(tmp_path).newest().result.arrays, saved)


def test_arrays_in_another_order_come_back_with_their_values(tmp_path: Path) -> None:
    values = np.asfortranarray(np.arange(24.0).reshape(2, 3, 4))
    save(tmp_path, 1, ArrayRecord({"a": Array(values)}))
    np.testing.assert_array_equal(Checkpointing(tmp_path).newest().result.arrays["a"].numpy(), values)


@pytest.mark.parametrize(
    "array",
    [
        Array(np.arange(5, dtype=">f4")),
        Array(np.array(["one", "two"])),
        Array("float32", (2,), "something.else", b"\x00\xff\x80"),
        Array("float32", (2,), "fedrot.tied", b"\xff"),
    ],
)
def test_an_array_that_cannot_be_decoded_is_named(tmp_path: Path, array: Array) -> None:
    with pytest.raises(FedrotError, match=r"round 1 cannot be written .* 'odd'"):
        save(tmp_path, 1, ArrayRecord({"odd": array}))
    assert Checkpointing(tmp_path).rounds() == []


def test_the_newest_model_loads_as_it_is(tmp_path: Path) -> None:
    """Tied tensors and bfloat16 included: every name has its values."""
    tensors = {k: t.bfloat16() for k, t in state(3).items()}
    folder = save(tmp_path, 1, to_arrays({**tensors, "tied": tensors["classifier.weight"]}))
    loaded = load_file(folder / "model.safetensors")
    assert torch.equal(loaded.pop("tied"), tensors["classifier.weight"])
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    model = build()
    model.load_state_dict(loaded)


def test_metrics_come_back_bit_for_bit(tmp_path: Path) -> None:
    nans = [struct.unpack(">d", bytes.fromhex(h))[0] for h in ("7ff8000000000001", "fff8000000000000")]
    floats = [0.1, -0.0, 5e-324, 1.7976931348623157e308, float("inf"), -float("inf"), *nans]
    result = Result(
        train_metrics_clientapp={1: MetricRecord({"loss": 0.1 + 0.2, "all": floats, "n": 2**80})},
        evaluate_metrics_serverapp={0: MetricRecord({"none": []}), 10: MetricRecord({"ints": [1, -2]})},
    )
    save(tmp_path, 1, result=result)
    found = Checkpointing(tmp_path).newest().result
    metrics: Any = found.train_metrics_clientapp[1]
    assert [struct.pack(">d", x) for x in metrics.pop("all")] == [struct.pack(">d", x) for x in floats]
    assert metrics == {"loss": 0.1 + 0.2, "n": 2**80}
    assert found.evaluate_metrics_clientapp == {}
    assert list(found.evaluate_metrics_serverapp) == [0, 10]
    assert found.evaluate_metrics_serverapp == result.evaluate_metrics_serverapp
    assert type(found.evaluate_metrics_serverapp[10]) is MetricRecord


# Values

VALUES: list[Any] = [
    None,
    True,
    -(2**70),
    "Zürich \ud800",
    b"\x00\xff",
    (1, (2.5, None)),
    [1, [2, {"a": 3}]],
    {1: "a", "1": "b", (1, 2): {}, None: float("-inf")},
    {"dict": 1, "float": "no"},
    {3, "x"},
    frozenset({1}),
    np.float32(0.1),
    np.int64(3),
    ConfigRecord({"a": [True, False], "b": b"\x01", "c": "s"}),
    MetricRecord({"a": 1}),
]


@pytest.mark.parametrize("value", VALUES)
def test_values_come_back(value: Any) -> None:
    arrays: dict[str, np.ndarray] = {}
    found = decode(json.loads(json.dumps(encode(value, "it", arrays), allow_nan=False)), arrays)
    assert found == value
    assert type(found) is type(value)


SQUARE = np.arange(12.0).reshape(3, 4)


@pytest.mark.parametrize(
    "value",
    [SQUARE, SQUARE.T, SQUARE[::2, ::-1], SQUARE[1, 1:2], np.array(7.0), np.zeros((0, 2)), SQUARE > 3]
    + [SQUARE.astype(d) for d in ("f2", "u2")],
    ids=lambda a: f"{a.dtype} {a.shape}",
)
def test_numpy_arrays_come_back(value: np.ndarray) -> None:
    arrays: dict[str, np.ndarray] = {}
    found = decode(encode({"x": [value]}, "it", arrays), arrays)["x"][0]
    np.testing.assert_array_equal(found, value, strict=True)
    assert found.dtype == value.dtype
    assert found.flags.writeable


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool])
def test_tensors_come_back(dtype: torch.dtype) -> None:
    for value in (torch.arange(6).reshape(2, 3).to(dtype).T, torch.ones((), dtype=dtype)):
        arrays: dict[str, np.ndarray] = {}
        found = decode(encode(value, "it", arrays), arrays)
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
        assert torch.equal(found.float(), value.float())


@pytest.mark.parametrize(
    "value",
    [object(), len, np.array([object()]), np.array(["a"]), np.ma.array([1.0]), {"a": [range(3)]}, 1j],
)
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(UnknownValueError):
        encode(value, "it", {})


# The folder


def test_the_last_ones_stay(tmp_path: Path) -> None:
    for number in range(1, 8):
        save(tmp_path, number, keep=2)
        assert Checkpointing(tmp_path).rounds() == [n for n in (number - 1, number) if n]
        assert round_of(Checkpointing(tmp_path).newest()) == number
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "round-000006", "round-000007"]
    assert sorted(p.name for p in (tmp_path / "round-000007").iterdir()) == sorted(FILES)


def test_the_files_can_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        folder = save(tmp_path, 1)
    finally:
        os.umask(before)
    assert {stat.S_IMODE((folder / name).stat().st_mode) for name in FILES} == {0o640}


def test_none_kept_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FedrotError, match="keep is 0"):
        Checkpointing(tmp_path, keep=0)


def _truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-len(data) // 3] ^= 1
    path.write_bytes(data)


def _emptied(path: Path) -> None:
    path.write_bytes(b"")


def _edited(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert '"round": 3' in text
    path.write_text(text.replace('"round": 3', '"round": 9'), encoding="utf-8")


def _other_json(path: Path) -> None:
    path.write_text('{"checkpoint": [1]}', encoding="utf-8")


def _of_round_two(path: Path) -> None:
    path.write_bytes((path.parents[1] / "round-000002" / path.name).read_bytes())


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    *((damage, name) for damage in (_truncated, _flipped, _emptied, Path.unlink) for name in FILES),
    (_edited, "checkpoint.json"),
    (_other_json, "checkpoint.json"),
    (_of_round_two, "model.safetensors"),
    (_of_round_two, "state.safetensors"),
]


@pytest.mark.parametrize(("damage", "name"), DAMAGES)
def test_a_damaged_one_is_reported_and_the_one_before_it_used(
    tmp_path: Path, warnings: Callable[[], str], damage: Callable[[Path], None], name: str
) -> None:
    for number in (1, 2, 3):
        save(tmp_path, number, ArrayRecord({"weight": torch.full((50, 40), float(number))}))
    assert round_of(Checkpointing(tmp_path).newest()) == 3
    assert warnings() == ""
    damage(tmp_path / "round-000003" / name)
    assert round_of(Checkpointing(tmp_path).newest()) == 2
    assert "round-000003' cannot be used" in warnings()
    assert name in warnings()


def test_an_empty_one_and_a_file_in_its_place_are_passed_over(
    tmp_path: Path, warnings: Callable[[], str]
) -> None:
    save(tmp_path, 1)
    (tmp_path / "round-000002").mkdir()
    (tmp_path / "round-000003").write_text("")
    assert round_of(Checkpointing(tmp_path).newest()) == 1
    assert "round-000002" in warnings()
    assert "round-000003" in warnings()


def test_none_good_is_an_error(tmp_path: Path) -> None:
    for number in (1, 2):
        _truncated(save(tmp_path, number) / "model.safetensors")
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(FedrotError, match=f"no usable checkpoint in '{folder}'"):
            Checkpointing(folder).newest()


def test_a_damaged_one_is_written_anew_and_never_counts_as_kept(tmp_path: Path) -> None:
    for number in range(1, 7):
        save(tmp_path, number, keep=6)
    for number in (5, 6):
        _truncated(tmp_path / f"round-{number:06d}" / "model.safetensors")
    for number in (5, 6):
        save(tmp_path, number, keep=1)
        assert round_of(Checkpointing(tmp_path).newest()) == number
    assert Checkpointing(tmp_path).rounds() == [6]


def test_another_format_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("fedrot.strategies.resume.checkpoints._FORMAT", 99)
        save(tmp_path, 1)
    with pytest.raises(FedrotError, match="no usable checkpoint"):
        Checkpointing(tmp_path).newest()
    assert "in format 99; this fedrot reads 1" in warnings()


# What lies in the folder beside checkpoints


def _link(path: Path, target: Path) -> None:
    path.symlink_to(target)


def _file(path: Path, target: Path) -> None:
    path.write_text("mine")


def _folder(path: Path, target: Path) -> None:
    path.mkdir()


def _pipe(path: Path, target: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("name", "put"),
    [
        *((".lock", put) for put in (_link, _folder, _pipe)),
        *((name, put) for name in ("round-000002", ".round-000002.1") for put in (_link, _file)),
    ],
)
@pytest.mark.parametrize("target", ["file", "folder", "missing"])
def test_something_else_under_a_name_of_ours_is_an_error_at_the_start_and_stays(
    tmp_path: Path, name: str, put: Callable[[Path, Path], None], target: str
) -> None:
    (tmp_path / "file").write_text("precious")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "inside").write_text("precious")
    folder = tmp_path / "run"
    save(folder, 1)
    (folder / name).unlink(missing_ok=True)
    put(folder / name, tmp_path / target)
    with pytest.raises(FedrotError, match=re.escape(name)), Checkpointing(folder).writing():
        pass
    assert (tmp_path / "file").read_text() == "precious"
    assert (tmp_path / "folder" / "inside").read_text() == "precious"
    assert not (tmp_path / "missing").exists()
    (folder / name).lstat()
    assert round_of(Checkpointing(folder).newest()) == 1


@pytest.mark.parametrize("name", [".round-x.1", ".round-x.1/inside", "notes.txt", "round-1", "round-x"])
def test_other_names_are_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    for number in range(1, 4):
        save(tmp_path, number, keep=1)
    assert (tmp_path / name).read_text() == "mine"
    assert round_of(Checkpointing(tmp_path).newest()) == 3


@pytest.mark.parametrize("name", ["", *FILES])
def test_a_link_in_place_of_a_checkpoint_or_of_its_files_is_not_followed(
    tmp_path: Path, name: str, warnings: Callable[[], str]
) -> None:
    for number in (1, 2):
        save(tmp_path / "run", number)
    path = tmp_path / "run" / "round-000002" / name
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert round_of(Checkpointing(tmp_path / "run").newest()) == 1
    assert "link" in warnings()


@pytest.mark.parametrize("key", ["format", "round", "metrics", "tied", "state", "sha256"])
@pytest.mark.parametrize("wrong", [None, [], "x"])
def test_a_checkpoint_without_one_of_its_entries_is_damaged(
    tmp_path: Path, key: str, wrong: Any, warnings: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2) / "checkpoint.json"
    about = json.loads(path.read_text())["checkpoint"]
    del about[key]
    if wrong is not None and key != "format":
        about[key] = wrong
    path.write_text(json.dumps({"checkpoint": about, "sha256": _json_digest(about)}))
    assert round_of(Checkpointing(tmp_path).newest()) == 1
    assert "round-000002' cannot be used" in warnings()


# Two writers


def test_two_runs_of_one_process_cannot_write_to_one_folder(tmp_path: Path) -> None:
    with (
        Checkpointing(tmp_path / "a").writing(),
        Checkpointing(tmp_path / "b").writing(),
        pytest.raises(FedrotError, match=f"process {os.getpid()} on .* is writing checkpoints to"),
        Checkpointing(tmp_path / "b" / ".." / "a").writing(),
    ):
        pass
    with Checkpointing(tmp_path / "a").writing():
        pass


def test_two_processes_cannot_write_to_one_folder(tmp_path: Path) -> None:
    script = (
        "import sys; from fedrot.strategies.resume.checkpoints import Checkpointing\n"
        "with Checkpointing(sys.argv[1]).writing(): print('locked', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, tmp_path],
        cwd=Path(__file__).parents[3],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with (
            pytest.raises(FedrotError, match=f"process {other.pid} on"),
            Checkpointing(tmp_path).writing(),
        ):
            pass
        other.kill()
    save(tmp_path, 1)
    assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on")


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks_is_named_and_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], str], code: int
) -> None:
    def without(*args: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", without)
    for number in (1, 2):
        save(tmp_path, number)
    assert warnings().count(f"'{tmp_path}' cannot be locked against other runs") == 2
    assert round_of(Checkpointing(tmp_path).newest()) == 2


# Writes that fail


@contextmanager
def full_after(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size: writes fail midway, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


def _large(number: int) -> ArrayRecord:
    return ArrayRecord({"weight": torch.full((1000, 1000), float(number))})


@pytest.mark.parametrize("folder", ["file/run", "/proc/run", "/proc/self"])
def test_a_folder_that_cannot_be_written_to_is_an_error_at_the_start(
    tmp_path: Path, folder: str
) -> None:
    """Root may write everywhere else."""
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(FedrotError, match="cannot be written to"),
        Checkpointing(tmp_path / folder).writing(),
    ):
        pass


def test_a_disk_that_is_full_from_the_start_is_an_error(tmp_path: Path) -> None:
    checkpoints = Checkpointing(tmp_path / "run")
    with full_after(0), pytest.raises(FedrotError, match="cannot be written to"), checkpoints.writing():
        pass
    save(tmp_path / "run", 1)  # The lock is free again.


def test_a_folder_that_cannot_be_read_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save(tmp_path, 1)

    def refused(path: Path) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refused)
    with pytest.raises(FedrotError, match="Permission denied"):
        Checkpointing(tmp_path).newest()


def test_a_full_disk_ends_the_run_and_leaves_the_others_whole(tmp_path: Path) -> None:
    save(tmp_path, 1, _large(1))
    with full_after(2_000_000), pytest.raises(FedrotError, match="round 2 cannot be written"):
        save(tmp_path, 2, _large(2))
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "round-000001"]
    assert round_of(Checkpointing(tmp_path).newest()) == 1
    save(tmp_path, 2, _large(2))
    assert round_of(Checkpointing(tmp_path).newest()) == 2


@pytest.mark.parametrize("operation", ["mkdir", "fsync", "replace"])
def test_an_error_of_the_file_system_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    save(tmp_path, 1)
    with Checkpointing(tmp_path).writing():

        def fails(*args: Any, **kwargs: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, operation, fails)
        with pytest.raises(FedrotError, match="No space left on device"):
            Checkpointing(tmp_path).save(2, Result(_large(2)), run_state())
    monkeypatch.undo()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "round-000001"]
    assert round_of(Checkpointing(tmp_path).newest()) == 1


@pytest.fixture
def operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return what is done to files below the folder of a checkpoint, in order: (what, path)."""
    found: list[tuple[str, str]] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def noted(what: str, path: Any) -> None:
        path = Path(path)
        if path.is_relative_to(tmp_path):
            found.append((what, str(path.relative_to(tmp_path))))

    def noted_fsync(descriptor: int) -> None:
        noted("sync", os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def noted_move(move: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def moved(source: Any, target: Any) -> None:
            noted("write", target)
            move(source, target)

        return moved

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_move(rename))
    monkeypatch.setattr(os, "replace", noted_move(replace))
    return found


def test_every_file_is_on_disk_before_its_checkpoint_has_a_name(
    tmp_path: Path, operations: list[tuple[str, str]]
) -> None:
    folder = save(tmp_path / "run", 7)
    named = operations.index(("write", "run/round-000007"))
    before = {path for what, path in operations[:named] if what == "sync"}
    assert {Path(path).name for path in before} >= {path.name for path in folder.iterdir()}
    # And the entries of the folder that becomes the checkpoint.
    (written,) = {Path(path).parent for path in before if path.endswith("checkpoint.json")}
    assert str(written) in before
    assert written.parent == Path("run")


def test_the_name_of_a_checkpoint_is_on_disk_before_older_ones_go(
    tmp_path: Path, operations: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "run", 6, keep=1)
    operations.clear()
    remove = shutil.rmtree

    def noted(path: Any, *args: Any, **kwargs: Any) -> None:
        if Path(path).exists():
            operations.append(("remove", str(Path(path).relative_to(tmp_path))))
        remove(path, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", noted)
    save(tmp_path / "run", 7, keep=1)
    named = operations.index(("write", "run/round-000007"))
    assert operations[named + 1 :] == [("sync", "run"), ("remove", "run/round-000006")]


def test_death_before_any_file_operation_leaves_whole_ones(tmp_path: Path, server: Server) -> None:
    """A process dies at every step of a write that replaces the only checkpoint."""
    steps = []
    for step in range(100):
        folder = tmp_path / str(step)
        save(folder, 2, keep=1)
        died = server.run("die", folder=str(folder), at=step)
        newest = Checkpointing(folder).newest()
        steps.append((*died.marks, round_of(newest)))
        assert newest.round in Checkpointing(folder).rounds()
        # The next run clears away what is left, and writes.
        save(folder, newest.round + 1, keep=1)
        assert round_of(Checkpointing(folder).newest()) == newest.round + 1
        assert Checkpointing(folder).rounds() == [newest.round + 1]
        assert len(list(folder.iterdir())) == 2  # With the lock.
        if died.code == 0:
            break
        assert died.code == -signal.SIGKILL
    # Before the rename the old one is the newest, after it the new one; there is nothing else.
    found = [number for *_, number in steps]
    assert found == sorted(found)
    assert set(found) == {2, 3}
    renamed = found.index(3)
    assert steps[renamed - 1][0] == "dies before replace"
    # It has died before every file and its folder were on disk, and while those of the old one went.
    files = len(list(next(folder.glob("round-*")).iterdir()))
    before, after = (Counter(mark for mark, _ in part) for part in (steps[:renamed], steps[renamed:-1]))
    assert before["dies before fsync"] == files + 1
    assert after["dies before fsync"] == 1, "the folder of them all"
    # The first one is of the temporary name, which is gone by then.
    assert (after["dies before unlink"], after["dies before rmdir"]) == (1 + files, 1)


def test_the_page_about_checkpoints_loads_the_newest_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parents[3] / "docs/how-to/checkpoints.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    (block,) = (block for block in blocks if "load_file" in block)
    for number in (9, 10):
        save(tmp_path / "runs" / "tuesday", number, ArrayRecord(state(number)))
    monkeypatch.chdir(tmp_path)
    model = build()
    exec(compile(block, "checkpoints.md", "exec"), {"model": model})
    expected = state(10)
    assert all(torch.equal(t, expected[name]) for name, t in model.state_dict().items())
