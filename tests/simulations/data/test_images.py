"""Images: where they come from, how they are seen, what is refused, and what models
read.
"""

import io
import json
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from fedrot.simulations.data import pictures
from fedrot.simulations.data.read import DataError
from fedrot.simulations.tasks.vision import ImageClassification
from tests.simulations.data.files import chosen, write


def load(data, data_dir=None, **fields):
    """Return the data, and the pixels of training and held-out rows."""
    data, train, test = ImageClassification.read(
        chosen(data, data_dir, task="image", **fields)
    )
    assert train.pixels.dtype == test.pixels.dtype == np.uint8
    return data, train.pixels, test.pixels


def encoded(image, form="png", **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def tiff(pixels):
    return encoded(Image.fromarray(pixels), "tiff")


def png(colour, size=(12, 12), mode="RGB"):
    return encoded(Image.new(mode, size, colour))


def folder_of(root, **classes):
    for number, (name, count) in enumerate(classes.items()):
        (root / name).mkdir(parents=True)
        for i in range(count):
            (root / name / f"{i}.png").write_bytes(png((number * 80, i, 0)))
    return root


RAMP = np.linspace(0, 65535, 16).astype(np.uint16).reshape(4, 4)
EIGHT = (RAMP // 257).astype(np.uint8)
HALF = np.zeros((4, 4, 4), dtype=np.uint8)
HALF[:2, :, 3] = 255
DRAWING = np.repeat([[0], [0], [255], [255]], 4, axis=1)
UPSIDE = Image.Exif()
UPSIDE[0x0112] = 6
TOP = np.repeat([[255]] * 4 + [[0]] * 4, 8, axis=1)
LEFT = Image.fromarray(TOP.T.astype(np.uint8))
DRAWN = Image.new("P", (4, 4), 1)
DRAWN.putpalette([255, 0, 0, 0, 255, 0])
ODD = np.array([[np.nan, np.inf], [1, 3]], dtype=np.float32)
FLAT = np.full((2, 2), 0.5, dtype=np.float32)

#: A file, and the pixels of its grey or coloured image.
SEEN = {
    "turned png": (encoded(LEFT, exif=UPSIDE), TOP),
    "turned jpeg": (encoded(LEFT, "jpeg", exif=UPSIDE, quality=100), TOP),
    **{
        f"16 bits {f}": (encoded(Image.fromarray(RAMP), f), EIGHT)
        for f in ("png", "tiff", "ppm")
    },
    "16 bits, dark": (encoded(Image.fromarray(RAMP // 257), "ppm"), EIGHT),
    "32 bits": (tiff(RAMP.astype(np.int32) * 999), EIGHT),
    "32 bits, small": (tiff(EIGHT.astype(np.int32) - 9), EIGHT),
    "floats": (tiff((RAMP / 65535).astype(np.float32)), EIGHT),
    "no numbers": (tiff(ODD), [[0, 255], [0, 255]]),
    "one value": (tiff(FLAT), np.zeros((2, 2))),
    "drawn in alpha": (encoded(Image.fromarray(HALF)), DRAWING[..., None].repeat(3, 2)),
    "grey in alpha": (encoded(Image.fromarray(HALF[..., 2:], "LA")), DRAWING),
    "half transparent": (png((255, 0, 0, 51), (1, 1), "RGBA"), [[[255, 204, 204]]]),
    "grey that is transparent": (
        encoded(Image.new("L", (1, 1), 9), transparency=9),
        [[255]],
    ),
    "a palette": (encoded(DRAWN), np.full((4, 4, 3), [0, 255, 0])),
    "a transparent GIF": (
        encoded(DRAWN, "gif", transparency=1),
        np.full((4, 4, 3), 255),
    ),
    "a damaged EXIF": (encoded(LEFT, "jpeg", exif=b"Exif\0\0", quality=100), TOP.T),
    "black and white": (png(1, (1, 1), "1"), [[255]]),
    "print": (
        encoded(Image.new("CMYK", (1, 1), (0, 255, 255, 0)), "tiff"),
        [[[255, 0, 0]]],
    ),
}


@pytest.mark.parametrize("name", SEEN)
def test_pictures_are_as_they_are_seen(name, tmp_path):
    file = SEEN[name][0]
    expected = np.asarray(SEEN[name][1])
    path = write(tmp_path / "seen.parquet", image=[file] * 10, label=["a", "b"] * 5)
    data, pixels, _ = load(path)
    assert data.shape[1:] == (len(expected), 1 if expected.ndim == 2 else 3)
    tolerance = 2 if "jpeg" in name else 0
    np.testing.assert_allclose(
        pixels[0], expected.reshape(pixels[0].shape), atol=tolerance
    )


@pytest.mark.parametrize("form", ["tiff", "png", "ppm"])
@pytest.mark.parametrize("kind", ["uint16", ">u2", "int32", "float32"])
def test_numbers_of_all_files_have_one_scale(kind, form, tmp_path):
    """Classes that differ in brightness alone still do, also in a file of 8 bits."""
    if form != "tiff" and kind != "uint16":
        pytest.skip("the format has no such numbers")
    levels = [100, 200, 300, 400]
    files = [
        encoded(Image.fromarray(np.full((4, 4), level, kind)), form) for level in levels
    ]
    split = ["train", "test"] * 2
    for expected, words, others in (
        (
            [0, 85, 170, 255],
            "4 of 4 images have more than 8 bits: 100 to 400, in all",
            0,
        ),
        ([7, 0, 128, 255], "3 of 4 images have more than 8 bits: 200 to 400, in", 1),
    ):
        files[:others] = [png(7, (4, 4), "L")] * others
        path = write(
            tmp_path / "a.parquet", image=files, label=[0, 0, 1, 1], split=split
        )
        data, train, test = load(path)
        seen = [train[0], test[0], train[1], test[1]]
        assert [pixels.item(0) for pixels in seen] == expected
        assert words in data.remarks
        told = "other images have 8 bits, and are not on this range" in data.remarks
        assert told == bool(others)


@pytest.mark.parametrize(
    "mode",
    ["1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr"],
)
def test_pictures_of_eight_bits_have_no_scale(mode, tmp_path, monkeypatch):
    """Files have few of Pillow's modes, other readers more."""
    monkeypatch.setattr(pictures.Image, "open", lambda _: Image.new(mode, (4, 4)))
    path = write(tmp_path / "a.parquet", image=[b"any"] * 10, label=["a", "b"] * 5)
    data, _, _ = load(path)
    assert data.shape[2] == (1 if mode in ("1", "L", "LA", "La") else 3)
    assert "8 bits" not in data.remarks


def test_a_folder_of_classes_is_divided_and_other_files_are_named(tmp_path):
    photos = folder_of(tmp_path / "photos", dog=10, none=5)
    (photos / "dog" / "0.png").rename(photos / "dog" / "0.TIFF")
    (photos / "dog" / "1.png").rename(photos / "dog" / "1.jfif")
    folder_of(photos / "none", below=5)
    others = (
        "readme.md dog/notes.txt dog/._1.png dog/.a/1.png none/2.heic .git/a.png b.png "
        "__MACOSX/a.png"
    )
    for left_out in others.split():
        (photos / left_out).parent.mkdir(exist_ok=True)
        (photos / left_out).write_bytes(b"no image")
    data, train, _ = load("photos", tmp_path)
    assert data.label_names == ("dog", "none")
    assert np.bincount(data.train.labels).tolist() == [8, 8]
    assert np.bincount(data.test.labels).tolist() == [2, 2]
    assert not train[data.train.labels == 0, 0, 0, 0].any()
    assert f"6 file(s) of {photos} left out, hidden or no images: " in data.remarks
    for name in ("readme.md", "notes.txt", "._1.png", "2.heic", "b.png"):
        assert f" {name}" in data.remarks
    assert load(photos)[0].train.labels.tolist() == data.train.labels.tolist()


def test_a_folder_with_splits_of_its_own(tmp_path):
    folder_of(tmp_path / "images" / "photos" / "train", a=3, b=2)
    splits = ("test", "dev", "valid", "val", "validation")
    for count, split in enumerate(splits, start=1):
        folder_of(tmp_path / "images" / "photos" / split, b=count)
        data, _, _ = load("photos", tmp_path)
        assert data.train.labels.tolist() == [0, 0, 0, 1, 1]
        assert data.test.labels.tolist() == [1] * count


def test_folders_without_images_are_refused(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    folder_of(tmp_path / "half", a=3, b=0)
    folder_of(tmp_path / "alone" / "train", a=3)
    folder_of(tmp_path / "few", a=1)
    folder_of(tmp_path / "nan", a=9)
    (tmp_path / "nan" / "a" / "4.png").write_bytes(tiff(FLAT * np.nan))
    (tmp_path / "half" / "b" / "1.heic").write_bytes(b"unknown")
    (folder_of(tmp_path / "broken", a=9) / "a" / "3.png").write_bytes(b"no image")
    for name, message in (
        ("empty", r"as in empty/CLASS/IMAGE.png"),
        ("half", "half has no images, nor train.parquet, in b;.* 1.heic$"),
        ("alone", "no held-out split next to it; add one of validation, .*test"),
        ("few", "1 rows, too few to hold one in 5"),
        ("nan", r"a/4.png cannot be read .*no finite number"),
        ("broken", r"a/3.png cannot be read as an image"),
    ):
        with pytest.raises(DataError, match=message):
            load(name, tmp_path)
    # A folder of the name of bundled data goes before them in a data folder alone.
    folder_of(tmp_path / "digits", a=5, b=5)
    monkeypatch.chdir(tmp_path)
    assert len(load("digits")[1]) > 1000
    assert load("digits", tmp_path)[0].label_names == ("a", "b")


@pytest.mark.parametrize("kind", ["bytes", "wrapped", "paths"])
def test_a_table_of_images(kind, tmp_path):
    files = [png((i, 0, 0)) for i in range(4)]
    if kind == "wrapped":
        files = [{"bytes": file, "path": None} for file in files]
    if kind == "paths":
        paths = [tmp_path / f"{number}.png" for number in range(4)]
        for path, file in zip(paths, files, strict=True):
            path.write_bytes(file)
        files = pa.array(
            [{"bytes": None, "path": str(path)} for path in paths],
            pa.struct({"bytes": pa.binary(), "path": pa.string()}),
        )
    write(
        tmp_path / "images" / "mine.parquet",
        img=files,
        image=files,
        label=[0, 1] * 2,
        label_name=["no", "yes"] * 2,
        split=["train", "train", "test", "test"],
    )
    data, _, test = load("mine", tmp_path)
    assert data.label_names == ("no", "yes")
    assert [*data.train.columns] == ["img", "label_name"]
    assert (data.train.labels.tolist(), data.test.labels.tolist()) == ([0, 1], [0, 1])
    assert test[:, 0, 0, 0].tolist() == [2, 3]


SIZE = {"image_size": 12}
#: Fields of a processor, and the mean, deviation and factor that they stand for.
NUMBERS = [
    (
        {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.5, 1.0]},
        ([0.1, 0.2, 0.3], [0.5, 0.5, 1.0], 1 / 255),
    ),
    ({"image_mean": 0.25, "image_std": 2, "do_rescale": None}, (0.25, 2, 1 / 255)),
    ({"do_normalize": False, "image_std": 0}, (0, 1, 1 / 255)),
    ({"do_rescale": False, "rescale_factor": 3}, (0.5, 0.5, 1)),
    ({"rescale_factor": 0.1}, (0.5, 0.5, 0.1)),
]
#: Fields of a model's configuration and of its processor, and the side and channels, or
#: an error.
MODELS = [
    *((SIZE, processor, (12, 3)) for processor, _ in NUMBERS),
    (SIZE, None, (12, 3)),
    (SIZE | {"num_channels": 1}, {"image_mean": None}, (12, 1)),
    (SIZE, {"image_std": [0.0]}, r"image_std.*\[0.0\].*; give .* above 0"),
    (SIZE, {"image_mean": [0.5, 0.5]}, r"image_mean.*\[0.5, 0.5\].* number or 3,"),
    (SIZE, {"image_mean": "grey"}, "image_mean.*grey"),
    (SIZE, {"rescale_factor": 0}, "rescale_factor.* 0}"),
    (SIZE, {"image_mean": 1e999}, "image_mean.* inf.*finite"),
    ({"image_size": [12, 16]}, None, r"no square images .*size \[12, 16\]"),
    ({"image_size": 12, "num_channels": 4}, None, "of 1 or 3 channels .* 4 channels"),
]


@pytest.mark.parametrize(("fields", "processor", "expected"), MODELS)
def test_a_pretrained_model_reads_its_own_size(
    fields, processor, expected, tmp_path, monkeypatch
):
    settings = SimpleNamespace(model_type="mine", **fields)
    monkeypatch.setattr(pictures, "pretrained_settings", lambda _: settings)
    if processor:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    red = write(
        tmp_path / "a.parquet",
        image=[png((200, 0, 0), (20, 20))] * 10,
        label=["a", "b"] * 5,
    )
    experiment = chosen(red, task="image", model=str(tmp_path))
    if isinstance(expected, str):
        with pytest.raises(DataError, match=expected):
            ImageClassification.read(experiment)
        return
    data, *both = ImageClassification.read(experiment)
    assert data.shape[1:] == expected
    # Red has 0.299 of the brightness.
    colour = torch.tensor([200, 0, 0] if expected[1] == 3 else [60])
    numbers = (n for fields, n in NUMBERS if fields is processor)
    mean, deviation, factor = map(torch.tensor, next(numbers, (0.5, 0.5, 1 / 255)))
    pixel = ((colour * factor - mean) / deviation)[:, None, None]
    for rows in both:
        values = rows.batch(np.array([1]))["pixel_values"]
        wanted = pixel.expand(1, -1, 12, 12)
        torch.testing.assert_close(values, wanted, atol=1e-6, rtol=1e-6)


def test_images_of_an_experiment_without_a_model():
    data, train, test = ImageClassification.read(
        chosen("digits", task="image", train_limit=20, test_limit=10)
    )
    assert (len(train), len(test)) == (20, 10)
    rows = np.array([4, 2])
    assert train.lengths(rows).tolist() == [0, 0]
    values = train.batch(rows)["pixel_values"][:, 0]
    wanted = train.pixels[rows][..., 0] / 127.5 - 1
    np.testing.assert_allclose(values, wanted, atol=1e-6)
    assert train.targets(rows).tolist() == data.train.labels[rows].tolist()
