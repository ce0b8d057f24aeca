import signal
from dataclasses import replace

import pytest

from memfit.core.supervised import Cause, ProcessMemory
from memfit.core.units import GIB, MIB
from memfit.processes.kills import Evidence, KernelLog, explain, logged_kill
from memfit.processes.limits import Ceiling
from memfit.processes.watch import WatchedMemory

SCRIPT = ProcessMemory(70, "python", 900 * MIB, 3.0)
WORKER = ProcessMemory(71, "worker", 300 * MIB, 3.0)
SEEN = WatchedMemory(
    peak=SCRIPT, last=SCRIPT, by_pid={70: SCRIPT, 71: WORKER}, data_bytes=GIB, data_limit_bytes=4 * GIB
)
MEMORY = {"type": "RuntimeError", "text": "can't allocate", "memory": True, "source": "torch"}


def evidence(status, **changes):
    defaults = {"pid": 70, "seconds": 4.0, "seen": SEEN, "ceiling": Ceiling(GIB, GIB, "container")}
    return Evidence(status, **{**defaults, **changes})


def test_an_end_by_itself():
    ending = explain(evidence(0, kills=1))

    assert (ending.cause, ending.exit_code) == (Cause.ENDED, 0)


def test_a_reason_of_its_own():
    ending = explain(evidence(4, error={"type": "ValueError", "text": "no", "memory": False}, kills=0))

    assert (ending.cause, ending.exit_code) == (Cause.FAILED, 4)
    assert ending.text == "it failed with exit code 4: ValueError: no"


def test_an_exception():
    ending = explain(evidence(1, error={**MEMORY, "requested_bytes": 50 * MIB}))

    assert ending.cause is Cause.EXCEPTION
    assert ending.text == (
        "an allocation of 50.0 MiB failed (RuntimeError); it held 900.0 MiB at most, the container's limit is 1.00 GiB"
    )
    assert (ending.process, ending.limit_bytes) == (SCRIPT, GIB)


def test_an_exception_while_importing():
    ending = explain(evidence(1, error={**MEMORY, "importing": "torch"}, ceiling=Ceiling(1, MIB, "budget")))

    assert ending.importing == "torch"
    assert ending.text.startswith("an allocation failed while it imported torch (RuntimeError: can't allocate)")
    assert ending.text.endswith("the budget is 1.00 MiB")


def test_a_guard_that_has_nothing_left():
    assert explain(evidence(3, cannot_fit="one sample needs 9 GiB")).cause is Cause.EXCEPTION


@pytest.mark.parametrize("known", [{"kills_around": 1}, {"logged": [ProcessMemory(70, "python", 950 * MIB)]}], ids=str)
def test_a_kill_by_the_kernel(known):
    ending = explain(evidence(-signal.SIGKILL, **known))

    assert (ending.cause, ending.signal) == (Cause.KILLED, "SIGKILL")
    assert ending.text.startswith("the kernel killed it: process 70 (python); it held 9")
    assert ending.text.endswith("MiB when seen last, the container's limit is 1.00 GiB")


def test_a_kill_by_somebody_else():
    ending = explain(evidence(-signal.SIGKILL, kills=0, kills_around=0, logged=[ProcessMemory(5, "other", 1)]))

    assert ending.cause is Cause.SIGNALLED
    assert "the kernel reports no OOM kill" in ending.text


