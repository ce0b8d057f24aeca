import pytest

from memfit.commands import main


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))


def test_it_says_where_the_result_is(capsys, tmp_path):
    assert main(["calibrate", "-d", "cpu", "--seconds", "0.1"]) == 0

    assert f"kept in {tmp_path / 'cache' / 'calibrations' / 'cpu.json'}" in capsys.readouterr().out


def test_a_file_has_a_name_that_estimates_take(capsys, tmp_path):
    assert main(["calibrate", "-d", "cpu", "--seconds", "0.1", "-O", str(tmp_path / "cpu.txt")]) == 2
    assert "a calibration is a file NAME.json" in capsys.readouterr().err


def test_a_script_is_not_replaced(capsys, tmp_path):
    script = tmp_path / "notes.json"
    script.write_text("import this")

    assert main(["calibrate", "-d", "cpu", "--seconds", "0.1", "-O", str(script)]) == 2
    assert script.read_text() == "import this"
