"""``PooledClassifier``: poolings, symmetry, bounds of every encoder, losses, and what
is loaded in another process.
"""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

import fedrot
from fedrot.errors import FedrotError
from fedrot.simulations.pretrained import source_of
from fedrot.strategies import PooledClassifier
from fedrot.strategies.pooled_classifier import POOLINGS, PooledClassifierConfig
from fedrot.task_head.bounds import largest_inputs
from fedrot.task_head.names import task_head_of
from tests.families import FIXED, MEMBERS, VOCABULARY, config_of
from tests.models import movable, randomise
from tests.simulations.saved.folders import change, tokenizer
from tests.simulations.tasks.cases import SIZES, save

#: Models that give a state for each token of a text.
ENCODERS = [
    name
    for name, member in MEMBERS.items()
    if member.takes == "text" and not name.startswith(("bart", "t5"))
]
#: Those whose last states have no known bound.
UNBOUNDED = ("deberta", "opt", "clip", "gemma3", "gptj", "gpt-neox", "bloom")
UNBOUNDED += ("falcon", "xglm")
MEAN = {"pooling_mode_mean_tokens": True}
CLS = {"pooling_mode_cls_token": True}
LAST = {"pooling_mode_lasttoken": True}
TRANSFORMER = ("sentence_transformers.models.Transformer", "")
POOLING = ("sentence_transformers.models.Pooling", "1_Pooling")
NORMALIZE = ("sentence_transformers.models.Normalize", "2_Normalize")
BERT = transformers.BertConfig(**SIZES)


def folder_of(
    folder,
    pooling=MEAN,
    config=BERT,
    modules=(),
    dtype=torch.float32,
):
    """Save a model as sentence-transformers does."""
    save(folder, config, dtype=dtype)
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": kind}
        for i, (kind, path) in enumerate(modules or (TRANSFORMER, POOLING, NORMALIZE))
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def classifier_of(name, **settings):
    """Return a random classifier in float64 on the encoder of a family's member."""
    inner = config_of(name).to_dict()
    config = PooledClassifierConfig(inner, **{"num_labels": 3, **settings})
    model = PooledClassifier(config).double()
    model.set_experts_implementation("eager")  # others have no float64
    return randomise(model).eval()


def batch_of(left=False):
    """Return three texts of 7, 4 and 2 tokens, padded on one side."""
    ids = torch.randint(4, 30, (3, 7), generator=torch.Generator().manual_seed(5))
    mask = (torch.arange(7) < torch.tensor([[7], [4], [2]])).long()
    if left:
        mask = mask.flip(1)
    return {"input_ids": ids, "attention_mask": mask}


def features_of(model, batch):
    """Return what the task head reads."""
    read = []
    handle = model.classifier.register_forward_pre_hook(
        lambda _, inputs: read.append(inputs[0])
    )
    with torch.no_grad(), handle:
        model(**batch)
    return read[0]


@pytest.mark.parametrize("name", ENCODERS)
def test_every_encoder_keeps_its_symmetry_its_bound_and_its_tensors(name, tmp_path):
    model = classifier_of(name)
    config = model.config
    state = model.state_dict()
    assert task_head_of(config, state) == "classifier"
    symmetry = fedrot.symmetry_of(config.to_dict(), state)
    assert symmetry.family == fedrot.symmetry_of(config_of(name), state).family
    parts = movable(symmetry)
    assert {"attention", "ffn"} <= {*parts}
    assert ("residual" in parts) == (name not in FIXED), symmetry.refused
    for pooling, left in zip(POOLINGS, (False, True, False), strict=True):
        config.pooling = pooling
        batch = {**batch_of(left), "labels": torch.tensor([0, 2, 1])}
        assert fedrot.check_function(model, config, symmetry, parts, batch=batch) < 1e-9
    if symmetry.can_rotate:
        assert fedrot.check_function(model, config, symmetry.rotated, parts) < 1e-9
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    largest = largest_inputs(config, model.state_dict(), "classifier")
    assert (largest is None) == name.startswith(UNBOUNDED)
    if largest is not None:
        assert 0.2 < (features_of(model, batch_of()).abs() / largest).max() <= 1
    model.float().save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert type(loaded) is PooledClassifier
    assert loaded.config.pooling == "last"
    for key, tensor in model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[key], tensor, rtol=0, atol=0)


def states_of(model, batch):
    """Return what each layer gives out, read by hooks, and the last states."""
    states = []

    def keep(_, inputs, output):
        states.append(output[0] if isinstance(output, tuple) else output)

    layers = re.compile(r".*(layer|layers|h|albert_layers)\.\d+")
    for name, module in model.encoder.named_modules():
        if layers.fullmatch(name):
            module.register_forward_hook(keep)
    last = model.encoder(**batch).last_hidden_state
    return [*states[:-1], last]