@pytest.mark.parametrize(("free_bytes", "cause"), [(MIB, Cause.KILLED), (GIB // 2, Cause.SIGNALLED)])
def test_where_the_kernel_tells_nothing_what_was_left_decides(free_bytes, cause):
    seen = WatchedMemory(last=SCRIPT, by_pid={}, least_free_bytes=free_bytes)

    assert explain(evidence(-signal.SIGKILL, seen=seen)).cause is cause


def test_numbers_of_processes_may_differ_between_container_and_machine():
    kill = ProcessMemory(31337, "python", 800 * MIB)

    ending = explain(evidence(-signal.SIGKILL, kills=1, kills_around=1, logged=[kill]))

    assert ending.process.held_bytes == 800 * MIB


def test_a_worker_that_was_killed():
    error = {**MEMORY, "source": "worker"}
    ending = explain(evidence(1, error=error, kills=1))

    assert (ending.cause, ending.process) == (Cause.WORKER_KILLED, WORKER)
    assert ending.text.startswith("the kernel killed process 71 (worker); it held 300.0 MiB when seen last")


def test_a_worker_that_was_killed_by_somebody_else():
    assert explain(evidence(1, error={**MEMORY, "source": "worker"}, kills=0, logged=[])).cause is Cause.FAILED


def test_a_rank_that_was_killed_under_a_launcher():
    # GIVEN a launcher that ends with an error of its own because the kernel killed one of its processes
    assert explain(evidence(1, error=None, kills=2)).cause is Cause.WORKER_KILLED


@pytest.mark.parametrize(("full", "cause"), [(True, Cause.SHARED_MEMORY), (False, Cause.SIGNALLED)])
def test_a_bus_error(full, cause):
    seen = WatchedMemory(last=SCRIPT, by_pid={}, shared_memory_full=full)

    assert explain(evidence(-signal.SIGBUS, seen=seen)).cause is cause


def test_shared_memory_that_is_full_by_exception():
    assert explain(evidence(1, error={**MEMORY, "source": "shared memory"})).cause is Cause.SHARED_MEMORY


@pytest.mark.parametrize(("data_bytes", "cause"), [(3 * GIB, Cause.CRASHED), (GIB, Cause.SIGNALLED)])
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT])
def test_a_crash_counts_as_memory_only_near_the_limit(number, data_bytes, cause):
    seen = WatchedMemory(last=SCRIPT, by_pid={}, data_bytes=data_bytes, data_limit_bytes=4 * GIB)

    assert explain(evidence(-number, seen=seen)).cause is cause


@pytest.mark.parametrize(("name", "cause"), [("SIGINT", Cause.INTERRUPTED), ("SIGTERM", Cause.SIGNALLED)])
def test_a_signal_that_was_passed_on(name, cause):
    ending = explain(evidence(-getattr(signal, name), passed_on=frozenset({name}), kills=3))

    assert (ending.cause, ending.signal) == (cause, name)


def test_a_signal_without_a_name():
    assert explain(evidence(-250)).signal == "signal 250"


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT])
def test_a_crash_in_a_step_of_tensorflow_is_taken_for_memory_far_from_the_limit_too(number):
    far = WatchedMemory(peak=SCRIPT, last=SCRIPT, by_pid={}, data_bytes=GIB // 4, data_limit_bytes=4 * GIB)

    ending = explain(evidence(-number, seen=far, guarded_by="TensorFlow"))

    assert ending.cause is Cause.CRASHED
    assert "in a step of TensorFlow, as its kernels do when memory runs out" in ending.text


@pytest.mark.parametrize(
    "changes", [{}, {"guarded_by": "TensorFlow", "ceiling": Ceiling(GIB, GIB, "machine")}], ids=str
)
def test_a_crash_far_from_any_limit_is_the_scripts_own(changes):
    far = WatchedMemory(peak=SCRIPT, last=SCRIPT, by_pid={}, data_bytes=GIB // 4, data_limit_bytes=4 * GIB)

    assert explain(evidence(-signal.SIGSEGV, seen=far, **changes)).cause is Cause.SIGNALLED


REFUSED = {
    "data_limit_bytes": GIB,
    "data_bytes": 1000 * MIB,
    "used_bytes": 200 * MIB,
    "type": "TypeError",
    "text": "no",
}


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ({"memory": True, "requested_bytes": 300 * MIB}, Cause.RESERVED),
        ({"memory": True, "requested_bytes": 900 * MIB}, Cause.EXCEPTION),
        ({"memory": True}, Cause.RESERVED),
        ({"memory": True, "used_bytes": 980 * MIB}, Cause.EXCEPTION),
        ({"memory": True, "data_bytes": 220 * MIB}, Cause.EXCEPTION),
        ({"memory": True, "data_bytes": 220 * MIB, "importing": "torch"}, Cause.RESERVED),
        ({"memory": True, "data_limit_bytes": None}, Cause.EXCEPTION),
        ({"memory": True, "source": "shared memory"}, Cause.SHARED_MEMORY),
        ({"memory": False}, Cause.RESERVED),
        ({"memory": False, "data_bytes": 500 * MIB}, Cause.FAILED),
        ({"memory": False, "used_bytes": 990 * MIB}, Cause.FAILED),
    ],
    ids=str,
)
def test_address_space_that_is_refused_with_memory_left(error, cause):
    assert explain(evidence(1, error={**REFUSED, **error})).cause is cause


