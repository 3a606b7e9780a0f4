from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nereus_common.engines.generation.scratch import PREFIX, Scratch, sweep

pytestmark = pytest.mark.fast
OWNER = """
import sys
from nereus_common.engines.generation.scratch import Scratch
scratch = Scratch.create()
(scratch.path / "socket").touch()
print(scratch.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_a_folder_whose_owner_was_killed_is_swept_at_the_next_start_and_no_other(parent: Path) -> None:
    other = parent / "something-else"
    other.mkdir()
    mine = Scratch.create()
    with subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        theirs = Path(owner.stdout.readline().decode().strip())
        sweep(parent)
        assert theirs.is_dir()
        assert mine.path.is_dir()
        owner.kill()
    assert (theirs / "socket").is_file()
    new = Scratch.create()
    assert sorted(parent.iterdir()) == sorted([other, mine.path, new.path])
    for scratch in (mine, new):
        scratch.remove()
        scratch.remove()
    assert list(parent.iterdir()) == [other]


def test_a_file_with_such_a_name_is_left_alone(parent: Path) -> None:
    (parent / f"{PREFIX}file").touch()
    sweep(parent)
    assert (parent / f"{PREFIX}file").is_file()
