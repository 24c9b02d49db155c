"""Inputs drawn for whatever a model reads: real models run on them, and look at all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

import fedrot
from fedrot.check import output_change
from fedrot.symmetry.groups import Symmetry
from tests.models import randomise

WORDS, WIDTH = 60, 32
_TEXT = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LAYERS = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
_IMAGE = {**_LAYERS, "image_size": 16, "patch_size": 4}
_BART = {
    "d_model": WIDTH,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 40,
}
_T5 = {"d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
_GPT2 = {"n_embd": WIDTH, "n_layer": 1, "n_head": 4, "n_positions": 40}


def _clip(end: int) -> Any:
    text = {**_LAYERS, **_TEXT, "eos_token_id": end}
    return transformers.CLIPConfig(text_config=text, vision_config=_IMAGE, projection_dim=8)


def _named(name: str, config: Callable[..., Any], *settings: dict[str, Any]) -> Callable[[], Any]:
    """Return what builds the class of that name from merged settings."""
    merged = {key: value for one in settings for key, value in one.items()}
    return lambda: getattr(transformers, name)(config(**merged))


UNPADDED = {"pad_token_id": None}
MODELS: dict[str, Callable[[], Any]] = {
    "bert": _named("BertForMaskedLM", transformers.BertConfig, _TEXT, _LAYERS),
    "roberta": _named("RobertaForMaskedLM", transformers.RobertaConfig, _TEXT, _LAYERS),
    "gpt2": _named("GPT2LMHeadModel", transformers.GPT2Config, _TEXT, _GPT2, UNPADDED),
    "gpt2-classifier": _named("GPT2ForSequenceClassification", transformers.GPT2Config, _TEXT, _GPT2),
    "gpt2-unpadded": _named(
        "GPT2ForSequenceClassification", transformers.GPT2Config, _TEXT, _GPT2, UNPADDED
    ),
    "llama": _named("LlamaForCausalLM", transformers.LlamaConfig, _TEXT, _LAYERS),
    "t5": _named("T5ForConditionalGeneration", transformers.T5Config, _TEXT, _T5),
    "t5-classifier": _named("T5ForSequenceClassification", transformers.T5Config, _TEXT, _T5),
    "t5-encoder": _named("T5EncoderModel", transformers.T5Config, _TEXT, _T5),
    "bart": _named("BartForConditionalGeneration", transformers.BartConfig, _TEXT, _BART),
    "bart-classifier": _named("BartForSequenceClassification", transformers.BartConfig, _TEXT, _BART),
    "vit": _named("ViTForImageClassification", transformers.ViTConfig, _IMAGE),
    "deit": _named("DeiTForImageClassification", transformers.DeiTConfig, _IMAGE),
    "clip": lambda: transformers.CLIPModel(_clip(WORDS - 1)),
    "clip-first": lambda: transformers.CLIPModel(_clip(2)),
    "clip-text": lambda: transformers.CLIPTextModelWithProjection(_clip(3).text_config),
    "clip-vision": lambda: transformers.CLIPVisionModelWithProjection(_clip(3).vision_config),
}
READS_TEXT = [name for name in MODELS if name not in ("vit", "deit", "clip-vision")]


def _built(name: str) -> Any:
    return randomise(MODELS[name]().double()).eval()


def _batch(model: Any, rows: int = 4, **options: Any) -> dict[str, torch.Tensor]:
    return next(fedrot.random_inputs(model.config.to_dict(), rows, **options))


@pytest.mark.parametrize("name", MODELS)
def test_models_run_on_what_is_drawn_for_them(name: str) -> None:
    model = _built(name)
    nothing = Symmetry(name, 1, (), {})
    change = output_change(model, model.config, nothing, ())
    assert change(lambda group: True) == 0
    if name != "gpt2-unpadded":  # takes one row at a time
        with torch.no_grad():
            model(**_batch(model))


def _answer(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return all that the model computes, one row per input."""
    with torch.no_grad():
        out = model(**batch, return_dict=True)
    kept = ("logits", "text_embeds", "image_embeds", "last_hidden_state")
    found = [out[name].flatten(1) for name in kept if out.get(name) is not None]
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("name", [n for n in READS_TEXT if n != "gpt2-unpadded"])
def test_every_token_counts(name: str) -> None:
    """A model that looked at the first token only would hide what heads do."""
    model = _built(name)
    batch = _batch(model)
    before = _answer(model, batch)
    read = batch.keys() & {"input_ids", "decoder_input_ids"}
    assert "input_ids" in read
    for name_of_ids in sorted(read):
        for place in (0, 7, 14):
            ids = batch[name_of_ids].clone()
            ids[:, place] = 3 + (ids[:, place] - 2) % (WORDS - 5)
            assert bool((ids != batch[name_of_ids])[:, place].all())
            after = _answer(model, {**batch, name_of_ids: ids})
            assert bool(((after - before).abs().amax(1) > 1e-9).all()), (name_of_ids, place)