#: Encoders whose layers have one width. Their classifiers read two layers.
EVEN = [name for name in ENCODERS if name != "opt-projected"]


@pytest.mark.parametrize("name", EVEN)
def test_features_of_several_layers_keep_function_and_bound(name, tmp_path):
    model = classifier_of(name, layers=[-2, -1], pooling="cls")
    config, state = model.config, model.state_dict()
    symmetry = fedrot.symmetry_of(config.to_dict(), state)
    parts = movable(symmetry)
    assert ("residual" in parts) == (name not in FIXED), symmetry.refused
    assert not symmetry.can_rotate
    batch = batch_of()
    assert fedrot.check_function(model, config, symmetry, parts, batch=batch) < 1e-9
    moved = fedrot.random_equivalent(state, symmetry, 3, parts)
    options = fedrot.AlignmentOptions(parts=parts)
    back = fedrot.align(moved, state, symmetry, options).apply(moved)
    torch.testing.assert_close(back, dict(state), rtol=1e-9, atol=1e-9)
    canonical = fedrot.canonical(state, symmetry)
    model.float()
    read = features_of(model, batch)
    model.load_state_dict(canonical)
    assert model(**batch).hidden_states is None
    assert len(model(**batch, output_hidden_states=True).hidden_states) > 2
    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(features_of(model, batch), read, **close)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    features = features_of(model, batch)
    *_, before, last = states_of(model, batch)
    expected = torch.cat([before[:, 0], last[:, 0]], -1)
    if name == "deberta-v2-conv":
        # A convolution follows the first layer.
        features, expected = features[:, 24:], expected[:, 24:]
    torch.testing.assert_close(features, expected)
    # Without their last norm, states of pre-norm models have no bound.
    largest = largest_inputs(config, model.state_dict(), "classifier")
    post_norm = name.startswith(("bert", "roberta", "camembert", "electra", "mpnet"))
    post_norm |= name in ("distilbert", "albert-groups")
    assert (largest is not None) == post_norm
    features = features_of(model, batch)
    if largest is not None:
        shares = (features.double().abs() / largest).max(0).values.chunk(2)
        assert all(0.1 < share.max() <= 1 + 1e-6 for share in shares)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert loaded.config.layers == [-2, -1]
    torch.testing.assert_close(features_of(loaded, batch), features)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("last", [-1]),
        ("all", [-3, -2, -1]),
        ([1, 3], [-3, -1]),
        ([-1, 2, 2], [-2, -1]),
        ((2,), [-2]),
    ],
)
def test_layers_are_counted_from_the_last(layers, expected, tmp_path):
    inner = transformers.BertConfig(**{**SIZES, "num_hidden_layers": 3})
    folder = folder_of(tmp_path, config=inner)
    model = PooledClassifier.from_encoder(folder, layers=layers, num_labels=2)
    assert model.config.layers == expected
    assert model.classifier.in_features == len(expected) * inner.hidden_size
    for wrong in (0, [4], [-4], [], "first", [1.5], [True], np.array([1, 2])):
        with pytest.raises(FedrotError, match="layers"):
            PooledClassifierConfig(inner, layers=wrong)


def test_layers_of_another_width_are_refused():
    with pytest.raises(FedrotError, match="12"):
        classifier_of("opt-projected", layers=[1])


def test_layers_of_albert_may_be_groups_and_share_norms():
    inner = {**config_of("albert-groups").to_dict(), "num_hidden_layers": 4}
    for layers, expected in {"all": -8, 6: -3}.items():
        config = PooledClassifierConfig(inner, layers=layers)
        assert config.layers[0] == expected
        state = PooledClassifier(config).state_dict()
        assert largest_inputs(config, state, "classifier") is None


def test_edited_settings_are_checked(tmp_path):
    model = classifier_of("bert", layers=[1]).float()
    model.save_pretrained(tmp_path)
    load = AutoModelForSequenceClassification.from_pretrained
    assert load(tmp_path, layers=[2]).config.layers == [-1]
    with pytest.raises(FedrotError, match="pooling"):
        load(tmp_path, pooling="max")
    settings, state = model.config.to_dict(), model.state_dict()
    for wrong in ("all", 5, [1], [0]):
        with pytest.raises(fedrot.SymmetryError, match="layers"):
            fedrot.symmetry_of({**settings, "layers": wrong}, state)
    del settings["layers"]
    last = classifier_of("bert").config
    assert fedrot.symmetry_of(settings, state) == fedrot.symmetry_of(last, state)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("left", [False, True])
