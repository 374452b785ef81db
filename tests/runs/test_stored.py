"""Findings as plain data and back: the diff of a fix, which older records do not have."""

import json

from ampwise.runs.findings_json import findings_data, read_findings
from ampwise.runs.reader import Run
from ampwise.runs.writer import RecordWriter

from ..for_each import for_each
from .record_toys import seen

DIFF = "--- train.py\n+++ train.py\n@@ -1 +1,2 @@\n+scaler.unscale_(optimizer)\n clip()  # <b>\u202e\n"


def test_a_diff_comes_back_as_it_was():
    data = json.loads(json.dumps(findings_data([seen(diff=DIFF), seen("another", line=4)])))
    found, said = read_findings(data)
    assert [each.diff for each in found] == [DIFF, ""]
    assert not said


@for_each("there", [None, 3, ["+"], {"+": 1}, ...])
def test_what_is_no_diff_is_none(there):
    data = findings_data([seen(diff=DIFF)])
    (entry,) = data["findings"]
    if there is ...:
        del entry["diff"]
    else:
        entry["diff"] = there
    found, said = read_findings(data)
    assert [each.diff for each in found] == [""]
    assert not said


def test_a_record_has_it(tmp_path):
    writer = RecordWriter.create(tmp_path / "run")
    writer.findings([seen(diff=DIFF)])
    writer.close("finished", 0)
    assert [each.diff for each in Run.read(tmp_path / "run").findings] == [DIFF]
