"""Small real ``transformers`` encoders whose parameters are all random and non-zero."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    BertConfig,
    DistilBertConfig,
    ElectraConfig,
    RobertaConfig,
    XLMRobertaConfig,
)

import fedrot

# Small tensors gain nothing from threads, and on busy cores their barriers cost twenty
# times the work.
torch.set_num_threads(1)

LAYERS, HEADS, DIM, NEURONS, VOCABULARY = 2, 4, 8, 48, 60
WIDTH = HEADS * DIM

State = dict[str, Tensor]
Parts = tuple[str, ...]

#: The parts inside the layers, and all there are.
FULL = ("heads", "attention", "ffn")
EVERYTHING = fedrot.WHOLE_MODEL

#: Moves whatever removes distance, even from noise, for tests whose clients differ by
#: noise alone.
EAGER = fedrot.AlignmentOptions(chance=0)


@dataclass(frozen=True)
class Names:
    """Module names of one layer, written down here independently of the library's own
    tables.
    """

    stack: str
    query: str
    key: str
    value: str
    output: str
    up: str
    down: str

    def of(self, layer, module):
        """Return the full name of one module of one layer."""
        return f"{self.stack}.{layer}.{getattr(self, module)}"


def _bert_names(prefix):
    return Names(
        stack=f"{prefix}.encoder.layer",
        query="attention.self.query",
        key="attention.self.key",
        value="attention.self.value",
        output="attention.output.dense",
        up="intermediate.dense",
        down="output.dense",
    )


_DISTILBERT_NAMES = Names(
    stack="distilbert.transformer.layer",
    query="attention.q_lin",
    key="attention.k_lin",
    value="attention.v_lin",
    output="attention.out_lin",
    up="ffn.lin1",
    down="ffn.lin2",
)


@dataclass(frozen=True)
class Case:
    """One architecture with one head on top: how to build it, and what its modules are
    called.
    """

    name: str
    build: Callable[[str], Any]
    names: Names


def _settings(attention):
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": NEURONS,
        "max_position_embeddings": 40,
        "num_labels": 3,
        "attn_implementation": attention,
    }


def bert_config(attention="eager"):
    """Return the configuration of the small BERT."""
    return BertConfig(**_settings(attention))


_DISTILBERT_KEYS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
}

#: Class prefix, configuration, settings of its own, and module names of every family.
_FAMILIES = {
    "bert": ("Bert", BertConfig, {}, _bert_names("bert")),
    "roberta": ("Roberta", RobertaConfig, {}, _bert_names("roberta")),
    "xlm-r": ("XLMRoberta", XLMRobertaConfig, {}, _bert_names("roberta")),
    "electra": (
        "Electra",
        ElectraConfig,
        {"embedding_size": 16},
        _bert_names("electra"),
    ),
    "electra-wide": (
        "Electra",
        ElectraConfig,
        {"embedding_size": WIDTH},
        _bert_names("electra"),
    ),
    "distilbert": ("DistilBert", DistilBertConfig, {}, _DISTILBERT_NAMES),
}

#: Class suffix and settings of every task head.
_TASKS = {
    "classifier": ("ForSequenceClassification", {}),
    "mlm": ("ForMaskedLM", {}),
    "mlm-untied": ("ForMaskedLM", {"tie_word_embeddings": False}),
    "causal": ("LMHeadModel", {"is_decoder": True}),
    "pretraining": ("ForPreTraining", {}),
    "discriminator": ("ForPreTraining", {}),
    "qa": ("ForQuestionAnswering", {"num_labels": 2}),
    "tokens": ("ForTokenClassification", {}),
    "choice": ("ForMultipleChoice", {}),
    "next": ("ForNextSentencePrediction", {}),
    "bare": ("Model", {}),
}


def _case(family, task):
    prefix, configuration, own, names = _FAMILIES[family]
    suffix, settings = _TASKS[task]

    def build(attention):
        merged = {**_settings(attention), **own, **settings}
        if family == "distilbert":
            merged = {
                _DISTILBERT_KEYS.get(key, key): value for key, value in merged.items()
            }
        return getattr(transformers, prefix + suffix)(configuration(**merged))

    return Case(f"{family}-{task}", build, names)


def _cases(tasks):
    found = [
        _case(family, task)
        for family, listed in tasks.items()
        for task in listed.split()
    ]
    return {case.name: case for case in found}


CASES = _cases(
    {
        "bert": "classifier mlm",
        "roberta": "classifier mlm",
        "xlm-r": "classifier",
        "electra": "classifier mlm discriminator",
        "distilbert": "classifier mlm",
    }
)

#: Every family with every head that is described, for tests of what crosses layers.
EVERY = CASES | _cases(
    {
        "bert": "pretraining qa tokens choice next causal mlm-untied",
        "roberta": "qa tokens choice mlm-untied",
        "xlm-r": "mlm qa tokens choice",
        "electra": "qa tokens mlm-untied",
        "electra-wide": "classifier mlm discriminator tokens mlm-untied",
        "distilbert": "qa tokens choice mlm-untied",
    }
)

#: Encoders whose output is the residual stream itself.
BARE = _cases(
    dict.fromkeys(
        ("bert", "roberta", "xlm-r", "electra", "electra-wide", "distilbert"), "bare"
    )
)

_ALL = EVERY | BARE

#: One case per module naming, for tests that need not run on every head.
FEW = ("bert-classifier", "distilbert-mlm")


def randomise(model, seed=0):
    """Set every parameter, biases and norms included, to random non-zero values, in
    place.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(
                parameter.shape, generator=generator, dtype=torch.float64
            )
            is_gain = "norm" in name.lower() and name.endswith("weight")
            parameter.copy_(1 + 0.2 * noise if is_gain else 0.25 * noise)
    return model


