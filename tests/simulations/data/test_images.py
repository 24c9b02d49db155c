"""Image classification: where images come from, what is refused, and what models read."""

from __future__ import annotations

import io
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.data import encoding, sources
from fedrot.simulations.data.images import load_image_data, resized, side_of
from fedrot.simulations.data.sources import DataError
from fedrot.simulations.models.architectures import patch_of
from fedrot.simulations.models.build import build_model
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.task import Task, task_of

SMALL: dict[str, Any] = {"task": "image", "width": 32, "heads": 2, "layers": 1, "clients": 2}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_offline", lambda: True)


@pytest.fixture(scope="module")
def task() -> Task:
    return task_of(SimulationConfig(**SMALL, train_limit=600).to_json())


def png(colour: int | tuple[int, ...], size: tuple[int, int] = (12, 12), mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.new(mode, size, colour).save(file, "png")
    return file.getvalue()


def folder_of(root: Path, classes: dict[str, int], **options: Any) -> Path:
    for number, (name, count) in enumerate(classes.items()):
        (root / name).mkdir(parents=True)
        for i in range(count):
            (root / name / f"{i}.png").write_bytes(png((number * 80, i, 0), **options))
    return root


def write(path: Path, **columns: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


def test_digits_are_the_default_and_always_divided_alike() -> None:
    data, again = load_image_data(), load_image_data()
    assert SimulationConfig(task="image").data == data.name == "digits"
    assert len(data.train) + len(data.test) == 1797
    assert len(data.test) == pytest.approx(1797 / 5, abs=5)
    assert (data.side, data.channels, data.kind) == (8, 1, "single")
    assert data.metrics[0] == "accuracy"
    assert min(np.bincount(data.test.labels)) >= 34, "one in five of every class"
    assert np.array_equal(data.train.labels, again.train.labels)
    assert np.array_equal(data.train.pixels[7], again.train.pixels[7])
    both = np.stack([*data.train.pixels, *data.test.pixels])
    assert both.shape == (1797, 8, 8, 1)
    assert (both.min(), both.max()) == (0, 255)
    assert len(np.unique(both.reshape(1797, -1), axis=0)) == 1797, "no image is in both splits"


def test_images_of_the_shared_folder() -> None:
    default = Path(__file__).parents[3].parent / "shared" / "data"
    folder = Path(os.environ.get("FEDROT_DATA", default))
    if not (folder / "images").is_dir():
        pytest.skip("shared/data is not present: set FEDROT_DATA to the folder with images/")
    data = load_image_data("cifar10", folder, train_limit=50, test_limit=20)
    assert (len(data.train), len(data.test), data.side, data.channels) == (50, 20, 32, 3)
    assert data.label_names[:3] == ("airplane", "automobile", "bird")
    assert len(data.label_names) == 10
    assert "file" in data.train.columns


def test_a_folder_of_classes_is_divided(tmp_path: Path) -> None:
    folder_of(tmp_path / "photos", {"dog": 10, "cat": 5})
    (tmp_path / "photos" / ".cache").mkdir()
    (tmp_path / "photos" / "cat" / "notes.txt").write_text("no image")
    data = load_image_data("photos", tmp_path)
    assert data.label_names == ("cat", "dog")
    assert np.bincount(data.train.labels).tolist() == [4, 8]
    assert np.bincount(data.test.labels).tolist() == [1, 2]
    cat = data.train.labels.tolist().index(0)
    assert data.train.pixels[cat][0, 0, 0] == 80, "the second folder that was written holds the cats"
    by_path = load_image_data(str(tmp_path / "photos"))
    assert by_path.train.labels.tolist() == data.train.labels.tolist()


def test_the_folder_above_is_the_class_whatever_its_name_and_what_is_below(tmp_path: Path) -> None:
    folder_of(tmp_path / "photos", {"None": 5, "test": 5})
    folder_of(tmp_path / "photos" / "test", {"a": 5})
    data = load_image_data("photos", tmp_path)
    assert data.label_names == ("None", "test")
    assert np.bincount([*data.train.labels, *data.test.labels]).tolist() == [5, 10]


def test_a_folder_with_splits_of_its_own(tmp_path: Path) -> None:
    folder_of(tmp_path / "images" / "photos" / "train", {"a": 3, "b": 2})
    folder_of(tmp_path / "images" / "photos" / "val", {"b": 4})
    data = load_image_data("photos", tmp_path)
    assert (data.train.labels.tolist(), data.test.labels.tolist()) == ([0, 0, 0, 1, 1], [1] * 4)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_parquet_file_of_images(tmp_path: Path, wrapped: bool) -> None:
    images: list[Any] = [png((i, 0, 0)) for i in range(4)]
    if wrapped:
        images = [{"bytes": image, "path": None} for image in images]
    names, split = ["no", "yes", "no", "yes"], ["train", "train", "test", "test"]
    write(
        tmp_path / "images" / "mine.parquet",
        image=images, label=[0, 1, 0, 1], label_name=names, split=split, camera=["x", "y", "x", "y"],
    )  # fmt: skip
    data = load_image_data("mine", tmp_path)
    assert data.label_names == ("no", "yes")
    assert (data.train.labels.tolist(), data.test.labels.tolist()) == ([0, 1], [0, 1])
    assert [int(pixels[0, 0, 0]) for pixels in data.test.pixels] == [2, 3]
    assert data.train.columns["camera"] == ["x", "y"]


@pytest.mark.parametrize("coloured", ["train", "test"])
def test_one_coloured_image_in_any_split_makes_three_channels(coloured: str, tmp_path: Path) -> None:
    splits = ["train"] * 4 + ["test"] * 4
    images = [png(9 * i, mode="L") for i in range(8)]
    images[splits.index(coloured)] = png((9, 0, 200))
    write(tmp_path / "mine.parquet", image=images, label=["a", "b"] * 4, split=splits)
    data = load_image_data("mine", tmp_path)
    assert data.channels == 3
    first = getattr(data, coloured).pixels[0]
    assert first[0, 0].tolist() == [9, 0, 200]


def test_a_parquet_file_without_splits_is_divided(tmp_path: Path) -> None:
    write(tmp_path / "mine.parquet", img=[png(9)] * 10, label=["a", "b"] * 5)
    data = load_image_data("mine", tmp_path)
    assert (len(data.train), len(data.test)) == (8, 2)


def test_sizes_and_colours_are_brought_together(tmp_path: Path) -> None:
    images = [
        png(7, (30, 10), "L"),
        png((1, 2, 3), (100, 200)),
        png((1, 2, 3, 0), mode="RGBA"),
        png(65535, mode="I;16"),
    ]
    write(tmp_path / "mine.parquet", image=images, label=[0, 1, 0, 1], split=["train", "test"] * 2)
    data = load_image_data("mine", tmp_path)
    assert (data.side, data.channels) == (64, 3)
    assert [p.shape for p in data.train.pixels] == [(10, 30, 3), (12, 12, 3)]
    assert [p.shape for p in data.test.pixels] == [(64, 64, 3), (12, 12, 3)]
    assert data.train.pixels[0][0, 0].tolist() == [7, 7, 7]
    assert data.test.pixels[1][0, 0].tolist() == [255, 255, 255]
    grey = load_image_data("mine", tmp_path, side=16, channels=1)
    assert (grey.side, grey.test.pixels[0].shape) == (16, (16, 16, 1))
    write(tmp_path / "red.parquet", image=[png((200, 0, 0))] * 10, label=[0, 1] * 5)
    # Red has 0.299 of the brightness.
    assert load_image_data("red", tmp_path, channels=1).test.pixels[0][0, 0].tolist() == [60]


@pytest.mark.parametrize(
    ("largest", "side"), [(5, 5), (8, 8), (9, 12), (12, 12), (13, 16), (30, 32), (32, 32)]
)
def test_images_are_enlarged_to_what_patches_divide(largest: int, side: int) -> None:
    images = [np.zeros((4, 3, 3), np.uint8), np.zeros((2, largest, 3), np.uint8)]
    assert side_of(images) == side


@pytest.mark.parametrize(("side", "patch"), [(8, 2), (12, 3), (28, 4), (32, 4), (64, 8)])
def test_patches_of_small_models(side: int, patch: int) -> None:
    assert patch_of(side) == patch


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"picture": [png(1)] * 2}, {}, "no image column 'image' or 'img'; columns are picture, label"),
        ({"image": [png(1)] * 2}, {"text_column": "photo"}, "no image column 'photo'"),
        ({"image": ["a.png", "b.png"]}, {}, "holds string; give whole image files"),
        ({"image": [png(1), b"no image"]}, {}, r"mine \(held-out\), row 0 cannot be read as an image"),
        ({"image": [png(1), png(1)[:40]]}, {}, r"row 0 cannot be read as an image"),
        (
            {"image": [png(1), None]},
            {},
            r"mine.parquet: .* column 'image' has 1 missing .* in row\(s\) 2,",
        ),
        ({"image": [png(1)] * 2}, {"label_column": "kind"}, "no label column 'kind'"),
    ],
)
def test_files_that_are_no_images_are_refused(
    tmp_path: Path, columns: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    write(tmp_path / "mine.parquet", **columns, label=[0, 1], split=["train", "test"])
    with pytest.raises(DataError, match=message):
        load_image_data("mine", tmp_path, **options)


def test_folders_that_hold_no_images_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty has no images; .* empty/CLASS/IMAGE.png"):
        load_image_data("empty", tmp_path)
    folder_of(tmp_path / "half", {"a": 3})
    (tmp_path / "half" / "b").mkdir()
    with pytest.raises(DataError, match=r"half/b has no images"):
        load_image_data("half", tmp_path)
    folder_of(tmp_path / "alone" / "train", {"a": 3})
    with pytest.raises(DataError, match="no held-out folder next to it; add one of test, validation"):
        load_image_data("alone", tmp_path)
    folder_of(tmp_path / "few", {"a": 1, "b": 2})
    with pytest.raises(DataError, match="3 rows, too few to hold one in 5"):
        load_image_data("few", tmp_path)
    (folder_of(tmp_path / "broken", {"a": 9}) / "a" / "3.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"a/3.png cannot be read as an image"):
        load_image_data("broken", tmp_path)
    with pytest.raises(DataError, match=r"'nope' is not available: .*Available: digits"):
        load_image_data("nope")


def test_batches_are_standardised_pixels(task: Task) -> None:
    rows = np.array([4, 2])
    batch = task.objective.batch(task.train, rows, np.random.default_rng(0))
    assert set(batch) == {"pixel_values", "labels"}
    assert batch["pixel_values"].shape == (2, 1, 8, 8)
    assert batch["pixel_values"].dtype == torch.float32
    expected = task.data.train.pixels[2][..., 0] / 127.5 - 1
    np.testing.assert_allclose(batch["pixel_values"][1, 0].numpy(), expected, atol=1e-6)
    assert batch["labels"].tolist() == task.data.train.labels[rows].tolist()


def test_enlarging_keeps_the_axis_of_channels() -> None:
    pixels = np.arange(12, dtype=np.uint8).reshape(2, 6, 1)
    assert resized(pixels, 4, 8).shape == (4, 8, 1)
    assert resized(pixels, 2, 6) is pixels


def test_training_on_digits_learns(task: Task) -> None:
    model = build_model(task.config, task.data, seed=0)
    everything = np.arange(len(task.test))
    before = training.evaluate(model, task, task.test, everything)
    training.train(model, task, np.arange(len(task.train)), 0, 8)
    after = training.evaluate(model, task, task.test, everything)
    assert after["accuracy"] > 0.4 > before["accuracy"]
    assert after["loss"] < before["loss"] - 0.5


def test_a_pretrained_vision_transformer_reads_its_own_size(tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTForImageClassification

    settings = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        image_size=12, patch_size=6, num_channels=3, num_labels=10,
    )  # fmt: skip
    ViTForImageClassification(settings).save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(
        '{"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.5, 1.0]}'
    )
    config = SimulationConfig(task="image", model=str(tmp_path), train_limit=40, test_limit=20)
    task = task_of(config.to_json())
    assert task.data.train.pixels[0].shape == (8, 8, 3), "enlarged when they are read"
    values = task.train.batch(np.array([0]))["pixel_values"].numpy()
    assert values.shape == (1, 3, 12, 12)
    np.testing.assert_allclose(
        values[0, 0] * 0.5 + 0.1, values[0, 2] + 0.3, atol=1e-6, err_msg="grey in every channel"
    )
    model = build_model(config, task.data, seed=0)
    assert np.isfinite(training.evaluate(model, task, task.test, np.arange(20))["loss"])


def test_a_model_of_text_reads_no_images(tmp_path: Path) -> None:
    from transformers import BertConfig

    BertConfig().save_pretrained(tmp_path)
    config = SimulationConfig(task="image", model=str(tmp_path))
    with pytest.raises(DataError, match="of type 'bert' does not take square images"):
        task_of(config.to_json())


def test_suffixes_of_images_are_read_in_any_case(tmp_path: Path) -> None:
    folder_of(tmp_path / "photos", {"dog": 5, "cat": 5})
    for file in list((tmp_path / "photos").rglob("*.png")):
        file.rename(file.with_suffix(".PNG" if file.stem < "3" else ".Png"))
    data = load_image_data("photos", tmp_path)
    assert len(data.train) + len(data.test) == 10


def test_deep_grey_images_keep_their_upper_eight_bits(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.fromarray(np.full((4, 4), 40_000, dtype=np.uint16)).save(file, "png")
    write(tmp_path / "deep.parquet", image=[file.getvalue()] * 10, label=[0, 1] * 5)
    data = load_image_data(str(tmp_path / "deep.parquet"))
    assert data.channels == 1
    assert {int(value) for image in data.train.pixels for value in image.flat} == {40_000 // 256}


@pytest.mark.parametrize(
    ("mode", "colour", "channels"),
    [("1", 1, 1), ("L", 9, 1), ("LA", (9, 255), 1), ("P", 1, 3), ("RGB", (9, 9, 9), 3)],
)
def test_grey_images_have_one_channel(mode: str, colour: Any, channels: int, tmp_path: Path) -> None:
    write(tmp_path / "mine.parquet", image=[png(colour, mode=mode)] * 10, label=["a", "b"] * 5)
    data = load_image_data("mine", tmp_path)
    assert data.channels == channels
    assert data.test.pixels[0].shape == (12, 12, channels)
    # Of a model for colours, grey is repeated.
    assert len(set(load_image_data("mine", tmp_path, channels=3).test.pixels[0][0, 0])) == 1


def test_bytes_of_any_type_are_images(tmp_path: Path) -> None:
    images = pa.array([png(i) for i in range(10)], pa.large_binary())
    write(tmp_path / "mine.parquet", img=images, image=images, label=["a", "b"] * 5)
    data = load_image_data("mine", tmp_path)
    assert len(data.train) == 8
    assert list(data.train.columns) == ["img"], "the column image is preferred"
    # Files that a table names are read where they are.
    (tmp_path / "0.png").write_bytes(png((7, 8, 9)))
    paths = [{"bytes": None, "path": str(tmp_path / "0.png")}] * 10
    write(tmp_path / "paths.parquet", image=paths, label=["a", "b"] * 5)
    assert load_image_data("paths", tmp_path).train.pixels[0][0, 0].tolist() == [7, 8, 9]
    nothing = [{"bytes": None, "path": None}] * 10
    write(tmp_path / "nothing.parquet", image=nothing, label=["a", "b"] * 5)
    with pytest.raises(DataError, match=r"nothing \(train\), row 0 has no image; remove that row"):
        load_image_data("nothing", tmp_path)


def test_the_row_of_a_broken_image_is_named(tmp_path: Path) -> None:
    images = [png(1, (1, 1), "L")] * 600
    images[300] = b"no image"
    write(
        tmp_path / "mine.parquet", image=images, label=[0, 1] * 300, split=["train"] * 598 + ["test"] * 2
    )
    with pytest.raises(DataError, match=r"mine \(train\), row 300 cannot be read"):
        load_image_data("mine", tmp_path)


def test_labels_of_images_are_those_of_the_chosen_column(tmp_path: Path) -> None:
    images = [png(i) for i in range(20)]
    kinds = ["glad"] * 15 + ["sad"] * 5
    write(tmp_path / "mine.parquet", image=images, label=list(range(20)), kind=kinds)
    data = load_image_data("mine", tmp_path, label_column="kind")
    assert data.label_names == ("glad", "sad")
    assert np.bincount(data.test.labels).tolist() == [3, 1]
    assert "of 20 rows 4 are held out, one in 5 of each class" in data.note
    assert data.said == "Labels: 2 classes in the column 'kind': glad, sad."
    scores = load_image_data("mine", tmp_path, label_kind="regression")
    assert (scores.kind, scores.metrics) == ("regression", ("pearson", "spearman"))
    write(tmp_path / "gaps.parquet", image=[*images[:10], *[None] * 10], label=kinds)
    assert "10 of 20 rows of" in load_image_data("gaps", tmp_path, missing="drop").said


def test_the_rows_of_test_are_held_out_before_those_of_validation(tmp_path: Path) -> None:
    folder_of(tmp_path / "photos" / "train", {"a": 9})
    for count, split in enumerate(("valid", "val", "validation", "test"), start=1):
        folder_of(tmp_path / "photos" / split, {"a": count})
        assert len(load_image_data("photos", tmp_path).test) == count


def test_a_folder_of_tables_or_with_the_name_of_bundled_data_is_none_of_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder_of(tmp_path / "digits", {"a": 5, "b": 5})
    assert len(load_image_data("digits").train) > 1000
    # A data folder that is named goes first.
    assert load_image_data("digits", tmp_path).label_names == ("a", "b")
    for split in ("train", "test"):
        write(tmp_path / "mine" / f"{split}.parquet", image=[png(1)] * 2, label=["x", "y"])
    folder_of(tmp_path / "mine" / "c", {"z": 5})
    assert load_image_data("mine", tmp_path).label_names == ("x", "y")


@pytest.mark.parametrize(("size", "side"), [(12, 12), ([12, 12], 12), ([12, 16], 0), (None, 0)], ids=str)
def test_a_pretrained_model_takes_squares(
    size: Any, side: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SimpleNamespace(image_size=size, model_type="mine")
    if size == 12:  # A processor may have no numbers.
        (tmp_path / "preprocessor_config.json").write_text('{"image_mean": null}')
    monkeypatch.setattr(encoding, "pretrained_settings", lambda name: settings)
    config = SimulationConfig(task="image", model=str(tmp_path), train_limit=20, test_limit=10)
    if not side:
        with pytest.raises(DataError, match="type 'mine' does not take square images"):
            encoding.IMAGE.read(config)
        return
    data, train, test = encoding.IMAGE.read(config)
    # Without a processor, values from 0 to 1 become values from -1 to 1 in three channels.
    assert (data.side, data.channels) == (12, 3)
    for split, encoded in ((data.train, train), (data.test, test)):
        values = encoded.batch(np.array([3]))["pixel_values"][0]
        grey = resized(split.pixels[3], 12, 12)[..., 0]
        for channel in values:
            np.testing.assert_allclose(channel.numpy(), grey / 127.5 - 1, atol=1e-6)
