"""Rounds of pre-norm models in other bases, whose residual stream is rotated."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from flwr.clientapp import ClientApp
from transformers import GPT2Config, GPT2LMHeadModel

import fedrot
from fedrot.strategies import FedRot, Matching, OtherBasis, match_at_client
from tests.families import config_of, model_of, state_of, symmetry_for
from tests.models import near, with_separate_tables
from tests.strategies.fakes import aggregated, broadcast, grid_of, node_of, tensors_of

WHOLE = fedrot.AlignmentOptions(fedrot.WHOLE_MODEL)
STREAM = replace(WHOLE, canonical=True)
NAMES = ["llama", "gpt2-classifier"]


def states(name):
    """Return a broadcast model, and the same function in three bases, one of them the
    broadcast's.
    """
    symmetry = symmetry_for(name)
    base = float32(state_of(name))
    folded = fedrot.canonical(state_of(name), symmetry)
    others = [
        fedrot.random_equivalent(folded, symmetry.rotated, s, fedrot.WHOLE_MODEL)
        for s in (1, 2)
    ]
    return base, [base, *map(float32, others)]


def float32(tensors):
    return {
        name: t.float() if t.is_floating_point() else t for name, t in tensors.items()
    }


def built(name):
    return with_separate_tables(model_of(name).float())


def answers(name, tensors):
    model = built(name)
    model.load_state_dict(tensors)
    ids = torch.arange(1, 19).reshape(2, 9)
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def silent(message):
    raise AssertionError("nobody is to be asked")


def matching(name):
    app = ClientApp()
    generator = torch.Generator().manual_seed(5)
    rows = [
        {"input_ids": torch.randint(1, 39, (8, 9), generator=generator)}
        for _ in range(3)
    ]
    match_at_client(app, lambda *_: Matching(lambda: built(name), lambda: rows, STREAM))
    return node_of(app)


@pytest.mark.parametrize("where", ["server", "probe", "clients"])
@pytest.mark.parametrize("name", NAMES)
def test_models_in_rotated_bases_are_averaged_to_the_function_that_all_of_them_have(
    name, where
):
    base, sent = states(name)
    others = OtherBasis(
        model=(lambda: built(name)) if where == "probe" else None,
        options=STREAM,
        at_clients=where == "clients",
    )
    nodes = [matching(name) if where == "clients" else silent] * 3
    strategy = FedRot(config_of(name), other_basis=others)
    arrays, metrics = aggregated(strategy, base, sent, nodes=nodes)
    result = tensors_of(arrays)
    assert metrics["fedrot-replies-accepted"] == 3
    expected = answers(name, base)
    assert (answers(name, result) - expected).abs().max() <= 5e-3 * expected.abs().max()
    for fold in symmetry_for(name).folds:
        assert bool((result[fold.gain] == 1).all()), "the new model is canonical"
    # Permutations of the stream do not find the function.
    permuted = OtherBasis(options=replace(WHOLE, canonical=False))
    lost, _ = aggregated(
        FedRot(config_of(name), other_basis=permuted), base, sent, nodes=[silent] * 3
    )
    assert (
        answers(name, tensors_of(lost)) - expected
    ).abs().max() > 0.1 * expected.abs().max()


def test_replies_in_the_broadcast_basis_become_canonical_beside_one_from_another():
    """A mean of canonical and of other tensors would be neither."""
    name = "llama"
    symmetry = symmetry_for(name)
    base = float32(state_of(name))
    folded = fedrot.canonical(base, symmetry)
    late = fedrot.random_equivalent(folded, symmetry.rotated, 3, fedrot.WHOLE_MODEL)
    near_by = [float32(near(base, 1e-3, seed)) for seed in (1, 2)]
    strategy = FedRot(config_of(name), other_basis=OtherBasis(options=STREAM))
    arrays, _ = aggregated(strategy, base, [*near_by, late], nodes=[silent] * 3)
    result = tensors_of(arrays)
    own = [*(fedrot.canonical(update, symmetry) for update in near_by), folded]
    for key, found in result.items():
        expected = (10 * own[0][key] + 11 * own[1][key] + 12 * own[2][key]) / 33
        assert torch.allclose(found, expected, atol=1e-2), key
    assert all(bool((result[fold.gain] == 1).all()) for fold in symmetry.folds)


TIED = GPT2Config(
    vocab_size=12, n_layer=1, n_head=2, n_embd=8, n_positions=4, pad_token_id=0
)
COPIED = GPT2LMHeadModel(TIED).state_dict()
SEPARATE = {**COPIED, "lm_head.weight": torch.randn(12, 8)}
PERMUTED = {"alignment": fedrot.AlignmentOptions(("heads", "ffn"))}
LLAMA = (config_of("llama"), float32(state_of("llama")))

#: Other bases, configuration and model, more settings, and whether the stream is
#: rotated. Statistics cannot be brought to canonical form. Tied tables are found in the
#: model, and without one in arrays, where they are two equal ones.
ROTATES = [
    *(
        (
            OtherBasis(partial(built, name)),
            config_of(name),
            float32(state_of(name)),
            {},
            rotates,
        )
        for name, rotates in (("llama", True), ("vit", True), ("bert", False))
    ),
    *(
        (
            OtherBasis(options=fedrot.AlignmentOptions(("residual", "heads", "ffn"))),
            *LLAMA,
            {**PERMUTED, "aggregation": aggregation},
            False,
        )
        for aggregation in ("regmean", "fisher")
    ),
    (OtherBasis(lambda: GPT2LMHeadModel(TIED)), TIED, COPIED, {}, False),
    (OtherBasis(lambda: GPT2LMHeadModel(TIED)), TIED, SEPARATE, {}, False),
    (OtherBasis(options=WHOLE), TIED, COPIED, {}, False),
    (OtherBasis(options=WHOLE), TIED, SEPARATE, {}, True),
    (
        OtherBasis(lambda: with_separate_tables(GPT2LMHeadModel(TIED))),
        TIED,
        SEPARATE,
        {},
        True,
    ),
]


@pytest.mark.parametrize(("others", "config", "base", "more", "rotates"), ROTATES)
def test_by_default_the_stream_is_rotated_where_it_can_be(
    others, config, base, more, rotates
):
    strategy = FedRot(config, other_basis=others, **more)
    broadcast(strategy, base, grid_of([silent] * 2))
    assert strategy.other_bases.options.rotates is rotates
    if config is not TIED and others.model:
        assert (strategy.other_bases.evidence is None) is rotates
    assert strategy.alignment.canonical is (False if "aggregation" in more else None)


@pytest.mark.parametrize(
    ("config", "word"), [(TIED, "tie_word_embeddings=False"), (None, "be rotated")]
)
def test_tied_tables_and_post_norm_models_are_refused_before_clients_train(
    config, word
):
    base = GPT2LMHeadModel(TIED).state_dict() if config else float32(state_of("bert"))
    strategy = FedRot(
        config or config_of("bert"), other_basis=OtherBasis(options=STREAM)
    )
    if config:
        strategy.symmetry = fedrot.symmetry_of(TIED, base)
    with pytest.raises(fedrot.SymmetryError, match=word):
        broadcast(strategy, base, grid_of([silent] * 2))
