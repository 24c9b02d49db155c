"""The continuous group of each kind of family, and what it leaves out, add up to all
flat directions.

The Jacobian of a small model's outputs with respect to all of its parameters has as
many directions without effect as the model has continuous symmetries, claimed or not.
What is not claimed is written down here by name and counted by formula. Most of it
stretches weights, which changes what weight decay and Adam see; of what does not,
rotations of DeBERTa's relative positions are the largest.

Norms have a large epsilon: a small one would make scales of a stream, and of queries
and keys under a norm, all but flat. Tables have many more rows than columns: with fewer
tokens, a feed-forward beside the first attention, which reads nothing but tokens, would
be free in more directions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pytest
import torch

from fedrot import symmetry_of
from fedrot.check import Float64
from tests.families import MEMBERS, Member
from tests.fedrot.oracles import normal, seeded
from tests.models import State, randomise

LAYERS, WIDTH, HEADS, DIM, NEURONS, EXPERTS = 2, 8, 2, 4, 6, 2
TOKENS, LENGTH, TYPES, LABELS = 24, 7, 2, 7
SMALLER = 6  # width of embeddings that are projected to the stream
SIDE, PATCHES = 3, 4  # of a patch, and of an image
PARTS = 10  # of a batch
FAR = 7000  # positions of XGLM

Counts = Mapping[str, int]

# Inputs


def _ids(rows=35, first=0):
    return torch.randint(first, TOKENS, (rows, LENGTH), generator=seeded(first + rows))


def _text():
    return {"input_ids": _ids()}


def _typed():
    return {
        **_text(),
        "token_type_ids": torch.randint(TYPES, (35, LENGTH), generator=seeded(1)),
    }


def _unpadded():
    """MPNet counts positions from its padding token, 1."""
    return {"input_ids": _ids(first=2)}


def _pair():
    return {"input_ids": _ids(30), "decoder_input_ids": _ids(31)[:30]}


def _image():
    return {"pixel_values": normal(seeded(2), 200, 1, 2 * SIDE, 2 * SIDE)}


def _spread():
    """Sinusoids of neighbouring positions are all but linear: the stream could all but
    turn.
    """
    ids = _ids(30)
    positions = (FAR // LENGTH * torch.arange(LENGTH)).expand_as(ids)
    # Without a mask, positions that jump are those of several texts.
    return {
        "input_ids": ids,
        "position_ids": positions,
        "attention_mask": torch.ones_like(ids),
    }


# What is left unused, by name

GL = "GL(d_h) in each head but for the rotations: scales above all"
KEY, VALUE = "biases of keys", "biases of values, which the output's can take up"
FREQUENCIES = "a scale per rotary frequency"
BIASES, GAINS = "biases of norms, folded into what reads them", "gains, likewise"
ROWS = (
    "rows of what reads a LayerNorm, whose outputs before gain and bias add up to zero"
)
MEAN = "the mean of the stream, which no LayerNorm sees, in what writes to it"
TRADED = "constants that writers trade, beside their mean"
ROTATED = "rotations of a stream whose gains are folded"
NEURON_SCALES = "scales of neurons that a ReLU or a gate lets pass"
UNREAD = "rows of tables that nothing reads"
SHIFTED = "constants of the relative positions"

#: Writers along the mean: columns and bias of the attention's output and the
#: feed-forward's.
_OUT = WIDTH + 1
_DOWN = NEURONS + 1
#: Readers, by row.
_QKV = 3 * WIDTH
#: Per head: all of GL(d_h) but the rotations, which are claimed.
_REST = DIM * (DIM + 1) // 2
_NORMS = 2 * LAYERS + 1
_PARALLEL = LAYERS + 1  # where one norm is read by attention and feed-forward
_EMBEDDED = TOKENS + LENGTH
#: Rotations of all that a LayerNorm sees, and an RMSNorm.
_CENTRED = (WIDTH - 1) * (WIDTH - 2) // 2
_ALL = WIDTH * (WIDTH - 1) // 2


def _attention(blocks=LAYERS):
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
    "the mean of the embeddings, and constants that they trade": _EMBEDDED
    + TYPES
    + 2 * (SMALLER - 1),
}
_DEBERTA = {
    **_BERT,
    "GL(d) of the relative positions, which their projections undo": WIDTH * WIDTH,
    SHIFTED: WIDTH,
    UNREAD: WIDTH,
}
_LLAMA = {
    FREQUENCIES: LAYERS * HEADS * DIM // 2,
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


@dataclass(frozen=True)
class Case:
    """One small model, its inputs, the dimensions that are left unused by name, and a
    seed.
    """

    member: Member
    batch: Callable[[], State]
    unused: Counts
    seed: int


#: The sizes of all models, by the keys of their configurations.
_SIZES = {
    "vocab_size": TOKENS,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "pooler_hidden_size"), WIDTH),
    **dict.fromkeys(("word_embed_proj_dim", "dim"), WIDTH),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), LAYERS),
    **dict.fromkeys(
        ("num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers"), 1
    ),
    **dict.fromkeys(
        ("num_attention_heads", "num_heads", "n_head", "attention_heads"), HEADS
    ),
    **dict.fromkeys(
        ("encoder_attention_heads", "decoder_attention_heads", "n_heads"), HEADS
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), HEADS),
    **dict.fromkeys(("d_kv", "head_dim", "relative_attention_num_buckets"), DIM),
    **dict.fromkeys(
        ("intermediate_size", "d_ff", "n_inner", "ffn_dim", "hidden_dim"), NEURONS
    ),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), NEURONS),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "max_relative_positions"), LENGTH
    ),
    "embedding_size": SMALLER,
    "image_size": 2 * SIDE,
    "patch_size": SIDE,
    "num_labels": LABELS,
    "num_local_experts": EXPERTS,
    "rotary_dim": DIM // 2,
    "eos_token_id": TOKENS - 1,
    "pad_token_id": None,
}
_TOKENS, _CAUSAL = "ForTokenClassification", "ForCausalLM"
CASES = {}


def _add(
    name,
    batch,
    unused,
    task=_TOKENS,
    seed=0,
    member=None,
    **more,
):
    """Add a case: a member of the zoo in small, with another task or other settings."""
    member = MEMBERS[name] if member is None else member
    known = dict(member.settings)
    if "vocab_size" in known and "hidden_size" in known:
        known["pad_token_id"] = None
    settings = {key: _SIZES.get(key, value) for key, value in known.items()} | more
    CASES[name] = Case(
        replace(member, task=task or member.task, settings=settings),
        batch,
        unused,
        seed,
    )


_DISTIL = (
    "vocab_size",
    "dim",
    "n_layers",
    "n_heads",
    "hidden_dim",
    "max_position_embeddings",
)
#: As many key heads as other models have heads, each shared by two query heads.
_GROUPED = {"num_attention_heads": 2 * HEADS}
_HALF_ROTARY = {
    "rope_type": "default",
    "rope_theta": 100.0,
    "partial_rotary_factor": 0.5,
}

_add("bert", _typed, _BERT, type_vocab_size=TYPES)
_add(
    "distilbert",
    _text,
    _BERT | {MEAN: _BERT[MEAN] - TYPES, TRADED: WIDTH - 1},
    member=Member("DistilBert", _TOKENS, dict.fromkeys((*_DISTIL, "num_labels"))),
)
_add(
    "electra",
    _typed,
    _BERT
    | _SMALLER
    | {
        # The projection's bias serves as the first norm's.
        ROWS: _BERT[ROWS] + _QKV * (WIDTH - SMALLER),
        # The projection can write to the mean as long as the first layer's rows undo
        # it.
        MEAN: LAYERS * (_OUT + _DOWN) + SMALLER - 1,
        TRADED: 0,
    },
    type_vocab_size=TYPES,
)
_add(
    "mpnet",
    _unpadded,
    _BERT
    | {
        MEAN: _BERT[MEAN] - TYPES - 2,
        TRADED: WIDTH - 1,
        SHIFTED: HEADS,
        # MPNet's buckets of distances are 32 whatever it is told.
        UNREAD: HEADS * (32 - 2 * LENGTH + 1) + 4 * WIDTH,
    },
    max_position_embeddings=LENGTH + 2,
    pad_token_id=1,
)
# Keys have no bias; their rows serve as one for constants from the norm before.
_UNBIASED = _DEBERTA | {KEY: 0, ROWS: _BERT[ROWS] - LAYERS * WIDTH}
_add("deberta", _typed, _UNBIASED, type_vocab_size=TYPES)
_SEPARATE = _DEBERTA | {KEY: 0, "biases of the positions' keys": LAYERS * WIDTH}
_add("deberta-v2", _typed, _SEPARATE, type_vocab_size=TYPES)
_add("t5", _pair, _T5_UNUSED, "", relative_attention_max_distance=4)
_add("t5-gated", _pair, _T5_UNUSED, "", relative_attention_max_distance=4)
_add(
    "bart",
    _pair,
    {
        **_attention(3),
        BIASES: 6 * WIDTH,  # the last is read by the embeddings' table
        GAINS: WIDTH,  # of the encoder's last norm
        ROWS: 3 * _QKV + 2 * NEURONS,
        MEAN: 2 * LENGTH + 3 * _OUT + 2 * _DOWN,
        UNREAD: 2 * 2 * WIDTH,
    },
    "",
)
# Pixels of a patch and their bias, class, positions.
_PIXELS = {
    MEAN: SIDE**2 + 1 + 1 + PATCHES + 1 + LAYERS * (_OUT + _DOWN),
    TRADED: 2 * (WIDTH - 1),
}
_add("vit", _image, _PRENORM | _PIXELS, "", num_channels=1)
_add(
    "gpt2",
    _text,
    _PRENORM | {MEAN: _EMBEDDED + LAYERS * (_OUT + _DOWN), TRADED: WIDTH - 1},
)
#: The output has no bias; its rows serve as one for the last norm's.
_NO_BIAS = _PRENORM | {ROWS: _PRENORM[ROWS] - LABELS}
_add(
    "opt",
    _text,
    _NO_BIAS
    | {
        NEURON_SCALES: LAYERS * NEURONS,
        MEAN: _EMBEDDED + LAYERS * (_OUT + _DOWN),
        TRADED: WIDTH - 1,
        UNREAD: 2 * WIDTH,
    },
    _CAUSAL,
    seed=8,  # every ReLU lets some inputs pass, and some not
    tie_word_embeddings=False,
)
_add(
    "gpt-neox",
    _text,
    _PRENORM
    | {
        # One frequency; GL(2) of what is not turned.
        FREQUENCIES: LAYERS * HEADS * 1,
        GL: LAYERS * HEADS * (3 + _REST),
        KEY: LAYERS * HEADS * 2,
        MEAN: TOKENS + LAYERS * (_OUT + _DOWN),
        TRADED: LAYERS
        * (WIDTH - 1),  # attention and feed-forward are added side by side
    },
    rope_parameters=_HALF_ROTARY,
)
_add(
    "gptj",
    _text,
    {
        FREQUENCIES: LAYERS * HEADS * 1,
        GL: LAYERS * HEADS * (3 + _REST),
        # Rows of queries, keys and values serve as their biases; the feed-forward's
        # bias takes up those of values, to whose output it is added.
        KEY: LAYERS * HEADS * 2,
        VALUE: LAYERS * WIDTH,
        BIASES: _PARALLEL * WIDTH,
        GAINS: _PARALLEL * WIDTH,
        ROWS: LAYERS * NEURONS + TOKENS,
        MEAN: TOKENS + LAYERS * (WIDTH + _DOWN),
        ROTATED: _CENTRED,
    },
    _CAUSAL,
    tie_word_embeddings=False,
)
_ONE_KEY_HEAD = {FREQUENCIES: LAYERS * DIM // 2, GL: LAYERS * _REST}
_add(
    "falcon-7b",
    _text,
    # Projections have no biases; their rows serve as such for constants from the norm
    # before.
    _ONE_KEY_HEAD
    | dict.fromkeys((BIASES, GAINS), _PARALLEL * WIDTH)
    | {ROWS: LABELS, MEAN: TOKENS + LAYERS * (WIDTH + NEURONS), ROTATED: _CENTRED},
)
_add("falcon-rw", _text, _PRENORM | {MEAN: TOKENS + LAYERS * (_OUT + _DOWN)})
_add(
    "bloom",
    _text,
    _PRENORM
    | {
        ROWS: LAYERS * (_QKV + 4 * WIDTH) + LABELS,
        MEAN: TOKENS + LAYERS * (_OUT + 4 * WIDTH + 1),
        "gain and bias of the embeddings' norm, for which the table makes up": 2
        * WIDTH,
    },
)
_add(
    "xglm",
    _spread,
    # Positions are fixed: nothing writes them, and the stream does not turn.
    _NO_BIAS | {MEAN: TOKENS + LAYERS * (_OUT + _DOWN), ROTATED: 0},
    _CAUSAL,
    num_layers=LAYERS,
    max_position_embeddings=FAR,
    pad_token_id=None,
    tie_word_embeddings=False,
)
_ROUTED = {NEURON_SCALES: LAYERS * EXPERTS * NEURONS}
_ROUTED |= {"what is added to all rows of the router": LAYERS * WIDTH}
_add("mixtral", _text, _LLAMA | _ROUTED, **_GROUPED)
_add("llama", _text, _LLAMA, **_GROUPED)
_add("qwen2", _text, _LLAMA, **_GROUPED)
_NORMED = _LLAMA | {FREQUENCIES: 0, "gains of queries against keys": LAYERS * DIM // 2}
_add("qwen3", _text, _NORMED, attention_bias=False, **_GROUPED)
# The gains of norms before the stream hold it where it is.
_HELD = {"sliding_window": 2 * LENGTH, "tie_word_embeddings": False, **_GROUPED}
_add("gemma3", _text, _NORMED | {ROTATED: 0}, _CAUSAL, **_HELD)
_add("phi3", _text, _LLAMA | _ONE_KEY_HEAD, num_key_value_heads=1)
_add(
    "modernbert",
    _text,
    {
        FREQUENCIES: LAYERS * HEADS * DIM // 2,
        GL: LAYERS * HEADS * _REST,
        NEURON_SCALES: LAYERS * NEURONS,
        # The first layer has no norm of its own before attention, and the head has one.
        GAINS: _NORMS * WIDTH,
        ROWS: LAYERS * (_QKV + 2 * NEURONS) + WIDTH + LABELS,
        MEAN: TOKENS + LAYERS * (WIDTH + NEURONS),
        ROTATED: _CENTRED,
        "gain of the embeddings' norm, for which the table makes up": WIDTH,
    },
)


def _build(case):
    model = case.member.build("eager")
    for module in model.modules():
        for name in ("eps", "variance_epsilon"):
            if hasattr(module, name):
                setattr(module, name, 0.1)
    return randomise(model.double().eval(), case.seed)


def _jacobian(model, case):
    """Return the derivatives of random combinations of the outputs, a few more than
    parameters.

    Each combines the outputs of a part of the batch, which is what it costs.
    """
    parameters = list(model.parameters())
    count = sum(parameter.numel() for parameter in parameters) // PARTS + 10
    rows = []
    batch = case.batch()
    for part in range(PARTS):
        with Float64():
            found = model(**{k: v[part::PARTS] for k, v in batch.items()})
        outputs = found["logits"].flatten()
        mixed = normal(seeded(part), count, len(outputs))
        derivatives = torch.autograd.grad(
            outputs, parameters, mixed, is_grads_batched=True
        )
        rows.append(torch.cat([d.reshape(count, -1) for d in derivatives], 1))
    return torch.cat(rows)


def _nullity(jacobian):
    """Return how many directions have no effect; those that have some must have much
    more.
    """
    sizes = jacobian.norm(dim=0)
    # The distance of each column to what the columns before it span.
    apart = (
        torch.linalg.qr(jacobian / sizes.clamp_min(1e-4 * sizes.max()), mode="r")
        .R.diagonal()
        .abs()
    )
    relative = apart / apart.max()
    assert not ((relative > 1e-10) & (relative < 1e-8)).any()
    return int((relative <= 1e-10).sum())


@pytest.mark.parametrize("name", CASES)
def test_claimed_and_unused_dimensions_are_all_there_are(name):
    case = CASES[name]
    model = _build(case)
    symmetry = symmetry_of(model.config, model.state_dict())
    claimed = sum(group.action.free for group in symmetry.groups)
    assert _nullity(_jacobian(model, case)) == claimed + sum(case.unused.values())
