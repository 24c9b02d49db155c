"""Saved models aligned and merged from disk: the result, what is written, and what is refused."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, load_file, save_file

import fedrot
from fedrot.aggregation import Fisher, Mean, RegMean
from fedrot.simulations.merge.merge_inputs import batches_of
from fedrot.simulations.merge.merge_settings import MergeSettings
from fedrot.simulations.merge.merging import merge, options_of
from fedrot.simulations.models.saved_model import open_saved_model
from tests import families
from tests.models import VOCABULARY, State, bert_config, fresh_model, inputs, near, randomise
from tests.simulations import commands

NONE = MergeSettings(parts="none")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(VOCABULARY - 5))]


def invoke(*arguments: object) -> tuple[int, str]:
    return commands.invoke("merge", *arguments)


def model_of(name: str, seed: int = 0) -> Any:
    return fresh_model(name, seed=seed).float()


def state(model: Any) -> State:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def with_state(model: Any, tensors: State) -> Any:
    other = copy.deepcopy(model)
    other.load_state_dict(tensors)
    return other


def neighbour(model: Any, seed: int = 1, scale: float = 0.1) -> Any:
    """The model after a little training, tied tensors still tied."""
    return with_state(model, {**state(model), **near(dict(model.named_parameters()), scale, seed)})


def scrambled(model: Any, parts: tuple[str, ...] = ("attention", "ffn")) -> Any:
    symmetry = fedrot.symmetry_of(model.config, model.state_dict())
    return with_state(model, fedrot.random_equivalent(model.state_dict(), symmetry, 3, parts))


def saved(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def loaded(folder: Path, like: Any) -> Any:
    """Load with the class that the configuration names; nothing may be missing or left over."""
    model, found = type(like).from_pretrained(folder, output_loading_info=True)
    assert not any(found[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def assert_close(one: State, other: State, atol: float = 1e-6) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name].float(), other[name].float(), atol=atol, rtol=1e-5)


def contents(folder: Path) -> dict[str, bytes]:
    return {name: data for name, (_, data) in commands.contents(folder).items()}


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A classifier and a neighbour of it in other coordinates."""
    model = model_of("bert-classifier")
    return saved(model, tmp_path / "a"), saved(scrambled(neighbour(model)), tmp_path / "b")


# What comes out


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("bert-classifier", "attention+ffn"),
        ("bert-mlm", "heads+attention+ffn"),
        ("roberta-mlm", "whole"),
        ("distilbert-mlm", "whole"),
        ("electra-mlm", "attention+ffn"),
        ("bert-mlm-untied", "attention+ffn"),
    ],
)
def test_a_scrambled_copy_gives_the_original_back(name: str, parts: str, tmp_path: Path) -> None:
    model = model_of(name)
    options = options_of(parts)
    a = saved(model, tmp_path / "a")
    b = saved(scrambled(model, options.parts), tmp_path / "b")
    code, output = invoke(a, b, "--parts", parts, "--out", tmp_path / "out")
    assert code == 0, output
    merged = loaded(tmp_path / "out", model)
    assert_close(state(merged), state(model), atol=2e-5)
    with torch.no_grad():
        torch.testing.assert_close(
            merged(**inputs()).logits, model(**inputs()).logits, atol=2e-4, rtol=1e-4
        )
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as ours:
        with safe_open(a / "model.safetensors", "pt") as theirs:
            assert set(ours.keys()) == set(theirs.keys())
        assert ours.metadata() == {"format": "pt"}
    merge([a, b], tmp_path / "plain", NONE)
    plain = state(loaded(tmp_path / "plain", model))
    assert max(float((plain[n] - t).abs().max()) for n, t in state(model).items()) > 0.1


