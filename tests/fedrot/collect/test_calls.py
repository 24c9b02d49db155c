"""Collectors: modules that run several times, and encoder-decoders, whose tokens are of two texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartModel,
    BertConfig,
    CLIPConfig,
    CLIPModel,
    DebertaV2Config,
    DebertaV2Model,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    T5Config,
    T5ForConditionalGeneration,
    T5Model,
)

import fedrot
from fedrot.aggregation import RegMean
from fedrot.collect.activations import _run, _sites
from tests.families import model_of, symmetry_for
from tests.fedrot.oracles import seeded

Mask = Tensor | None


def deberta() -> nn.Module:
    """Return a model whose queries and keys also read the table of relative positions."""
    torch.manual_seed(0)
    return DebertaV2Model(
        DebertaV2Config(
            vocab_size=50,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=32,
            relative_attention=True,
            position_buckets=8,
            share_att_key=True,
            pos_att_type=["p2c", "c2p"],
            norm_rel_ebd="layer_norm",
            type_vocab_size=0,
            position_biased_input=False,
        )
    )


def t5(kind: type[Any] = T5Model) -> Any:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_ff": 24, "d_kv": 8, "num_heads": 2, "num_layers": 1}
    return kind(T5Config(vocab_size=50, decoder_start_token_id=0, **sizes))


def bart() -> nn.Module:
    torch.manual_seed(0)
    both = {
        f"{side}_{name}": size
        for side in ("encoder", "decoder")
        for name, size in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 24))
    }
    return BartModel(BartConfig(vocab_size=50, d_model=16, max_position_embeddings=32, **both))


def read(
    model: nn.Module, name: str, batch: Mapping[str, Tensor], mask: Callable[[Tensor], Mask]
) -> Any:
    """Return what a module reads, call by call and token by token where its mask is not 0."""
    found: list[Tensor] = []

    def keep(_: nn.Module, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor]) -> None:
        (given,) = (*args, *kwargs.values())
        of_call = mask(given)
        for row in range(given.shape[0]):
            for token in range(given.shape[1]):
                if of_call is None or bool(of_call[row, token]):
                    found.append(given[row, token].double())

    handle = model.get_submodule(name).register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        model.eval()(**batch)
    handle.remove()
    rows = torch.stack(found)
    return sum(torch.outer(row, row) for row in rows) / len(rows), rows.mean(0)


def tokens(seed: int, rows: int, length: int, padding: int) -> tuple[Tensor, Tensor]:
    """Return tokens and their mask; every row but the last is padded."""
    ids = torch.randint(3, 20, (rows, length), generator=seeded(seed))
    mask = torch.ones_like(ids)
    mask[:-1, length - padding :] = 0
    return ids, mask


def close(found: Tensor, expected: Tensor) -> bool:
    return float((found.double() - expected).norm()) <= 1e-5 * float(expected.norm())


# Rows times tokens are as many as relative positions, 16, in two of the batches.
@pytest.mark.parametrize("size", [(2, 6), (2, 8), (4, 4)])
def test_a_layer_that_reads_less_than_its_neighbour_has_a_matrix_of_its_own(
    size: tuple[int, int],
) -> None:
    model = deberta()
    ids, mask = tokens(1, *size, padding=2)
    batch = {"input_ids": ids, "attention_mask": mask}
    found = fedrot.collect_gram(model, [batch])

    def of_tokens(given: Tensor) -> Mask:
        return mask if given.shape[:2] == mask.shape else None

    for layer in range(2):
        for name in ("query_proj", "key_proj", "value_proj"):
            where = f"encoder.layer.{layer}.attention.self.{name}"
            gram, mean = read(model, where, batch, of_tokens)
            assert close(found["gram"][f"{where}.weight"], gram)
            assert close(found["input_mean"][f"{where}.weight"], mean)


@pytest.mark.parametrize("build", [t5, bart])
@pytest.mark.parametrize("length", [6, 5])
@pytest.mark.parametrize("masked", [True, False])
def test_a_decoder_reads_its_own_tokens_and_those_of_the_encoder(
    build: Callable[[], nn.Module], length: int, masked: bool
) -> None:
    """Also where both texts are as long, so that a mask fits either."""
    model = build()
    ids, mask = tokens(2, 3, 6, padding=3)
    answers, own = tokens(3, 3, length, padding=1)
    batch = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": answers}
    if masked:
        batch["decoder_attention_mask"] = own
    found = fedrot.collect_gram(model, [batch])["gram"]
    seen = set()
    for weight, gram in found.items():
        name = weight.removesuffix(".weight")
        block, _, last = name.rpartition(".")
        crosses = block.endswith(("EncDecAttention", "encoder_attn")) and last[0] in "kv"
        of_text = name.startswith("encoder.") or crosses
        seen.add((name.partition(".")[0], crosses))
        expected, _ = read(
            model, name, batch, lambda _, text=of_text: mask if text else own * masked + (1 - masked)
        )
        assert close(gram, expected), name
    assert seen == {("encoder", False), ("decoder", False), ("decoder", True)}


def test_a_decoder_that_reads_the_same_tokens_has_their_mask() -> None:
    model = bart()
    ids, mask = tokens(2, 3, 6, padding=3)
    batch = {"input_ids": ids, "attention_mask": mask}
    found = fedrot.collect_gram(model, [batch])["gram"]
    name = "decoder.layers.0.self_attn.q_proj"
    assert close(found[f"{name}.weight"], read(model, name, batch, lambda _: mask)[0])


class _InPlace(nn.Module):
    """A model that changes what a layer has read, before another one reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h += self.b(h)
        return self.c(h)