def test_an_attempt_without_a_limit_can_have_been_refused_only_memory():
    assert explain(evidence(1, error={**REFUSED, "memory": True}, reserves=True)).cause is Cause.EXCEPTION
    assert explain(evidence(1, error={**REFUSED, "memory": False}, reserves=True)).cause is Cause.FAILED


@pytest.mark.parametrize(("refused", "causes"), [(3.0, Cause.RESERVED), (None, Cause.FAILED), (-60.0, Cause.FAILED)])
def test_what_the_watch_saw_of_a_process_that_says_nothing(refused, causes):
    seen = replace(SEEN, refused_seconds=refused)

    assert explain(evidence(1, seen=seen)).cause is causes
    crash = explain(evidence(-signal.SIGABRT, seen=seen))
    assert crash.cause is (Cause.RESERVED if causes is Cause.RESERVED else Cause.SIGNALLED)


def test_a_script_that_was_stopped_by_us():
    ending = explain(evidence(-signal.SIGKILL, seen=replace(SEEN, exceeded=SCRIPT), kills=0, kills_around=0))

    assert (ending.cause, ending.signal, ending.process) == (Cause.KILLED, "SIGKILL", SCRIPT)
    assert ending.text.startswith("memfit stopped it because it exceeded its budget; it held 900.0 MiB")


# The kernel's log

GROUP = (
    "3,1,2,-;Memory cgroup out of memory: Killed process 27367 (my (odd) name) total-vm:615924kB, anon-rss:14772kB, "
    "file-rss:4688kB, shmem-rss:374144kB, UID:0 pgtables:836kB oom_score_adj:0"
)


def test_a_kill_in_a_container():
    assert logged_kill(GROUP) == ProcessMemory(27367, "my (odd) name", (14772 + 374144) * 1024)


def test_a_kill_of_the_whole_machine():
    line = "Out of memory: Killed process 9 (python3) total-vm:1kB, anon-rss:2kB, file-rss:0kB"

    assert logged_kill(line) == ProcessMemory(9, "python3", 2048)


@pytest.mark.parametrize(
    "line", ["", "python[1]: segfault at 0", "oom-kill:constraint=CONSTRAINT_MEMCG,task=python,pid=3,uid=0"]
)
def test_other_lines_tell_nothing(line):
    assert logged_kill(line) is None


def test_only_what_is_new_is_read(tmp_path):
    path = tmp_path / "log"
    path.write_text(GROUP.replace("27367", "1") + "\n")
    log = KernelLog(path)
    assert log.kills() == []

    with path.open("a") as file:
        file.write(f"something else\n{GROUP}\n")

    assert [kill.pid for kill in log.kills()] == [27367]
    assert log.kills() == []
    log.close()
    log.close()
    assert log.kills() is None


def test_without_a_log_nothing_is_known(tmp_path):
    assert KernelLog(tmp_path / "missing").kills() is None