def test_weights_follow_the_order_of_the_models(tmp_path: Path) -> None:
    models = [model_of("bert-classifier", seed) for seed in range(3)]
    paths = [saved(model, tmp_path / str(i)) for i, model in enumerate(models)]
    options = ["--weights", "1, 2,5", "--parts", "none"]
    code, output = invoke(*paths, *options, "--out", tmp_path / "out")
    assert code == 0, output
    a, b, c = map(state, models)
    expected = {name: (a[name] + 2 * b[name] + 5 * c[name]) / 8 for name in a}
    assert_close(state(loaded(tmp_path / "out", models[0])), expected)
    for share in ("0.125", "0.25", "0.625"):
        assert share in output


def test_the_mean_is_that_of_aligned_models(pair: tuple[Path, Path], tmp_path: Path) -> None:
    first = model_of("bert-classifier")
    ours, theirs = state(first), state(loaded(pair[1], first))
    symmetry = fedrot.symmetry_of(first.config, ours)
    options = fedrot.AlignmentOptions(parts=("attention",))
    moved = fedrot.align(theirs, ours, symmetry, options).apply(theirs)
    code, output = invoke(*pair, "--parts", "attention", "--out", tmp_path / "out")
    assert code == 0, output
    mean = {name: (ours[name] + moved[name]) / 2 for name in ours}
    assert_close(state(loaded(tmp_path / "out", first)), mean)


def test_what_does_not_exceed_chance_is_averaged_as_it_is(tmp_path: Path) -> None:
    model = model_of("bert-classifier")
    a, b = saved(model, tmp_path / "a"), saved(neighbour(model, scale=1e-3), tmp_path / "b")
    merge([a, b], tmp_path / "plain", NONE)
    report = merge([a, b], tmp_path / "out")
    groups = report.inputs[1].alignment.groups
    # What best elements would remove is found, and is too little.
    assert max(group.found for group in groups) > 0
    assert not any(group.moved for group in groups)
    plain, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "out"))
    assert all(torch.equal(tensor, plain[name]) for name, tensor in merged.items())


@pytest.mark.parametrize(("name", "parts"), [("bert-classifier", "ffn"), ("bert-mlm", "whole")])
def test_distances_are_over_all_tensors_once(name: str, parts: str, tmp_path: Path) -> None:
    model = model_of(name)
    other = neighbour(scrambled(model, options_of(parts).parts))
    a, b = saved(model, tmp_path / "a"), saved(other, tmp_path / "b")
    first, second = merge([a, b], None, MergeSettings(parts=parts), dry_run=True).inputs
    ours, theirs = ({n: p.detach() for n, p in m.named_parameters()} for m in (model, other))
    assert (first.before, first.after) == (0, 0)
    assert second.before == pytest.approx(
        sum(float((ours[n] - theirs[n]).square().sum()) for n in ours), rel=1e-5
    )
    # What training added is left: a tenth of every tensor's size.
    assert second.after == pytest.approx(
        sum(float(theirs[n].square().sum()) for n in ours) / 101, rel=0.1
    )
    plain = merge([a, b], None, NONE, dry_run=True).inputs[1]
    assert plain.before == plain.after == second.before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_dtype_is_that_of_the_first_model(dtype: torch.dtype, tmp_path: Path) -> None:
    model = model_of("distilbert-classifier")
    rounded = copy.deepcopy(model).to(dtype)
    a = saved(rounded, tmp_path / "a")
    same = saved(copy.deepcopy(rounded).float(), tmp_path / "same")
    b = saved(neighbour(model), tmp_path / "b")
    code, output = invoke(a, b, "--parts", "none", "--out", tmp_path / "out")
    assert code == 0, output
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert settings["dtype"] == str(dtype).removeprefix("torch.")
    assert loaded(tmp_path / "out", model).dtype == dtype
    merge([same, b], tmp_path / "exact", NONE)
    exact = state(loaded(tmp_path / "exact", model))
    for name, tensor in tensors.items():
        assert torch.equal(tensor, exact[name].to(tensor.dtype))


def test_what_belongs_to_the_anchor_is_copied(tmp_path: Path) -> None:
    model = model_of("bert-causal")
    a, b = saved(model, tmp_path / "a"), saved(neighbour(model), tmp_path / "b")
    save_tokenizer(a)
    (a / "training_args.bin").write_text("not the model's")
    merge([a, b], tmp_path / "out")
    copied = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    written = contents(tmp_path / "out")
    assert set(written) == copied | {"model.safetensors"}
    assert {n: written[n] for n in copied} == {n: contents(a)[n] for n in copied}
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab()["w7"] == 12


