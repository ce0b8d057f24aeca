"""Streams of real files in real trainings: killed and resumed, with other numbers of workers and of ranks."""

import contextlib
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.integration.stream_scripts.training import NUM_SAMPLES, open_stream, train, write_data

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "stream_scripts"

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="forked workers, and gloo over the loopback device of Linux"),
    # Said by PyTorch where there are more workers than processors.
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """The training that nothing interrupts, without workers, for each form.

    PyTorch's loader draws a random number of the program's in each epoch, and so dropout isn't that of other forms.
    """

    @functools.cache
    def of(form):
        return train(data, tmp_path_factory.mktemp("whole"), form, 0)

    return lambda form: of("dataset" if form == "dataset" else "stream")


@pytest.fixture(autouse=True)
def own_random_numbers():
    state, num_threads = torch.get_rng_state(), torch.get_num_threads()
    yield
    torch.set_rng_state(state)
    torch.set_num_threads(num_threads)


def run(command, timeout=180):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    process = subprocess.Popen(
        [sys.executable, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def killed(data, folder, form, num_workers, stop):
    """The checkpoints of a training that was killed."""
    ended = run([SCRIPTS / "training.py", data, folder, form, num_workers, stop])
    assert ended.returncode == -signal.SIGKILL, ended.stderr[-4000:]
    return folder


def check_resumed(data, whole, folder, form, num_workers):
    parameters, resumed_from, seen = train(data, folder, form, num_workers)

    expected = whole(form)
    assert resumed_from is not None
    assert seen == expected[2][resumed_from:]
    for one, other in zip(parameters, expected[0], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("loader", [("stream", 0), ("loader", 3)]),
        pytest.param("dataset", [("dataset", 0), ("dataset", 3)], marks=pytest.mark.slow),
    ],
)
def test_a_killed_training_ends_with_the_same_parameters_whatever_makes_its_batches(
    data, whole, tmp_path, before, after
):
    # GIVEN a training with two workers that was killed in its second epoch
    folder = killed(data, tmp_path / "killed", before, 2, 25)

    # WHEN it goes on with other workers, or none
    for form, num_workers in after:
        copied = shutil.copytree(folder, tmp_path / f"{form}-{num_workers}")
        # THEN it sees the same samples, and ends with the same parameters, to the bit
        check_resumed(data, whole, copied, form, num_workers)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_killed_anywhere(data, whole, tmp_path, seed):
    draw = random.Random(seed)
    own = [("stream", 0), ("loader", 0), ("loader", 2), ("loader", 4)]
    forms = own if seed % 2 else [("dataset", 0), ("dataset", 1), ("dataset", 3)]
    num_steps = len(whole("stream")[2])
    folder = killed(data, tmp_path / "killed", *draw.choice(forms), draw.randint(6, num_steps))

    check_resumed(data, whole, folder, *draw.choice(forms))


def launch(data, directory, num_ranks, num_workers, num_batches):
    """What each rank gave."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_ranks]
    ended = run([*command, SCRIPTS / "ranks.py", data, num_workers, num_batches, directory])
    assert ended.returncode == 0, ended.stderr[-4000:]
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(num_ranks)]


def flat(batches):
    return [number for batch in batches for number in batch]


def check_ranks(data, directory, num_ranks, num_workers, num_batches):
    found = launch(data, directory, num_ranks, num_workers, num_batches)

    # THEN every sample comes once, and all ranks give as many batches as they say
    assert sorted(flat(flat(rank["epoch"] for rank in found))) == list(range(NUM_SAMPLES))
    assert {len(rank["epoch"]) for rank in found} == {found[0]["length"]}
    begun = flat(flat(rank["begun"] for rank in found))
    assert len(begun) == len(set(begun)) == num_ranks * num_batches * 8
    assert all(rank["state"] == found[0]["state"] for rank in found)
    return begun, found[0]["state"]


def rest(data, state, num_ranks, num_workers):
    """What is left of an epoch, given by other ranks."""
    given = []
    for rank in range(num_ranks):
        loader = open_stream(data).split(rank, num_ranks).loader(num_workers)
        loader.load_state_dict(state)
        given.append([labels.tolist() for _, labels in loader])
    assert len({len(batches) for batches in given}) == 1
    return flat(flat(given))


def test_ranks_share_an_epoch_and_others_finish_it(data, tmp_path):
    begun, state = check_ranks(data, tmp_path, 2, 1, 3)

    for num_ranks, num_workers in ((1, 0), (3, 2)):
        assert sorted(begun + rest(data, state, num_ranks, num_workers)) == list(range(NUM_SAMPLES))


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_any_number_of_ranks(data, tmp_path, num_ranks, num_workers):
    begun, state = check_ranks(data, tmp_path, num_ranks, num_workers, 2)

    for others in range(1, 5):
        assert sorted(begun + rest(data, state, others, 1)) == list(range(NUM_SAMPLES))


def resume_at_random(data, seed):
    """An epoch that is given by several sets of ranks, one after the other."""
    draw = random.Random(seed)
    stream = open_stream(data, batch_size=draw.choice([1, 3, 8]), seed=seed)
    given, state = [], stream.state_dict()
    for _ in range(draw.randint(1, 3)):
        num_ranks = draw.randint(1, 4)
        loaders = [stream.split(rank, num_ranks).loader(draw.randint(0, 2)) for rank in range(num_ranks)]
        for loader in loaders:
            loader.load_state_dict(json.loads(json.dumps(state)))
        iterators = [iter(loader) for loader in loaders]
        for _ in range(draw.randint(0, len(loaders[0]))):
            given += [next(iterator, (None, torch.empty(0)))[1].tolist() for iterator in iterators]
        states = [loader.state_dict() for loader in loaders]
        assert all(each == states[0] or each["epoch"] != states[0]["epoch"] for each in states)
        state = states[0]
        if state["epoch"]:
            break
    if not state["epoch"]:
        stream.load_state_dict(state)
        given += [labels.tolist() for _, labels in stream]
    assert sorted(flat(given)) == list(range(NUM_SAMPLES)), seed


def test_an_epoch_may_change_hands(data):
    for seed in range(3):
        resume_at_random(data, seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 240, 20))
def test_an_epoch_may_change_hands_anywhere(data, first):
    for seed in range(first, first + 20):
        resume_at_random(data, seed)
