"""Gram matrices and means of inputs against hooks and loops, token by token and call by
call.
"""

from functools import partial

import pytest
import torch
import transformers
from torch import nn

from fedrot import FedrotError, collect_fisher, collect_gram
from tests import families
from tests.families import model_of
from tests.fedrot.collect.tiny import (
    CONV1D,
    batch_of,
    of_text,
    rows_of,
    tiny_classifier,
)
from tests.fedrot.oracles import seeded
from tests.models import CASES, fresh_model, inputs, randomise

few_words = partial(batch_of, vocabulary=families.VOCABULARY)


def of_encoder_and_decoder(name, batch):
    """Cross-attention reads the encoder's text by its keys and values, the rest the
    decoder's.
    """
    block, _, last = name.rpartition(".")
    crosses = block.endswith(("EncDecAttention", "encoder_attn"))
    if (
        "encoder.block" in name
        or "encoder.layers" in name
        or (crosses and last[0] in "kv")
    ):
        return batch["attention_mask"]
    return batch.get("decoder_attention_mask")


def of_image_or_text(name, batch):
    return None if "vision" in name else batch["attention_mask"]


def near(found, expected):
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    return float((found.double() - expected).norm()) <= 1e-5 * float(expected.norm())


def check(model, batches, mask_of=of_text):
    """Compare the statistics of every linear layer that shares no weight, and return
    them.
    """
    found = collect_gram(model, batches)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    seen = {}
    for name, (rows, _) in rows_of(model, batches, mask_of).items():
        layer = model.get_submodule(name)
        if id(layer.weight) in tables:
            continue
        suffix = "_conv1d" if isinstance(layer, CONV1D) else ""
        for other, same in model.named_modules(remove_duplicate=False):
            if same is layer:
                key = f"{other}.weight"
                gram = sum(torch.outer(row, row) for row in rows) / len(rows)
                assert near(found[f"gram{suffix}"][key], gram), key
                seen.setdefault(f"gram{suffix}", set()).add(key)
    assert {kind: set(by_name) for kind, by_name in found.items()} == seen
    return found


# Real models

ENCODERS = {
    **{
        name: partial(fresh_model, name)
        for name in (
            "bert-mlm",
            "bert-mlm-untied",
            "distilbert-classifier",
            "roberta-tokens",
        )
    },
    "albert, called three times": lambda: randomise(
        tiny_classifier("albert", num_hidden_layers=3, embedding_size=6)
    ),
    "gpt2, of Conv1D": lambda: randomise(tiny_classifier("gpt2", n_layer=2)),
}
TWO = [batch_of(1), batch_of(2, rows=2, length=5, padding=1)]


@pytest.mark.parametrize("name", ENCODERS)
def test_statistics_of_every_layer_are_sums_over_tokens(name):
    found = check(ENCODERS[name]().double(), TWO)
    assert ("gram_conv1d" in found) == ("gpt2" in name)
    if "mlm" in name:
        assert ("cls.predictions.decoder.weight" in found["gram"]) == name.endswith(
            "untied"
        )