# What goes in


def test_shards_are_one_model(pair: tuple[Path, Path], tmp_path: Path) -> None:
    model = model_of("bert-classifier")
    shards = saved(model, tmp_path / "shards", max_shard_size="20KB")
    assert len(list(shards.glob("*.safetensors"))) > 2
    for name, first in (("whole", pair[0]), ("sharded", shards)):
        assert invoke(first, pair[1], "--out", tmp_path / name)[0] == 0
    whole, sharded = contents(tmp_path / "whole"), contents(tmp_path / "sharded")
    # Tensors lie elsewhere in memory, which changes the order of some sums.
    first, second = (load(files.pop("model.safetensors")) for files in (whole, sharded))
    assert_close(first, second)
    assert whole == sharded


def test_a_model_is_a_folder_and_no_file(pair: tuple[Path, Path], tmp_path: Path) -> None:
    code, output = invoke(*pair, "--out", tmp_path / "out.safetensors")
    assert code == 2
    assert "out.safetensors' names a file, and a model is a folder of files. Leave" in output
    code, output = invoke(pair[0], pair[1] / "model.safetensors", "--out", tmp_path / "no")
    assert code == 2
    assert "model.safetensors' is a file. Give the folder of a saved model. Put config.json" in output
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


@pytest.mark.parametrize("name", ["bert-mlm", "distilbert-mlm"])
def test_tied_tensors_may_be_stored_twice_and_are_written_once(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    a, both = saved(model, tmp_path / "a"), saved(model, tmp_path / "both")
    save_file(state(model), both / "model.safetensors")
    merge([both, a], tmp_path / "out")
    assert_close(state(loaded(tmp_path / "out", model)), state(model))
    assert (
        load_file(tmp_path / "out" / "model.safetensors").keys()
        == load_file(a / "model.safetensors").keys()
    )
    tied = next(n for n in state(model) if n not in load_file(a / "model.safetensors"))
    save_file({**state(model), tied: state(model)[tied] + 1}, both / "model.safetensors")
    with pytest.raises(fedrot.FedrotError, match="has different values"):
        merge([both, a], tmp_path / "no")


def test_what_a_class_does_not_have_is_left_out_and_said(tmp_path: Path) -> None:
    model = model_of("bert-classifier")
    a, b = saved(model, tmp_path / "a"), saved(neighbour(model), tmp_path / "b")
    tensors = load_file(b / "model.safetensors")
    save_file({**tensors, "bert.embeddings.ages": torch.arange(3)}, b / "model.safetensors")
    report = merge([a, b], tmp_path / "out")
    assert any("left out: bert.embeddings.ages" in note for note in report.notes)
    loaded(tmp_path / "out", model)


# What the report says


def test_the_report_has_a_line_per_part(tmp_path: Path) -> None:
    model = model_of("bert-classifier")
    a, b = saved(model, tmp_path / "a"), saved(scrambled(model), tmp_path / "b")
    code, output = invoke(a, b, "--dry-run")
    assert code == 0, output
    lines = output.replace("┃", "│").split("│")
    cells = [cell.strip() for cell in lines]
    row = cells.index("attention")
    assert cells[row + 3] == "16 of 16"
    assert float(cells[row + 1]) > 1 > float(cells[row + 2])
    neurons = int(cells[cells.index("ffn") + 3].removesuffix(" of 96"))
    assert 80 < neurons <= 96
    assert "all tensors" in cells
    assert "another basis" not in output
    told = " ".join(output.split())
    assert f"'b' was in other coordinates: {16 + neurons} of 112 heads, neurons and directions" in told
    assert re.search(
        "were moved, which removed [0-9.]+% of the squared distance to the first model", told
    )


def test_of_a_model_that_is_not_moved_the_command_says_why(tmp_path: Path) -> None:
    model = model_of("bert-classifier")
    pair = saved(model, tmp_path / "a"), saved(neighbour(model), tmp_path / "b")
    code, output = invoke(*pair, "--dry-run")
    assert code == 0, output
    told = " ".join(output.split())
    assert "'b' was averaged as it is: none of 112 heads, neurons and directions differs" in told


@pytest.mark.parametrize(
    ("parts", "advice"),
    [("attention+ffn", "Merge with --parts whole"), ("whole", "Its residual stream was matched")],
)
def test_models_from_other_bases_are_pointed_out(parts: str, advice: str, tmp_path: Path) -> None:
    a, b = (saved(model_of("bert-classifier", seed), tmp_path / str(seed)) for seed in (0, 1))
    code, output = invoke(a, b, "--parts", parts, "--dry-run")
    assert code == 0, output
    assert f"'{b}' is in another basis than the anchor" in output
    assert advice in output


def test_labels_of_other_names_are_pointed_out(pair: tuple[Path, Path]) -> None:
    settings = json.loads((pair[1] / "config.json").read_text())
    names = {"0": "yes", "1": "no", "2": "maybe"}
    changed = {"id2label": names, "label2id": {v: int(k) for k, v in names.items()}}
    (pair[1] / "config.json").write_text(json.dumps(settings | changed))
    report = merge(pair, None, dry_run=True)
    assert any("has other label names than the anchor" in note for note in report.notes)


def test_a_tokenizer_that_the_result_lacks_is_pointed_out(pair: tuple[Path, Path]) -> None:
    save_tokenizer(pair[1])
    (note,) = merge(pair, None, NONE, dry_run=True).notes
    assert note.startswith("The first model has no tokenizer")
    assert str(pair[1]) in note
    assert merge(pair[::-1], None, NONE, dry_run=True).notes == ()


def test_a_dry_run_writes_nothing(pair: tuple[Path, Path], tmp_path: Path) -> None:
    before = contents(tmp_path)
    for options in ([], ["--out", tmp_path / "out"], ["--out", pair[0]]):
        code, output = invoke(*pair, *options, "--dry-run")
        assert code == 0, output
        assert "nothing was written" in output
    assert contents(tmp_path) == before
    assert not (tmp_path / "out").exists()


# Statistics


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]"
    ).save_pretrained(folder)


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, Any]:
    """A data set of few words, as settings."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(5, 25, (80, 9), generator=generator).tolist()
    table = {
        "words": [" ".join(WORDS[i] for i in row) for row in rows],
        "label": [0, 1] * 40,
        "split": ["train"] * 60 + ["test"] * 20,
    }
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table(table), tmp_path / "data" / "few.parquet")
    return {"data": "few", "data_dir": tmp_path / "data", "text_column": "words"}


def as_options(texts: dict[str, Any]) -> list[object]:
    return [item for name, value in texts.items() for item in (f"--{name.replace('_', '-')}", value)]


Expected = Callable[[Any, Any, list[Any]], State]


def regmean(ours: Any, theirs: Any, batches: list[Any]) -> State:
    alignment = fedrot.align(
        state(theirs), state(ours), fedrot.symmetry_of(ours.config, ours.state_dict())
    )
    merged = RegMean()
    merged.add(state(ours), 1.0, fedrot.collect_gram(ours, batches))
    moved = alignment.apply(state(theirs))
    merged.add(moved, 3.0, alignment.transport(fedrot.collect_gram(theirs, batches)))
    return merged.result()


def fisher(ours: Any, theirs: Any, batches: list[Any]) -> State:
    symmetry = fedrot.symmetry_of(ours.config, ours.state_dict())
    moved = with_state(theirs, fedrot.align(state(theirs), state(ours), symmetry).apply(state(theirs)))
    merged = Fisher()
    for model, weight in ((ours, 1.0), (moved, 3.0)):
        merged.add(state(model), weight, fedrot.collect_fisher(model, batches))
    return merged.result()


@pytest.mark.parametrize("name", ["bert-classifier", "distilbert-mlm"])
@pytest.mark.parametrize("expected", [regmean, fisher])
def test_statistics_are_those_of_the_aggregators(
    name: str, expected: Expected, texts: dict[str, Any], tmp_path: Path
) -> None:
    ours = model_of(name)
    theirs = neighbour(scrambled(ours))
    a, b = saved(ours, tmp_path / "a"), saved(theirs, tmp_path / "b")
    save_tokenizer(a)
    options = ["--method", expected.__name__, "--weights", "1,3"]
    code, output = invoke(a, b, *options, *as_options(texts), "--out", tmp_path / "out")
    assert code == 0, output
    batches, _ = batches_of(open_saved_model(a), MergeSettings(**texts), 256)
    assert sum(len(batch["input_ids"]) for batch in batches) == 60
    assert "labels" not in batches[0]
    # Of tied tensors one is stored.
    stored = load_file(tmp_path / "out" / "model.safetensors")
    reference = expected(ours, theirs, batches)
    assert_close(stored, {name: reference[name] for name in stored}, atol=1e-5)
    loaded(tmp_path / "out", ours)
    merge([a, b], tmp_path / "mean", MergeSettings(weights="1,3"))
    mean = load_file(tmp_path / "mean" / "model.safetensors")
    assert max(float((mean[n] - stored[n]).abs().max()) for n in stored) > 1e-3


def test_regmean_finds_a_rotated_residual_stream(texts: dict[str, Any], tmp_path: Path) -> None:
    """A model and the same in a rotated basis merge alike; both are canonical before statistics."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=16, pad_token_id=0
    )
    ours = randomise(transformers.GPT2ForSequenceClassification(config)).eval()
    theirs, symmetry = neighbour(ours), fedrot.symmetry_of(config, ours.state_dict())
    folded = fedrot.canonical(state(theirs), symmetry)
    turned = fedrot.random_equivalent(folded, symmetry.rotated, 3, ("residual",))
    first = saved(ours, tmp_path / "ours")
    save_tokenizer(first)
    stored = {}
    for name, model, method in (
        ("plain", theirs, "regmean"),
        ("turned", with_state(ours, turned), "regmean"),
        ("mean", theirs, "mean"),
    ):
        settings = MergeSettings(method=method, parts="residual", weights="1,3", **texts)
        merge([first, saved(model, tmp_path / name)], tmp_path / f"{name}-out", settings)
        stored[name] = load_file(tmp_path / f"{name}-out" / "model.safetensors")
    assert_close(stored["turned"], stored["plain"], atol=1e-4)
    assert all(bool((stored["turned"][fold.gain] == 1).all()) for fold in symmetry.folds)
    assert (
        max(float((stored["mean"][n] - stored["plain"][n]).abs().max()) for n in stored["mean"]) > 1e-2
    )


