"""Processes that make batches: the same order, errors that arrive, and nothing left behind."""

import errno
import faulthandler
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from memfit.core.errors import BadFile, BadInput, MemfitError
from memfit.core.units import MIB
from memfit.data import windows, workers
from memfit.data.geometry import Geometry
from memfit.data.workers import WorkerBatches
from tests.sources import ArraySource, stream_over


def stream_of(num_samples=230, *, lanes=12, fails_at=None, **options):
    x = np.arange(num_samples)
    options = {"batch_size": 10, "memory_bytes": MIB} | options
    stream = stream_over(ArraySource(x.astype(np.float32)[:, None], x, labels=1, fails_at=fails_at), **options)
    stream.geometry = Geometry(num_samples, stream.batch_size, lanes, 40, 5)
    return stream


class Given:
    """Batches that aren't of a stream: `make(number)` for each of `count`."""

    batch_bytes = 100

    def __init__(self, count, make):
        self.count = count
        self.make = make

    def working(self, num_workers):
        return num_workers

    def part(self, worker, num_workers):
        return (self.make(number) for number in range(worker, self.count, num_workers))


def numbers(batches):
    return [labels.tolist() for _, labels in batches]


def same_number(number):
    return number


@pytest.fixture(autouse=True)
def nothing_left_behind():
    workers._warn_once.cache_clear()
    before = {child.pid for child in psutil.Process().children()}
    files = _open_files()
    yield
    gc.collect()
    left = [child for child in psutil.Process().children() if child.pid not in before]
    # Python's own process that watches over named memory isn't one of ours.
    assert [child for child in left if "resource_tracker" not in " ".join(child.cmdline())] == []
    assert _open_files() <= files + 1


def _open_files():
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_the_order_is_the_one_without_workers(num_workers):
    stream = stream_of()
    batches = WorkerBatches(stream, num_workers, limit_bytes=MIB)

    assert batches.num_workers == num_workers
    assert numbers(batches) == numbers(stream_of())
    assert next(batches, None) is None
    assert stream.state_dict() == stream_of().state_dict()


def test_it_begins_where_the_stream_is():
    expected = stream_of()
    list(expected)
    stream = stream_of()
    stream.set_epoch(1)
    stream.load_state_dict(stream.state_after(4))

    assert numbers(WorkerBatches(stream, 2, limit_bytes=MIB)) == numbers(expected)[4:]


def test_any_nesting_of_arrays_of_any_shape():
    def make(number):
        rows = np.arange(number * 1000, dtype=np.float64).reshape(number, 1000)
        return {"rows": rows, "turned": rows.T[::-1], "list": [np.float32(number), "text"], "none": None}

    batches = list(WorkerBatches(Given(9, make), 2, limit_bytes=MIB))

    for number, batch in enumerate(batches):
        expected = make(number)
        assert batch["rows"].shape == (number, 1000)
        for name in ("rows", "turned"):
            assert np.array_equal(batch[name], expected[name])
        assert batch["list"] == [number, "text"]
        # The arrays are the caller's own.
        batch["rows"][...] = -1


def test_batches_that_are_kept_are_not_overwritten():
    kept = list(WorkerBatches(Given(50, lambda number: np.full(3000, number)), 2, limit_bytes=MIB))

    assert [batch.min() for batch in kept] == [batch.max() for batch in kept] == list(range(50))


@pytest.mark.parametrize(("limit_bytes", "expected"), [(0, 1), (4 * 2**17, 3), (10**9, 4)])
def test_processes_work_ahead_as_far_as_there_is_room(tmp_path, limit_bytes, expected):
    def make(number):
        (tmp_path / str(number)).touch()
        return np.zeros(2**14)

    batches = WorkerBatches(Given(20, make), 1, limit_bytes=limit_bytes)
    next(batches)
    # One slot was given back, and one batch more is in the making; what never comes is not waited for.
    _wait_until(lambda: len(list(tmp_path.iterdir())) >= expected + 2)
    time.sleep(0.2)
    assert len(list(tmp_path.iterdir())) == expected + 2
    batches.close()


def test_fewer_processes_where_there_is_no_room_for_more():
    assert WorkerBatches(Given(3, same_number), 4, limit_bytes=450).num_workers == 2
    assert WorkerBatches(Given(3, same_number), 4, limit_bytes=0).num_workers == 1


def test_a_damaged_file_is_named_and_the_workers_traceback_shown():
    with pytest.raises(BadFile, match="arrays is damaged at sample 7") as caught:
        list(WorkerBatches(stream_of(fails_at=7), 2, limit_bytes=MIB))
    assert "in a worker of the stream" in str(caught.value.__cause__)
    assert "in read" in str(caught.value.__cause__)


def crash():
    faulthandler.disable()
    os.kill(os.getpid(), signal.SIGSEGV)


class Demanding(Exception):
    def __init__(self, first, second):
        super().__init__(first)


class Unpicklable(Exception):
    def __reduce__(self):
        raise TypeError("no")


