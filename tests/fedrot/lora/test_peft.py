"""Adapters of real PEFT models: names, scales, and outputs that no gauge changes."""

import peft
import pytest
import torch
from torch import nn

from fedrot.errors import FedrotError
from fedrot.lora import AdapterOptions, AdapterUpdate, LoraSettings, average_adapters
from fedrot.lora.adapters import pairs_of, plain_names
from fedrot.lora.gauges import GAUGES
from tests.fedrot.collect.tiny import tiny_classifier
from tests.fedrot.oracles import gap, seeded
from tests.models import largest_difference

SIZES = {"vocab_size": 30, "num_labels": 3}


def bert():
    return tiny_classifier(
        "bert", hidden_size=16, intermediate_size=20, num_hidden_layers=2, **SIZES
    )


def gpt2():
    return tiny_classifier(
        "gpt2",
        "CausalLM",
        **SIZES,
        n_embd=16,
        n_layer=2,
        n_positions=12,
        tie_word_embeddings=False,
    )


def adapted(net, rank=4, seed=0, **options):
    """Return a model in float64 whose factors are random."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=rank, lora_alpha=6, **options)
    found = peft.get_peft_model(net, config).double().eval()
    for name, parameter in found.named_parameters():
        if "lora_" in name and "magnitude" not in name:
            nn.init.normal_(parameter, std=0.3)
    return found


SETTINGS = {
    "linear": (
        bert,
        {"task_type": "SEQ_CLS", "target_modules": ["query", "value", "dense"]},
    ),
    "rslora": (
        bert,
        {"task_type": "SEQ_CLS", "target_modules": ["query"], "use_rslora": True},
    ),
    "dora": (
        bert,
        {"task_type": "SEQ_CLS", "target_modules": ["query", "key"], "use_dora": True},
    ),
    "patterns": (
        bert,
        {
            "target_modules": ["query", "key", "value"],
            "rank_pattern": {"query": 2, "layer.1.attention.self.key": 5},
            "alpha_pattern": {"layer.0.attention.self.query": 3, "key": 20},
        },
    ),
    "conv1d and embedding": (
        gpt2,
        {
            "target_modules": ["c_attn", "c_fc", "wte"],
            "fan_in_fan_out": True,
            "lora_bias": False,
        },
    ),
}


def outputs(model):
    ids = torch.randint(30, (3, 7), generator=seeded(1))
    with torch.inference_mode():
        return model(input_ids=ids).logits


@pytest.mark.parametrize("which", SETTINGS)
def test_scales_are_those_of_peft_and_no_gauge_changes_the_outputs(which):
    build, how = SETTINGS[which]
    torch.manual_seed(0)
    model = adapted(build(), **how)
    before = outputs(model)
    settings = LoraSettings.of(model.peft_config["default"])
    tensors = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    modules = dict(model.named_modules())
    for pair in pairs_of(tensors):
        layer = modules[pair.module]
        scale = settings.scale(pair.module, layer.r["default"])
        assert scale == pytest.approx(layer.scaling["default"])
    for gauge in GAUGES:
        options = AdapterOptions("exact", gauge)
        update = AdapterUpdate(tensors, 1.0, settings)
        found, report = average_adapters([update], settings, options)
        for name, tensor in tensors.items():
            assert found[name].shape == tensor.shape
        assert gauge != "none" or largest_difference(found, tensors) > 0.01
        assert not peft.set_peft_model_state_dict(model, dict(found)).unexpected_keys
        assert gap(outputs(model), before) <= 1e-9
        assert max(report.error.values()) < 1e-6
        dora = any("magnitude" in name for name in tensors)
        assert report.magnitudes == dora == ("DoRA's magnitudes" in str(report))


@pytest.mark.parametrize("which", SETTINGS)
def test_a_state_dict_has_the_names_of_peft_and_those_of_wrappers(which):
    """Adapters that are written in both ways have a mean, in the first one's names."""
    build, how = SETTINGS[which]
    model = adapted(build(), **how)
    tensors = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    trained = {
        f"module._orig_mod.{name}": tensor
        for name, tensor in model.state_dict().items()
        if "lora_" in name or "modules_to_save.default" in name
    }
    assert plain_names(trained).keys() == tensors.keys() == plain_names(tensors).keys()
    settings = LoraSettings.of(model.peft_config["default"])
    updates = [AdapterUpdate(own, 1.0, settings) for own in (tensors, trained)]
    found, _ = average_adapters(updates, settings)
    assert largest_difference(found, tensors) < 1e-9


def test_settings_are_read_from_files():
    config = peft.LoraConfig(
        r=4, lora_alpha=6, use_rslora=True, alpha_pattern={"query": 3}
    )
    settings = LoraSettings.of(config)
    assert (
        settings == LoraSettings(6.0, {"query": 3.0}, True) == LoraSettings.of(settings)
    )
    assert settings == LoraSettings.of({**config.to_dict(), "peft_type": "LORA"})
    assert LoraSettings.of({"r": 4}) == LoraSettings(8.0)
    starts = ("gaussian", "eva", "orthogonal", True, False, None, "pissa", "olora")
    changed = [
        LoraSettings.of({"r": 4, "init_lora_weights": start}).changed_base
        for start in starts
    ]
    assert changed == [*[""] * 6, "pissa", "olora"]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "IA3"}, "kind IA3"),
        ({"hidden_size": 3}, "A dict is no configuration of a LoRA adapter"),
        (4, "A int is no configuration"),
        ({"r": 4, "init_lora_weights": "mica"}, "init_lora_weights='mica'"),
        *(
            (
                {"lora_alpha": 4, field: {"beta": 1e-4}},
                f"has {field}: .* fedrot does not average",
            )
            for field in (
                "target_parameters",
                "kasa_config",
                "use_bdlora",
                "monteclora_config",
            )
        ),
        *(
            ({"lora_alpha": alpha}, "positive and finite")
            for alpha in (-8, 1e-400, float("nan"))
        ),
        ({"r": 4, "alpha_pattern": {"query": float("inf")}}, "positive and finite"),
    ],
)
def test_other_settings_are_refused(config, said):
    with pytest.raises(FedrotError, match=said):
        LoraSettings.of(config)