def test_optimal_transport_finds_units_where_nothing_is_aligned(tmp_path: Path) -> None:
    """The plan of two neighbours is hard, so that heads and neurons in another order come back."""
    ours = model_of("bert-classifier")
    theirs = neighbour(ours)
    folders = {
        "ours": saved(ours, tmp_path / "ours"),
        "theirs": saved(theirs, tmp_path / "theirs"),
        "mixed": saved(scrambled(theirs, ("heads", "ffn")), tmp_path / "mixed"),
    }
    still = MergeSettings(parts="none", weights="1,3")
    merge([folders["ours"], folders["theirs"]], tmp_path / "mean", still)
    expected = load_file(tmp_path / "mean" / "model.safetensors")
    for method, apart in (("ot", False), ("mean", True)):
        models = [folders["ours"], folders["mixed"]]
        merge(models, tmp_path / method / "out", still.model_copy(update={"method": method}))
        found = load_file(tmp_path / method / "out" / "model.safetensors")
        largest = max(float((found[name] - expected[name]).abs().max()) for name in expected)
        assert largest > 0.1 if apart else largest < 1e-5


def test_what_the_aggregator_notes_is_in_the_report(
    pair: tuple[Path, Path], texts: dict[str, Any]
) -> None:
    save_tokenizer(pair[0])
    norm = "bert.encoder.layer.1.output.LayerNorm"

    def zero(tensors: State) -> None:
        for name in ("weight", "bias"):
            tensors[f"{norm}.{name}"][:3] = 0

    for folder in pair:
        change_weights(folder, zero)
    report = merge(pair, None, MergeSettings(method="regmean", **texts), dry_run=True)
    (note,) = (note for note in report.notes if "bert.pooler.dense.weight" in note)
    assert note.startswith("3 of 32 directions of its input are zero at every client")


