"""Small real ``transformers`` models of every supported family, all parameters random
and non-zero.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers

import fedrot
from fedrot.check import Float64
from tests.models import randomise, with_separate_tables

VOCABULARY = 40

_ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 24,
    "num_labels": 3,
}
_IMAGE = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "image_size": 8,
    "patch_size": 4,
    "num_labels": 3,
}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 24,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 3,
    "d_kv": 6,
    "d_ff": 20,
    "relative_attention_num_buckets": 8,
    "num_labels": 3,
    "decoder_start_token_id": 0,
}
_BART = {
    "vocab_size": VOCABULARY,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 16,
    "max_position_embeddings": 24,
    "num_labels": 3,
}
_DECODER = {
    **_ENCODER,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
}
_DECODER |= {"pad_token_id": 0}
_TEXT = {k: v for k, v in _ENCODER.items() if k != "num_labels"} | {
    "eos_token_id": VOCABULARY - 1
}
_VISION = {k: v for k, v in _IMAGE.items() if k != "num_labels"}
_CLIP = {
    "text_config": _TEXT,
    "vision_config": _VISION,
    "projection_dim": 8,
}
_RELATIVE = {
    "relative_attention": True,
    "max_relative_positions": 6,
    "pooler_hidden_size": 24,
}
_BOTH = {**_RELATIVE, "pos_att_type": ["c2p", "p2c"]}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 24,
    "n_layer": 2,
    "n_head": 3,
    "n_inner": 20,
    "n_positions": 24,
    "num_labels": 3,
    "pad_token_id": 0,
}

_GPTJ = {**_GPT2, "rotary_dim": 4}
_FALCON = {
    **_ENCODER,
    "num_attention_heads": 4,
    "ffn_hidden_size": 20,
    "pad_token_id": 0,
}
_BLOOM = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "n_layer": 2,
    "n_head": 3,
    "num_labels": 3,
    "pad_token_id": 0,
}
#: The grouped product of experts has no float64.
_MIXTRAL = {**_DECODER, "num_experts_per_tok": 2, "experts_implementation": "eager"}
_OPT = {k: v for k, v in _ENCODER.items() if k != "intermediate_size"}
_OPT |= {"ffn_dim": 20, "word_embed_proj_dim": 12}
_XGLM = {
    "vocab_size": VOCABULARY,
    "d_model": 24,
    "num_layers": 2,
    "attention_heads": 3,
    "ffn_dim": 20,
    "max_position_embeddings": 24,
}


@dataclass(frozen=True)
class Member:
    """One model of a family.

    Attributes:
        model: class name without ``Config`` or task, as in transformers.
        task: the rest of the class name.
        settings: of the configuration.
        takes: ``text``, ``pair`` (encoder and decoder), ``image`` or ``clip``.
        config: class name of the configuration if it is not ``model`` + ``Config``.
        attention: the implementations of attention that it has on a CPU.
        bare: whether its outputs are in coordinates of the residual stream.
        default_dtype: whether it makes tensors of the default dtype, which float64
            numbers overflow.
    """

    model: str
    task: str
    settings: Mapping[str, Any]
    takes: str = "text"
    config: str = ""
    attention: tuple[str, ...] = ("eager", "sdpa")
    bare: bool = False
    default_dtype: bool = False

    def build(self, attention):
        """Return the model as transformers initialises it, float32."""
        config = getattr(transformers, f"{self.config or self.model}Config")(
            **self.settings
        )
        config._attn_implementation = attention
        return getattr(transformers, f"{self.model}{self.task}")._from_config(
            config, attn_implementation=attention
        )


_CLASSIFIER, _MLM, _CAUSAL = "ForSequenceClassification", "ForMaskedLM", "ForCausalLM"
_EAGER = ("eager",)

MEMBERS = {
    "bert": Member("Bert", _CLASSIFIER, _ENCODER),
    "roberta": Member("Roberta", _MLM, _ENCODER),
    "camembert": Member("Camembert", _CLASSIFIER, _ENCODER),
    "electra": Member("Electra", "ForPreTraining", {**_ENCODER, "embedding_size": 12}),
    "mpnet": Member("MPNet", _CLASSIFIER, _ENCODER, attention=_EAGER),
    "mpnet-mlm": Member("MPNet", _MLM, _ENCODER, attention=_EAGER),
    "albert": Member("Albert", _CLASSIFIER, {**_ENCODER, "embedding_size": 12}),
    "albert-groups": Member(
        "Albert",
        _MLM,
        {
            **_ENCODER,
            "embedding_size": 12,
            "num_hidden_groups": 2,
            "inner_group_num": 2,
        },
    ),
    "deberta": Member("Deberta", _CLASSIFIER, {**_ENCODER, **_BOTH}, attention=_EAGER),
    "deberta-c2p": Member(
        "Deberta",
        _MLM,
        {**_ENCODER, **_RELATIVE, "pos_att_type": "c2p"},
        attention=_EAGER,
    ),
    "deberta-embedding": Member(
        "Deberta",
        "ForTokenClassification",
        {**_ENCODER, **_BOTH, "embedding_size": 12},
        attention=_EAGER,
    ),
    "deberta-v2": Member(
        "DebertaV2",
        _CLASSIFIER,
        {**_ENCODER, **_BOTH, "share_att_key": False},
        attention=_EAGER,
    ),
    "deberta-v2-conv": Member(
        "DebertaV2",
        _CLASSIFIER,
        {
            **_ENCODER,
            **_BOTH,
            "share_att_key": False,
            "conv_kernel_size": 3,
            "conv_act": "gelu",
            "norm_rel_ebd": "layer_norm",
            "position_biased_input": False,
            "type_vocab_size": 2,
        },
        attention=_EAGER,
    ),
    "deberta-v3": Member(
        "DebertaV2",
        _MLM,
        {
            **_ENCODER,
            **_BOTH,
            "share_att_key": True,
            "position_buckets": 4,
            "norm_rel_ebd": "layer_norm",
        },
        attention=_EAGER,
    ),
    "deberta-v3-new": Member(
        "DebertaV2",
        _MLM,
        {**_ENCODER, **_BOTH, "share_att_key": True, "legacy": False},
        attention=_EAGER,
    ),
    "t5": Member("T5", "ForConditionalGeneration", _T5, "pair"),
    "t5-gated": Member(
        "T5",
        "ForConditionalGeneration",
        {**_T5, "feed_forward_proj": "gated-gelu"},
        "pair",
    ),
    "t5-classifier": Member(
        "T5", _CLASSIFIER, {**_T5, "feed_forward_proj": "gated-gelu"}
    ),
    "mt5": Member(
        "MT5", "ForConditionalGeneration", {**_T5, "num_decoder_layers": 1}, "pair"
    ),
    "t5-encoder": Member("T5", "EncoderModel", _T5, bare=True),
    "bart": Member("Bart", "ForConditionalGeneration", _BART, "pair"),
    "bart-classifier": Member("Bart", _CLASSIFIER, _BART),
    "vit": Member("ViT", "ForImageClassification", _IMAGE, "image"),
    "vit-plain": Member(
        "ViT", "ForImageClassification", {**_IMAGE, "qkv_bias": False}, "image"
    ),
    "deit": Member("DeiT", "ForImageClassificationWithTeacher", _IMAGE, "image"),
    "clip": Member("CLIP", "Model", _CLIP, "clip"),
    "clip-classifier": Member(
        "CLIP", "ForImageClassification", {**_CLIP, "num_labels": 3}, "image"
    ),
    "clip-text": Member(
        "CLIP",
        "TextModelWithProjection",
        {**_TEXT, "projection_dim": 8},
        config="CLIPText",
    ),
    "clip-image": Member(
        "CLIP",
        "VisionModelWithProjection",
        {**_VISION, "projection_dim": 8},
        "image",
        config="CLIPVision",
    ),
    "clip-text-bare": Member("CLIP", "TextModel", _TEXT, config="CLIPText", bare=True),
    "gpt2": Member("GPT2", "LMHeadModel", _GPT2),
    "gpt2-classifier": Member("GPT2", _CLASSIFIER, _GPT2),
    "gpt-neox": Member(
        "GPTNeoX",
        _CAUSAL,
        {
            **_ENCODER,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "gpt-neox-odd": Member(
        "GPTNeoX", "ForTokenClassification", {**_ENCODER, "hidden_size": 36}
    ),
    "gpt-neox-tokens": Member(
        "GPTNeoX", "ForTokenClassification", {**_ENCODER, "attention_bias": False}
    ),
    "gptj": Member("GPTJ", _CAUSAL, _GPTJ, attention=_EAGER),
    "gptj-whole": Member(
        "GPTJ", _CLASSIFIER, {**_GPTJ, "rotary_dim": 8}, attention=_EAGER
    ),
    "falcon-7b": Member("Falcon", _CAUSAL, _FALCON),
    "falcon-11b": Member(
        "Falcon",
        _CLASSIFIER,
        {
            **_FALCON,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
        },
    ),
    "falcon-40b": Member(
        "Falcon",
        _CAUSAL,
        {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "falcon-rw": Member(
        "Falcon",
        "ForTokenClassification",
        {
            **_FALCON,
            "multi_query": False,
            "parallel_attn": False,
            "alibi": True,
            "bias": True,
        },
    ),
    "bloom": Member("Bloom", _CAUSAL, _BLOOM, attention=_EAGER),
    "opt": Member("OPT", _CAUSAL, {**_OPT, "word_embed_proj_dim": 24}),
    "opt-open": Member(
        "OPT",
        _CAUSAL,
        {**_OPT, "word_embed_proj_dim": 24, "_remove_final_layer_norm": True},
    ),
    "opt-projected": Member(
        "OPT", _CLASSIFIER, {**_OPT, "do_layer_norm_before": False}
    ),
    "xglm": Member("XGLM", _CAUSAL, _XGLM, attention=_EAGER, default_dtype=True),
    "llama": Member("Llama", _CAUSAL, _DECODER),
    "llama-biased": Member(
        "Llama",
        _CLASSIFIER,
        {
            **_DECODER,
            "attention_bias": True,
            "mlp_bias": True,
            "num_key_value_heads": 4,
        },
    ),
    # The model does not heed the factor: it turns whole heads.
    "llama-factor": Member(
        "Llama", _CAUSAL, {**_DECODER, "partial_rotary_factor": 0.5}
    ),
    "mistral": Member(
        "Mistral", "ForQuestionAnswering", {**_DECODER, "num_key_value_heads": 1}
    ),
    "qwen2": Member("Qwen2", _CLASSIFIER, {**_DECODER, "tie_word_embeddings": True}),
    "qwen3": Member("Qwen3", _CAUSAL, {**_DECODER, "attention_bias": True}),
    "gemma3": Member(
        "Gemma3", _CAUSAL, {**_DECODER, "sliding_window": 4}, config="Gemma3Text"
    ),
    "mixtral": Member("Mixtral", _CAUSAL, {**_MIXTRAL, "num_local_experts": 3}),
    "phi3": Member(
        "Phi3", _CAUSAL, {k: v for k, v in _DECODER.items() if k != "head_dim"}
    ),
    "phi3-partial": Member(
        "Phi3",
        _CLASSIFIER,
        {
            **{k: v for k, v in _DECODER.items() if k != "head_dim"},
            "hidden_size": 32,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "modernbert": Member("ModernBert", _MLM, {**_ENCODER, "pad_token_id": 0}),
    "modernbert-biased": Member(
        "ModernBert",
        _CLASSIFIER,
        {
            **_ENCODER,
            "pad_token_id": 0,
            "attention_bias": True,
            "mlp_bias": True,
            "norm_bias": True,
            "classifier_bias": True,
        },
    ),
}


#: One member of each kind of structure, or all of them (``make test-all``, for changes
#: of a family). That moves preserve the function is always tested with every member.
KINDS = (
    tuple(MEMBERS)
    if os.environ.get("FEDROT_TEST_ALL")
    else (
        "bert",
        "albert",
        "deberta-v3",
        "modernbert",
        "vit",
        "bart",
        "t5-gated",
        "gpt2",
        "gpt-neox",
        "gptj",
        "bloom",
        "opt-projected",
        "llama",
        "gemma3",
        "mixtral",
    )
)

#: Members whose heads have slopes of their own.
ALIBI = ("falcon-rw", "bloom")
#: Members with positions that are no parameters, which hold the residual stream where
#: it is.
FIXED = ("xglm",)


def _float64_by_default(*_):
    torch.set_default_dtype(torch.float64)


def _float32_by_default(*_):
    torch.set_default_dtype(torch.float32)


@cache
def _model(name, attention):
    model = randomise(MEMBERS[name].build(attention).double()).eval()
    if MEMBERS[name].default_dtype:
        model.register_forward_pre_hook(_float64_by_default)
        model.register_forward_hook(_float32_by_default, always_call=True)
    return model


def config_of(name):
    """Return the configuration of a member."""
    return _model(name, "eager").config


@cache
def _state(name, seed):
    model = randomise(copy.deepcopy(_model(name, "eager")), seed)
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def state_of(name, seed=0):
    """Return a private copy of a member's random float64 state dict."""
    return {key: value.clone() for key, value in _state(name, seed).items()}


