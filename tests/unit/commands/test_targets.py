import argparse
import sys

import pytest

from memfit.commands import targets
from memfit.core.errors import BadInput, BadTarget


def parse(*options, **settings):
    parser = argparse.ArgumentParser()
    targets.add_job_arguments(parser, **settings)
    return parser.parse_args(options)


def load(target, *options):
    return targets.load_job(target, parse(*options))


def test_a_function_of_a_file_gives_the_job(script):
    assert load(f"{script}:job").batch[0].shape == (4, 3, 32, 32)


def test_a_job_in_a_file_is_one(script):
    assert load(f"{script}:READY").name == ""


def test_a_file_can_import_its_neighbours_even_late(script):
    assert load(f"{script}:late").model.__name__ == "Contrastive"


def test_options_take_the_place_of_the_jobs_own(script):
    job = load(f"{script}:job", "-p", "bf16", "--inference", "--workers", "5", "-o", "none")

    assert (job.precision, job.mode, job.num_workers, job.optimizer) == ("bf16", "inference", 5, None)


def test_without_options_a_job_stays_as_it_is(script):
    job = load(f"{script}:READY")

    assert job is sys.modules["my_training"].READY or job == sys.modules["my_training"].READY
    assert (job.precision, job.mode, job.num_workers) == (None, "training", 0)


def test_options_for_named_models_are_not_dropped_silently(script, capsys):
    load(f"{script}:job", "--image-size", "64", "--sequence-length", "8")

    told = capsys.readouterr().err.splitlines()
    assert told == [
        "memfit: --sequence-length is for named models; my_training.py:job makes its own batch",
        "memfit: --image-size is for named models; my_training.py:job makes its own batch",
    ]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("job", "'job' is not a target. Write FILE.py:function, timm:NAME"),
        ("my_training.py", "For a script as it is: `memfit dryrun`, `memfit plan --script`."),
        ("my_training.py:", "is not a target. Write FILE.py:function"),
        ("elsewhere.py:job", "there is no file 'elsewhere.py' in"),
        ("my_training.py:jobb", "has no function 'jobb'. Did you mean 'job'? It must define one"),
        ("my_training.py:zzz", "has no function 'zzz'. It must define one that returns a memfit.Job"),
        ("my_training.py:NUMBER", "'NUMBER' in my_training.py is int, not a function that returns a memfit.Job"),
        ("my_training.py:number", "number() in my_training.py returned int, not a memfit.Job. Let it return"),
        ("my_training.py:broken", "broken() in my_training.py failed: RuntimeError: no data here (my_training.py:22)"),
        ("my_training.py:leaving", "leaving() in my_training.py failed: SystemExit: 1 (my_training.py:30)"),
    ],
)
def test_a_bad_target_is_explained(script, target, message):
    with pytest.raises(BadTarget) as refused:
        load(target)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def job(:\n", "SyntaxError: invalid syntax"),
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module' (broken.py:1)"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3 (broken.py:2)"),
        ("\n1 / 0\n", "ZeroDivisionError: division by zero (broken.py:2)"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_explained(script, tmp_path, text, message):
    (tmp_path / "broken.py").write_text(text)

    with pytest.raises(BadTarget) as refused:
        load("broken.py:job")
    sys.modules.pop("broken", None)
    assert str(refused.value).startswith("broken.py can't be loaded: ")
    assert message in str(refused.value)


def test_a_file_of_another_kind_is_refused(script, tmp_path):
    (tmp_path / "notes.txt").write_text("job")

    with pytest.raises(BadTarget, match=r"notes\.txt is not a Python file\. Write FILE\.py:function"):
        load("notes.txt:job")


@pytest.mark.parametrize(
    ("option", "least"), [("--batch-size", 1), ("--sequence-length", 1), ("--image-size", 1), ("--workers", 0)]
)
def test_sizes_have_a_least_value(script, option, least):
    with pytest.raises(BadInput, match=f"{option} must be at least {least}, but {least - 1} was given"):
        load(f"{script}:job", option, str(least - 1))


def test_a_search_has_no_batch_size():
    assert not hasattr(parse(of_one_size=False), "batch_size")
    assert not hasattr(parse(of_one_size=False), "workers")
    assert parse().batch_size is None
