"""The script that counts lines and words."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CI = Path(__file__).parents[2] / ".ci"
CEILINGS = "[lines]\nfedrot = {fedrot}\ntests = 9\n[words]\ndocumentation = {words}\n"
#: Three lines of Python in fedrot/, one in tests/, six words of documentation.
TREE = {
    "fedrot/a.py": "a\nb\n",
    "fedrot/deep/b.py": "c",
    "fedrot/rows.csv": "1\n2\n3\n",
    "tests/test_a.py": "a\n",
    "README.md": "two words\n",
    "docs/how-to/page.md": "three words, here\n",
    "docs/results/page.md": "one\n",
    "docs/results/rows/summary.md": "not counted\n",
    "docs/results/archive/page.md": "not counted\n",
}


@pytest.mark.parametrize(
    ("repository", "fedrot", "words", "said", "code"),
    [
        (True, 3, 6, "below the ceilings: lines of tests 8\n", 0),
        (
            False,
            4,
            9,
            "below the ceilings: lines of fedrot 1, lines of tests 8, words of documentation 3\n",
            0,
        ),
        (True, 1, 6, "lines of fedrot: 3, 2 above", 1),
        (False, 3, 5, "words of documentation: 6, 1 above", 1),
    ],
)
def test_what_is_above_a_ceiling_is_named_and_fails(
    tmp_path: Path, repository: bool, fedrot: int, words: int, said: str, code: int
) -> None:
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / ".ci").mkdir()
    shutil.copy(CI / "ceilings", tmp_path / ".ci")
    (tmp_path / ".ci" / "ceilings.toml").write_text(CEILINGS.format(fedrot=fedrot, words=words))
    if repository:
        subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
        subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
        (tmp_path / "fedrot" / "untracked.py").write_text("a\n")
    command = [sys.executable, str(tmp_path / ".ci" / "ceilings")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert done.stdout.startswith(said)
