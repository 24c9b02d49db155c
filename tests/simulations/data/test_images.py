"""Images: where they come from, how they are seen, what is refused, and what models read."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from fedrot.simulations.data import encode, images
from fedrot.simulations.data.images import RULES, load_images, resized, side_of
from fedrot.simulations.data.read import DataError
from tests.simulations.data.files import chosen, shared_data, write


def encoded(image: Image.Image, form: str = "png", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def png(colour: Any, size: tuple[int, int] = (12, 12), mode: str = "RGB") -> bytes:
    return encoded(Image.new(mode, size, colour))


def folder_of(root: Path, classes: dict[str, int]) -> Path:
    for number, (name, count) in enumerate(classes.items()):
        (root / name).mkdir(parents=True)
        for i in range(count):
            (root / name / f"{i}.png").write_bytes(png((number * 80, i, 0)))
    return root


def seen(tmp_path: Path, *files: bytes, **options: Any) -> np.ndarray[Any, Any]:
    """Return the pixels of the first file, ``[height, width, channels]``."""
    rows = [*files] * 10
    path = write(tmp_path / "seen.parquet", image=rows, label=(["a", "b"] * len(rows))[: len(rows)])
    data = load_images(chosen(path), **options)
    number = [*data.train.columns["number"]].index(0) if "number" in data.train.columns else 0
    return data.train.inputs[number]


RAMP = np.linspace(0, 65535, 16).astype(np.uint16).reshape(4, 4)
EIGHT = (RAMP // 257).astype(np.uint8)
HALF = np.zeros((4, 4, 4), dtype=np.uint8)
HALF[:2, :, 3] = 255
UPSIDE = Image.Exif()
UPSIDE[0x0112] = 6
LEFT = Image.fromarray(np.repeat([[255] * 4 + [0] * 4], 4, axis=0).astype(np.uint8))
DRAWN = Image.new("P", (4, 4), 1)
DRAWN.putpalette([255, 0, 0, 0, 255, 0])
ODD = np.array([[np.nan, np.inf], [1, 3]], dtype=np.float32)
FLAT = np.full((2, 2), 0.5, dtype=np.float32)

#: A file, and the pixels of its grey or coloured image.
SEEN: dict[str, tuple[bytes, Any]] = {
    **{
        f"turned {form}": (
            encoded(LEFT, form, exif=UPSIDE, **options),
            np.repeat([[255]] * 4 + [[0]] * 4, 4, axis=1),
        )
        for form, options in (("png", {}), ("tiff", {}), ("jpeg", {"quality": 100}))
    },
    **{
        f"16 bits {form}": (encoded(Image.fromarray(RAMP), form), EIGHT)
        for form in ("png", "tiff", "ppm")
    },
    "16 bits, dark": (encoded(Image.fromarray(RAMP // 256), "ppm"), np.zeros((4, 4))),
    "32 bits": (encoded(Image.fromarray(RAMP.astype(np.int32) * 999), "tiff"), EIGHT),
    "32 bits, small": (encoded(Image.fromarray(EIGHT.astype(np.int32) - 9), "tiff"), EIGHT),
    "floats": (encoded(Image.fromarray((RAMP / 65535).astype(np.float32)), "tiff"), EIGHT),
    "no numbers": (encoded(Image.fromarray(ODD), "tiff"), [[0, 255], [0, 255]]),
    "one value": (encoded(Image.fromarray(FLAT), "tiff"), np.zeros((2, 2))),
    "nothing but no numbers": (encoded(Image.fromarray(FLAT * np.nan), "tiff"), np.zeros((2, 2))),
    "drawn in alpha": (
        encoded(Image.fromarray(HALF)),
        np.repeat([[0, 0, 255, 255]], 4, axis=0).T[..., None].repeat(3, 2),
    ),
    "grey in alpha": (
        encoded(Image.fromarray(HALF[..., 2:], "LA")),
        np.repeat([[0, 0, 255, 255]], 4, axis=0).T,
    ),
    "half transparent": (encoded(Image.new("RGBA", (1, 1), (255, 0, 0, 51))), [[[255, 204, 204]]]),
    "grey that is transparent": (encoded(Image.new("L", (2, 1), 9), transparency=9), [[255, 255]]),
    "a colour that is transparent": (
        encoded(Image.new("RGB", (1, 1), "red"), transparency=(255, 0, 0)),
        [[[255] * 3]],
    ),
    "a palette": (encoded(DRAWN), np.full((4, 4, 3), [0, 255, 0])),
    "a transparent palette": (encoded(DRAWN, transparency=1), np.full((4, 4, 3), 255)),
    "a transparent GIF": (encoded(DRAWN, "gif", transparency=1), np.full((4, 4, 3), 255)),
    "a damaged EXIF": (
        encoded(LEFT, "jpeg", exif=b"Exif\0\0", quality=100),
        np.repeat([[255] * 4 + [0] * 4], 4, axis=0),
    ),
    "black and white": (png(1, (2, 1), "1"), [[255, 255]]),
    "print": (encoded(Image.new("CMYK", (1, 1), (0, 255, 255, 0)), "tiff"), [[[255, 0, 0]]]),
    "LAB": (encoded(Image.new("LAB", (1, 1), (0, 128, 128)), "tiff"), [[[0, 0, 0]]]),
    "film": (
        encoded(
            Image.new("RGB", (1, 1), "red"),
            "tiff",
            save_all=True,
            append_images=[Image.new("RGB", (1, 1))],
        ),
        [[[255, 0, 0]]],
    ),
}


@pytest.mark.parametrize("name", SEEN)
def test_pictures_are_as_they_are_seen(name: str, tmp_path: Path) -> None:
    file, expected = SEEN[name]
    expected = np.asarray(expected)
    found = seen(tmp_path, file)
    assert found.shape == (*expected.shape[:2], 1 if expected.ndim == 2 else 3)
    tolerance = 2 if "LAB" in name or "jpeg" in name else 0
    np.testing.assert_allclose(found.reshape(expected.shape), expected, atol=tolerance)
    if name == "LAB":
        return
    # Of a model for colours, grey is repeated.
    assert np.ptp(seen(tmp_path, file, channels=3).astype(int), axis=2).max() == (
        0 if expected.ndim == 2 else np.ptp(expected.astype(int), axis=2).max()
    )


def test_every_mode_has_a_rule_or_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {*Image.MODES, "LA", "La", "PA", "RGBa", "I;16B", "I;16L", "I;16N"} <= set(RULES)
    for mode in RULES:
        found = np.asarray(RULES[mode](Image.new(mode, (3, 2))))
        assert (found.shape[:2], found.dtype) == ((2, 3), np.uint8)
    monkeypatch.setattr(images, "RULES", {mode: rule for mode, rule in RULES.items() if mode != "CMYK"})
    with pytest.raises(DataError, match="no rule for its mode CMYK: save it as RGB"):
        seen(tmp_path, encoded(Image.new("CMYK", (1, 1)), "tiff"))


def test_digits_are_always_divided_alike() -> None:
    data, again = load_images(chosen("digits")), load_images(chosen("digits"))
    assert (len(data.train) + len(data.test), len(data.test)) == (1797, pytest.approx(1797 / 5, abs=5))
    assert (data.side, data.channels, data.kind, data.metrics[0]) == (8, 1, "single", "accuracy")
    assert min(np.bincount(data.test.labels)) >= 34, "one in five of every class"
    assert np.array_equal(data.train.inputs[7], again.train.inputs[7])
    both = np.stack([*data.train.inputs, *data.test.inputs])
    assert (both.shape, both.min(), both.max()) == ((1797, 8, 8, 1), 0, 255)
    assert len(np.unique(both.reshape(1797, -1), axis=0)) == 1797, "no image is in both splits"


def test_images_of_the_shared_folder() -> None:
    data = load_images(chosen("cifar10", shared_data(), train_limit=50, test_limit=20))
    assert (len(data.train), len(data.test), data.side, data.channels) == (50, 20, 32, 3)
    assert (data.label_names[:3], len(data.label_names)) == (("airplane", "automobile", "bird"), 10)
    assert "file" in data.train.columns


def test_a_folder_of_classes_is_divided_and_other_files_are_named(tmp_path: Path) -> None:
    photos = folder_of(tmp_path / "photos", {"dog": 10, "None": 5})
    (photos / "dog" / "0.png").rename(photos / "dog" / "0.PNG")
    folder_of(photos / "None", {"below": 5})
    for left_out in (
        "readme.md",
        "dog/notes.txt",
        "dog/._1.png",
        "dog/.cache/1.png",
        "None/2.heic",
        ".git/a.png",
        "__MACOSX/a.png",
    ):
        (photos / left_out).parent.mkdir(exist_ok=True)
        (photos / left_out).write_bytes(b"no image")
    data = load_images(chosen("photos", tmp_path))
    assert data.label_names == ("None", "dog")
    assert np.bincount(data.train.labels).tolist() == [8, 8]
    assert np.bincount(data.test.labels).tolist() == [2, 2]
    assert all(
        pixels[0, 0, 0] == 0
        for pixels, dog in zip(data.train.inputs, data.train.labels, strict=True)
        if dog
    )
    assert data.said.startswith(f"5 file(s) of {photos} left out, hidden or no images: readme.md, ")
    assert all(name in data.said for name in ("notes.txt", "._1.png", "1.png", "2.heic"))
    assert load_images(chosen(photos)).train.labels.tolist() == data.train.labels.tolist()
    (tmp_path / "linked").mkdir()
    for name in ("dog", "None"):
        (tmp_path / "linked" / name).symlink_to(photos / name)
    assert len(load_images(chosen("linked", tmp_path)).train) == 16


def test_a_folder_with_splits_of_its_own(tmp_path: Path) -> None:
    folder_of(tmp_path / "images" / "photos" / "train", {"a": 3, "b": 2})
    for count, split in enumerate(("valid", "val", "validation", "test"), start=1):
        folder_of(tmp_path / "images" / "photos" / split, {"b": count})
        data = load_images(chosen("photos", tmp_path))
        assert (data.train.labels.tolist(), data.test.labels.tolist()) == ([0, 0, 0, 1, 1], [1] * count)


def test_folders_without_images_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    folder_of(tmp_path / "half", {"a": 3, "b": 0})
    folder_of(tmp_path / "alone" / "train", {"a": 3})
    folder_of(tmp_path / "few", {"a": 1, "b": 2})
    (folder_of(tmp_path / "broken", {"a": 9}) / "a" / "3.png").write_bytes(b"no image")
    for name, message in (
        ("empty", r"as in empty/CLASS/IMAGE.png"),
        ("half", "half/b has no images"),
        ("alone", "no held-out split next to it; add one of test, validation"),
        ("few", "3 rows, too few to hold one in 5"),
        ("broken", r"a/3.png cannot be read as an image"),
        ("nope", r"'nope' is not available. Available: alone, broken, digits"),
    ):
        with pytest.raises(DataError, match=message):
            load_images(chosen(name, tmp_path))
    # A folder of the name of bundled data goes before them in a data folder alone.
    folder_of(tmp_path / "digits", {"a": 5, "b": 5})
    monkeypatch.chdir(tmp_path)
    assert len(load_images(chosen("digits")).train) > 1000
    assert load_images(chosen("digits", tmp_path)).label_names == ("a", "b")


@pytest.mark.parametrize("kind", ["bytes", "large", "wrapped", "paths"])
def test_a_table_of_images(kind: str, tmp_path: Path) -> None:
    files: Any = [png((i, 0, 0)) for i in range(4)]
    if kind == "large":
        files = pa.array(files, pa.large_binary())
    if kind == "wrapped":
        files = [{"bytes": file, "path": None} for file in files]
    if kind == "paths":
        for number, file in enumerate(files):
            (tmp_path / f"{number}.png").write_bytes(file)
        files = [{"bytes": None, "path": str(tmp_path / f"{number}.png")} for number in range(4)]
    names, split = ["no", "yes", "no", "yes"], ["train", "train", "test", "test"]
    path = tmp_path / "images" / "mine.parquet"
    write(path, img=files, image=files, label=[0, 1, 0, 1], label_name=names, split=split)
    data = load_images(chosen("mine", tmp_path))
    assert (data.label_names, [*data.train.columns]) == (("no", "yes"), ["img", "label_name"])
    assert (data.train.labels.tolist(), data.test.labels.tolist()) == ([0, 1], [0, 1])
    assert [int(pixels[0, 0, 0]) for pixels in data.test.inputs] == [2, 3]


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"picture": [png(1)] * 2}, {}, "no image column 'image' or 'img'; columns are label, picture"),
        ({"image": [png(1)] * 2}, {"text_column": "photo"}, "no image column 'photo'"),
        ({"image": ["a.png", "b.png"]}, {}, "holds string; give whole image files"),
        ({"image": [png(1), b"no image"]}, {}, r"mine.parquet, row 2 cannot be read as an image"),
        ({"image": [png(1), png(1)[:45]]}, {}, r"row 2 cannot be read as an image"),
        (
            {"image": [png(1), None]},
            {},
            r"mine.parquet: image column 'image' has no value in 1 .*row\(s\) 2,",
        ),
        (
            {"image": [{"bytes": png(1), "path": None}, {"bytes": None, "path": None}]},
            {},
            r"row 2 cannot be read as an image \(it is empty",
        ),
        ({"image": [png(1)] * 2}, {"label_column": "kind"}, "no label column 'kind'"),
        ({"image": [png(1)] * 2, "label": ["a", None]}, {}, r"label column 'label' has no value"),
    ],
)
def test_what_is_no_table_of_images_is_refused(
    columns: Any, options: Any, message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "mine.parquet", **{"label": [0, 1], **columns}, split=["train", "test"])
    with pytest.raises(DataError, match=message):
        load_images(chosen(path, **options))


def test_the_row_of_a_broken_image_is_that_of_the_file(tmp_path: Path) -> None:
    files = [png(1, (1, 1), "L")] * 600
    files[300] = b"no image"
    path = write(tmp_path / "mine.parquet", image=files, label=[0, 1] * 300)
    with pytest.raises(DataError, match=r"mine.parquet, row 301 cannot be read"):
        load_images(chosen(path))


@pytest.mark.parametrize("coloured", [0, 7])
def test_one_coloured_image_in_any_split_makes_three_channels(coloured: int, tmp_path: Path) -> None:
    files = [png(9 * i, mode="L") for i in range(8)]
    files[coloured] = png((9, 0, 200))
    write(
        tmp_path / "mine.parquet", image=files, label=["a", "b"] * 4, split=["train"] * 4 + ["test"] * 4
    )
    data = load_images(chosen("mine", tmp_path))
    assert data.channels == 3
    assert [*data.train.inputs, *data.test.inputs][coloured][0, 0].tolist() == [9, 0, 200]


def test_sizes_and_colours_are_brought_together(tmp_path: Path) -> None:
    files = [png(7, (30, 10), "L"), png((200, 0, 0), (100, 200))]
    write(tmp_path / "mine.parquet", image=files, label=[0, 1], split=["train", "test"])
    data = load_images(chosen("mine", tmp_path))
    assert (data.side, data.channels) == (64, 3)
    assert (data.train.inputs[0].shape, data.test.inputs[0].shape) == ((10, 30, 3), (64, 64, 3))
    grey = load_images(chosen("mine", tmp_path), side=16, channels=1)
    assert (grey.side, grey.test.inputs[0].shape) == (16, (16, 16, 1))
    # Red has 0.299 of the brightness.
    assert grey.test.inputs[0][0, 0].tolist() == [60]


@pytest.mark.parametrize(("largest", "side"), [(5, 5), (8, 8), (9, 12), (12, 12), (13, 16), (30, 32)])
def test_images_are_enlarged_to_what_patches_divide(largest: int, side: int) -> None:
    assert side_of([np.zeros((4, 3, 3), np.uint8), np.zeros((2, largest, 3), np.uint8)]) == side
    pixels = np.arange(12, dtype=np.uint8).reshape(2, 6, 1)
    assert resized(pixels, 4, 8).shape == (4, 8, 1)
    assert resized(pixels, 2, 6) is pixels


#: Fields of a model's configuration and of its processor, and the side and channels, or an error.
MODELS: dict[str, tuple[dict[str, Any], str, Any]] = {
    "a processor": (
        {"image_size": 12},
        '{"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.5, 1.0]}',
        (12, 3),
    ),
    "no processor": ({"image_size": [12, 12]}, "", (12, 3)),
    "a processor without numbers": (
        {"image_size": 12, "num_channels": 1},
        '{"image_mean": null}',
        (12, 1),
    ),
    "no squares": ({"image_size": [12, 16]}, "", r"no square images .*size \[12, 16\]"),
    "no images": ({}, "", "no square images .*size None"),
    "four channels": ({"image_size": 12, "num_channels": 4}, "", "of 1 or 3 channels .* 4 channels"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_pretrained_model_reads_its_own_size(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields, processor, expected = MODELS[name]
    monkeypatch.setattr(
        encode, "pretrained_settings", lambda _: SimpleNamespace(model_type="mine", **fields)
    )
    if processor:
        (tmp_path / "preprocessor_config.json").write_text(processor)
    experiment = chosen("digits", task="image", model=str(tmp_path), train_limit=20, test_limit=10)
    if isinstance(expected, str):
        with pytest.raises(DataError, match=expected):
            encode.read_encoded(experiment)
        return
    data, *both = encode.read_encoded(experiment)
    assert (data.side, data.channels) == expected
    mean, deviation = (
        ([0.1, 0.2, 0.3], [0.5, 0.5, 1.0]) if name == "a processor" else ([0.5] * 3, [0.5] * 3)
    )
    for split, rows in zip((data.train, data.test), both, strict=True):
        values = rows.batch(np.array([3]))["pixel_values"]
        assert (values.shape, values.dtype) == ((1, data.channels, 12, 12), torch.float32)
        grey = resized(split.inputs[3], 12, 12)[..., 0] / 255
        for channel in range(data.channels):
            wanted = (grey - mean[channel]) / deviation[channel]
            np.testing.assert_allclose(values[0, channel].numpy(), wanted, atol=1e-6)


def test_images_of_an_experiment_without_a_model() -> None:
    data, train, test = encode.read_encoded(
        chosen("digits", task="image", train_limit=20, test_limit=10)
    )
    assert (len(train), len(test), train.lengths(np.arange(3)).tolist()) == (20, 10, [0, 0, 0])
    values = train.batch(np.array([4, 2]))["pixel_values"]
    np.testing.assert_allclose(values[1, 0].numpy(), data.train.inputs[2][..., 0] / 127.5 - 1, atol=1e-6)
    assert train.targets(np.array([4, 2])).tolist() == data.train.labels[[4, 2]].tolist()