def test_inputs_are_those_of_the_call_whatever_the_model_does_to_them_later() -> None:
    torch.manual_seed(0)
    model, x = _InPlace(), torch.randn(7, 4, generator=seeded(1))
    found = fedrot.collect_gram(model, [{"x": x[:3]}, {"x": x[3:]}])["gram"]
    with torch.no_grad():
        before = model.a(x)
        after = before + model.b(before)
    for name, read_rows in (("b", before), ("c", after)):
        rows = read_rows.double()
        assert close(found[f"{name}.weight"], rows.mT @ rows / 7)


class _Skips(nn.Module):
    """Two layers that read one tensor; one of them is left out in some batches."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        return self.a(x) if skip else self.a(x) + self.b(x)


def test_a_layer_that_is_left_out_of_some_batches_has_no_matrix_of_another() -> None:
    batches: list[Any] = [{"x": torch.ones(2, 4)}, {"x": torch.ones(2, 4), "skip": True}]
    with pytest.raises(fedrot.FedrotError, match=r"a\.weight.*b\.weight.*in some batches only"):
        fedrot.collect_gram(_Skips(), batches)
    late = fedrot.collect_gram(_Skips(), batches[::-1])["gram"]
    assert torch.equal(late["a.weight"], torch.ones(4, 4))
    assert torch.equal(late["b.weight"], torch.ones(4, 4))


class _Twice(nn.Module):
    """Two layers that read one tensor, and the first reads another one, too; one has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.again = self.c

    def forward(self, x: Tensor) -> Tensor:
        u, v = self.a(x), self.b(x)
        return self.c(self.a(u + v))


def test_layers_share_a_matrix_only_if_they_read_the_same_in_every_call() -> None:
    torch.manual_seed(0)
    model, x = _Twice(), torch.randn(7, 4, generator=seeded(1))
    found = fedrot.collect_gram(model, [{"x": x}])["gram"]
    assert close(found["b.weight"], x.double().mT @ x.double() / 7)
    with torch.no_grad():
        both = torch.cat([x, model.a(x) + model.b(x)]).double()
    assert close(found["a.weight"], both.mT @ both / 14)


def test_a_layer_with_two_names_is_regressed_under_both() -> None:
    """Otherwise a model that loads the result would have the weight of the name it reads last."""
    regmean, models = RegMean(), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        models.append(_Twice())
        x = torch.randn(9, 4, generator=seeded(seed))
        regmean.add(models[-1].state_dict(), 1.0, fedrot.collect_gram(models[-1], [{"x": x}]))
    merged = regmean.result()
    assert torch.equal(merged["c.weight"], merged["again.weight"])
    mean = sum(model.c.weight.detach() for model in models) / 2
    assert float((merged["c.weight"] - mean).abs().max()) > 1e-3


