"""What clients do with PEFT models: loading, cutting, frozen factors."""

from types import SimpleNamespace

import peft
import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from fedrot.errors import FedrotError, UpdateError
from fedrot.lora import adapter_tensors, fitted, load_adapter, load_as_sent, train_only
from fedrot.lora.adapters import pairs_of
from tests.fedrot.lora.test_averaging import product, truncated
from tests.fedrot.lora.test_peft import adapted, bert, gpt2, outputs
from tests.fedrot.oracles import gap
from tests.models import copied, largest_difference, same


class Layers(nn.Module):
    """One layer of each kind that PEFT adapts."""

    def __init__(self):
        super().__init__()
        self.config = {"model_type": "layers"}
        self.wte = nn.Embedding(30, 6)
        self.conv1d = Conv1D(6, 6)
        self.linear = nn.Linear(6, 6)
        self.conv = nn.Conv1d(6, 5, 3)

    def forward(self, input_ids):
        found = self.conv(self.linear(self.conv1d(self.wte(input_ids))).mT)
        return SimpleNamespace(logits=found)


def layers(rank=4, seed=0, target="linear"):
    torch.manual_seed(9)
    return adapted(
        Layers(), rank, seed, target_modules=[target], fan_in_fan_out=target == "conv1d"
    )


def test_larger_ranks_are_cut_to_the_models_own():
    options = {"task_type": "SEQ_CLS", "target_modules": ["query", "value"]}
    small = adapted(bert(), 4, rank_pattern={"query": 2}, **options)
    torch.manual_seed(1)
    large = adapted(bert(), 6, seed=3, **options)
    received = adapter_tensors(large)
    load_adapter(small, received)
    found = adapter_tensors(small)
    assert {len(tensor) for name, tensor in found.items() if "lora_A" in name} == {2, 4}
    for pair in pairs_of(found):
        dense, cut = (product(each, pair.module) for each in (received, found))
        assert gap(cut, truncated(dense, len(found[pair.a]))) <= 1e-10
    head = next(name for name in found if "classifier" in name)
    assert torch.equal(found[head], received[head])
    with pytest.raises(UpdateError, match="client's rank"):
        load_adapter(large, found)
    del received[head]
    with pytest.raises(UpdateError, match=rf"'{head}'.*one of the two is missing"):
        load_adapter(small, received)


#: Adapters of every kind whose rank can change, as the sender and a client of another
#: rank have them.
SENT = {
    "head": (bert, {"task_type": "SEQ_CLS", "target_modules": ["query", "value"]}, {}),
    "rslora": (bert, {"target_modules": ["query"], "use_rslora": True}, {}),
    "dora": (bert, {"target_modules": ["query", "dense"], "use_dora": True}, {}),
    "patterns": (
        bert,
        {
            "target_modules": ["query", "value"],
            "alpha_pattern": {"layer.0.attention.self.query": 3},
        },
        {"rank_pattern": {"query": 3, "layer.1.attention.self.value": 5}},
    ),
    "bias": (bert, {"target_modules": ["value"], "lora_bias": True}, {}),
    "embedding": (
        gpt2,
        {"target_modules": ["wte", "c_attn"], "fan_in_fan_out": True},
        {},
    ),
    "convolution": (Layers, {"target_modules": ["conv", "linear"]}, {}),
}


@pytest.mark.parametrize("own", [2, 8])
@pytest.mark.parametrize("kind", SENT)
def test_clients_of_all_ranks_compute_what_the_sender_computes(kind, own):
    build, options, patterns = SENT[kind]
    torch.manual_seed(9)
    base = build()
    other = build()
    other.load_state_dict(base.state_dict())
    sender = adapted(base, 4, 1, **options, **patterns)
    client = adapted(other, own, 2, **options)
    with torch.no_grad():
        for name, parameter in sender.named_parameters():
            if parameter.requires_grad and "lora_" not in name:
                parameter.add_(0.1)
    assert not torch.allclose(outputs(client), outputs(sender))
    load_as_sent(client, adapter_tensors(sender))
    assert torch.allclose(outputs(client), outputs(sender), atol=1e-12)
    trained = [
        {n for n, p in model.named_parameters() if p.requires_grad}
        for model in (sender, client)
    ]
    assert trained[0] == trained[1]


def test_a_model_that_took_other_ranks_is_trained_at_its_own_again():
    def train():
        (client(torch.arange(7)[None]).logits ** 2).sum().backward()

    client = layers(2)
    client.peft_config["default"].rank_pattern = {"linear": 3}
    for rank in (4, 8):
        train()
        load_as_sent(client, adapter_tensors(layers(rank, seed=rank)))
    received = adapter_tensors(layers(8, seed=1))
    load_adapter(client, received)
    found = adapter_tensors(client)
    cut = fitted(received, client.peft_config["default"], 3)
    assert largest_difference(found, cut) <= 1e-6
    again = layers(3, seed=2)
    load_adapter(again, cut)
    assert gap(outputs(again), outputs(client)) <= 1e-12
    train()


