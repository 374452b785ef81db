"""`ampwise skill`: printed, or written where it does no harm."""

from __future__ import annotations

from ampwise.cli import main, summaries
from ampwise.integrations.skill import skill_text


def test_it_is_printed(capsys):
    assert main(["skill"]) == 0
    assert capsys.readouterr().out == skill_text(summaries())


def test_it_is_written_and_written_again(tmp_path, capsys):
    folder = tmp_path / "skills" / "mixed-precision"
    for _ in range(2):
        assert main(["skill", "--out", str(folder)]) == 0
        assert capsys.readouterr().out == f"Wrote {folder / 'SKILL.md'}\n"
        assert (folder / "SKILL.md").read_text(encoding="utf-8") == skill_text(summaries())


def test_a_file_of_another_origin_stays(tmp_path, capsys):
    (tmp_path / "SKILL.md").write_text("mine")
    assert main(["skill", "--out", str(tmp_path)]) == 2
    assert "was not written by `ampwise skill`. Overwrite it with -f." in capsys.readouterr().err
    assert (tmp_path / "SKILL.md").read_text() == "mine"
    assert main(["skill", "--out", str(tmp_path), "-f"]) == 0
    assert (tmp_path / "SKILL.md").read_text(encoding="utf-8") == skill_text(summaries())


def test_what_cannot_be_written_is_reported(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["skill", "--out", str(tmp_path / "file")]) == 2
    assert "SKILL.md cannot be written: " in capsys.readouterr().err