def test_poolings_leave_out_padding_at_either_end(pooling, name, left):
    model = classifier_of(name, pooling=pooling)
    batch = batch_of(left)
    tokens = model.encoder(**batch).last_hidden_state
    mask = batch["attention_mask"]
    expected = {
        "mean": lambda own: own.mean(0),
        "cls": lambda own: own[0],
        "last": lambda own: own[-1],
    }[pooling]
    rows = [expected(own[keep.bool()]) for own, keep in zip(tokens, mask, strict=True)]
    torch.testing.assert_close(features_of(model, batch), torch.stack(rows))
    # Without a mask every token is one of the text.
    ids = batch["input_ids"][:1]
    torch.testing.assert_close(
        features_of(model, {"input_ids": ids}), features_of(model, batch)[:1]
    )


@pytest.mark.parametrize("kind", ["bert", "distilbert"])
def test_segments_reach_encoders_that_have_them_and_no_others(kind):
    inner = transformers.AutoConfig.for_model(kind, **SIZES)
    model = randomise(PooledClassifier(PooledClassifierConfig(inner))).eval()
    batch = batch_of()
    segments = torch.ones_like(batch["input_ids"])
    same = torch.equal(
        features_of(model, {**batch, "token_type_ids": segments}),
        features_of(model, batch),
    )
    assert same == (kind == "distilbert")


@pytest.mark.parametrize(
    ("settings", "labels", "loss"),
    [
        ({"num_labels": 3}, torch.tensor([2, 0, 1]), functional.cross_entropy),
        (
            {"num_labels": 3},
            torch.eye(3).double(),
            functional.binary_cross_entropy_with_logits,
        ),
        (
            {"num_labels": 1, "problem_type": "regression"},
            torch.tensor([[0.5], [1.0], [2.0]]).double(),
            functional.mse_loss,
        ),
    ],
)
def test_losses_are_those_of_the_problem_type(settings, labels, loss):
    out = classifier_of("bert", **settings)(**batch_of(), labels=labels)
    torch.testing.assert_close(out.loss, loss(out.logits, labels))