def symmetry_for(name):
    """Return the symmetry of a member."""
    return fedrot.symmetry_of(config_of(name), state_of(name))


def model_of(name, tensors=None, attention="eager"):
    """Return a float64 model of its own with these tensors, random ones if None."""
    model = copy.deepcopy(_model(name, attention))
    if tensors is not None:
        model.load_state_dict(dict(tensors))
    return model


def inputs(name, rows=2):
    """Return rows of inputs, texts padded on the right in every second row."""
    generator = torch.Generator().manual_seed(7)
    takes = MEMBERS[name].takes
    config = config_of(name)
    batch = {}
    if takes in ("image", "clip"):
        batch["pixel_values"] = torch.randn(
            rows, 3, 8, 8, generator=generator, dtype=torch.float64
        )
    if takes != "image":
        end = min(getattr(config, "eos_token_id", None) or VOCABULARY, VOCABULARY - 1)
        ids = torch.randint(4, VOCABULARY - 1, (rows, 9), generator=generator)
        mask = torch.ones_like(ids)
        mask[1::2, 6:] = 0
        ids[0::2, -1] = ids[1::2, 5] = end
        padding = getattr(config, "pad_token_id", None)
        batch["input_ids"] = torch.where(
            mask.bool(), ids, 1 if padding is None else padding
        )
        batch["attention_mask"] = mask
    if takes == "pair":
        batch["decoder_input_ids"] = torch.randint(
            4, VOCABULARY, (rows, 5), generator=generator
        )
    return batch


def answers(name, model, rows=2):
    """Return what a member computes from its inputs, flat: logits, scores,
    embeddings.
    """
    with Float64():
        found = model(**inputs(name, rows))
    wanted = (
        "logits",
        "start_logits",
        "end_logits",
        "logits_per_text",
        "text_embeds",
        "image_embeds",
    )
    wanted += (
        ("cls_logits", "distillation_logits", "last_hidden_state")
        if MEMBERS[name].bare
        else ()
    )
    seen = [found[key].flatten() for key in wanted if key in found]
    assert seen
    return torch.cat(seen)


@cache
def _loaded(name, attention):
    """Return a model whose tied tensors became separate ones, as canonical tensors need
    it.
    """
    return with_separate_tables(model_of(name, attention=attention))


def outputs(name, tensors, attention="eager"):
    """Return what the model with these tensors computes; see ``answers``."""
    model = _loaded(name, attention)
    model.load_state_dict(dict(tensors))
    with torch.no_grad():
        return answers(name, model)
