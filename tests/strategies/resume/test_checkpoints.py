"""Checkpointing: equal bits after a round trip, and each is complete or absent."""

import json
import os
import re
import resource
import shutil
import signal
import struct
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp.strategy import Result

from fedrot.errors import FedrotError
from fedrot.strategies.resume.checkpoints import Checkpointing
from fedrot.strategies.resume.values import UnknownValueError, decode, encode
from fedrot.strategies.wire.arrays import to_arrays
from tests.strategies.classifier import state
from tests.strategies.resume.children import child
from tests.strategies.resume.folders import result_of, round_of, run_state, save

FILES = ("model.safetensors", "state.safetensors")
LINES = "checkpoint-metrics.jsonl"


def same(one, other):
    """Return whether two records are the same bytes under the same names in the same
    order.
    """

    def parts(record):
        return [(name, a.dtype, a.shape, a.stype, a.data) for name, a in record.items()]

    return parts(one) == parts(other)


def newest_in(folder):
    return round_of(Checkpointing(folder).newest())


# Arrays

INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
NUMBERS = ["float16", "float32", "float64", "bool", *INTEGERS]
BYTES = np.arange(48, dtype=np.uint8)
ARRAYS = {
    **{
        name: ArrayRecord({"a": Array(BYTES.astype(name).reshape(6, 8))})
        for name in NUMBERS
    },
    "bits of nan": ArrayRecord(
        {"a": Array(np.array([0x7FC00001, 0xFFC12345], "u4").view("f4"))}
    ),
    "bfloat16": to_arrays({"a": torch.randn(3, 5).bfloat16(), "b": torch.randn(4)}),
    "tied": to_arrays(dict.fromkeys("ab", torch.randn(3, 5)) | {"c": torch.randn(3)}),
    "tied bfloat16": to_arrays(dict.fromkeys("ab", torch.randn(3, 5).bfloat16())),
    "one array twice": ArrayRecord(dict.fromkeys("ab", Array(np.arange(6.0)))),
    "no dimensions": ArrayRecord({"a": Array(np.array(2.5)), "b": Array(np.array(3))}),
    "no elements": ArrayRecord({"a": Array(np.zeros((0, 3), "f4"))}),
    "empty": ArrayRecord(),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_come_back_byte_for_byte(tmp_path, kind):
    saved = ARRAYS[kind]
    save(tmp_path, 1, saved)
    assert same(Checkpointing(tmp_path).newest().result.arrays, saved)


def test_arrays_in_another_order_come_back_with_their_values(tmp_path):
    values = np.asfortranarray(np.arange(24.0).reshape(2, 3, 4))
    save(tmp_path, 1, ArrayRecord({"a": Array(values)}))
    np.testing.assert_array_equal(
        Checkpointing(tmp_path).newest().result.arrays["a"].numpy(), values
    )


@pytest.mark.parametrize(
    "array",
    [
        Array(np.arange(5, dtype=">f4")),
        Array(np.array(["one", "two"])),
        Array("float32", (2,), "something.else", b"\x00\xff\x80"),
        Array("float32", (2,), "fedrot.tied", b"\xff"),
    ],
)
def test_an_array_that_cannot_be_decoded_is_named(tmp_path, array):
    with pytest.raises(FedrotError, match=r"round 1 cannot be written .* 'odd'"):
        save(tmp_path, 1, ArrayRecord({"odd": array}))
    assert Checkpointing(tmp_path).rounds() == []


def test_the_page_about_checkpoints_loads_the_newest_model(tmp_path, monkeypatch):
    """Tied tensors and bfloat16 included: every name has its values."""
    text = (Path(__file__).parents[3] / "docs/how-to/checkpoints.md").read_text(
        encoding="utf-8"
    )
    blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    (block,) = (block for block in blocks if "load_file" in block)
    for number in (9, 10):
        tensors = {k: t.bfloat16() for k, t in state(number).items()}
        folder = tmp_path / "runs" / "tuesday"
        newest = save(
            folder, number, to_arrays({**tensors, "tied": tensors["classifier.weight"]})
        )
    monkeypatch.chdir(tmp_path)
    found = {}
    model = SimpleNamespace(load_state_dict=found.update)
    exec(compile(block, "checkpoints.md", "exec"), {"model": model})
    assert torch.equal(found.pop("tied"), tensors["classifier.weight"])
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert newest.name == "round-000010"


def test_metrics_come_back_bit_for_bit(tmp_path):
    nans = [
        struct.unpack(">d", bytes.fromhex(h))[0]
        for h in ("7ff8000000000001", "fff8000000000000")
    ]
    floats = [
        0.1,
        -0.0,
        5e-324,
        1.7976931348623157e308,
        float("inf"),
        -float("inf"),
        *nans,
    ]
    result = Result(
        ArrayRecord(),
        train_metrics_clientapp={
            1: MetricRecord({"loss": 0.1 + 0.2, "all": floats, "n": 2**80})
        },
        evaluate_metrics_serverapp={
            0: MetricRecord({"none": []}),
            2: MetricRecord({"ints": [1, -2]}),
        },
    )
    checkpoints = Checkpointing(tmp_path)
    with checkpoints.writing():
        for number in (1, 2):
            checkpoints.save(number, result, run_state())
    found = Checkpointing(tmp_path).newest().result
    metrics = found.train_metrics_clientapp[1]
    assert [struct.pack(">d", x) for x in metrics.pop("all")] == [
        struct.pack(">d", x) for x in floats
    ]
    assert metrics == {"loss": 0.1 + 0.2, "n": 2**80}
    assert found.evaluate_metrics_clientapp == {}
    assert list(found.evaluate_metrics_serverapp) == [0, 2]
    assert found.evaluate_metrics_serverapp == result.evaluate_metrics_serverapp
    assert type(found.evaluate_metrics_serverapp[2]) is MetricRecord


def test_the_metrics_of_a_round_are_written_once_and_only_added(tmp_path):
    """Also those of an earlier, damaged checkpoint's rounds are replaced by the run
    that goes on.
    """
    checkpoints, sizes, growth = Checkpointing(tmp_path), [0], list[str]()
    with checkpoints.writing():
        for number in range(1, 6):
            before = (tmp_path / LINES).read_bytes() if sizes[1:] else b""
            checkpoints.save(number, result_of(number), run_state())
            now = (tmp_path / LINES).read_bytes()
            assert now.startswith(before)
            growth.append(now[len(before) :].decode())
            sizes.append(len(now))
    assert [json.loads(line)["round"] for line in growth] == [1, 2, 3, 4, 5]
    folder = save(tmp_path, 4)
    assert (tmp_path / LINES).read_text() == "".join(growth[:4])
    shutil.rmtree(folder)
    assert newest_in(tmp_path) == 3


# Values

SQUARE = np.arange(12.0).reshape(3, 4)
VALUES = [
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
MANY = [
    SQUARE,
    SQUARE.T,
    SQUARE[::2, ::-1],
    np.array(7.0),
    np.zeros((0, 2)),
    SQUARE > 3,
    SQUARE.astype("f2"),
]
for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool):
    MANY += [torch.arange(6).reshape(2, 3).to(dtype).T, torch.ones((), dtype=dtype)]


def come_back(value):
    arrays = {}
    coded = json.dumps(encode({"x": [value]}, "it", arrays), allow_nan=False)
    (result,) = decode(json.loads(coded), arrays)["x"]
    assert type(result) is type(value)
    return result


@pytest.mark.parametrize("value", VALUES)
def test_values_come_back(value):
    assert come_back(value) == value


@pytest.mark.parametrize("value", MANY, ids=lambda a: f"{a.dtype} {tuple(a.shape)}")
def test_arrays_and_tensors_come_back(value):
    result = come_back(value)
    assert (result.dtype, result.shape) == (value.dtype, value.shape)
    if isinstance(value, torch.Tensor):
        assert torch.equal(result.float(), value.float())
    else:
        np.testing.assert_array_equal(result, value, strict=True)
        assert result.flags.writeable


@pytest.mark.parametrize(
    "value",
    [
        object(),
        len,
        np.array([object()]),
        np.array(["a"]),
        np.ma.array([1.0]),
        {"a": [range(3)]},
        1j,
    ],
)
def test_other_values_are_refused(value):
    with pytest.raises(UnknownValueError):
        encode(value, "it", {})


# The folder


def test_the_last_ones_stay(tmp_path):
    for number in range(1, 5):
        save(tmp_path, number, keep=2)
        assert Checkpointing(tmp_path).rounds() == [
            n for n in (number - 1, number) if n
        ]
        assert newest_in(tmp_path) == number
    names = [".lock", LINES, "round-000003", "round-000004"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    assert sorted(p.name for p in (tmp_path / "round-000004").iterdir()) == sorted(
        FILES
    )


def test_none_kept_is_refused(tmp_path):
    with pytest.raises(FedrotError, match="keep is 0"):
        Checkpointing(tmp_path, keep=0)


def _truncated(path):
    os.truncate(path, path.stat().st_size // 2)


def _flipped(path):
    data = bytearray(path.read_bytes())
    data[-len(data) // 3] ^= 1
    path.write_bytes(data)


def _emptied(path):
    path.write_bytes(b"")


def _of_round_two(path):
    path.write_bytes((path.parents[1] / "round-000002" / path.name).read_bytes())


def _linked(path):
    path.symlink_to(path.rename(path.with_name("elsewhere")))


LAST = "round-000003"
#: What is done to which file, and the newest round that is left.
DAMAGES = [
    *(
        (damage, f"{LAST}/{name}", 2)
        for damage in (
            _truncated,
            _flipped,
            _emptied,
            _of_round_two,
            _linked,
            Path.unlink,
        )
        for name in FILES
    ),
    *((damage, LINES, 0) for damage in (_emptied, _linked, Path.unlink)),
    (_truncated, LINES, 1),
    (_flipped, LINES, 2),
    (lambda path: os.truncate(path, path.stat().st_size - 1), LINES, 2),
    (lambda path: path.write_text(path.read_text() + "more\n"), LINES, 3),
    (_linked, LAST, 2),
    (shutil.rmtree, LAST, 2),
    (lambda path: [file.unlink() for file in path.iterdir()], LAST, 2),
    (lambda path: path.rename(path.with_name("round-000009")), LAST, 2),
    (lambda path: path.with_name("round-000009").touch(), LAST, 3),
]


@pytest.mark.parametrize(("damage", "name", "newest"), DAMAGES)
def test_a_damaged_one_is_reported_and_the_one_before_it_used(
    tmp_path,
    warnings,
    damage,
    name,
    newest,
):
    for number in (1, 2, 3):
        save(tmp_path, number)
    assert newest_in(tmp_path) == 3
    assert warnings() == ""
    damage(tmp_path / name)
    if newest:
        assert newest_in(tmp_path) == newest
    else:
        with pytest.raises(FedrotError, match=f"no usable checkpoint in '{tmp_path}'"):
            Checkpointing(tmp_path).newest()
    left = {path.name for path in tmp_path.glob("round-*")}
    bad = [name for name in left if int(name.removeprefix("round-")) > newest]
    assert all(f"{name}' cannot be used" in warnings() for name in bad)
    if ("/" in name and damage is not _of_round_two) or newest == 0:
        assert Path(name).name in warnings()


def test_a_folder_that_is_missing_has_no_checkpoint(tmp_path):
    with pytest.raises(FedrotError, match="no usable checkpoint in"):
        Checkpointing(tmp_path / "missing").newest()


def test_a_damaged_one_is_written_anew_and_never_counts_as_kept(tmp_path):
    for number in range(1, 7):
        save(tmp_path, number, keep=6)
    for number in (5, 6):
        _truncated(tmp_path / f"round-{number:06d}" / "model.safetensors")
    for number in (5, 6):
        save(tmp_path, number, keep=1)
        assert newest_in(tmp_path) == number
    assert Checkpointing(tmp_path).rounds() == [6]


def test_another_format_is_named(tmp_path, monkeypatch, warnings):
    with monkeypatch.context() as patch:
        patch.setattr("fedrot.strategies.resume.checkpoints._FORMAT", 99)
        save(tmp_path, 1)
    with pytest.raises(FedrotError, match="no usable checkpoint"):
        Checkpointing(tmp_path).newest()
    assert "in format 99, but this is round 1 in format 1" in warnings()


# What lies in the folder beside checkpoints


def _link(path, target):
    path.symlink_to(target)


def _file(path, target):
    path.write_text("mine")


def _folder(path, target):
    path.mkdir()


def _pipe(path, target):
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("name", "put", "target"),
    [
        *((".lock", _link, target) for target in ("file", "folder", "missing")),
        (".lock", _folder, ""),
        (".lock", _pipe, ""),
        *(("round-000002", _link, target) for target in ("file", "folder", "missing")),
        (".round-000002.1", _link, "folder"),
        ("round-000002", _file, ""),
        (".round-000002.1", _file, ""),
    ],
)
def test_something_else_under_a_name_of_ours_is_an_error_at_the_start_and_stays(
    tmp_path, name, put, target
):
    (tmp_path / "file").write_text("precious")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "inside").write_text("precious")
    folder = tmp_path / "run"
    save(folder, 1)
    (folder / name).unlink(missing_ok=True)
    put(folder / name, tmp_path / target)
    with (
        pytest.raises(FedrotError, match=re.escape(name)),
        Checkpointing(folder).writing(),
    ):
        pass
    assert (tmp_path / "file").read_text() == "precious"
    assert (tmp_path / "folder" / "inside").read_text() == "precious"
    assert not (tmp_path / "missing").exists()
    (folder / name).lstat()
    assert newest_in(folder) == 1


def test_other_names_are_left_alone(tmp_path):
    names = [".round-x.1", ".round-x.2/inside", "notes.txt", "round-1", "round-x"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    for number in (1, 2):
        save(tmp_path, number, keep=1)
    assert [(tmp_path / name).read_text() for name in names] == ["mine"] * len(names)
    assert Checkpointing(tmp_path).rounds() == [2]


def test_a_link_in_place_of_the_metrics_is_replaced_and_not_followed(
    tmp_path,
):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / LINES).symlink_to(tmp_path / "precious")
    save(tmp_path, 1)
    assert (tmp_path / "precious").read_text() == "precious"
    assert newest_in(tmp_path) == 1


# Two writers


def test_two_processes_cannot_write_to_one_folder(tmp_path):
    def locks(mark):
        try:
            with Checkpointing(tmp_path).writing():
                mark("locked")
        except FedrotError as error:
            mark(str(error))

    with Checkpointing(tmp_path).writing():
        assert f"process {os.getpid()} on" in next(iter(child(locks).marks))
    assert child(locks, "locked", until="locked").code == -signal.SIGKILL
    save(tmp_path, 1)
    assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on")


# Writes that fail


@contextmanager
def full_after(size):
    """Let no file of this process grow beyond a size: writes fail midway, as on a full
    disk.
    """
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


@pytest.mark.parametrize("folder", ["file/run", "/proc/run", "/proc/self"])
def test_a_folder_that_cannot_be_written_to_is_an_error_at_the_start(tmp_path, folder):
    """Root may write everywhere else."""
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(FedrotError, match="cannot be written to"),
        Checkpointing(tmp_path / folder).writing(),
    ):
        pass


def test_a_disk_that_is_full_from_the_start_is_an_error(tmp_path):
    checkpoints = Checkpointing(tmp_path / "run")
    with (
        full_after(0),
        pytest.raises(FedrotError, match="cannot be written to"),
        checkpoints.writing(),
    ):
        pass
    save(tmp_path / "run", 1)  # The lock is free again.


def test_a_folder_that_cannot_be_read_is_an_error(monkeypatch, tmp_path):
    save(tmp_path, 1)

    def refused(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refused)
    with pytest.raises(FedrotError, match="Permission denied"):
        Checkpointing(tmp_path).newest()


@pytest.mark.parametrize("operation", ["", "mkdir", "fsync", "replace"])
def test_a_write_that_fails_ends_the_run_and_leaves_the_others_whole(
    tmp_path, monkeypatch, operation
):
    """An operation of the file system fails, or the disk is full."""
    save(tmp_path, 1)

    def fails(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with Checkpointing(tmp_path).writing(), monkeypatch.context() as patch:
        if operation:
            patch.setattr(os, operation, fails)
        word = "No space left" if operation else "round 2 cannot be written"
        with full_after(5_000), pytest.raises(FedrotError, match=word):
            Checkpointing(tmp_path).save(2, result_of(2), run_state())
    names = [".lock", LINES, "round-000001"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    assert newest_in(tmp_path) == 1
    save(tmp_path, 2)
    assert newest_in(tmp_path) == 2


@pytest.fixture
def operations(tmp_path, monkeypatch):
    """Return what is done to files below the folder of a checkpoint, in order: (what,
    path).
    """
    done = []
    fsync = os.fsync

    def note(what, path):
        path = Path(path)
        if path.is_relative_to(tmp_path) and (what != "remove" or path.exists()):
            done.append((what, str(path.relative_to(tmp_path))))

    def noted_fsync(descriptor):
        note("sync", os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def noted(what, operation, place):
        def call(*paths, **kwargs):
            note(what, paths[place])
            operation(*paths, **kwargs)

        return call

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted("write", os.rename, 1))
    monkeypatch.setattr(os, "replace", noted("write", os.replace, 1))
    monkeypatch.setattr(shutil, "rmtree", noted("remove", shutil.rmtree, 0))
    return done


def test_a_checkpoint_is_on_disk_before_it_has_a_name_and_that_before_older_ones_go(
    tmp_path, operations
):
    save(tmp_path / "run", 6, keep=1)
    operations.clear()
    folder = save(tmp_path / "run", 7, keep=1)
    named = operations.index(("write", "run/round-000007"))
    before = [path for what, path in operations[:named] if what == "sync"]
    (unfinished,) = {Path(path).parent for path in before if path.endswith(FILES[0])}
    files = [f"{unfinished}/{path.name}" for path in folder.iterdir()]
    # And the entries of the folder that becomes the checkpoint.
    assert {*before} == {f"run/{LINES}", *files, str(unfinished)}
    assert before[-1] == str(unfinished)
    assert unfinished.parent == Path("run")
    assert operations[named + 1 :] == [("sync", "run"), ("remove", "run/round-000006")]
