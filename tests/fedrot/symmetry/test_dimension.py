"""The continuous group of every family, and what it leaves out, add up to all flat directions.

The Jacobian of a small model's outputs with respect to all of its parameters has as many directions
without effect as the model has continuous symmetries, claimed or not. What is not claimed is written
down here by name and counted by formula. Most of it stretches weights, which changes what weight decay
and Adam see; of what does not, rotations of DeBERTa's relative positions are the largest.

Norms have a large epsilon: a small one would make scales of a stream, and of queries and keys under a
norm, all but flat. Tables have more rows than columns, so that no direction is unseen by accident.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import fedrot
from fedrot.precision import Float64
from fedrot.symmetry.actions import HeadRotation, Kind, Rescale
from fedrot.symmetry.rotary_actions import RotaryPhases
from tests.fedrot.oracles import seeded
from tests.models import randomise

LAYERS, WIDTH, HEADS, DIM, NEURONS, EXPERTS = 2, 8, 2, 4, 6, 2
TOKENS, LENGTH, TYPES, LABELS = 24, 7, 2, 3
SMALLER = 6  # width of embeddings that are projected to the stream
PROJECTED = 5  # width of what CLIP's towers are projected to
SIDE, PATCHES = 3, 4  # of a patch, and of an image
PARTS = 10  # of a batch
FAR = 7000  # positions of XGLM

Counts = Mapping[str, int]

# Inputs


def _ids(rows: int, first: int = 0) -> Tensor:
    return torch.randint(first, TOKENS, (rows, LENGTH), generator=seeded(first + rows))


def _text(rows: int = 100) -> dict[str, Tensor]:
    return {"input_ids": _ids(rows)}


def _typed(rows: int = 60) -> dict[str, Tensor]:
    return {**_text(rows), "token_type_ids": torch.randint(TYPES, (rows, LENGTH), generator=seeded(1))}


def _unpadded() -> dict[str, Tensor]:
    """MPNet counts positions from its padding token, 1."""
    return {"input_ids": _ids(60, first=2)}


def _pair() -> dict[str, Tensor]:
    return {"input_ids": _ids(30), "decoder_input_ids": _ids(31)[:30]}


def _ended() -> dict[str, Tensor]:
    """CLIP reads a text at its end, the largest token."""
    ids = _ids(200)
    ids[ids == TOKENS - 1] = 0
    ids[:, -1] = TOKENS - 1
    return {"input_ids": ids}


def _image(rows: int = 300) -> dict[str, Tensor]:
    size = 2 * SIDE
    return {"pixel_values": torch.randn(rows, 1, size, size, generator=seeded(2), dtype=torch.float64)}


def _spread() -> dict[str, Tensor]:
    """Sinusoids of neighbouring positions are all but linear: the stream could all but turn."""
    ids = _ids(30)
    positions = (FAR // LENGTH * torch.arange(LENGTH)).expand_as(ids)
    # Without a mask, positions that jump are those of several texts.
    return {"input_ids": ids, "position_ids": positions, "attention_mask": torch.ones_like(ids)}


# Settings

_ENCODER = {
    "vocab_size": TOKENS,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": NEURONS,
    "max_position_embeddings": LENGTH,
    "type_vocab_size": TYPES,
    "num_labels": LABELS,
    "pad_token_id": None,
}
_DECODER = {k: v for k, v in _ENCODER.items() if k != "type_vocab_size"}
#: As many key heads as other models have heads, each shared by two query heads.
_GROUPED = {**_DECODER, "num_attention_heads": 2 * HEADS, "num_key_value_heads": HEADS, "head_dim": DIM}
_DISTIL = {"vocab_size": TOKENS, "dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS}
_DISTIL |= {"hidden_dim": NEURONS, "max_position_embeddings": LENGTH, "num_labels": LABELS}
#: MPNet's buckets of distances are 32 whatever it is told.
_MPNET = {**_ENCODER, "max_position_embeddings": LENGTH + 2, "pad_token_id": 1}
_RELATIVE = {
    "relative_attention": True,
    "max_relative_positions": LENGTH,
    "pos_att_type": ["c2p", "p2c"],
}
_T5 = {
    "vocab_size": TOKENS,
    "d_model": WIDTH,
    "num_layers": 1,
    "num_decoder_layers": 1,
    "num_heads": HEADS,
    "d_kv": DIM,
    "d_ff": NEURONS,
    "relative_attention_num_buckets": 4,
    "relative_attention_max_distance": 4,
    "decoder_start_token_id": 0,
}
_BART = {
    "vocab_size": TOKENS,
    "d_model": WIDTH,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": NEURONS,
    "decoder_ffn_dim": NEURONS,
    "max_position_embeddings": LENGTH,
}
_GPT2 = {"vocab_size": TOKENS, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
_GPT2 |= {"n_inner": NEURONS, "n_positions": LENGTH, "num_labels": LABELS}
_OPT = {k: v for k, v in _DECODER.items() if k != "intermediate_size"}
_OPT |= {"ffn_dim": NEURONS, "word_embed_proj_dim": WIDTH, "tie_word_embeddings": False}
_XGLM = {"vocab_size": TOKENS, "d_model": WIDTH, "num_layers": LAYERS, "attention_heads": HEADS}
_XGLM |= {"ffn_dim": NEURONS, "max_position_embeddings": FAR, "pad_token_id": None}
_HALF_ROTARY = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
_FALCON = {**_DECODER, "ffn_hidden_size": NEURONS}
_VISION = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": NEURONS,
    "image_size": 2 * SIDE,
    "patch_size": SIDE,
    "num_channels": 1,
}

# What is left unused, by name

GL = "rest of GL(d_h) in each head"
KEY, VALUE = "biases of keys", "biases of values, which the output's can take up"
FREQUENCIES = "a scale per rotary frequency"
BIASES, GAINS = "biases of norms, folded into what reads them", "gains, likewise"
ROWS = "rows of what reads a LayerNorm, whose outputs before gain and bias add up to zero"
MEAN = "the mean of the stream, which no LayerNorm sees, in what writes to it"
TRADED = "constants that writers trade, beside their mean"
ROTATED = "rotations of a stream whose gains are folded"
NEURON_SCALES = "scales of neurons that a ReLU or a gate lets pass"
UNREAD = "rows of tables that nothing reads"
SHIFTED = "constants of the relative positions"

#: Writers along the mean: columns and bias of the attention's output and the feed-forward's.
_OUT, _DOWN = WIDTH + 1, NEURONS + 1
#: Readers, by row.
_QKV = 3 * WIDTH
#: Per head: all of GL(d_h) but the rotations and the one scale that are claimed.
_REST = DIM * (DIM + 1) // 2 - 1
_NORMS = 2 * LAYERS + 1
_PARALLEL = LAYERS + 1  # where one norm is read by attention and feed-forward
_EMBEDDED = TOKENS + LENGTH
#: Rotations of all that a LayerNorm sees, and an RMSNorm.
_CENTRED, _ALL = (WIDTH - 1) * (WIDTH - 2) // 2, WIDTH * (WIDTH - 1) // 2


def _attention(blocks: int = LAYERS) -> dict[str, int]:
    """Plain attention with all biases."""
    return {GL: blocks * 2 * HEADS * _REST, KEY: blocks * WIDTH, VALUE: blocks * WIDTH}


_BERT = {
    **_attention(),
    BIASES: _NORMS * WIDTH,
    GAINS: WIDTH,  # of the last norm: the others' outputs are also added to
    ROWS: LAYERS * (_QKV + NEURONS) + LABELS,
    MEAN: _EMBEDDED + TYPES + LAYERS * (_OUT + _DOWN),
    TRADED: 2 * (WIDTH - 1),
}
#: Embeddings in a space of their own, whose norm is read by a projection alone.
_SMALLER = {
    "biases and gains of the norm of the embeddings": 2 * SMALLER,
    "rotations of the embeddings": (SMALLER - 1) * (SMALLER - 2) // 2,
    "rows of their projection": WIDTH,
    "the mean of the embeddings, and constants that they trade": _EMBEDDED + TYPES + 2 * (SMALLER - 1),
}
_DEBERTA = {
    **_BERT,
    "GL(d) of the relative positions, which their projections undo": WIDTH * WIDTH,
    SHIFTED: WIDTH,
    UNREAD: WIDTH,
}
_LLAMA = {
    FREQUENCIES: LAYERS * HEADS * (DIM // 2 - 1),
    GL: LAYERS * HEADS * _REST,
    GAINS: _NORMS * WIDTH,
    NEURON_SCALES: LAYERS * NEURONS,
    ROTATED: _ALL,
}
_T5_UNUSED = {
    GL: 3 * 2 * HEADS * _REST,
    GAINS: 6 * WIDTH,  # the last is read by the embeddings' table
    NEURON_SCALES: 2 * NEURONS,
    SHIFTED: 2 * HEADS,
    UNREAD: HEADS,  # the bucket of a distance 0 ahead
}
_PRENORM = {
    **_attention(),
    BIASES: _NORMS * WIDTH,
    GAINS: _NORMS * WIDTH,
    ROWS: LAYERS * (_QKV + NEURONS) + LABELS,
    ROTATED: _CENTRED,
}
#: Projections have no biases; their rows serve as such for constants from the norm before.
_FALCON_UNUSED = {ROWS: LABELS, MEAN: TOKENS + LAYERS * (WIDTH + NEURONS), ROTATED: _CENTRED}
#: Projections have no bias; their rows serve as one for the last norm's.
_CLIP = {k: v for k, v in _PRENORM.items() if k != ROTATED} | {ROWS: _PRENORM[ROWS] - LABELS}


@dataclass(frozen=True)
class Case:
    """One small model, and the dimensions that its family leaves unused.

    Attributes:
        model, task, config: names of classes as in transformers.
        settings: of the configuration.
        batch: its inputs.
        unused: by name.
        read: its outputs.
        seed: of its parameters.
    """

    model: str
    task: str
    settings: Mapping[str, Any]
    batch: Callable[[], dict[str, Tensor]]
    unused: Counts
    read: Callable[[Any], list[Tensor]] = lambda found: [found.logits]
    config: str = ""
    seed: int = 0


_TOKENS, _CAUSAL, _PAIR = "ForTokenClassification", "ForCausalLM", "ForConditionalGeneration"

CASES: dict[str, Case] = {
    "bert": Case("Bert", _TOKENS, _ENCODER, _typed, _BERT),
    "distilbert": Case(
        "DistilBert",
        _TOKENS,
        _DISTIL,
        _text,
        {**_BERT, MEAN: _BERT[MEAN] - TYPES, TRADED: WIDTH - 1},
    ),
    "electra": Case(
        "Electra",
        _TOKENS,
        {**_ENCODER, "embedding_size": SMALLER},
        _typed,
        {
            **_BERT,
            **_SMALLER,
            # The projection's bias serves as the first norm's.
            ROWS: _BERT[ROWS] + _QKV * (WIDTH - SMALLER),
            # The projection can write to the mean as long as the first layer's rows undo it.
            MEAN: LAYERS * (_OUT + _DOWN) + SMALLER - 1,
            TRADED: 0,
        },
    ),
    "mpnet": Case(
        "MPNet",
        _TOKENS,
        _MPNET,
        _unpadded,
        {
            **_BERT,
            MEAN: _BERT[MEAN] - TYPES - 2,
            TRADED: WIDTH - 1,
            SHIFTED: HEADS,
            UNREAD: HEADS * (32 - 2 * LENGTH + 1) + 4 * WIDTH,
        },
    ),
    "albert": Case(
        "Albert",
        _TOKENS,
        {**_ENCODER, "embedding_size": SMALLER},
        _typed,
        {
            **_attention(1),
            **_SMALLER,
            BIASES: 2 * WIDTH,
            # Queries, keys and values read the projected embeddings too, which have no zero mean.
            ROWS: NEURONS + LABELS,
            MEAN: _OUT + _DOWN,
            "the mean of the projected embeddings, against that of the layers' outputs": 1,
        },
    ),
    "deberta": Case(
        "Deberta",
        _TOKENS,
        {**_ENCODER, **_RELATIVE},
        _typed,
        # Keys have no bias; their rows serve as one for constants from the norm before.
        {**_DEBERTA, KEY: 0, ROWS: _BERT[ROWS] - LAYERS * WIDTH},
    ),
    "deberta-v2": Case(
        "DebertaV2",
        _TOKENS,
        {**_ENCODER, **_RELATIVE, "share_att_key": False},
        _typed,
        {**_DEBERTA, KEY: 0, "biases of the positions' keys": LAYERS * WIDTH},
    ),
    "deberta-v3": Case(
        "DebertaV2",
        _TOKENS,
        {**_ENCODER, **_RELATIVE, "share_att_key": True},
        _typed,
        {
            **_BERT,
            KEY: 0,
            # What layers read shifts together with the relative positions, which all layers share.
            BIASES: (LAYERS + 2) * WIDTH,
            ROWS: _BERT[ROWS] - LAYERS * 2 * WIDTH,
            UNREAD: WIDTH,
        },
    ),
    "t5": Case("T5", _PAIR, _T5, _pair, _T5_UNUSED),
    "t5-gated": Case("T5", _PAIR, {**_T5, "feed_forward_proj": "gated-gelu"}, _pair, _T5_UNUSED),
    "bart": Case(
        "Bart",
        _PAIR,
        _BART,
        _pair,
        {
            **_attention(3),
            BIASES: 6 * WIDTH,  # the last is read by the embeddings' table
            GAINS: WIDTH,  # of the encoder's last norm
            ROWS: 3 * _QKV + 2 * NEURONS,
            MEAN: 2 * LENGTH + 3 * _OUT + 2 * _DOWN,
            UNREAD: 2 * 2 * WIDTH,
        },
    ),
    "vit": Case(
        "ViT",
        "ForImageClassification",
        {**_VISION, "num_labels": LABELS},
        _image,
        {
            **_PRENORM,
            # Pixels of a patch and their bias, class, positions.
            MEAN: SIDE**2 + 1 + 1 + PATCHES + 1 + LAYERS * (_OUT + _DOWN),
            TRADED: 2 * (WIDTH - 1),
        },
    ),
    "clip-text": Case(
        "CLIP",
        "TextModelWithProjection",
        {**_DECODER, "eos_token_id": TOKENS - 1, "projection_dim": PROJECTED},
        _ended,
        {
            **_CLIP,
            MEAN: _EMBEDDED + LAYERS * (_OUT + _DOWN),
            # The token that ends a text stands at its end alone: it trades with that position.
            TRADED: 2 * (WIDTH - 1),
            ROTATED: _CENTRED,
        },
        read=lambda found: [found.text_embeds],
        config="CLIPText",
    ),
    "clip-image": Case(
        "CLIP",
        "VisionModelWithProjection",
        {**_VISION, "projection_dim": PROJECTED},
        _image,
        {
            **_CLIP,
            # Pixels, class, positions, and the bias of the norm before the layers.
            MEAN: SIDE**2 + 1 + PATCHES + 1 + 1 + LAYERS * (_OUT + _DOWN),
            TRADED: WIDTH - 1,
            # That norm's gain, with rotations of what it reads and of the stream: 8 + 2 * 21 - 7 * 7.
            "rotations around a gain": WIDTH + 2 * _CENTRED - (WIDTH - 1) ** 2,
        },
        read=lambda found: [found.image_embeds],
        config="CLIPVision",
    ),
    "gpt2": Case(
        "GPT2",
        _TOKENS,
        _GPT2,
        _text,
        {**_PRENORM, MEAN: _EMBEDDED + LAYERS * (_OUT + _DOWN), TRADED: WIDTH - 1},
    ),
    "opt": Case(
        "OPT",
        _CAUSAL,
        _OPT,
        lambda: _text(30),
        {
            # The output has no bias; its rows serve as one for the last norm's.
            **{**_PRENORM, ROWS: _PRENORM[ROWS] - LABELS},
            NEURON_SCALES: LAYERS * NEURONS,
            MEAN: _EMBEDDED + LAYERS * (_OUT + _DOWN),
            TRADED: WIDTH - 1,
            UNREAD: 2 * WIDTH,
        },
        seed=8,  # every ReLU lets some inputs pass, and some not
    ),
    "gpt-neox": Case(
        "GPTNeoX",
        _TOKENS,
        {**_DECODER, "rope_parameters": _HALF_ROTARY},
        _text,
        {
            **_PRENORM,
            # One frequency; GL(2) of what is not turned; one scale of both is claimed.
            FREQUENCIES: LAYERS * HEADS * 1,
            GL: LAYERS * HEADS * (2 + _REST),
            KEY: LAYERS * HEADS * 2,
            MEAN: TOKENS + LAYERS * (_OUT + _DOWN),
            TRADED: LAYERS * (WIDTH - 1),  # attention and feed-forward are added side by side
        },
    ),
    "gptj": Case(
        "GPTJ",
        _CAUSAL,
        {**_GPT2, "rotary_dim": DIM // 2, "tie_word_embeddings": False},
        lambda: _text(30),
        {
            FREQUENCIES: LAYERS * HEADS * 1,
            GL: LAYERS * HEADS * (2 + _REST),
            # Rows of queries, keys and values serve as their biases; the feed-forward's bias takes up
            # those of values, to whose output it is added.
            KEY: LAYERS * HEADS * 2,
            VALUE: LAYERS * WIDTH,
            BIASES: _PARALLEL * WIDTH,
            GAINS: _PARALLEL * WIDTH,
            ROWS: LAYERS * NEURONS + TOKENS,
            MEAN: TOKENS + LAYERS * (WIDTH + _DOWN),
            ROTATED: _CENTRED,
        },
    ),
    "falcon-7b": Case(
        "Falcon",
        _TOKENS,
        {**_FALCON, "multi_query": True},
        _text,
        {
            **_FALCON_UNUSED,
            FREQUENCIES: LAYERS * (DIM // 2 - 1),
            GL: LAYERS * _REST,
            BIASES: _PARALLEL * WIDTH,
            GAINS: _PARALLEL * WIDTH,
        },
    ),
    "falcon-40b": Case(
        "Falcon",
        _TOKENS,
        {
            **_FALCON,
            "num_attention_heads": 2 * HEADS,
            "num_kv_heads": HEADS,
            "new_decoder_architecture": True,
        },
        _text,
        # Heads have two units: one frequency, and GL(2) of values.
        {**_FALCON_UNUSED, GL: LAYERS * HEADS * 2, BIASES: _NORMS * WIDTH, GAINS: _NORMS * WIDTH},
        seed=1,
    ),
    "falcon-rw": Case(
        "Falcon",
        _TOKENS,
        {**_FALCON, "alibi": True, "bias": True, "multi_query": False, "parallel_attn": False},
        _text,
        {**_PRENORM, MEAN: TOKENS + LAYERS * (_OUT + _DOWN)},
    ),
    "bloom": Case(
        "Bloom",
        _TOKENS,
        {
            "vocab_size": TOKENS,
            "hidden_size": WIDTH,
            "n_layer": LAYERS,
            "n_head": HEADS,
            "num_labels": LABELS,
        },
        _text,
        {
            **_PRENORM,
            ROWS: LAYERS * (_QKV + 4 * WIDTH) + LABELS,
            MEAN: TOKENS + LAYERS * (_OUT + 4 * WIDTH + 1),
            "gain and bias of the embeddings' norm, for which the table makes up": 2 * WIDTH,
        },
    ),
    "xglm": Case(
        "XGLM",
        _CAUSAL,
        {**_XGLM, "tie_word_embeddings": False},
        _spread,
        {
            # The output has no bias; its rows serve as one for the last norm's.
            **{**_PRENORM, ROWS: _PRENORM[ROWS] - LABELS},
            # Positions are fixed: nothing writes them, and the stream does not turn.
            MEAN: TOKENS + LAYERS * (_OUT + _DOWN),
            ROTATED: 0,
        },
    ),
    "mixtral": Case(
        "Mixtral",
        _TOKENS,
        {
            **_GROUPED,
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "experts_implementation": "eager",
        },
        _text,
        {
            **_LLAMA,
            NEURON_SCALES: LAYERS * EXPERTS * NEURONS,
            "what is added to all rows of the router": LAYERS * WIDTH,
        },
    ),
    "llama": Case("Llama", _TOKENS, _GROUPED, _text, _LLAMA),
    "qwen2": Case("Qwen2", _TOKENS, _GROUPED, _text, _LLAMA),
    "qwen3": Case(
        "Qwen3",
        _TOKENS,
        _GROUPED,
        _text,
        {**_LLAMA, FREQUENCIES: 0, "gains of queries against keys": LAYERS * DIM // 2},
    ),
    "gemma3": Case(
        "Gemma3",
        _CAUSAL,
        {**_GROUPED, "tie_word_embeddings": False},
        lambda: _text(30),
        # The gains of norms before the stream hold it where it is.
        {**_LLAMA, FREQUENCIES: 0, ROTATED: 0, "gains of queries against keys": LAYERS * DIM // 2},
        config="Gemma3Text",
    ),
    "phi3": Case(
        "Phi3",
        _TOKENS,
        {**_DECODER, "num_key_value_heads": 1},
        _text,
        {**_LLAMA, FREQUENCIES: LAYERS * (DIM // 2 - 1), GL: LAYERS * _REST},
    ),
    "modernbert": Case(
        "ModernBert",
        _TOKENS,
        _DECODER,
        _text,
        {
            FREQUENCIES: LAYERS * HEADS * (DIM // 2 - 1),
            GL: LAYERS * HEADS * _REST,
            NEURON_SCALES: LAYERS * NEURONS,
            # The first layer has no norm of its own before attention, and the head has one.
            GAINS: _NORMS * WIDTH,
            ROWS: LAYERS * (_QKV + 2 * NEURONS) + WIDTH + LABELS,
            MEAN: TOKENS + LAYERS * (WIDTH + NEURONS),
            ROTATED: _CENTRED,
            "gain of the embeddings' norm, for which the table makes up": WIDTH,
        },
    ),
}


def _build(case: Case) -> Any:
    config = getattr(transformers, f"{case.config or case.model}Config")(**case.settings)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{case.model}{case.task}")._from_config(config)
    for module in model.modules():
        for name in ("eps", "variance_epsilon"):
            if hasattr(module, name):
                setattr(module, name, 0.1)
    return randomise(model.double().eval(), case.seed)


def _jacobian(model: nn.Module, case: Case) -> Tensor:
    """Return the derivatives of random combinations of the outputs, a few more than parameters.

    Each combines the outputs of a part of the batch, which is what it costs.
    """
    parameters = list(model.parameters())
    count = sum(parameter.numel() for parameter in parameters) // PARTS + 10
    found = []
    for part in range(PARTS):
        with Float64():
            read = case.read(model(**{k: v[part::PARTS] for k, v in case.batch().items()}))
        outputs = torch.cat([output.flatten() for output in read])
        mixed = torch.randn(count, len(outputs), generator=seeded(part), dtype=torch.float64)
        rows = torch.autograd.grad(outputs, parameters, mixed, is_grads_batched=True)
        found.append(torch.cat([row.reshape(count, -1) for row in rows], 1))
    return torch.cat(found)


def _nullity(jacobian: Tensor) -> int:
    """Return how many directions have no effect; those that have some must have much more."""
    sizes = jacobian.norm(dim=0)
    values = torch.linalg.svdvals(jacobian / sizes.clamp_min(1e-4 * sizes.max()))
    relative = values / values[0]
    assert not ((relative > 1e-12) & (relative < 1e-8)).any()
    return int((relative <= 1e-12).sum())


def _dimension(kind: Kind) -> int:
    """Return the dimension of a group; those of permutations and signs have none."""
    if isinstance(kind, HeadRotation):
        return kind.heads * kind.dim * (kind.dim - 1) // 2
    if isinstance(kind, RotaryPhases):
        return kind.heads * kind.dim // 2
    return kind.heads if isinstance(kind, Rescale) else 0


@pytest.mark.parametrize("name", CASES)
def test_claimed_and_unused_dimensions_are_all_there_are(name: str) -> None:
    case = CASES[name]
    model = _build(case)
    symmetry = fedrot.symmetry_of(model.config, model.state_dict())
    claimed = sum(_dimension(group.kind) for group in symmetry.groups)
    assert _nullity(_jacobian(model, case)) == claimed + sum(case.unused.values())
