"""What a model cannot do is said before training, with the setting to change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fedrot.simulations.data.encoding import bundled_tokenizer
from tests.simulations.commands import contents, invoke

PLACES = 16
SIZES: dict[str, Any] = {
    "vocab_size": 6000,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
VISION = {**SIZES, "image_size": 16, "patch_size": 4}
del VISION["vocab_size"]
BART: dict[str, Any] = {
    **{f"{side}_{name}": 1 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")},
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}
GPT2: dict[str, Any] = {"vocab_size": 6000, "n_embd": 32, "n_layer": 1, "n_head": 2, "eos_token_id": 3}

#: Families with learned positions for ``PLACES`` tokens, and without.
LEARNED: dict[str, Any] = {
    "bert": transformers.BertConfig(**SIZES, max_position_embeddings=PLACES),
    "roberta": transformers.RobertaConfig(**SIZES, max_position_embeddings=PLACES + 2, pad_token_id=1),
    "xlm-roberta": transformers.XLMRobertaConfig(
        **SIZES, max_position_embeddings=PLACES + 1, pad_token_id=0
    ),
    "mpnet": transformers.MPNetConfig(**SIZES, max_position_embeddings=PLACES + 2, pad_token_id=1),
    "electra": transformers.ElectraConfig(**SIZES, max_position_embeddings=PLACES),
    "albert": transformers.AlbertConfig(**SIZES, embedding_size=16, max_position_embeddings=PLACES),
    "distilbert": transformers.DistilBertConfig(
        vocab_size=6000, dim=32, n_layers=1, n_heads=2, hidden_dim=64, max_position_embeddings=PLACES
    ),
    "gpt2": transformers.GPT2Config(**GPT2, n_positions=PLACES),
    "opt": transformers.OPTConfig(
        vocab_size=6000, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, ffn_dim=64,
        word_embed_proj_dim=32, max_position_embeddings=PLACES, pad_token_id=0,
    ),
    "bart": transformers.BartConfig(
        vocab_size=6000, d_model=32, **BART, max_position_embeddings=PLACES, pad_token_id=0,
        bos_token_id=2, eos_token_id=3, decoder_start_token_id=2, forced_eos_token_id=None,
    ),
}  # fmt: skip
COMPUTED: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SIZES, max_position_embeddings=PLACES, pad_token_id=None),
    "deberta": transformers.DebertaV2Config(
        **SIZES, max_position_embeddings=PLACES, relative_attention=True, position_biased_input=False
    ),
}


def save(folder: Path, config: Any, auto: Any = transformers.AutoModel, tokenizer: bool = True) -> Path:
    torch.manual_seed(0)
    auto.from_config(config).save_pretrained(folder)
    if tokenizer:
        special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "mask", "cls", "sep", "unk")}
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=bundled_tokenizer(), **special
        ).save_pretrained(folder)
    return folder


def simulate(model: Path, *options: object, dry: bool = True) -> tuple[int, str]:
    """Try a model out; nothing may be written."""
    out, before = model.parent / "out", contents(model.parent)
    small = ("--train-limit", 200, "--test-limit", 50, "--clients", 2, "--seeds", 1, "--arms", "plain")
    dry_run = ("--dry-run",) if dry else ()
    found = invoke("simulate", "--out", out, "--model", model, *small, *dry_run, *options)
    assert contents(model.parent) == before
    return found


@pytest.mark.parametrize("family", LEARNED)
def test_texts_longer_than_the_table_of_positions_are_refused(family: str, tmp_path: Path) -> None:
    model = save(tmp_path / family, LEARNED[family])
    code, output = simulate(model)
    assert code == 2
    assert f"has positions for {PLACES} tokens, but max_length is 64 and" in output
    assert f"give --max-length {PLACES}" in output
    assert simulate(model, "--max-length", PLACES)[0] == 0
    code, output = simulate(model, "--max-length", PLACES + 1)
    assert (code, f"give --max-length {PLACES}" in output) == (2, True), output


def test_a_run_without_dry_run_checks_the_same(tmp_path: Path) -> None:
    code, output = simulate(save(tmp_path / "bert", LEARNED["bert"]), dry=False)
    assert (code, f"give --max-length {PLACES}" in output) == (2, True), output


@pytest.mark.parametrize("family", COMPUTED)
def test_positions_that_are_computed_have_no_end(family: str, tmp_path: Path) -> None:
    code, output = simulate(save(tmp_path / family, COMPUTED[family]))
    assert code == 0, output


def test_a_length_that_no_text_reaches_is_fine(tmp_path: Path) -> None:
    config = transformers.BertConfig(**SIZES, max_position_embeddings=128)
    code, output = simulate(save(tmp_path / "bert", config), "--max-length", 500)
    assert code == 0, output


@pytest.mark.parametrize("task", ["classification", "mlm"])
def test_a_tokenizer_larger_than_the_embeddings_is_refused(task: str, tmp_path: Path) -> None:
    config = transformers.BertConfig(**{**SIZES, "vocab_size": 300})
    code, output = simulate(save(tmp_path / "bert", config), "--task", task)
    assert (code, "the model has embeddings for tokens 0 to 299" in output) == (2, True), output


@pytest.mark.parametrize(("task", "code"), [("classification", 0), ("mlm", 2)])
def test_masks_are_any_tokens_of_the_tokenizer(task: str, code: int, tmp_path: Path) -> None:
    """Letters have the first numbers, and some masked tokens become random ones."""
    (tmp_path / "data.csv").write_text("text,label\n" + "a b,x\nc d,y\n" * 50)
    model = save(tmp_path / "bert", transformers.BertConfig(**{**SIZES, "vocab_size": 1000}))
    found, output = simulate(model, "--task", task, "--data", tmp_path / "data.csv")
    assert (found, "has token 5999, but the model has embeddings" in output) == (code, code == 2), output


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    model = save(tmp_path / "bert", transformers.BertConfig(**SIZES), tokenizer=False)
    code, output = simulate(model)
    assert (code, "has no tokenizer; save its tokenizer.json in the same folder" in output) == (
        2,
        True,
    ), output


def test_a_head_of_other_labels_is_refused(tmp_path: Path) -> None:
    auto = transformers.AutoModelForSequenceClassification
    config = transformers.BertConfig(**SIZES, num_labels=3)
    code, output = simulate(save(tmp_path / "three", config, auto))
    said = "was saved with a task head of 3 labels, but 'goemotions_ekman' has 7"
    assert (code, said in output) == (2, True), output
    # A model without a head gets one of its own.
    code, output = simulate(save(tmp_path / "none", config))
    assert code == 0, output
    config = transformers.BertConfig(**SIZES, num_labels=7)
    code, output = simulate(save(tmp_path / "seven", config, auto))
    assert code == 0, output


@pytest.mark.parametrize(
    ("family", "task", "said"),
    [
        ("bert", "clm", "is an encoder: its outputs depend on the tokens that task 'clm' predicts"),
        ("roberta", "clm", "outputs depend on the tokens that task 'clm' predicts"),
        ("gpt2", "mlm", "of type 'gpt2' does not fit task 'mlm'"),
        ("gpt2", "clm", ""),
        ("bart", "clm", "it would be random"),
        ("llama", "clm", ""),
        ("gpt2", "classification", ""),
    ],
)
def test_a_task_for_other_models_is_refused(family: str, task: str, said: str, tmp_path: Path) -> None:
    model = save(tmp_path / family, {**LEARNED, **COMPUTED}[family])
    code, output = simulate(model, "--task", task, "--max-length", PLACES)
    assert (code, said in output) == (2 if said else 0, True), output


@pytest.mark.parametrize(("channels", "code"), [(1, 0), (3, 0), (4, 2)])
def test_images_have_one_channel_or_three(channels: int, code: int, tmp_path: Path) -> None:
    config = transformers.ViTConfig(**VISION, num_channels=channels)
    model = save(tmp_path / "vit", config, tokenizer=False)
    found, output = simulate(model, "--task", "image")
    assert (found, "takes images of 4 channels" in output) == (code, code == 2), output


def test_what_no_check_foresees_is_found_by_the_trial_step(tmp_path: Path) -> None:
    config = transformers.T5Config(
        vocab_size=6000, d_model=32, num_layers=1, num_heads=2, d_ff=64, d_kv=16, eos_token_id=5999
    )
    code, output = simulate(save(tmp_path / "t5", config))
    assert (code, "a trial step on training rows failed" in output) == (2, True), output


def test_arms_that_choose_by_held_out_rows_need_some(tmp_path: Path) -> None:
    model = save(tmp_path / "bert", LEARNED["bert"])
    options = ("--max-length", PLACES, "--arms", "aligned:loss", "--train-limit", 8, "--clients", 4)
    code, output = simulate(model, *options)
    assert (code, "arm 'aligned:loss' needs clients' held-out rows" in output) == (2, True), output
    assert simulate(model, *options, "--set", "holdout=0.5")[0] == 0