@pytest.mark.parametrize("name", ["vit", "deit", "clip", "clip-vision"])
def test_images_are_standard_normal(name: str) -> None:
    model = _built(name)
    pixels = _batch(model, 200, batch_size=200)["pixel_values"]
    assert (pixels.shape, pixels.dtype) == ((200, 3, 16, 16), torch.float32)
    assert float(pixels.mean()) == pytest.approx(0, abs=0.02)
    assert float(pixels.std()) == pytest.approx(1, abs=0.02)


def test_clip_reads_both_side_by_side() -> None:
    batches = list(fedrot.random_inputs(_clip(59).to_dict(), 10, batch_size=4))
    for batch, rows in zip(batches, (4, 4, 2), strict=True):
        assert batch.keys() == {"input_ids", "attention_mask", "pixel_values"}
        assert {len(value) for value in batch.values()} == {rows}


@pytest.mark.parametrize("name", READS_TEXT)
def test_texts_end_where_the_model_looks(name: str) -> None:
    model = _built(name)
    settings = model.config.to_dict()
    text = settings.get("text_config") or settings
    ends = {"clip": WORDS - 1, "clip-first": WORDS - 1}.get(name, text["eos_token_id"])
    batches = list(fedrot.random_inputs(settings, 256))
    assert sum(len(batch["input_ids"]) for batch in batches) == 256
    for batch in batches:
        ids = batch["input_ids"]
        assert bool((ids[:, -1] == ends).all())
        assert not bool((ids[:, :-1] == ends).any())
        assert text["pad_token_id"] is None or not bool((ids == text["pad_token_id"]).any())
        assert int(ids.min()) >= 0
        assert int(ids.max()) < WORDS


def test_all_other_words_are_drawn_evenly() -> None:
    settings = {"vocab_size": 11, "eos_token_id": [4, 9], "pad_token_id": 0}
    ids = torch.cat([batch["input_ids"][:, :-1] for batch in fedrot.random_inputs(settings, 4000)])
    counts = torch.bincount(ids.flatten(), minlength=11).double()
    assert counts[[0, 4, 9]].sum() == 0
    others = counts[counts > 0]
    assert len(others) == 8
    assert float(others.min()) > 0.93 * float(others.max())


@pytest.mark.parametrize("end", [None, 60, -1, [], [61, 62]])
def test_an_end_that_is_no_word_is_ignored(end: Any) -> None:
    settings = {"vocab_size": 60, "eos_token_id": end, "pad_token_id": 0}
    plain = next(fedrot.random_inputs({"vocab_size": 60}, 8, seed=3))
    assert torch.equal(next(fedrot.random_inputs(settings, 8, seed=3))["input_ids"], plain["input_ids"])


def test_decoders_read_words_of_their_own() -> None:
    batch = _batch(_built("t5"), 8)
    assert batch["decoder_input_ids"].shape == batch["input_ids"].shape == (8, 16)
    assert not torch.equal(batch["decoder_input_ids"], batch["input_ids"])


def test_vocabularies_may_lie_inside() -> None:
    nested = {"text_config": {"vocab_size": 60, "max_position_embeddings": 12}}
    assert next(fedrot.random_inputs(nested, 3))["input_ids"].shape == (3, 10)
    # Models of text and boxes have both, and take no pixels of themselves.
    assert "pixel_values" not in next(fedrot.random_inputs({"vocab_size": 60, "image_size": 16}, 3))


def test_positions_may_be_called_otherwise() -> None:
    settings = {"vocab_size": 60, "n_positions": 9}
    assert next(fedrot.random_inputs(settings, 3))["input_ids"].shape == (3, 7)


def test_images_may_be_oblong() -> None:
    settings = {"image_size": [8, 24], "patch_size": (4, 4), "num_channels": 1}
    assert next(fedrot.random_inputs(settings, 3))["pixel_values"].shape == (3, 1, 8, 24)


def test_images_are_as_many_as_have_the_tokens_of_the_texts() -> None:
    texts = list(fedrot.random_inputs({"vocab_size": 60}))
    assert sum(len(batch["input_ids"]) for batch in texts) == 2048
    assert len(texts[0]["input_ids"]) == 128
    settings = {"image_size": 32, "patch_size": 4, "num_channels": 1}  # 64 patches
    images = [len(batch["pixel_values"]) for batch in fedrot.random_inputs(settings)]
    assert (sum(images), images[0]) == (512, 32)


@pytest.mark.parametrize("settings", [{}, {"model_type": "wav2vec2"}, {"text_config": None}])
def test_what_reads_neither_words_nor_images_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(fedrot.SymmetryError, match="neither a 'vocab_size' nor an 'image_size'"):
        next(fedrot.random_inputs(settings))