@cache
def _model(name, attention, dtype):
    return randomise(_ALL[name].build(attention).to(dtype)).eval()


def fresh_model(name, attention="eager", seed=0):
    """Return a float64 model of its own, which the test may change."""
    return randomise(copy.deepcopy(_model(name, attention, torch.float64)), seed)


def config_of(name):
    """Return the configuration of a case."""
    return _model(name, "eager", torch.float64).config


@cache
def _state(name, seed):
    return {
        k: v.detach().clone()
        for k, v in fresh_model(name, seed=seed).state_dict().items()
    }


def state_of(name, seed=0, dtype=torch.float64):
    """Return a private copy of a case's random state dict; another seed is an unrelated
    model.
    """
    return {
        k: v.to(dtype, copy=True) if v.is_floating_point() else v.clone()
        for k, v in _state(name, seed).items()
    }


def symmetry_for(name):
    """Return the symmetry of a case, described from its state dict."""
    return fedrot.symmetry_of(config_of(name), state_of(name))


def inputs(name=""):
    """Return two token sequences, the second one padded; RoBERTa's padding index is
    avoided.

    For a multiple-choice case they are the two choices of one question.
    """
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(4, VOCABULARY, (2, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    return {k: v[None] for k, v in batch.items()} if name.endswith("-choice") else batch


def logits(name, tensors, attention="eager"):
    """Return all outputs of the model with these tensors, flat, in the dtype of the
    tensors.
    """
    dtype = next(t.dtype for t in tensors.values() if t.is_floating_point())
    model = copy.deepcopy(_model(name, attention, dtype))
    model.load_state_dict(dict(tensors))
    with torch.no_grad():
        found = (
            model(**inputs(name), use_cache=False)
            if "causal" in name
            else model(**inputs(name))
        )
    return torch.cat([output.flatten() for output in found.to_tuple()])


def near(state, scale, seed=1):
    """Return the state plus Gaussian noise of that relative size, tensor by tensor."""
    generator = torch.Generator().manual_seed(seed)
    moved = {}
    for name, tensor in state.items():
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            size = scale * tensor.double().norm() / max(float(noise.norm()), 1e-30)
            moved[name] = (tensor.double() + size * noise).to(tensor.dtype)
        else:
            moved[name] = tensor.clone()
    return moved


def squared_distance(one, other):
    """Return the squared distance over all floating-point tensors, summed in
    float64.
    """
    total = 0.0
    for name, tensor in one.items():
        if tensor.is_floating_point():
            total += float((tensor.double() - other[name].double()).square().sum())
    return total


def largest_difference(one, other):
    """Return the largest absolute difference over all tensors."""
    assert one.keys() == other.keys()
    return max(float((one[n].double() - other[n].double()).abs().max()) for n in one)


def same(one, other):
    """Return whether two states have the same tensors, entry by entry."""
    return one.keys() == other.keys() and not changed(one, other)


def changed(one, other):
    """Return the names of the tensors that differ."""
    return {name for name in one if not torch.equal(one[name], other[name])}


def copied(state):
    """Return copies of all tensors."""
    return {name: tensor.clone() for name, tensor in state.items()}


def cast(state, dtype):
    """Return the state with floating-point tensors of another dtype."""
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in state.items()
    }


def align_tensors(update, anchor, symmetry, *how):
    """Return the tensors of an update that was aligned to an anchor."""
    return fedrot.align(update, anchor, symmetry, *how).apply(update)


def tensors_of(groups):
    """Return the names of the tensors that groups act on."""
    return {slot.tensor for group in groups for slot in group.slots}


def movable(symmetry, parts=EVERYTHING):
    """Return the parts that can be moved."""
    return tuple(part for part in parts if part not in symmetry.refused)


def with_separate_tables(model):
    """Return the model itself, in which every parameter has storage of its own now."""
    seen = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(
            recurse=False, remove_duplicate=False
        ):
            if id(parameter) in seen:
                setattr(module, name, nn.Parameter(parameter.detach().clone()))
            seen.add(id(parameter))
    return model