#: What a client cannot load into its adapter of rank 2, given what the server has and
#: the names of its factors, and a word of the error.
WRONG = {
    "other inputs": (lambda sent, a, b: {**sent, a: sent[a][:, :5]}, "differ in shape"),
    "other outputs": (lambda sent, a, b: {**sent, b: sent[b][:5]}, "differ in shape"),
    "one tensor more": (
        lambda sent, a, b: {**sent, "more": sent[a]},
        "one of the two is missing",
    ),
    "two ranks": (
        lambda sent, a, b: {**sent, b: sent[b][:, :3]},
        "have no common rank",
    ),
    "rank 0": (
        lambda sent, a, b: {a: sent[a][:0], b: sent[b][:, :0]},
        "have no common rank",
    ),
    "names of a state_dict": (
        lambda sent, a, b: {
            n: t for n, t in layers().state_dict().items() if "lora_" in n
        },
        "contains the adapter's name.*adapter_tensors",
    ),
}


@pytest.mark.parametrize("load", [load_adapter, load_as_sent])
@pytest.mark.parametrize("wrong", WRONG)
def test_nothing_is_loaded_if_more_than_ranks_differs(wrong, load):
    client = layers(2)
    before = outputs(client)
    sent = adapter_tensors(layers(4, seed=1))
    change, said = WRONG[wrong]
    with pytest.raises(UpdateError, match=said):
        load(client, change(sent, *sorted(sent)))
    assert torch.equal(outputs(client), before)
    client.merge_adapter()
    with pytest.raises(FedrotError, match=r"merged.*linear'"):
        load(client, sent)
    client.unmerge_adapter()
    load(client, sent)
    assert not torch.equal(outputs(client), before)


def test_what_is_sent_does_not_change_with_the_model():
    model = layers()
    sent = adapter_tensors(model)
    before = copied(sent)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert same(sent, before)


@pytest.mark.parametrize("trained", ["A", "B", "both"])
def test_only_the_named_factors_of_one_adapter_train(trained):
    options = {"task_type": "SEQ_CLS", "target_modules": ["query"]}
    model = adapted(bert(), **options)
    model.add_adapter("default2", peft.LoraConfig(r=2, target_modules=["query"]))
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    train_only(model, trained)
    # New parameters, of rank 2.
    load_as_sent(model, adapter_tensors(adapted(bert(), 2, **options)))
    for name, parameter in model.named_parameters():
        expected = before[name]
        for factor in "AB":
            if f"lora_{factor}.default." in name:
                expected = trained in (factor, "both")
        assert parameter.requires_grad == expected
    with pytest.raises(FedrotError, match="factors is 'C'"):
        train_only(model, "C")
    (pair, *_) = pairs_of(adapter_tensors(model, "default2"))
    assert len(adapter_tensors(model, "default2")[pair.a]) == 2


@pytest.mark.parametrize("load", [load_adapter, load_as_sent])
@pytest.mark.parametrize("kind", ["head", "embedding"])
def test_the_active_adapter_is_meant_whatever_its_name(kind, load):
    build, options, _ = SENT[kind]
    lora = peft.LoraConfig(r=4, **options)
    model = peft.get_peft_model(build(), lora, "mine").double()
    sender = adapted(build(), 4, 1, **options)
    sent = adapter_tensors(sender)
    load(model, sent)
    assert same(adapter_tensors(model), sent)
    train_only(model, "B")
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert {".lora_B.mine" in n for n in trained if "lora_B" in n} == {True}
    assert not any("lora_A" in name for name in trained)
    with pytest.raises(UpdateError, match=r"contains the adapter's name"):
        load(model, {n: t for n, t in sender.state_dict().items() if "lora_" in n})
    model.add_adapter("other", lora)
    model.set_adapter("other")
    assert not same(adapter_tensors(model), sent)
    assert same(adapter_tensors(model, "mine"), sent)
    model.base_model.active_adapter = ["mine", "other"]
    with pytest.raises(FedrotError, match=r"'mine \+ other'.* are mine, other"):
        adapter_tensors(model)


def test_models_without_this_adapter_are_refused():
    with pytest.raises(FedrotError, match=r"'default'; its adapters are none"):
        adapter_tensors(nn.Linear(2, 2))
    with pytest.raises(FedrotError, match=r"'other'.* are default"):
        load_adapter(layers(), {}, "other")
