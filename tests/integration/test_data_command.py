"""`memfit data` as users meet it: files of all kinds, damaged ones, kills, full disks."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memfit import commands
from memfit.core.errors import MemfitError
from memfit.data.convert import convert_data
from memfit.data.inspection import inspect_data

ROOT = Path(__file__).parents[2]

# Ends the process by SIGKILL when the given number of writes, waits for the disk and renames have begun; not at all if
# the number is negative. Everything is forced to disk after each block, so that there is much to interrupt.
KILLED = """
import os, signal, sys
from memfit.data import journal, transfer, writing
from memfit.data.convert import ConvertOptions, convert_data

left = int(sys.argv[1])
transfer._SYNC_BYTES, transfer._JOURNAL_SECONDS = 1, 0.0

def counted(real):
    def call(*arguments):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)
    return call

writing._write_all = counted(writing._write_all)
writing.sync_and_drop = counted(writing.sync_and_drop)
journal.os.replace = counted(os.replace)
journal.os.fsync = counted(os.fsync)
done = convert_data(sys.argv[2], sys.argv[3], dtype="float32", options=ConvertOptions(chunk="64KiB"))
print(done.resumed_at, done.totals["max_relative_error"], -left)
"""


def run_killed(after, source, destination):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", KILLED, str(after), str(source), str(destination)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def digest(path):
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def check_kills(folder, seed, num_kills, destination):
    """Kills conversions at random points, several times each, and compares what comes out in the end."""
    generator = random.Random(seed)
    source = folder / "x.npy"
    np.save(source, np.random.default_rng(seed).standard_normal((4000, 50)))
    if "." not in destination:
        np.savez(folder / "x.npz", x=np.load(source), y=np.arange(4000))
        source = folder / "x.npz"
    expected = run_killed(-1, source, folder / f"whole-{destination}")
    assert expected.returncode == 0, expected.stderr
    _, error, num_points = expected.stdout.split()
    resumed = []
    for _ in range(num_kills):
        path = folder / destination
        while True:
            # Sometimes the run that goes on is killed as well.
            done = run_killed(generator.randint(1, int(num_points) * 2), source, path)
            if done.returncode == 0:
                break
            assert done.returncode == -signal.SIGKILL, done.stderr
            assert not path.exists() or digest(path) == digest(folder / f"whole-{destination}")
            if path.exists():
                break
        assert digest(path) == digest(folder / f"whole-{destination}")
        if done.returncode == 0:
            assert done.stdout.split()[1] == error
            resumed.append(int(done.stdout.split()[0]))
            assert [each.name for each in folder.glob(".*")] == []
        convert_again = [*folder.glob(f".{destination}*"), path]
        for leftover in convert_again:
            if leftover.is_dir():
                for file in leftover.iterdir():
                    file.unlink()
                leftover.rmdir()
            else:
                leftover.unlink()
    return resumed


@pytest.mark.parametrize(("destination", "num_kills"), [("small.npy", 3), ("folder", 2)])
def test_killed_at_random_points_the_bytes_are_the_same(tmp_path, destination, num_kills):
    check_kills(tmp_path, seed=1, num_kills=num_kills, destination=destination)


@pytest.mark.slow
@pytest.mark.parametrize("destination", ["small.npy", "folder"])
def test_killed_at_many_random_points_the_bytes_are_the_same(tmp_path, destination):
    resumed = check_kills(tmp_path, seed=2, num_kills=25, destination=destination)

    assert any(resumed), "no run went on where another was killed: the test would pass on nothing"


def test_a_run_after_a_kill_goes_on(tmp_path):
    source, path = tmp_path / "x.npy", tmp_path / "small.npy"
    np.save(source, np.random.default_rng(0).standard_normal((4000, 50)))

    killed = run_killed(60, source, path)
    again = run_killed(-1, source, path)

    assert killed.returncode == -signal.SIGKILL
    assert again.returncode == 0, again.stderr
    assert int(again.stdout.split()[0]) > 0
    assert np.array_equal(np.load(path), np.load(source).astype("f4"))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if sys.platform != "linux" or os.getuid() != 0:
        pytest.skip("only root can mount a small file system")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no small file system can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("name", ["small.npy", "small.h5", "small.parquet"])
def test_a_disk_that_gets_full_meanwhile(tmp_path, small_disk, name, monkeypatch):
    # GIVEN a disk with room when it is looked at, which others then fill
    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((30_000, 50)))
    monkeypatch.setattr("memfit.data.convert.free_bytes", lambda path: None)

    # WHEN it is full
    with pytest.raises(MemfitError, match="the disk is full"):
        convert_data(tmp_path / "x.npy", small_disk / name, dtype="float32")

    # THEN nothing is there that could be taken for the result
    assert not (small_disk / name).exists()
    assert all(path.name.startswith(".") for path in small_disk.iterdir())
    # AND the disk can be used again
    np.save(tmp_path / "y.npy", np.zeros((100, 50)))
    for leftover in small_disk.iterdir():
        leftover.unlink()
    convert_data(tmp_path / "y.npy", small_disk / name)


def test_a_disk_that_is_too_small_is_refused_at_once(tmp_path, small_disk, capsys):
    np.save(tmp_path / "x.npy", np.zeros((20_000, 50)))

    code = commands.main(["data", "convert", str(tmp_path / "x.npy"), str(small_disk / "x.npy")])

    assert code == 2
    assert "would take 7.63 MiB, and its disk has" in capsys.readouterr().err
    assert list(small_disk.iterdir()) == []


def valid_files(folder):
    """A small file of each kind."""
    x, y = np.arange(40.0).reshape(20, 2), np.arange(20)
    np.save(folder / "x.npy", x)
    np.savez(folder / "x.npz", x=x, y=y)
    np.savez_compressed(folder / "packed.npz", x=x, y=y)
    convert_data((folder / "x.npy", x_labels(folder, y)), folder / "x.h5")
    convert_data((folder / "x.npy", folder / "y.npy"), folder / "x.parquet")
    (folder / "x.csv").write_text("a,b\n" + "".join(f"{row},{row * 2}\n" for row in range(20)))
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def x_labels(folder, y):
    np.save(folder / "y.npy", y)
    return folder / "y.npy"


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    folder = tmp_path_factory.mktemp("originals")
    pytest.importorskip("h5py")
    pytest.importorskip("pyarrow")
    return valid_files(folder)


ENDINGS = (".npy", ".npz", ".h5", ".parquet", ".arrow", ".csv", ".csv.gz", "")


def inspect_bytes(folder, name, content):
    path = folder / name
    path.write_bytes(content)
    try:
        inspect_data(str(path))
    except MemfitError as error:
        assert str(error)
    finally:
        path.unlink()


def check_random_bytes(folder, content, ending):
    inspect_bytes(folder, f"random{ending}", content)


def check_damage(folder, originals, name, seed):
    generator = random.Random(seed)
    content = bytearray(originals[name])
    for _ in range(generator.randint(1, 4)):
        place = generator.randrange(len(content))
        if generator.random() < 0.3:
            del content[place:]
            break
        content[place] = generator.randrange(256)
    inspect_bytes(folder, f"damaged-{name}", bytes(content) or b"x")


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(content=st.binary(min_size=0, max_size=200))
@pytest.mark.parametrize("ending", ENDINGS)
def test_random_bytes_are_refused_with_a_message(tmp_path, ending, content):
    check_random_bytes(tmp_path, content, ending)


@pytest.mark.parametrize("seed", range(8))
def test_damaged_files_are_refused_with_a_message(tmp_path, originals, seed):
    for name in originals:
        check_damage(tmp_path, originals, name, seed)


@pytest.mark.slow
def test_many_damaged_files_are_refused_with_a_message(tmp_path, originals):
    for seed in range(1000):
        for name in originals:
            check_damage(tmp_path, originals, name, seed + 1000)


@pytest.mark.slow
def test_much_random_content_is_refused_with_a_message(tmp_path):
    generator = random.Random(0)
    starts = (b"", b"\x93NUMPY\x01\x00", b"PK\x03\x04", b"\x89HDF\r\n\x1a\n", b"PAR1", b"ARROW1\0\0", b"a,b\n1,2\n")
    for number in range(4000):
        content = generator.choice(starts) + generator.randbytes(generator.randrange(500))
        check_random_bytes(tmp_path, content, ENDINGS[number % len(ENDINGS)])


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_every_kind_of_file_is_inspected(tmp_path, originals, arguments, capsys):
    for name, content in originals.items():
        (tmp_path / name).write_bytes(content)
        assert commands.main(["data", "inspect", str(tmp_path / name), *arguments]) == 0
        written = capsys.readouterr()
        assert written.err == ""
        if arguments:
            assert json.loads(written.out)["num_samples"] == 20
        else:
            assert "20 samples" in written.out


def test_memory_stays_bounded(tmp_path):
    """A file of 256 MiB goes through a process that has less than 200 MiB of memory in all."""
    if sys.platform != "linux":
        pytest.skip("the limit is Linux's")
    large = np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", dtype="f8", shape=(32_768, 1024))
    large[::1000] = 1.5
    del large
    # Not `ru_maxrss`, which begins with the memory of the process that started this one.
    script = (
        "import sys; from memfit.data.convert import convert_data;"
        "convert_data(sys.argv[1], sys.argv[2], dtype='float32');"
        "print(*[line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "x.npy", tmp_path / "y.npy"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )

    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 200 * 1024