def test_the_report_says_how_rows_without_splits_were_divided(pair: tuple[Path, Path]) -> None:
    save_tokenizer(pair[0])
    file = pair[0].parent / "texts.csv"
    file.write_text("text,label\n" + "w1 w2 w3,0\nw4 w5,1\n" * 10)
    settings = MergeSettings(method="regmean", data=str(file))
    report = merge(pair, None, settings, dry_run=True)
    assert report.notes[0].startswith(f"{file} has no splits: of 20 rows 4 are held out")


def test_texts_are_cut_to_the_positions_that_a_model_has_for_them(tmp_path: Path) -> None:
    """RoBERTa's positions start after the padding token."""
    model = model_of("roberta-mlm")
    folder, file = saved(model, tmp_path / "a"), tmp_path / "long.csv"
    save_tokenizer(folder)
    file.write_text("text,label\n" + f"{' '.join(['w1'] * 90)},0\nw2 w3,1\n" * 10)
    own = model.config.max_position_embeddings
    for positions, longest in ((own, own - 2), (65, 63), (66, 64), (200, 64)):
        change_config(folder, max_position_embeddings=positions)
        batches, _ = batches_of(open_saved_model(folder), MergeSettings(data=str(file)), 16)
        assert max(batch["input_ids"].shape[1] for batch in batches) == longest


