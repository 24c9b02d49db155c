"""Inputs drawn for whatever a model reads: real models run on them, and look at all of
them.
"""

from dataclasses import replace

import pytest
import torch

from fedrot import SymmetryError, random_inputs
from fedrot.check import output_change
from fedrot.collect.random_inputs import reads_text
from fedrot.symmetry.groups import Symmetry
from tests.families import MEMBERS, VOCABULARY
from tests.models import randomise

_TEXT = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LAST = VOCABULARY - 1
#: Members of families, by name, with an end-of-text token other than the usual one.
ENDS = {"clip": LAST, "clip, first": 2, "clip-text": 3}
MODELS = (
    "bert",
    "roberta",
    "gpt2",
    "gpt2-classifier",
    "gpt2-classifier, unpadded",
    "llama",
    "t5",
    "t5-classifier",
    "t5-encoder",
    "bart",
    "bart-classifier",
    "clip",
    "clip, first",
    "clip-text",
    "vit",
    "deit",
    "clip-image",
)
IMAGES = ("vit", "deit", "clip-image")
READS_TEXT = [name for name in MODELS if name not in IMAGES]


def built(name):
    member = MEMBERS[name.partition(",")[0]]
    special = {**_TEXT, "eos_token_id": ENDS.get(name, 2)}
    special |= (
        {"pad_token_id": None} if name in ("gpt2", "gpt2-classifier, unpadded") else {}
    )
    given = {} if name in IMAGES else special
    settings = {**member.settings, **given, "max_position_embeddings": 24}
    if name.startswith("clip") and "text_config" in settings:
        settings = {
            **member.settings,
            "text_config": {**member.settings["text_config"], **given},
        }
    return randomise(replace(member, settings=settings).build("eager").double()).eval()


def batch_for(model, rows=4, **options):
    return next(random_inputs(model.config.to_dict(), rows, **options))


@pytest.mark.parametrize("name", [*IMAGES, "gpt2-classifier, unpadded"])
def test_models_of_images_and_of_one_row_run_on_what_is_drawn_for_them(
    name,
):
    model = built(name)
    change = output_change(model, model.config, Symmetry(name, 1, (), {}), ())
    assert change(lambda group: True) == 0
    assert reads_text(model.config.to_dict()) == (name in READS_TEXT)


def answer(model, batch):
    """Return all that the model computes, one row per input."""
    with torch.no_grad():
        out = model(**batch, return_dict=True)
    kept = ("logits", "text_embeds", "image_embeds", "last_hidden_state")
    found = [out[name].flatten(1) for name in kept if out.get(name) is not None]
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("name", [n for n in READS_TEXT if "unpadded" not in n])
def test_every_token_counts(name):
    """A model that looked at the first token only would hide what heads do."""
    model = built(name)
    batch = batch_for(model)
    before = answer(model, batch)
    read = batch.keys() & {"input_ids", "decoder_input_ids"}
    assert "input_ids" in read
    for name_of_ids in sorted(read):
        for place in (0, 14):
            ids = batch[name_of_ids].clone()
            ids[:, place] = 4 + (ids[:, place] - 2) % (VOCABULARY - 6)
            assert bool((ids != batch[name_of_ids])[:, place].all())
            after = answer(model, {**batch, name_of_ids: ids})
            assert bool(((after - before).abs().amax(1) > 1e-9).all()), (
                name_of_ids,
                place,
            )


@pytest.mark.parametrize("name", READS_TEXT)
def test_texts_end_where_the_model_looks(name):
    settings = built(name).config.to_dict()
    text = settings.get("text_config") or settings
    end = LAST if name == "clip, first" else text["eos_token_id"]
    batches = list(random_inputs(settings, 256))
    assert sum(len(batch["input_ids"]) for batch in batches) == 256
    for batch in batches:
        ids = batch["input_ids"]
        assert bool((ids[:, -1] == end).all())
        assert not bool((ids[:, :-1] == end).any())
        assert text["pad_token_id"] is None or not bool(
            (ids == text["pad_token_id"]).any()
        )
        assert int(ids.min()) >= 0
        assert int(ids.max()) < VOCABULARY
        assert bool((batch["attention_mask"] == 1).all())
        assert {len(value) for value in batch.values()} == {len(ids)}
        assert ("pixel_values" in batch) == (name in ("clip", "clip, first"))
        if settings.get("is_encoder_decoder"):
            # Of the same length, and other words.
            assert batch["decoder_input_ids"].shape == ids.shape
            assert not torch.equal(batch["decoder_input_ids"], ids)


