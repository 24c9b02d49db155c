"""``Reporting(hashes=True)``: rows with the hash of every averaged update and of the
model.
"""

import hashlib
import math
import shutil

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp.strategy import FedAdam, FedMedian

from fedrot.errors import FedrotError
from fedrot.simulations.report.hashes import verified
from fedrot.strategies import (
    Checkpointing,
    FedRot,
    Reporting,
    Server,
    from_arrays,
    model_hash,
    statistics_record,
    to_arrays,
    wanted_statistics,
)
from fedrot.strategies.resume import checkpoints
from fedrot.strategies.wire import arrays
from fedrot.strategies.wire.arrays import STATISTICS
from tests.simulations.commands import run
from tests.strategies.aggregating import grams
from tests.strategies.classifier import SYMMETRY, state
from tests.strategies.fakes import FakeGrid, in_front_of, reply
from tests.strategies.reporting.test_rows import rows_of, update


def oracle(tensors):
    """Return the hash by NumPy and hashlib alone."""
    given = tensors if isinstance(tensors, ArrayRecord) else ArrayRecord(tensors)
    found = b""
    for name in sorted(given):
        value = given[name].numpy()
        shape = ", ".join(map(str, value.shape))
        found += f'["{name}", "{value.dtype}", [{shape}]]\n'.encode() + value.tobytes()
    return hashlib.sha256(found).hexdigest()


def test_the_hash_is_of_names_dtypes_shapes_and_bits():
    mixed = {
        "b": torch.arange(6.0).reshape(2, 3).T,
        "a": torch.tensor(True),
        "c": torch.zeros(0, 3).double(),
        "a.b": torch.tensor([1, -(2**60)]),
    }
    assert model_hash(mixed) == oracle(mixed)
    assert model_hash(from_arrays(to_arrays(mixed))) == oracle(mixed)
    one = torch.tensor([0.0, 1.0])
    line = 'a", "float32", [1]]\n' + "\0" * 4 + '["b'
    others = [
        {"a": one},
        {"b": one},
        {"a": -one},
        {"a": one.reshape(2, 1)},
        {"a": one.view(torch.int32)},
        {"a": one[:1], "b": one[:1]},
        {line: one[:1]},
        {"a": one.bfloat16()},
    ]
    assert len({model_hash(other) for other in others}) == len(others)


def client(index, *, half=False, says=None, bad=False):
    """Return a client; one that is ``bad`` sends NaN, another ``says`` that it is
    another one.
    """

    def answer(message):
        sent = {
            n: t.half() if half else t * (math.nan if bad else 1)
            for n, t in update(index).items()
        }
        made = reply(message, sent, 10 + index, index if says is None else says)
        if says is not None:
            made.content["hashes"] = ConfigRecord(
                {"sha256": oracle(update(says)), "node": 100 + says}
            )
        if wanted_statistics(message):
            made.content[STATISTICS] = statistics_record(grams(update(index)))
        return made

    return answer


