"""Labels of saved models meet those of the data by their names, in every task."""

import pytest
import torch
import transformers

from fedrot.simulations.model_labels import places_of
from fedrot.simulations.tasks.training import check_model
from fedrot.task_head.names import task_head_of
from tests.simulations.tasks.cases import (
    SIZES,
    VISION,
    model_for,
    save,
    task_for,
)

#: Labels, classes, the outputs of the classes, and whether numbers decide.
PLACES = {
    "names": ("xyz", "zxy", [2, 0, 1], False),
    "cases": (["X ", "y"], ["Y", "x"], [1, 0], False),
    "others": ("xyz", "zq", [2, -1], False),
    "no names": (["LABEL_0", "LABEL_1"], "ab", [0, 1], True),
    "no names, in their order": (["LABEL_0", "LABEL_1"], ["LABEL_1"], [1], False),
    "no names for some": (["LABEL_0", "LABEL_1", "LABEL_2"], "ab", [-1, -1], False),
    "some numbers": (["LABEL_0", "LABEL_1", "LABEL_2"], "20", [2, 0], True),
    "numbers of the data": ("ab", "01", [0, 1], True),
    "numbers from 1": ("ab", "12", [-1, -1], False),
    "numbers by name": ("10", "01", [1, 0], False),
    "twice": (["a", "A", "b"], "ab", [0, 2], False),
    "twice in other cases": (["a", "A", "b"], ["á", "B"], [-1, 2], False),
    "cases that differ": (["a", "A"], ["A", "a"], [1, 0], False),
    "letters and accents": (["e\u0301", "b"], ["b", "\u00e9"], [1, 0], False),
    "numbers as pandas writes them": (["1.0", "0.0"], "01", [1, 0], False),
    "truth as numbers": (["True", "False"], "01", [1, 0], False),
    "numbers that overlap": ("123", "012", [-1, 0, 1], False),
    "a score": (["LABEL_0"], ["score"], [0], False),
}


@pytest.mark.parametrize("how", PLACES)
def test_outputs_of_classes(how):
    labels, classes, places, unnamed = PLACES[how]
    assert places_of([*labels], [*classes]) == (places, unnamed)


GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 6000, "pad_token_id": 0}
#: Kinds of saved models: what they are for, and their configurations.
KINDS = {
    "bert": ("Sequence", transformers.BertConfig(**SIZES)),
    "gpt2": ("Sequence", transformers.GPT2Config(**GPT2)),
    "tagger": ("Token", transformers.BertConfig(**SIZES)),
    "vit": (
        "Image",
        transformers.ViTConfig(**VISION, image_size=8, patch_size=4, num_channels=1),
    ),
}


def backwards(names):
    return names[::-1]


#: A case, the kind of the saved model, its labels by those of the data, and a word of
#: what is said; empty: nothing.
SAVED = {
    "same": ("bert", "bert", lambda names: [n.upper() for n in names], ""),
    "reversed": ("bert", "bert", backwards, "names"),
    "a decoder": ("gpt2", "gpt2", backwards, "names"),
    "more": ("bert", "bert", lambda names: ["x", *names], "label: none"),
    "fewer": ("bert", "bert", lambda names: names[1:], "such a label: "),
    "several": ("multi", "bert", backwards, "names"),
    "a score": ("regression", "bert", lambda _: ["LABEL_0"], ""),
    "tags": ("ner bert", "tagger", backwards, "names"),
    "tags for texts": ("bert", "tagger", lambda _: ["O", "B-X"], "such a label: "),
    "images": ("image", "vit", backwards, "names"),
    "images of names": (
        "image",
        "vit",
        lambda names: [*map(hex, map(int, names))],
        "by position",
    ),
}


@pytest.mark.parametrize("how", SAVED)
def test_rows_of_a_saved_task_head_go_to_the_classes_of_their_names(how, tmp_path):
    case, kind, changed, said = SAVED[how]
    data = task_for(case).data
    classes = [*(data.tags or data.label_names)]
    labels = changed(classes)
    what, config = KINDS[kind]
    config.id2label = dict(enumerate(labels))
    auto = f"AutoModelFor{what}Classification"
    folder = save(tmp_path, config, auto)
    task = task_for(case, model=str(folder), architecture="")
    model = model_for(task)
    remark = getattr(model, "remark", "")
    assert (said in remark, bool(remark)) == (True, bool(said))
    assert [*model.config.id2label.values()] == classes
    file = getattr(transformers, auto).from_pretrained(folder)
    name = task_head_of(file.config, file.state_dict())
    head = model.get_submodule(task_head_of(model.config, model.state_dict()))
    places, _ = places_of(labels, classes)
    for row, place in zip(head.weight, places, strict=True):
        assert 0 < row.abs().max() < 0.2
        assert torch.equal(row, file.get_submodule(name).weight[place]) == (place >= 0)
    check_model(task, model)