def drawn(settings, *given, **options):
    return list(random_inputs(settings, *given, **options))


def test_images_are_standard_normal():
    pixels = torch.cat(
        [b["pixel_values"] for b in drawn({"image_size": 16, "patch_size": 4}, 200)]
    )
    assert (pixels.shape, pixels.dtype) == ((200, 3, 16, 16), torch.float32)
    assert float(pixels.mean()) == pytest.approx(0, abs=0.02)
    assert float(pixels.std()) == pytest.approx(1, abs=0.02)


def test_the_same_seed_gives_the_same_inputs():
    one, again, other = (
        drawn({"vocab_size": 11}, 10, batch_size=4, seed=seed) for seed in (1, 1, 2)
    )
    assert [len(batch["input_ids"]) for batch in one] == [4, 4, 2]
    for left, right in zip(one, again, strict=True):
        assert torch.equal(left["input_ids"], right["input_ids"])
    assert not torch.equal(one[0]["input_ids"], other[0]["input_ids"])


@pytest.mark.parametrize("special", [[], [0, 4, 9]])
def test_all_other_words_are_drawn_evenly(special):
    settings = {"vocab_size": 11}
    settings |= {"eos_token_id": [4, 9], "pad_token_id": 0} if special else {}
    ids = torch.cat([batch["input_ids"][:, :-1] for batch in drawn(settings, 4000)])
    assert ids.dtype == torch.int64
    counts = torch.bincount(ids.flatten(), minlength=11).double()
    assert len(counts) == 11
    assert counts[special].sum() == 0
    others = counts[counts > 0]
    assert len(others) == 11 - len(special)
    assert float(others.min()) > 0.93 * float(others.max())


@pytest.mark.parametrize("end", [None, 60, -1, [], [61, 62]])
def test_an_end_that_is_no_word_is_ignored(end):
    (plain,) = drawn({"vocab_size": 60}, 8, seed=3)
    (found,) = drawn(
        {"vocab_size": 60, "eos_token_id": end, "pad_token_id": 0}, 8, seed=3
    )
    assert torch.equal(found["input_ids"], plain["input_ids"])


@pytest.mark.parametrize(
    ("settings", "shapes"),
    [
        ({"vocab_size": 5}, {"input_ids": (3, 16)}),
        ({"vocab_size": 60, "max_position_embeddings": 8}, {"input_ids": (3, 6)}),
        ({"vocab_size": 60, "max_position_embeddings": 2}, {"input_ids": (3, 1)}),
        ({"vocab_size": 60, "n_positions": 9}, {"input_ids": (3, 7)}),
        (
            {"text_config": {"vocab_size": 60, "max_position_embeddings": 12}},
            {"input_ids": (3, 10)},
        ),
        # Models of text and boxes have both, and take no pixels of themselves.
        ({"vocab_size": 60, "image_size": 16}, {"input_ids": (3, 16)}),
        (
            {"image_size": [8, 24], "patch_size": (4, 4), "num_channels": 1},
            {"pixel_values": (3, 1, 8, 24)},
        ),
        ({"vision_config": {"image_size": 8}}, {"pixel_values": (3, 3, 8, 8)}),
    ],
)
def test_shapes_are_those_that_the_configuration_allows(settings, shapes):
    (batch,) = drawn(settings, 3)
    assert {
        k: tuple(v.shape) for k, v in batch.items() if k != "attention_mask"
    } == shapes


@pytest.mark.parametrize(
    ("settings", "key", "total", "first"),
    [
        ({"vocab_size": 60}, "input_ids", 2048, 128),
        # 64 patches, then 96, then 49 of the usual size.
        (
            {"image_size": 32, "patch_size": 4, "num_channels": 1},
            "pixel_values",
            512,
            32,
        ),
        (
            {"image_size": [48, 32], "patch_size": 4, "num_channels": 1},
            "pixel_values",
            341,
            21,
        ),
        ({"image_size": 112, "num_channels": 1}, "pixel_values", 682, 42),
    ],
)
def test_images_are_as_many_as_have_the_tokens_of_the_texts(
    settings, key, total, first
):
    sizes = [len(batch[key]) for batch in drawn(settings)]
    assert (sum(sizes), sizes[0]) == (total, first)


@pytest.mark.parametrize(
    "settings", [{}, {"model_type": "wav2vec2"}, {"text_config": None}]
)
def test_what_reads_neither_words_nor_images_is_refused(
    settings,
):
    with pytest.raises(SymmetryError, match="'vocab_size' nor"):
        drawn(settings)