CLIENTS = {
    100: client(0),
    101: client(1, half=True),
    102: client(2, says=0),
    103: client(3, bad=True),
}
TRAIN = {"fraction_evaluate": 0.0}
STRATEGIES = {
    "running": FedRot,
    "deterministic": lambda config, **more: FedRot(
        config, server=Server(deterministic=True), **more
    ),
    "not aligned": lambda config, **more: FedRot(config, alignment=None, **more),
    "regmean": lambda config, **more: FedRot(config, aggregation="regmean", **more),
    "FedAdam": in_front_of(FedAdam),
    "FedMedian": in_front_of(FedMedian),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_rows_name_what_was_averaged_as_it_was_received(name, tmp_path):
    reporting = Reporting(tmp_path / "rows.jsonl", hashes=True)
    strategy = STRATEGIES[name](SYMMETRY, reporting=reporting, **TRAIN)
    result = strategy.start(FakeGrid(CLIENTS), ArrayRecord(state()), 2)
    rows = rows_of(tmp_path / "rows.jsonl")
    for number in (1, 2):
        own = [row for row in rows if row["round"] == number]
        found = {row["node"]: row for row in own if "sha256" in row}
        halved = {n: t.half() for n, t in update(1).items()}
        expected = {100: oracle(update(0)), 101: oracle(halved), 102: oracle(update(2))}
        assert {node: row["sha256"] for node, row in found.items()} == expected
        assert [found[node]["weight"] for node in expected] == [10, 11, 12]
        assert [found[node]["client"] for node in expected] == [0, 1, 0]
        kinds = ["gram"] if name == "regmean" else []
        assert [found[node]["statistics"] for node in expected] == [kinds] * 3
        assert [row["client"] for row in own if "dropped" in row] == [3]
    first, second = (row for row in rows if "sha256_before" in row)
    assert first["sha256_before"] == oracle(state())
    assert first["sha256_after"] == second["sha256_before"] != first["sha256_before"]
    assert second["sha256_after"] == oracle(result.arrays)
    assert first["versions"].keys() == {"fedrot", "flwr", "torch"}


def test_without_a_new_model_no_update_is_named_and_hashes_are_an_option(
    tmp_path, monkeypatch
):
    file = tmp_path / "rows.jsonl"
    server = Server(min_replies=4)
    for hashes, count in ((True, 1), (False, 0)):
        strategy = FedRot(
            SYMMETRY, reporting=Reporting(file, hashes=hashes), server=server, **TRAIN
        )
        strategy.start(FakeGrid(CLIENTS), ArrayRecord(state()), 1)
        rows = [row for row in rows_of(file) if "sha256" in str(row)]
        assert len(rows) == count
        assert all(
            row["sha256_before"] == row["sha256_after"] == oracle(state())
            for row in rows
        )
        monkeypatch.setattr(arrays.hashlib, "sha256", None)
    with pytest.raises(FedrotError, match="file for the hashes"):
        Reporting(hashes=True)


def play(folder, rounds, offset=0):
    """Start or resume a run; return its rows and checkpoints."""
    file = folder / "rows.jsonl"
    kept = folder / "checkpoints"
    reporting = Reporting(file, hashes=True)
    strategy = FedRot(
        SYMMETRY, reporting=reporting, checkpoints=Checkpointing(kept), **TRAIN
    )
    clients = {100 + i: client(i + offset) for i in range(2)}
    strategy.start(FakeGrid(clients), ArrayRecord(state()), rounds)
    return file, kept


def test_checkpoints_of_a_resumed_run_are_those_of_its_rows_and_no_others(
    tmp_path,
):
    play(tmp_path, 2)
    file, kept = play(tmp_path, 3)
    known = f"'{file}', with rounds 1 to 3"
    said = f"Rounds 1, 2, 3: the models in '{kept}' are those of {known}."
    assert verified(file, kept) == said
    run("report", file, "--verify", kept, code=0, says="Rounds 1, 2, 3: ")
    # One bit of a value.
    model = kept / "round-000002" / "model.safetensors"
    whole = model.read_bytes()
    model.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(RuntimeError) as wrong:
        verified(file, kept)
    assert str(wrong.value).startswith(
        f"Round 2: the checkpoint '{kept}/round-000002' cannot be used: "
    )
    assert "'model.safetensors' was changed" in str(wrong.value)
    run("report", file, "--verify", kept, code=1, says="Round 2: the checkpoint")
    model.write_bytes(whole)
    assert verified(file, kept) == said
    # A whole checkpoint of another run, which is valid for itself.
    _, others = play(tmp_path / "other", 3, offset=5)
    shutil.copytree(others, kept, dirs_exist_ok=True)
    (kept / "round-latest").mkdir()
    with pytest.raises(
        RuntimeError, match=r"round-latest' is no check(.|\n)*Round 3: .* differs"
    ) as wrong:
        verified(file, kept)
    assert len(str(wrong.value).splitlines()) == 4


def test_a_model_file_with_other_tensors_than_a_run_would_load_is_refused(
    tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:  # so that all digests fit
        patch.setattr(
            checkpoints, "_unshared", lambda own: {**own, "more": torch.ones(2)}
        )
        file, kept = play(tmp_path, 1)
    with pytest.raises(
        RuntimeError, match=r"Round 1: .*'model\.safetensors' was changed"
    ):
        verified(file, kept)


def test_a_file_that_was_changed_or_has_no_hashes_verifies_nothing(
    tmp_path,
):
    file, kept = play(tmp_path, 2)
    text = file.read_text()
    after = next(row["sha256_after"] for row in rows_of(file) if "sha256_after" in row)
    file.write_text(
        text.replace(f'"sha256_after": "{after}"', f'"sha256_after": "{"0" * 64}"')
    )
    with pytest.raises(
        RuntimeError,
        match=r"Round 2 did not begin with round 1's model(.|\n)*Round 1: ",
    ):
        verified(file, kept)
    file.write_text(
        "".join(line for line in text.splitlines(True) if "sha256_after" not in line)
    )
    run("report", file, "--verify", kept, code=2, says="has no hashes of models")
    file.write_text(text)
    run(
        "report", file, "--verify", tmp_path / "none", code=2, says="has no checkpoints"
    )