@pytest.mark.parametrize("error", [Demanding("the reason", 2), Unpicklable("the reason")])
def test_an_exception_that_cannot_be_sent_is_told_of(error):
    def make(number):
        raise error

    with pytest.raises(MemfitError, match=f"{type(error).__name__}: the reason"):
        list(WorkerBatches(Given(3, make), 1, limit_bytes=MIB))


def test_batches_before_an_error_are_given_out():
    def make(number):
        if number == 3:
            raise ValueError("at 3")
        return number

    batches = WorkerBatches(Given(10, make), 2, limit_bytes=MIB)
    assert [next(batches), next(batches), next(batches)] == [0, 1, 2]
    with pytest.raises(ValueError, match="at 3"):
        next(batches)
    assert next(batches, None) is None


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (
            lambda: os.kill(os.getpid(), signal.SIGKILL),
            r"was ended by SIGKILL before its last batch\. The usual cause is",
        ),
        (lambda: crash(), r"was ended by SIGSEGV .* crashed in native code"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), r"was ended by SIGTERM .* Another program killed it"),
        (
            lambda: os._exit(3),
            "ended with exit code 3 before its last batch; .* must begin its work under `if __name__",
        ),
    ],
)
def test_a_worker_that_dies_is_named(end, expected):
    def make(number):
        if number == 5:
            end()
        return number

    batches = WorkerBatches(Given(10, make), 2, limit_bytes=MIB)
    with pytest.raises(MemfitError, match=f"worker 1 of the stream \\(process [0-9]+\\) {expected}"):
        list(batches)


def test_leaving_in_the_middle_ends_the_processes():
    for batch in WorkerBatches(Given(10**9, same_number), 2, limit_bytes=MIB):
        if batch == 5:
            break
    # and `nothing_left_behind` looks


def test_two_streams_at_once():
    one = WorkerBatches(stream_of(), 2, limit_bytes=MIB)
    other = WorkerBatches(stream_of(seed=1), 2, limit_bytes=MIB)
    pairs = list(zip(one, other, strict=True))

    assert numbers(pair[0] for pair in pairs) == numbers(stream_of())
    assert numbers(pair[1] for pair in pairs) == numbers(stream_of(seed=1))


def test_an_interrupt_ends_the_processes(monkeypatch):
    batches = WorkerBatches(Given(10**9, same_number), 2, limit_bytes=MIB)

    class Interrupted:
        def wait(self, objects, timeout):
            raise KeyboardInterrupt

    monkeypatch.setattr(workers, "connection", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert not batches._workers


def test_workers_end_with_a_program_that_is_killed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, psutil, numpy as np\n"
        "from memfit.data.workers import WorkerBatches\n"
        "class Endless:\n"
        "    batch_bytes = 8\n"
        "    def working(self, n): return n\n"
        "    def part(self, w, n):\n"
        "        while True: yield np.zeros(1)\n"
        "batches = WorkerBatches(Endless(), 2, limit_bytes=1000)\n"
        "next(batches)\n"
        "print(*[child.pid for child in psutil.Process().children()], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    found = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, env=_path())
    pids = [int(pid) for pid in found.stdout.split()]

    assert len(pids) == 2, found.stderr
    _wait_until(lambda: not any(_is_alive(pid) for pid in pids))
    assert not any(_is_alive(pid) for pid in pids)


class TestStarting:
    def test_processes_are_forked_where_that_is_safe(self, monkeypatch):
        for name in workers._NOT_FORKABLE:
            monkeypatch.delitem(sys.modules, name, raising=False)
        assert workers._context(Given(1, lambda number: number)).get_start_method() == "fork"

    def test_and_started_anew_beside_threads_that_do_not_survive_it(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "jax", sys)
        assert workers._context(stream_of()).get_start_method() == "spawn"

    def test_what_cannot_be_pickled_is_forked_and_that_is_said_once(self, monkeypatch, caplog):
        monkeypatch.setitem(sys.modules, "jax", sys)
        for _ in range(2):
            assert list(WorkerBatches(Given(2, lambda number: number), 1, limit_bytes=MIB)) == [0, 1]
        assert caplog.text.count("workers of the stream are forked although jax is loaded") == 1
        assert "A transform that is defined at the top of a module can be pickled." in caplog.text

    def test_where_there_is_no_fork(self, monkeypatch):
        monkeypatch.setattr(workers.multiprocessing, "get_all_start_methods", lambda: ["spawn"])
        with pytest.raises(MemfitError, match="must be a function that is defined at the top of a module"):
            WorkerBatches(Given(2, lambda number: number), 1, limit_bytes=MIB)

    def test_processes_that_are_started_anew_give_the_same(self, tmp_path):
        script = tmp_path / "script.py"
        script.write_text(
            "import sys, numpy as np\n"
            "from memfit.data.workers import WorkerBatches\n"
            "class Squares:\n"
            "    batch_bytes = 8\n"
            "    def working(self, n): return n\n"
            "    def part(self, w, n): return (np.full(5, i * i) for i in range(w, 7, n))\n"
            "if __name__ == '__main__':\n"
            "    sys.modules['jax'] = sys\n"
            "    print(*[batch[0] for batch in WorkerBatches(Squares(), 2, limit_bytes=10**6)])\n"
        )
        found = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, env=_path())
        assert found.stdout.split() == ["0", "1", "4", "9", "16", "25", "36"], found.stderr

    def test_workers_of_workers_are_refused(self):
        def make(number):
            return list(WorkerBatches(Given(1, same_number), 1, limit_bytes=MIB))

        with pytest.raises(BadInput, match="a worker of another loader can't start workers of its own"):
            next(WorkerBatches(Given(1, make), 1, limit_bytes=MIB))

    def test_a_process_that_cannot_be_started_leaves_nothing(self, monkeypatch):
        def refuse(process):
            raise OSError(errno.EAGAIN, "no more processes")

        context = workers._context(Given(1, same_number))
        monkeypatch.setattr(context.Process, "start", refuse)
        with pytest.raises(OSError, match="no more processes"):
            WorkerBatches(Given(1, same_number), 2, limit_bytes=MIB)


