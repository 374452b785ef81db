"""`ampwise skill`: printed, or written where it does no harm."""

from __future__ import annotations

import pytest

from ampwise.cli import main, summaries
from ampwise.integrations.skill import TOPICS, skill_files


def files(folder):
    return {path.relative_to(folder).as_posix(): path.read_text("utf-8") for path in folder.rglob("*.md")}


def test_the_core_or_a_topic_is_printed(capsys):
    texts = skill_files(summaries())
    assert main(["skill"]) == 0
    assert capsys.readouterr().out == texts["SKILL.md"]
    assert main(["skill", "nan"]) == 0
    assert capsys.readouterr().out == texts["references/nan.md"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["stap"], f"unknown topic 'stap'. Did you mean step? The topics are {', '.join(TOPICS)}."),
        (["nan", "-o", "x"], "-o writes the core and all topics: leave out TOPIC."),
    ],
)
def test_what_is_wrong_is_said_in_one_line(words, message, capsys):
    assert main(["skill", *words]) == 2
    assert capsys.readouterr().err == f"ampwise: error: {message}\n"


def test_it_is_written_and_written_again(tmp_path, capsys):
    folder = tmp_path / "skills" / "mixed-precision"
    for _ in range(2):
        assert main(["skill", "-o", str(folder)]) == 0
        wrote = f"Wrote {folder / 'SKILL.md'} and {len(TOPICS)} topics in {folder / 'references'}\n"
        assert capsys.readouterr().out == wrote
        assert files(folder) == skill_files(summaries())


def test_a_file_of_another_origin_stays(tmp_path, capsys):
    (tmp_path / "references").mkdir()
    (tmp_path / "references" / "nan.md").write_text("mine")
    assert main(["skill", "--output", str(tmp_path)]) == 2
    assert "was not written by `ampwise skill`. Overwrite it with -f." in capsys.readouterr().err
    assert files(tmp_path) == {"references/nan.md": "mine"}, "nothing is written if something is in the way"
    assert main(["skill", "-o", str(tmp_path), "-f"]) == 0
    assert files(tmp_path) == skill_files(summaries())


def test_a_symlink_is_not_followed(tmp_path, capsys):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "skill").mkdir()
    (tmp_path / "skill" / "references").symlink_to(tmp_path / "elsewhere")
    assert main(["skill", "-o", str(tmp_path / "skill"), "-f"]) == 2
    assert "is a symlink" in capsys.readouterr().err
    assert not [*(tmp_path / "elsewhere").iterdir()]


def test_what_cannot_be_written_is_reported(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["skill", "-o", str(tmp_path / "file")]) == 2
    assert "SKILL.md cannot be " in capsys.readouterr().err