def test_data_also_serves_the_residual_stream(
    texts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedrot.collect import activations

    model = model_of("bert-classifier")
    a = saved(model, tmp_path / "a")
    b = saved(scrambled(model, fedrot.WHOLE_MODEL), tmp_path / "b")
    save_tokenizer(a)
    seen: list[Any] = []
    original = activations.collect_activations

    def spy(ours: Any, theirs: Any, batches: Any, *args: Any) -> Any:
        seen.append(batches)
        return original(ours, theirs, batches, *args)

    monkeypatch.setattr(activations, "collect_activations", spy)
    merge([a, b], tmp_path / "out", MergeSettings(parts="whole", **texts))
    assert [len(batches[0]["input_ids"]) for batches in seen] == [60]
    assert_close(state(loaded(tmp_path / "out", model)), state(model), atol=2e-5)


# What is refused


def other_class(folder: Path) -> None:
    saved(model_of("bert-mlm"), folder)


def other_heads(folder: Path) -> None:
    settings = bert_config()
    settings.num_attention_heads = 2
    saved(transformers.BertForSequenceClassification(settings), folder)


def other_labels(folder: Path) -> None:
    settings = bert_config()
    settings.num_labels = 5
    saved(transformers.BertForSequenceClassification(settings), folder)


def change_config(folder: Path, **changes: Any) -> None:
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | changes))


def xlnet(folder: Path) -> None:
    change_config(folder, model_type="xlnet")


def no_class(folder: Path) -> None:
    change_config(folder, architectures=None)


def no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])


def no_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").write_text("hello")


