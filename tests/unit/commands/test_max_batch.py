import json
import re

import pytest

import memfit
from memfit.commands import main
from tests import jobs


def run(capsys, *arguments):
    code = main(["max-batch", *arguments])
    return code, capsys.readouterr()


def test_json_equals_what_the_api_says(script, capsys):
    code, written = run(capsys, f"{script}:job", "-d", "400MiB", "--json")

    expected = memfit.max_batch(jobs.conv_job(), device="400MiB")
    data = json.loads(written.out)
    assert code == 0
    assert (data["batch_size"], data["limit"], data["device"]) == (expected.batch_size, expected.limit, "400MiB")
    assert [tuple(row.values()) for row in data["tried"]] == list(expected.tried)


def test_candidates_are_the_only_answers(script, capsys):
    code, written = run(capsys, f"{script}:job", "-d", "400MiB", "--candidates", "64, 4,8")

    assert code == 0
    assert "Batch size 64 fits with 95% (400.0 MiB usable" in written.out


def test_nothing_at_the_limit_is_called_sure(script, capsys):
    code, written = run(capsys, f"{script}:job", "-d", "400MiB")

    found = memfit.max_batch(jobs.conv_job(), device="400MiB")
    assert code == 0
    assert f"Batch size {found.batch_size} fits with 95%; {found.limit} at best (400.0 MiB usable" in written.out
    rows = [line for line in written.out.splitlines() if "MiB" in line and "%" in line][1:]
    for row in rows:
        size, share = int(row.replace(">", " ").split()[0]), int(row.split("%")[0].split()[-1])
        assert ("yes" in row) == (size <= found.batch_size)
        assert share <= 99 if "yes" in row else True
        assert share <= 100 if "at best" in row else True


def test_nothing_fits(script, capsys):
    code, written = run(capsys, f"{script}:job", "-d", "200MiB")

    assert code == 3
    assert "No batch size fits (200.0 MiB usable" in written.out


@pytest.mark.parametrize("text", ["", "8,", "a", "4;8", "1.5", "0", "-4,8"])
def test_candidates_are_whole_numbers(script, capsys, text):
    code, written = run(capsys, f"{script}:job", "-d", "400MiB", f"--candidates={text}")

    assert code == 2
    assert written.err == (
        "memfit: --candidates takes whole numbers from 1 up, separated by commas, such as 16,32,64; "
        f"{text!r} was given.\n"
    )


def test_several_devices_give_a_table_and_a_list(script, capsys):
    code, written = run(capsys, f"{script}:job", "-d", "200MiB,400MiB", "--candidates", "4,8")

    assert code == 3
    assert "ConvNet: largest batch size" in written.out
    assert [re.split(r"  +", line.strip())[1] for line in written.out.splitlines()[-2:]] == ["none", "8"]
    code, written = run(capsys, f"{script}:job", "-d", "300MiB", "-d", "400MiB", "--candidates", "4", "--json")
    assert [found["device"] for found in json.loads(written.out)] == ["300MiB", "400MiB"]
