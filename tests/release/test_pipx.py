"""`pipx run ampwise run train.py`: an environment of ampwise's own, where the script's torch is not."""


def test_it_says_so_in_a_line_before_anything_runs(command, tmp_path):
    (tmp_path / "train.py").write_text("import torch\n")
    done = command("run", "train.py", cwd=tmp_path, code=2)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("ampwise: error: ampwise run needs torch, which is not installed in this Python: /")
    assert "pip install 'ampwise[torch]'" in line
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