class TestSharing:
    def test_without_files_in_memory_one_without_a_name_is_used(self, monkeypatch):
        monkeypatch.delattr(os, "memfd_create", raising=False)
        assert numbers(WorkerBatches(stream_of(), 2, limit_bytes=MIB)) == numbers(stream_of())

    def test_without_room_for_batches_that_is_said(self, monkeypatch):
        def full(file, start, size):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
        # Forked, whatever else the process of the tests has loaded: what is changed here must be so there.
        monkeypatch.setattr("memfit.data.workers._NOT_FORKABLE", ())
        with pytest.raises(MemfitError, match=r"has no room for batches of .* bytes .*: No space left on device"):
            list(WorkerBatches(stream_of(), 2, limit_bytes=MIB))

    def test_nothing_in_dev_shm(self):
        if not os.path.isdir("/dev/shm"):
            pytest.skip("no such folder")
        before = set(os.listdir("/dev/shm"))
        batches = WorkerBatches(stream_of(), 2, limit_bytes=MIB)
        next(batches)
        assert set(os.listdir("/dev/shm")) <= before
        batches.close()

    def test_a_copy_of_the_iterator_in_a_forked_process_ends_nothing(self):
        batches = WorkerBatches(Given(10, same_number), 1, limit_bytes=MIB)
        child = os.fork()
        if child == 0:
            batches.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert list(batches) == list(range(10))


def test_a_process_that_never_begins_is_ended_and_named(monkeypatch):
    # GIVEN a process that waits for ever before it has begun, as for a lock that nobody will release
    monkeypatch.setattr(workers, "_NOT_FORKABLE", ())
    monkeypatch.setattr(workers, "_BEGIN_SECONDS", 0.5)
    monkeypatch.setattr(workers, "_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(workers, "_work", lambda *_: time.sleep(600))
    batches = WorkerBatches(Given(3, same_number), 1, limit_bytes=MIB)

    with pytest.raises(MemfitError, match=r"worker 0 of the stream .* has not begun its work"):
        next(batches)
    assert not batches._workers


def test_workers_begin_whatever_locks_other_threads_hold(monkeypatch):
    # GIVEN a stream that is being read, whose thread starts others at the moment of the fork
    monkeypatch.setattr(workers, "_NOT_FORKABLE", ())
    is_held, may_go = threading.Event(), threading.Event()

    def hold():
        with windows._small_stacks():
            is_held.set()
            may_go.wait(1)

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()

    # THEN workers don't find its lock taken for ever
    assert numbers(WorkerBatches(stream_of(), 2, limit_bytes=MIB)) == numbers(stream_of())
    may_go.set()
    thread.join()


def test_what_a_process_does_step_by_step():
    # GIVEN the program in a thread, and the process's work in this one
    near, far = multiprocessing.Pipe()
    memory = workers._Memory()
    lives, never = multiprocessing.Pipe()
    program = workers._Worker(0, SimpleNamespace(sentinel=lives), near, memory)
    found, signals = [], [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    def take_all():
        with pytest.raises(ValueError, match="the end"):
            while True:
                found.append(program.take().tolist())

    def make(number):
        if number == 6:
            raise ValueError("the end")
        return np.arange(number, number + 3)

    taking = threading.Thread(target=take_all, daemon=True)
    taking.start()
    try:
        workers._work(Given(9, make), 0, 1, MIB, far, memory, os.getppid())
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), signals, strict=True):
            signal.signal(number, handler)
    taking.join()
    for end in (near, far, lives, never):
        end.close()
    memory.close()

    assert found == [[number, number + 1, number + 2] for number in range(6)]


def _path():
    source = Path(workers.__file__).parents[2]
    return {**os.environ, "PYTHONPATH": str(source)}


def _is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _wait_until(is_so, seconds=60):
    deadline = time.monotonic() + seconds
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.02)
