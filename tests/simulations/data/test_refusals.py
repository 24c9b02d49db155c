"""Tables of every task whose columns or rows cannot be used: the error names them."""

import pytest

from fedrot.simulations.data.read import DataError
from fedrot.simulations.tasks.task_registry import TASKS
from tests.simulations.data.files import TEXTS, chosen, repeated, write
from tests.simulations.data.test_images import png
from tests.simulations.data.test_texts import MARKS, SPLIT, WORDS

#: Columns of a table that can be used, by task.
TABLES = {
    "classification": {"text": TEXTS, "label": repeated(["glad", "sad"])},
    "ner": {"tokens": WORDS, "ner_tags": MARKS, "split": SPLIT},
    "image": {"image": [png(1)] * 2, "label": [0, 1], "split": ["train", "test"]},
}
HOLE = [{"bytes": png(1), "path": None}, {"bytes": None, "path": None}]
THREE = ["B-X", "O", "O"]
#: By task: changed columns of its table (None: left out) or options, and a word of the
#: error.
REFUSED = {
    "classification": [
        ({"text_column": "body"}, "no text column 'body' among text, label"),
        ({"text_column": "text,label,text"}, "3 columns; give one or two"),
        ({"text": [*TEXTS[:-1], None]}, r"text column 'text' has no .*row\(s\) 40,"),
        ({"text": ["", *TEXTS[1:]]}, r"no value in 1 of 40 rows: row\(s\) 1,"),
        ({"text": [0.5, float("nan")] * 20}, r"row\(s\) 2, 4"),
        ({"text": [["text"]] * 40}, "holds list.*, no texts"),
        ({"text": [b"text"] * 40}, "no texts"),
        ({"split": ["train", None] * 20}, "column 'split' of .*has None, train"),
        ({"Split": ["train", "fold 2"] * 20}, "'Split' .*fold 2.* rename the column"),
        *(
            ({"split": values * 10}, "it needs 'train'.* rename the column")
            for values in (["test", "validation"] * 2, ["train"] * 4, [0, 1] * 2)
        ),
        ({"text": ["a"], "label": [0]}, "1 rows, too few to hold one in 5"),
        ({"label": [[0, 3]] * 40}, "list<.*, no labels; .* true and false"),
    ],
    "ner": [
        ({"tokens": None}, "no word list column 'tokens' or 'words' among ner_tags, s"),
        ({"label_column": "fine"}, "no tag list column 'fine'.* --label-column"),
        ({"tokens": ["Anna", "is", "a"]}, "'tokens' holds string, no word lists"),
        ({"ner_tags": [{"0": "B-X"}] * 3}, "holds struct.* O, B-TYPE or I-TYPE for"),
        ({"ner_tags": [[{"start": 0, "label": "X"}]] * 3}, "row 1 has 3 words"),
        ({"ner_tags": [[[0, 1]]] * 3}, r"row 1 has .*\[0, 1\]; each word needs"),
        ({"ner_tags": [["O", None], ["O"], []]}, r"'ner_tags' has no .*row\(s\) 1,"),
        ({"ner_tags": [THREE, ["O"], []]}, "row 2 has 2 words in 'tokens', and in"),
        ({"ner_tags": [THREE, ["O"] * 2, ["O"]]}, "parquet, row 3 has 0 words"),
        ({"ner_tags": [[3, 0, 0], [0, 0], []]}, "row 1 has .*'ner_tags' 3, 0, 0; each"),
        ({"ner_tags": [["O"] * 3, ["O"] * 2, []]}, "every tag is 'O'"),
        *(
            ({"ner_tags": [THREE, ["O", tag], []]}, f"row 2 has .* O, {tag};")
            for tag in ("U-PER", "B-", "")
        ),
    ],
    "image": [
        (
            {"image": None, "photo": [png(1)] * 2},
            "no image file column 'image' or 'img' among",
        ),
        ({"image": ["a.png", "b.png"]}, "string, no image files; .* CLASS/IMAGE"),
        (
            {"image": [png(1), b"no image"]},
            "mine.parquet, row 2 cannot be read as an image",
        ),
        ({"image": [png(1), None]}, r"'image' has no value in 1 .*row\(s\) 2,"),
        ({"image": HOLE}, "row 2 cannot be read as an image"),
    ],
}


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [(task, *case) for task, cases in REFUSED.items() for case in cases],
)
def test_a_wrong_table_is_refused_with_its_column_and_rows(
    task, changes, message, tmp_path
):
    columns = {**TABLES[task], **changes}
    options = {name: columns.pop(name) for name in changes if "_column" in name}
    table = {name: values for name, values in columns.items() if values}
    path = write(tmp_path / "mine.parquet", **table)
    with pytest.raises(DataError, match=message):
        TASKS[task].read(chosen(path, task=task, **options))