#: Models with a batch: choices of a question are sequences like any other; a layer of
#: DeBERTa that reads positions, as many as rows times tokens of the first batch or not,
#: has its own matrix; a decoder that reads the encoder's tokens has their mask.
OTHERS = {
    "choices": (partial(fresh_model, "bert-choice"), partial(inputs, "bert-choice")),
    "as many positions": (
        partial(model_of, "deberta-v3"),
        partial(few_words, 1, 2, 4, 2),
    ),
    "positions": (partial(model_of, "deberta-v3"), partial(few_words, 1, 2, 6, 2)),
    "the same tokens": (lambda: model_of("bart").model, partial(few_words, 2, 3, 6, 3)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_statistics_of_other_models_are_sums_over_tokens(name):
    build, batch = OTHERS[name]
    check(build(), [batch()])


def two_texts(length, masked=True):
    """Return a text of 6 tokens and what the decoder reads, both padded."""
    text = few_words(2, 3, 6, 3)
    answer = few_words(3, 3, length, 1)
    found = {**text, "decoder_input_ids": answer["input_ids"]}
    return found | (
        {"decoder_attention_mask": answer["attention_mask"]} if masked else {}
    )


@pytest.mark.parametrize("name", ["t5-gated", "bart"])
@pytest.mark.parametrize(("length", "masked"), [(6, True), (6, False), (5, True)])
def test_a_decoder_reads_its_own_tokens_and_those_of_the_encoder(name, length, masked):
    """Also where both texts are as long, so that a mask fits either."""
    found = check(model_of(name), [two_texts(length, masked)], of_encoder_and_decoder)[
        "gram"
    ]
    assert any("decoder" in key for key in found)


def test_a_decoder_reads_the_text_through_a_projection_too():
    """The encoder is narrower than the decoder."""
    sizes = {
        "vocab_size": 60,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    bert = transformers.BertConfig
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        bert(hidden_size=16, **sizes), bert(hidden_size=24, **sizes)
    )
    model = randomise(transformers.EncoderDecoderModel(config))
    found = collect_gram(model, [two_texts(6)])["gram"]
    expected = rows_of(model, [two_texts(6)])
    for name in (
        "enc_to_dec_proj",
        "decoder.bert.encoder.layer.0.crossattention.self.key",
    ):
        rows, _ = expected[name]
        assert near(found[f"{name}.weight"], rows.mT @ rows / len(rows)), name


def test_an_encoders_output_may_be_given():
    model = model_of("t5-gated").eval()
    batch = two_texts(6)
    with torch.no_grad():
        encoded = model.encoder(batch["input_ids"], batch["attention_mask"])
    given = {key: value for key, value in batch.items() if key != "input_ids"}
    check(model, [{**given, "encoder_outputs": encoded}], of_encoder_and_decoder)


def test_images_beside_texts_have_no_padding():
    """Although the text is as long as the patches of an image and one."""
    batch = {
        **few_words(5, 3, 5, 2),
        "pixel_values": families.inputs("clip", 3)["pixel_values"],
    }
    check(model_of("clip"), [batch], of_image_or_text)


@pytest.mark.parametrize("name", ["t5-gated", "bart"])
@pytest.mark.parametrize("embedded", [False, True])
def test_labels_become_a_decoders_inputs_only_if_it_has_none(name, embedded):
    """The usual batch of sequence-to-sequence training has no inputs of the decoder."""
    model = model_of(name)
    given = few_words(2, 2, 6, 3)
    labels = torch.tensor([[5, 9, 7, 1], [8, 6, -100, -100]])
    ids = model.prepare_decoder_input_ids_from_labels(labels=labels)
    collectors = [collect_gram]
    if embedded:
        given["decoder_inputs_embeds"] = model.get_input_embeddings()(ids).detach()
        full = given
    else:
        shown = {
            "decoder_input_ids": ids,
            "decoder_attention_mask": (labels != -100).long(),
        }
        full = {**given, **shown, "labels": labels}
        collectors.append(partial(collect_fisher, labels="data"))
    for collect in collectors:
        found, expected = (
            collect(model, [batch]) for batch in ({**given, "labels": labels}, full)
        )
        assert found.keys() == expected.keys()
        for kind, by_name in expected.items():
            assert all(
                torch.equal(found[kind][key], value) for key, value in by_name.items()
            )


# Any module


class Paths(nn.Module):
    """Layers that read one tensor or several, once or twice, or are left out; one has
    two names.
    """

    def __init__(self):
        super().__init__()
        self.left, self.right, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.again = self.last
        self.unused = nn.Linear(5, 5)
        randomise(self)

    def forward(self, x, how=""):
        y = self.right(x + 1 if how == "apart" else x)
        if how in ("skip", "in place"):
            y += self.left(y) if how == "in place" else 0
            return self.last(y)
        z = self.left(input=x) if how == "by name" else self.left(x)
        if how == "twice":
            z = z + self.left(y + z)
        return self.last(y + z)


def ways(*how):
    return [
        {"x": torch.randn(4, 4, generator=seeded(i)), "how": one}
        for i, one in enumerate(how)
    ]


@pytest.mark.parametrize(
    ("how", "shared"),
    [
        (("", ""), True),
        (("by name", ""), True),
        (("apart", "apart"), False),
        (("apart", ""), False),
        (("skip", ""), False),
        (("twice", "twice"), False),
        (("in place", "in place"), False),
    ],
)
def test_layers_share_a_matrix_only_if_they_read_the_same_in_every_call(how, shared):
    found = check(Paths(), ways(*how))["gram"]
    assert found.keys() == {
        f"{name}.weight" for name in ("left", "right", "last", "again")
    }
    assert (found["left.weight"] is found["right.weight"]) == shared
    assert found["last.weight"] is found["again.weight"]


@pytest.mark.parametrize("second", ["apart", "skip", "twice"])
def test_inputs_that_are_shared_in_the_first_batch_and_not_later_are_refused(
    second,
):
    with pytest.raises(
        FedrotError, match=r"right\.weight.*left\.weight.*in some batches only"
    ):
        collect_gram(Paths(), ways("", second))


def test_no_token_to_read_gives_zeros():
    batch = batch_of(1)
    batch["attention_mask"] = torch.zeros_like(batch["attention_mask"])
    found = collect_gram(fresh_model("bert-classifier"), [batch])["gram"]
    assert not found[f"{CASES['bert-classifier'].names.of(0, 'query')}.weight"].any()


@pytest.mark.parametrize("most", [1, 2])
def test_no_more_batches_are_read_than_asked_for(most):
    taken = []

    def batches():
        for batch in ways("", "", ""):
            taken.append(batch)
            yield batch

    found = collect_gram(Paths(), batches(), max_batches=most)["gram"]
    assert len(taken) == most
    expected = collect_gram(Paths(), ways("", "", "")[:most])["gram"]
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize(
    ("model", "batches", "most"),
    [(Paths, [], None), (Paths, ways(""), 0), (nn.Identity, [{}], None)],
)
def test_nothing_to_read_is_refused(model, batches, most):
    given = [{"input": torch.ones(1, 2)}] if batches == [{}] else batches
    with pytest.raises(FedrotError, match=r"batch.*Linear"):
        collect_gram(model(), given, max_batches=most)