@pytest.mark.parametrize("name", ["albert", "deberta-v3"])
def test_activations_of_every_call_count(name: str) -> None:
    """ALBERT's layers run once for each layer; queries of DeBERTa read positions, too."""
    model, symmetry = model_of(name), symmetry_for(name)
    ids, mask = tokens(4, 3, 7, padding=3)
    calls: dict[str, list[Tensor]] = {}

    def keep(module: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda _, args, output: calls.setdefault(module, []).append(output)

    sites = [s for group in symmetry.groups if group.part == "attention" for s in _sites(group, model)]
    outputs = [site for site in sites if site.output]
    handles = [
        model.get_submodule(module).register_forward_hook(keep(module))
        for module in {site.module for site in outputs}
    ]
    found = _run(model, outputs, {"input_ids": ids, "attention_mask": mask})
    for handle in handles:
        handle.remove()
    assert outputs
    for site in outputs:
        rows = [
            one[mask.bool()] if one.shape[:2] == mask.shape else one.flatten(0, -2)
            for one in calls[site.module]
        ]
        expected = site.slice.of(torch.cat(rows), 1)
        assert torch.equal(found[site], expected)
        assert len(calls[site.module]) > 1


def test_images_beside_texts_have_no_padding() -> None:
    """Although the text is as long as the patches of an image and one."""
    torch.manual_seed(0)
    text = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = CLIPModel(
        CLIPConfig(
            text_config={**text, "vocab_size": 50, "max_position_embeddings": 16, "eos_token_id": 2},
            vision_config={**text, "image_size": 4, "patch_size": 2},
            projection_dim=8,
        )
    )
    ids, mask = tokens(5, 3, 5, padding=2)
    images = torch.randn(3, 3, 4, 4, generator=seeded(6))
    batch = {"input_ids": ids, "attention_mask": mask, "pixel_values": images}
    found = fedrot.collect_gram(model, [batch])["gram"]
    for side, of in (("vision", None), ("text", mask)):
        name = f"{side}_model.encoder.layers.0.mlp.fc1"
        assert close(found[f"{name}.weight"], read(model, name, batch, lambda _, of=of: of)[0])


def test_a_decoder_reads_the_text_through_a_projection_too() -> None:
    """The encoder is narrower than the decoder."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = EncoderDecoderConfig.from_encoder_decoder_configs(
        BertConfig(hidden_size=16, **sizes), BertConfig(hidden_size=24, **sizes)
    )
    model = EncoderDecoderModel(config)
    ids, mask = tokens(2, 3, 6, padding=3)
    answers, own = tokens(3, 3, 6, padding=1)
    batch = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": answers}
    batch["decoder_attention_mask"] = own
    found = fedrot.collect_gram(model, [batch])["gram"]
    name = "decoder.bert.encoder.layer.0.crossattention.self.key"
    assert close(found[f"{name}.weight"], read(model, name, batch, lambda _: mask)[0])


def test_an_encoders_output_may_be_given() -> None:
    model = t5().eval()
    ids, mask = tokens(2, 3, 6, padding=3)
    answers, own = tokens(3, 3, 6, padding=1)
    with torch.no_grad():
        encoded = model.encoder(input_ids=ids, attention_mask=mask)
    batch: Any = {"encoder_outputs": encoded, "attention_mask": mask, "decoder_input_ids": answers}
    batch["decoder_attention_mask"] = own
    found = fedrot.collect_gram(model, [batch])["gram"]
    for name, of in (("layer.1.EncDecAttention.k", mask), ("layer.0.SelfAttention.k", own)):
        where = f"decoder.block.0.{name}"
        assert close(found[f"{where}.weight"], read(model, where, batch, lambda _, of=of: of)[0])


@pytest.mark.parametrize("embedded", [False, True])
def test_labels_become_a_decoders_inputs_only_if_it_has_none(embedded: bool) -> None:
    model = t5(T5ForConditionalGeneration).eval()
    ids, mask = tokens(2, 3, 6, padding=3)
    labels, _ = tokens(3, 3, 6, padding=1)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    shifted = model.prepare_decoder_input_ids_from_labels(labels=labels)
    given = {"input_ids": ids, "attention_mask": mask}
    if embedded:
        with torch.no_grad():
            batch["decoder_inputs_embeds"] = given["decoder_inputs_embeds"] = model.shared(shifted)
    else:
        given |= {"decoder_input_ids": shifted, "decoder_attention_mask": torch.ones_like(labels)}
    found, expected = (fedrot.collect_gram(model, [one])["gram"] for one in (batch, given))
    for name, gram in expected.items():
        assert torch.equal(found[name], gram)