def test_precision_and_checkpoints_of_gradients_pass_through(tmp_path):
    folder = folder_of(tmp_path / "encoder")
    half = PooledClassifier.from_encoder(folder, dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    for dtype in (torch.bfloat16, torch.float32):
        loaded = PooledClassifier.from_pretrained(tmp_path / "half", dtype=dtype)
        assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    eager = PooledClassifier.from_pretrained(
        tmp_path / "half", attn_implementation="eager"
    )
    for model, attention in ((half, "sdpa"), (loaded, "sdpa"), (eager, "eager")):
        assert model.encoder.config._attn_implementation == attention
    gradients = []
    for checkpointing in (False, True):
        loaded.zero_grad()
        if checkpointing:
            loaded.gradient_checkpointing_enable()
        loaded.train()
        torch.manual_seed(0)
        loaded(**batch_of(), labels=torch.tensor([0, 1, 1])).loss.backward()
        gradients.append([p.grad.clone() for p in loaded.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1])
    assert any(
        getattr(module, "gradient_checkpointing", False) for module in loaded.modules()
    )


@pytest.mark.parametrize(
    ("pooling", "config", "expected"),
    [
        (MEAN, BERT, "mean"),
        (CLS, BERT, "cls"),
        (LAST, BERT, "last"),
        ({}, BERT, "mean"),
        ({"pooling_mode": "cls"}, BERT, "cls"),
        ({"pooling_mode": ["mean"]}, BERT, "mean"),
        ({"pooling_mode": "lasttoken"}, BERT, "last"),
        (None, BERT, "mean"),
        (None, transformers.LlamaConfig(**SIZES), "last"),
    ],
)
def test_the_pooling_is_that_of_the_folder(pooling, config, expected, tmp_path):
    """Without one, encoders are read by the mean and decoders by the last token."""
    if pooling is None:
        save(tmp_path, config)
    else:
        folder_of(tmp_path, pooling, config)
    model = PooledClassifier.from_encoder(tmp_path, num_labels=4)
    assert model.config.pooling == expected
    named = PooledClassifier.from_encoder(tmp_path, "cls")
    assert (named.config.pooling, named.config.num_labels) == ("cls", 2)
    encoder = transformers.AutoModel.from_pretrained(tmp_path).state_dict()
    for name, tensor in model.encoder.state_dict().items():
        assert torch.equal(tensor, encoder[name])
    assert model.classifier.weight.std() < 0.05


@pytest.mark.parametrize("version", ["as packaged", "saved again"])
def test_features_are_sentence_transformers_own(version, tmp_path):
    """Theirs are normalised. Version 6 writes another configuration than that of the
    package.
    """
    from sentence_transformers import SentenceTransformer

    folder = source_of("minilm")
    theirs = SentenceTransformer(folder, device="cpu")
    if version == "saved again":
        folder = str(tmp_path)
        theirs.save(folder)
    texts = ["I am so happy for you!", "what?", "This is a sad, sad story of men."]
    encode = transformers.AutoTokenizer.from_pretrained(folder)
    batch = encode(texts, padding=True, return_tensors="pt")
    features = features_of(PooledClassifier.from_encoder(folder), batch)
    expected = theirs.encode(texts, convert_to_tensor=True)
    torch.testing.assert_close(
        functional.normalize(features), expected, atol=1e-5, rtol=0
    )
    assert (features.norm(dim=1) - 1).abs().min() > 0.1


DENSE = ("sentence_transformers.models.WordWeights", "2_Weights")
#: Pooling, modules, and a part of the error.
REFUSED = {
    "max": ({"pooling_mode_max_tokens": True}, (), "pooling pooling_mode_max_tokens;"),
    "max, version 6": ({"pooling_mode": "max"}, (), "pooling max;"),
    "both, version 6": ({"pooling_mode": ["cls", "max"]}, (), "pooling cls and max;"),
    "a number": ({"pooling_mode": 3}, (), "pooling 3;"),
    "between": (MEAN, (TRANSFORMER, DENSE, POOLING), "Transformer, WordWeights"),
    "no transformer": (MEAN, (("models.StaticEmbedding", ""),), "StaticEmbedding"),
    "no pooling": (MEAN, (TRANSFORMER, (POOLING[0], "2")), "mean, cls or last token"),
    "no object": ([1], (), "it holds a list"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_poolings_are_refused_by_name(name, tmp_path):
    pooling, modules, words = REFUSED[name]
    folder = folder_of(tmp_path, pooling, modules=modules)
    with pytest.raises(FedrotError, match=words) as error:
        PooledClassifier.from_encoder(folder)
    assert str(tmp_path) in str(error.value)
    PooledClassifier.from_encoder(folder, "mean")


def test_no_layer_of_the_encoder_is_ever_random(tmp_path):
    folder = folder_of(tmp_path)
    with pytest.raises(FedrotError, match="from_encoder"):
        PooledClassifier.from_pretrained(folder)
    with pytest.raises(FedrotError, match="t5"):
        PooledClassifierConfig(transformers.T5Config())
    for pooling in ("max", ""):
        with pytest.raises(FedrotError, match="mean, cls, last"):
            PooledClassifier.from_encoder(folder, pooling)
    lost = "encoder.layer.0.output.dense.bias"

    def without(tensors):
        return {name: tensor for name, tensor in tensors.items() if name != lost}

    change(folder, without)
    with pytest.raises(FedrotError, match=lost):
        PooledClassifier.from_encoder(folder)


def process_of(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


#: Loads a folder in every way, with the import or without it.
SERVE = """
import sys
if {imports}:
    from fedrot.strategies import PooledClassifier
from transformers import AutoModelForSequenceClassification, pipeline
try:
    AutoModelForSequenceClassification.from_pretrained({folder!r})
    ask = pipeline("text-classification", model={folder!r}, top_k=None)
except ValueError as error:
    sys.exit(str(error))
print({{own["label"]: own["score"] for own in ask(["w7 w9 w30 w30"])[0]}})
"""


@pytest.mark.parametrize("imports", [False, True])
def test_a_saved_folder_is_served_in_another_process_or_refused(imports, tmp_path):
    torch.manual_seed(2)
    inner = transformers.BertConfig(**{**SIZES, "vocab_size": VOCABULARY})
    names = {0: "joy", 1: "fear", 2: "anger"}
    config = PooledClassifierConfig(inner, "mean", id2label=names)
    model = randomise(PooledClassifier(config)).eval()
    model.save_pretrained(tmp_path)
    tokenizer(tmp_path)
    result = process_of(SERVE.format(imports=imports, folder=str(tmp_path)))
    assert (result.returncode == 0) == imports, result.stderr
    if not imports:
        assert "fedrot_pooled_classifier" in result.stderr
        return
    assert "not supported" not in result.stderr
    words = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    batch = words(["w7 w9 w30 w30"], return_tensors="pt")
    scores = model(**batch).logits[0].detach().softmax(-1)
    served = json.loads(result.stdout.replace("'", '"'))
    for number, name in names.items():
        assert served[name] == pytest.approx(float(scores[number]), abs=1e-6)


def test_only_the_name_imports_transformers():
    code = (
        "import sys, fedrot.strategies as s; assert 'transformers' not in sys.modules; "
        "s.PooledClassifier; assert 'transformers' in sys.modules; s.wrong"
    )
    result = process_of(code)
    assert "AttributeError" in result.stderr, result.stderr
    assert "wrong" in result.stderr
