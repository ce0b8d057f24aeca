import json

import memfit
from memfit.commands import main
from tests import jobs


def test_json_has_an_estimate_for_each(script, capsys):
    code = main(["compare", f"{script}:job", f"{script}:late", "-d", "rtx-3090", "--json"])

    first, second = json.loads(capsys.readouterr().out)
    assert code == 0
    assert (first["subject"], second["subject"]) == ("ConvNet", "Contrastive")
    assert first["peak_bytes"] == memfit.estimate(jobs.conv_job(), device="rtx-3090").peak_bytes


def test_the_table_has_a_column_for_each(script, capsys):
    code = main(["compare", f"{script}:job", f"{script}:late", "-d", "rtx-3090"])

    written = capsys.readouterr().out
    assert code == 0
    assert "ConvNet" in written
    assert "Contrastive" in written
    assert "peak against the first" in written


def test_one_that_does_not_fit_is_enough(script, capsys):
    assert main(["compare", f"{script}:job", f"{script}:job", "-d", "100MiB"]) == 3
    assert "host memory" in capsys.readouterr().out


def test_several_devices_have_a_column_each(script, capsys):
    assert main(["compare", f"{script}:job", "-d", "t4,a10g", "--json"]) == 0

    assert [found["device"]["name"] for found in json.loads(capsys.readouterr().out)] == ["t4", "a10g"]
