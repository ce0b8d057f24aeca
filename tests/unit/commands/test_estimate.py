import json
import re

import memfit
from memfit.commands import main
from tests import jobs


def run(capsys, *arguments):
    code = main(["estimate", *arguments])
    return code, capsys.readouterr()


def test_json_equals_what_the_api_says(script, capsys):
    code, written = run(capsys, f"{script}:job", "-d", "rtx-3090", "-b", "9", "-p", "amp-fp16", "--json")

    expected = memfit.estimate(jobs.conv_job(9, precision="amp-fp16"), device="rtx-3090")
    found = memfit.Estimate.from_json(written.out)
    assert code == 0
    assert written.err == ""
    assert (found.timeline, found.replay, found.device) == (expected.timeline, expected.replay, expected.device)
    assert json.loads(written.out)["peak_bytes"] == expected.peak_bytes


def test_text_says_whether_it_fits(script, capsys):
    assert run(capsys, f"{script}:job", "-d", "rtx-3090")[0] == 0
    code, written = run(capsys, f"{script}:job", "-d", "100MiB")

    assert code == 3
    assert "100.0 MiB usable on A CUDA device with 100 MiB: does not fit" in written.out
    assert "at least" not in written.out


def test_lines_shown_are_the_users(script, capsys):
    _, written = run(capsys, f"{script}:job", "-d", "rtx-3090")

    lines = written.out[written.out.index("Largest source lines") :].splitlines()[1:4]
    assert all("jobs.py:" in line or "(framework)" in line for line in lines if line.strip())


def test_inference_needs_less(script, capsys):
    training, inference = (
        json.loads(run(capsys, f"{script}:job", "-d", "cpu", "--json", *options)[1].out)["peak_bytes"]
        for options in ((), ("--inference",))
    )

    assert inference < training


def test_a_page_is_written_beside_the_text(script, capsys, tmp_path):
    code, written = run(capsys, f"{script}:job", "-d", "rtx-3090", "--html", "memory.html")

    assert code == 0
    assert written.out.endswith("page written to memory.html\n")
    assert "<html" in (tmp_path / "memory.html").read_text(encoding="utf-8")


def test_a_page_beside_json_leaves_json_alone(script, capsys, tmp_path):
    _, written = run(capsys, f"{script}:job", "-d", "rtx-3090", "--html", "memory.html", "--json")

    json.loads(written.out)
    assert (tmp_path / "memory.html").exists()


def test_an_impossible_page_is_refused_before_the_work(script, capsys, monkeypatch):
    monkeypatch.setattr(memfit.api.estimate, "estimate", None)
    code, written = run(capsys, f"{script}:job", "-d", "rtx-3090", "--html", "missing/memory.html")

    assert code == 2
    assert written.err == (
        "memfit: there is no folder 'missing' to write 'missing/memory.html' to. Make it first, or name another.\n"
    )


def test_several_devices_give_a_table_and_a_list(script, capsys):
    code, written = run(capsys, f"{script}:job", "-d", "rtx-3090", "-d", "t4,64MiB")

    assert code == 3
    rows = [re.split(r"  +", line.strip()) for line in written.out.splitlines()[-3:]]
    assert [row[0] for row in rows] == ["NVIDIA GeForce RTX 3090", "NVIDIA Tesla T4", "A CUDA device with 64 MiB"]
    assert [row[-2] for row in rows] == ["yes, 99%", "yes, 99%", "no, 99%"]
    code, written = run(capsys, f"{script}:job", "-d", "rtx-3090,t4", "--json")
    assert (code, [found["device"]["name"] for found in json.loads(written.out)]) == (0, ["rtx-3090", "t4"])


def test_a_wrong_name_among_devices_is_refused_before_the_work(script, capsys, monkeypatch):
    monkeypatch.setattr(memfit.api.estimate, "estimate", None)
    code, written = run(capsys, f"{script}:job", "-d", "t4,xyz")

    assert (code, written.out) == (2, "")
    assert "no device is called 'xyz'" in written.err
    assert run(capsys, f"{script}:job", "-d", "t4,a10g", "--html", "x.html")[0] == 2


def test_the_stack_that_is_asked_for_is_named(script, capsys):
    _, installed = run(capsys, f"{script}:job", "-d", "rtx-3090")
    _, asked = run(capsys, f"{script}:job", "-d", "rtx-3090", "--stack", "torch2.4-cu124")
    _, as_json = run(capsys, f"{script}:job", "-d", "rtx-3090", "--stack", "torch2.4-cu124", "--json")

    assert re.search(r"software +PyTorch [\d.]+, CUDA [\d.]+ +installed", installed.out)
    assert re.search(r"software +PyTorch 2.4, CUDA 12.4 +as asked", asked.out)
    assert memfit.Estimate.from_json(as_json.out).device.stack.text == "torch2.4-cu124"


def test_a_stack_that_is_not_known_is_refused(script, capsys):
    code, written = run(capsys, f"{script}:job", "-d", "rtx-3090", "--stack", "torch2.4-cu130")

    assert code == 2
    assert "the nearest: torch2.4-cu124" in written.err