def change_weights(folder: Path, change: Callable[[State], object]) -> None:
    tensors = {name: t.clone() for name, t in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def no_tensor(folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors.pop("classifier.bias"))


def misshapen(folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors.update({"classifier.bias": torch.zeros(4)}))


def not_finite(folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors["classifier.bias"].fill_(float("nan")))


def no_shard(folder: Path) -> None:
    saved(model_of("bert-classifier"), folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    sorted(folder.glob("*.safetensors"))[1].unlink()


def no_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": 3}')


def other_words(folder: Path) -> None:
    save_tokenizer(folder.parent / "a")
    save_tokenizer(folder)
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"w3"', '"other"'))


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (other_class, "Different architectures: architectures is ['BertForSequenceClassification'] in"),
        (other_heads, "Different architectures: num_attention_heads is 4 in '{a}' and 2 in '{b}'"),
        (
            other_labels,
            "Different shapes: the tensor 'classifier.weight' is (3, 32) in '{a}' and (5, 32)",
        ),
        (other_words, "'{b}' are not the same (60 and 60 embeddings): 'other' "),
        (xlnet, "'{b}/config.json': The architecture 'xlnet' is not supported"),
        (no_class, "'{b}/config.json' has nothing in 'architectures'"),
        (no_json, "'{b}/config.json' is damaged: it is not JSON"),
        (no_config, "'{b}/config.json' does not exist"),
        (no_weights, "'{b}' has no model.safetensors and no model.safetensors.index.json"),
        (truncated, "'{b}/model.safetensors' is damaged or no safetensors file"),
        (no_safetensors, "'{b}/model.safetensors' is damaged or no safetensors file"),
        (no_tensor, "'{b}' has no tensor 'classifier.bias' (1 missing in all)"),
        (misshapen, "'{b}': the tensor 'classifier.bias' has shape [4], but needs shape [3]"),
        (not_finite, "'{b}': The tensor 'classifier.bias' holds NaN or Inf"),
        (no_shard, "which does not have it. Copy all shards"),
        (no_index, "'{b}/model.safetensors.index.json' is damaged: it has no readable 'weight_map'"),
        (shutil.rmtree, "'{b}' does not exist. Give the folder of a saved model, or a hub name"),
    ],
)
def test_models_that_cannot_be_merged(
    spoil: Callable[[Path], object], expected: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    a, b = pair
    spoil(b)
    code, output = invoke(a, b, "--out", tmp_path / "out")
    assert code == 2, output
    assert expected.format(a=a, b=b) in output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--method", "magic"], "Unknown method 'magic'; choose from mean, fisher, ot, regmean"),
        (["--method", "fisher"], "Method 'fisher' collects statistics from data: give --data"),
        (["--method", "regmean", "--data", "goemotions_ekman"], "has no tokenizer. The bundled"),
        (["--parts", "legs"], "Unknown part 'legs' in parts"),
        (["--parts", "attention,ffn"], "Join parts by '+', or give whole or none"),
        (["--weights", "1"], "The weights are 1 for 2 models; each model needs one"),
        (["--weights", "1,0"], "each model needs one, positive and finite"),
        (["--weights", "1,x"], "The weights are '1,x'; give numbers separated by commas"),
    ],
)
def test_requests_that_make_no_sense(
    options: list[str], expected: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    code, output = invoke(*pair, *options, "--out", tmp_path / "out")
    assert code == 2, output
    assert expected in output
    assert not (tmp_path / "out").exists()


def test_unknown_data_and_unknown_tokens_are_refused(
    pair: tuple[Path, Path], texts: dict[str, Any], tmp_path: Path
) -> None:
    save_tokenizer(pair[0])
    options = ["--method", "regmean", "--out", tmp_path / "out"]
    code, output = invoke(*pair, *options, *as_options({**texts, "data": "nothing"}))
    assert (code, "data set 'nothing' is" in output) == (2, True), output
    code, output = invoke(*pair, *options, *as_options({**texts, "text_column": "content"}))
    assert (code, "no text column 'content'; columns are words" in output) == (2, True), output
    path = pair[0] / "tokenizer.json"
    path.write_text(path.read_text().replace('"w5":10', '"w5":70').replace('"w5": 10', '"w5": 70'))
    code, output = invoke(*pair, *options, *as_options(texts))
    assert (code, f"'{pair[0]}' has tokens beyond the model's 60" in output) == (2, True), output


def test_one_model_and_no_place_to_write_to_are_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    code, output = invoke(pair[0], "--out", tmp_path / "out")
    assert (code, "1 model is given" in output) == (2, True)
    code, output = invoke(*pair)
    assert (code, "give --out, or --dry-run" in output) == (2, True)


def test_bare_encoders_are_not_matched_as_a_whole(tmp_path: Path) -> None:
    paths = [saved(model_of("bert-bare", seed), tmp_path / str(seed)) for seed in (0, 1)]
    code, output = invoke(*paths, "--parts", "whole", "--dry-run")
    assert code == 2
    assert f"'{paths[1]}': Part 'residual' cannot be moved" in output


def test_values_beyond_the_dtype_are_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    saved(model_of("bert-classifier").half(), pair[0])
    change_weights(pair[1], lambda tensors: tensors["classifier.bias"].fill_(1e6))
    code, output = invoke(*pair, "--out", tmp_path / "out")
    assert code == 2
    assert f"'classifier.bias' has values beyond torch.float16, the dtype of '{pair[0]}'" in output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_is_there_already_is_left_alone(kind: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("precious")
    else:
        out.mkdir()
        (out / "precious").write_text("1")
    before = contents(tmp_path)
    code, output = invoke(*pair, "--out", out)
    assert code == 2
    assert "Choose another --out" in output
    assert contents(tmp_path) == before


def test_an_empty_folder_is_filled(pair: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert invoke(*pair, "--out", tmp_path / "out")[0] == 0
    loaded(tmp_path / "out", model_of("bert-classifier"))


@pytest.mark.parametrize("stage", ["merging", "writing", "copying"])
def test_nothing_is_left_when_it_fails(
    stage: str, pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise OSError("out of luck")

    def half(_: object, file: Path, *__: object, **___: object) -> Any:
        Path(file).write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    if stage == "merging":
        monkeypatch.setattr(Mean, "result", fail)
    elif stage == "writing":
        for module in (safetensors.torch, transformers.modeling_utils):
            for function in ("save_file", "safe_save_file"):
                monkeypatch.setattr(module, function, half, raising=False)
    else:
        monkeypatch.setattr(Path, "replace", fail)
    before = contents(tmp_path)
    code, output = invoke(*pair, "--out", tmp_path / "out")
    assert code == 2
    assert ("No space left" if stage == "writing" else "out of luck") in output
    assert contents(tmp_path) == before
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_a_folder_that_cannot_be_written_to_is_an_error(pair: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, output = invoke(*pair, "--out", tmp_path / "file" / "out")
    assert code == 2, output
    assert "file" in output


#: Families with tied tables, with tables of their own, and four whose files have other names than they.
OTHERS = ("t5-gated", "bart", "gpt2", "llama", "clip", "deberta-v3", "albert")
TRANSLATED = ("vit", "deit", "gpt-neox", "mixtral")


@pytest.mark.parametrize("name", [*OTHERS, *TRANSLATED])
def test_other_families_merge_too(name: str, tmp_path: Path) -> None:
    """A model and itself in other coordinates give the model, under the names of its own files."""
    model, symmetry = families.model_of(name), families.symmetry_for(name)
    for seed in (0, 1):
        state = families.state_of(name)
        if seed:
            state = fedrot.random_equivalent(state, symmetry, seed, fedrot.WHOLE_MODEL)
        model.load_state_dict(state)
        copy.deepcopy(model).float().save_pretrained(tmp_path / str(seed))
    pair = tmp_path / "0", tmp_path / "1"
    code, output = invoke(*pair, "--parts", "whole", "--out", tmp_path / "merged")
    assert code == 0, output
    merged, first = (type(model).from_pretrained(tmp_path / n).state_dict() for n in ("merged", "0"))
    if fedrot.symmetry_of(model.config, model.state_dict()).can_rotate:
        # The residual stream was rotated, which takes models in canonical form. Tied tables prevent it.
        first = fedrot.canonical(first, symmetry)
    assert all(torch.allclose(merged[key], first[key], atol=1e-5) for key in first)
    files = (load_file(tmp_path / folder / "model.safetensors") for folder in ("merged", "0"))
    ours, theirs = (file.keys() for file in files)
    assert ours == theirs
