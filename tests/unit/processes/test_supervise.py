"""The supervisor with real scripts that say by events what a guard in them would say."""

import signal

import pytest

from memfit.core.run_events import RunRequest
from memfit.core.supervised import Cause, Configuration, RunOutcome
from memfit.core.units import MIB
from memfit.processes import process_tree as processes
from memfit.processes import supervise
from memfit.processes.supervise import Supervisor, next_configuration

pytestmark = pytest.mark.skipif(not processes.IS_LINUX, reason="keepers are Linux's")

GUARDED = """
import sys
from memfit.core.run_events import current, note

request = current()
size = request.micro_batch_size or 16
note("guard", model="Net")
note("step", step=1, micro_batch_size=size)
note("settings", text=f"micro-batches of {size}")
if request.attempt > 1:
    note("resume", step=4, path="runs/step-4")
if size > int(sys.argv[1]):
    note("checkpoint", update=4, path="runs/step-4")
    raise MemoryError
note("step", step=9, micro_batch_size=size)
"""


@pytest.fixture
def supervised(tmp_path, capfd):
    """Runs a script's text under supervision; gives the result and what was announced."""

    def run(text, *arguments, retries=5, **options):
        script = tmp_path / "train.py"
        script.write_text(text)
        said = []
        request = RunRequest(script=str(script), arguments=arguments, **options)
        result = Supervisor(request, retries=retries, announce=said.append).run()
        return result, said

    return run


def test_a_script_that_gets_through(supervised):
    run, said = supervised("import time; held = bytearray(30_000_000); time.sleep(0.5)")

    assert (run.outcome, run.exit_code, said) == (RunOutcome.COMPLETED, 0, [])
    (attempt,) = run.attempts
    assert attempt.configuration == Configuration()
    assert attempt.peak.held_bytes > 30_000_000
    assert run.history and run.limit_bytes
    assert [mark.kind for mark in run.marks] == ["start", "end"]


def test_a_failure_of_its_own_is_not_repeated(supervised):
    run, said = supervised("raise SystemExit(5)")

    assert (run.outcome, run.exit_code, len(run.attempts), said) == (RunOutcome.FAILED, 5, 1, [])


def test_a_guard_is_told_less_until_it_fits(supervised):
    run, said = supervised(GUARDED, "4", checkpoint="runs")

    assert run.outcome is RunOutcome.COMPLETED
    assert [attempt.configuration.micro_batch_size for attempt in run.attempts] == [None, 8, 4]
    assert [attempt.resumed_from for attempt in run.attempts] == ["", "runs/step-4", "runs/step-4"]
    assert [attempt.steps for attempt in run.attempts] == [4, 4, 9]
    assert all(attempt.guarded for attempt in run.attempts)
    assert len(said) == 4
    assert said[0].startswith("memory ran out in attempt 1: an allocation failed (MemoryError)")
    assert said[1] == (
        "starting it again from the checkpoint runs/step-4, update 4, with micro-batches of at most 8 (attempt 2 of 6)"
    )
    kinds = [mark.kind for mark in run.marks]
    assert (kinds.count("checkpoint"), kinds.count("out of memory"), kinds.count("restart")) == (4, 2, 2)
    settings = [mark["text"] for mark in run.to_json()["marks"] if mark["kind"] == "settings"]
    assert settings == ["micro-batches of 16", "micro-batches of 8", "micro-batches of 4"]


def test_retries_bound_the_number_of_attempts(supervised):
    run, said = supervised(GUARDED, "1", retries=1)

    assert (run.outcome, run.exit_code, len(run.attempts)) == (RunOutcome.OUT_OF_MEMORY, 3, 2)
    assert said[-1] == "giving up: it has been started 2 times, and --retries is 1"


def test_a_guard_that_does_not_listen_is_named(supervised):
    text = GUARDED.replace("size = request.micro_batch_size or 16", "size = 16")
    run, _ = supervised(text, "1", retries=2)

    assert run.outcome is RunOutcome.OUT_OF_MEMORY
    assert "attempt 2 was to use micro-batches of at most 8 but used 16" in run.notes
    configurations = [attempt.configuration for attempt in run.attempts]
    assert len(set(configurations)) == len(configurations)


RESCUED = """
from memfit.core.run_events import current, note
note("torch")
request = current()
if not (request.rescue and request.eager):
    raise MemoryError
"""


def test_without_a_guard_the_rescue_is_tried(supervised):
    run, said = supervised(RESCUED)

    assert run.outcome is RunOutcome.COMPLETED
    assert [str(attempt.configuration) for attempt in run.attempts] == ["as it is", "rescue", "rescue of everything"]
    assert "from its beginning, unless it resumes by itself" in said[1]


def test_a_script_that_can_not_be_helped_is_told_so(supervised):
    run, said = supervised("from memfit.core.run_events import note; note('torch'); raise MemoryError")

    assert (run.exit_code, len(run.attempts)) == (3, 3)
    assert said[-1].startswith("giving up: the script uses no guard (memfit.Guard, or a trainer that memfit knows)")


def test_nothing_is_tried_that_could_have_no_effect(supervised):
    run, said = supervised("raise MemoryError")

    assert (run.exit_code, len(run.attempts)) == (3, 1)
    assert "had not imported PyTorch when memory ran out" in said[-1]


def test_a_budget_below_what_the_libraries_take(supervised):
    text = "import importlib\nfor name in ('json', 'numpy', 'numpy.random'):\n    importlib.import_module(name)"
    run, said = supervised(text, budget_bytes=2_000_000)

    assert (run.outcome, run.exit_code, run.limit_of) == (RunOutcome.OUT_OF_MEMORY, 3, "budget")
    assert len(run.attempts) == 1
    assert "1.91 MiB" in said[-1]


def test_a_budget_is_a_limit(supervised):
    run, _ = supervised("bytearray(400_000_000)", budget_bytes=200_000_000)

    assert run.attempts[0].ending.cause is Cause.EXCEPTION
    assert run.attempts[0].ending.limit_bytes == 200_000_000


def test_a_signal_of_somebody_else(supervised):
    run, said = supervised("import os, signal; os.kill(os.getpid(), signal.SIGTERM)")

    assert (run.outcome, run.exit_code, said) == (RunOutcome.SIGNALLED, 128 + signal.SIGTERM, [])


def test_a_script_that_is_asked_to_end_is_not_started_again(supervised):
    # GIVEN a script that runs out of memory while it ends as it was asked to
    text = (
        "import os, signal, time\n"
        "def stop(number, frame):\n    raise MemoryError\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "from memfit.core.run_events import note; note('torch')\n"
        "supervisor = int(open(f'/proc/{os.getppid()}/stat').read().rsplit(')')[-1].split()[1])\n"
        "os.kill(supervisor, signal.SIGTERM)\n"
        "time.sleep(60)"
    )
    run, said = supervised(text)

    assert (len(run.attempts), run.outcome, said) == (1, RunOutcome.OUT_OF_MEMORY, [])


def test_a_kill_that_nobody_explains(supervised):
    run, _ = supervised("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")

    assert (run.outcome, run.exit_code) == (RunOutcome.SIGNALLED, 137)


def test_processes_of_a_script_whose_keeper_was_killed_are_ended(supervised, tmp_path):
    text = (
        "import os, signal, subprocess, sys, time\n"
        "left = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(left.pid))\n"
        "time.sleep(1.5)\n"
        "os.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(60)"
    )
    run, _ = supervised(text)

    assert run.exit_code == 137
    left = int((tmp_path / "pid").read_text())
    while processes.held_by(left) is not None:
        pass


def test_on_a_machine_with_devices_the_budget_is_theirs(supervised, monkeypatch):
    monkeypatch.setattr(supervise, "has_devices", lambda: True)
    text = "from memfit.core.run_events import current; assert current().budget_bytes == 9; bytearray(50_000_000)"
    run, _ = supervised(text, budget_bytes=9)

    assert run.outcome is RunOutcome.COMPLETED
    assert run.limit_of != "budget"


KERAS = """
import os, sys
from memfit.core.run_events import current, note

request = current()
print(request.budget_bytes, request.share, request.micro_batch_size, file=open("told.txt", "a"))
note("keras", backend="tensorflow")
if "early" not in sys.argv:
    note("guard", model="Net")
    note("step", update=1, micro_batch_size=8)
if "planned" in sys.argv:
    note("cannot fit", text="the smallest plan needs 9.0 GiB", planned=True)
if request.attempt < 3:
    os.abort() if "crash" in sys.argv else (_ for _ in ()).throw(MemoryError())
"""


def test_a_guard_of_keras_plans_for_less_each_time(supervised, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    run, said = supervised(KERAS, "crash", budget_bytes=400 * MIB)

    assert run.outcome is RunOutcome.COMPLETED
    assert [attempt.ending.cause for attempt in run.attempts[:2]] == [Cause.CRASHED, Cause.CRASHED]
    assert [attempt.configuration for attempt in run.attempts] == [
        Configuration(),
        Configuration(4, share=0.75),
        Configuration(4, share=0.56),
    ]
    told = [line.split() for line in (tmp_path / "told.txt").read_text().splitlines()]
    assert told == [[str(400 * MIB), "1.0", "None"], [str(400 * MIB), "0.75", "4"], [str(400 * MIB), "0.56", "4"]]
    assert "a plan for 75% of the memory" in said[1]


def test_without_a_budget_keras_plans_for_a_share_of_what_there_is(supervised, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    run, _ = supervised(KERAS)

    told = [line.split()[:2] for line in (tmp_path / "told.txt").read_text().splitlines()]
    assert told[0] == ["None", "1.0"]
    assert told[1] == [str(run.limit_bytes), "0.75"]


@pytest.mark.parametrize(
    ("argument", "text"),
    [("early", "memory ran out outside of `fit`"), ("planned", "the smallest plan needs 9.0 GiB")],
)
def test_where_keras_can_do_nothing_it_is_not_started_again(supervised, monkeypatch, tmp_path, argument, text):
    monkeypatch.chdir(tmp_path)
    run, said = supervised(KERAS, argument)

    assert (run.exit_code, len(run.attempts)) == (3, 1)
    assert text in said[-1]


RESERVES = """
import mmap, sys
ahead = mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
held = bytearray(b"x") * int(sys.argv[1])
"""
THREADS = """
import threading
wait = threading.Event()
for _ in range(100):
    threading.Thread(target=wait.wait, daemon=True).start()
held = bytearray(b"x") * 100_000_000
"""


@pytest.mark.parametrize(
    ("text", "budget_bytes"),
    [(RESERVES, 1100 * MIB), (RESERVES, 500 * MIB), (THREADS, 600 * MIB)],
    ids=["refused later", "refused itself", "stacks"],
)
def test_what_is_reserved_and_never_used_is_no_reason_to_fail(supervised, text, budget_bytes):
    run, said = supervised(text, "100000000", budget_bytes=budget_bytes)

    assert run.outcome is RunOutcome.COMPLETED, said
    assert [attempt.configuration.reserves for attempt in run.attempts] == [False, True]
    assert "with no limit on address space (attempt 2 of 6)" in said[1]


def test_what_settles_before_it_matters_costs_no_attempt(supervised):
    run, said = supervised(
        RESERVES.replace("held", "import time; time.sleep(2.5); held"), "100000000", budget_bytes=1100 * MIB
    )

    assert (run.outcome, len(run.attempts), said) == (RunOutcome.COMPLETED, 1, [])


def test_a_child_of_the_script_may_reserve_too(supervised):
    text = "import subprocess, sys\ncode = 'import time; ' + sys.argv[1].replace('held', 'time.sleep(4); held')\n"
    text += "sys.exit(subprocess.run([sys.executable, '-c', code, '100000000']).returncode)"
    run, said = supervised(text, RESERVES.strip(), budget_bytes=1100 * MIB)

    assert (run.outcome, len(run.attempts)) == (RunOutcome.COMPLETED, 1), said


def test_a_script_that_reserves_and_uses_too_much_fails_with_an_exception(supervised):
    text = RESERVES.replace("held =", "held = []\nwhile True: held.append(").replace("int(sys.argv[1])", "10_000_000)")
    run, _ = supervised(text, budget_bytes=400 * MIB)

    assert [attempt.ending.cause for attempt in run.attempts] == [Cause.EXCEPTION, Cause.EXCEPTION]
    assert run.exit_code == 3
    assert 300 * MIB < run.peak.held_bytes <= 440 * MIB


def test_a_script_that_uses_what_it_reserved_is_stopped_beyond_its_budget(supervised):
    text = "import mmap\nheld = mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
    text += "for start in range(0, 1 << 30, 4096):\n    held[start] = 1\n"
    run, said = supervised(text, budget_bytes=300 * MIB)

    assert [attempt.ending.cause for attempt in run.attempts] == [Cause.EXCEPTION, Cause.KILLED]
    assert "memfit stopped it because it exceeded its budget" in said[2]
    assert (run.outcome, run.exit_code) == (RunOutcome.OUT_OF_MEMORY, 3)


def test_shared_memory_beyond_a_budget_is_told(supervised):
    text = "import mmap, time\nheld = mmap.mmap(-1, 400 << 20)\n"
    text += "for start in range(0, 400 << 20, 4096):\n    held[start] = 1\ntime.sleep(1)\n"
    run, said = supervised(text, budget_bytes=200 * MIB)

    assert run.outcome is RunOutcome.COMPLETED
    assert "more than its budget of 200.0 MiB" in said[0]
    assert (run.notes, len(said)) == ((said[0],), 1)


def test_a_strange_error_of_a_library_that_got_no_address_space_is_tried_again(supervised):
    text = RESERVES.split("held")[0] + "import time; time.sleep(0.2)\nif not {attempt}: raise TypeError('NoneType')"
    text = text.replace("{attempt}", "__import__('memfit.core.run_events').core.run_events.current().attempt - 1")
    run, said = supervised(text, budget_bytes=1060 * MIB)

    assert (run.outcome, len(run.attempts)) == (RunOutcome.COMPLETED, 2)
    assert said[0].startswith("attempt 1: it was refused address space, not memory: of 1.0")
    assert "(TypeError: NoneType) at train.py, line " in said[0]


def test_the_traceback_of_the_last_attempt_is_kept(supervised, tmp_path, monkeypatch):
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    run, said = supervised("raise MemoryError")

    (note,) = [note for note in run.notes if "traceback" in note]
    assert note in said
    (kept,) = (tmp_path / "cache" / "tracebacks").iterdir()
    assert note.endswith(str(kept))
    assert kept.read_text().endswith("\nMemoryError\n")
    assert not any("Traceback" in line for line in said)


# What the next attempt is told

PLAIN = Configuration()


def all_of(first, sizes):
    """What attempts are told one after another, where each uses what `sizes` says."""
    tried = [first]
    for size in sizes:
        following = next_configuration(tried, size(tried[-1]))
        if following is None:
            break
        tried.append(following)
    return tried


def test_a_guard_is_told_half_of_what_it_used():
    assert next_configuration([PLAIN], 12) == Configuration(6)
    assert next_configuration([PLAIN, Configuration(6)], 5) == Configuration(2)


def test_a_guard_is_taken_down_to_one_sample_and_then_rescued():
    tried = all_of(PLAIN, [lambda told: told.micro_batch_size or 8] * 20)

    assert tried == [
        PLAIN,
        Configuration(4),
        Configuration(2),
        Configuration(1),
        Configuration(1, rescue=True),
        Configuration(1, rescue=True, eager=True),
    ]


def test_without_a_guard_there_is_only_the_rescue():
    tried = all_of(PLAIN, [lambda told: None] * 20)

    assert tried == [PLAIN, Configuration(rescue=True), Configuration(rescue=True, eager=True)]


def test_a_rescue_that_was_wanted_from_the_start_becomes_eager():
    tried = all_of(Configuration(rescue=True), [lambda told: None] * 20)

    assert tried == [Configuration(rescue=True), Configuration(rescue=True, eager=True)]


def test_nothing_is_told_twice_even_to_a_script_that_does_not_listen():
    # GIVEN a guard that uses 16 whatever it is told
    tried = all_of(PLAIN, [lambda told: 16] * 20)

    assert len(set(tried)) == len(tried)
    assert len(tried) < 20


def planned(first, sizes, **options):
    tried = [first]
    for size in sizes:
        following = next_configuration(tried, size, plans=True, **options)
        if following is None:
            break
        tried.append(following)
    return tried


def test_a_guard_that_plans_is_given_less_memory_to_plan_for():
    # GIVEN a model whose batches may not be split, so that 64 samples are used whatever it is told
    tried = planned(PLAIN, [64] * 20, rescues=False)

    assert [one.share for one in tried] == [1.0, 0.75, 0.56, 0.42, 0.32]
    assert {one.micro_batch_size for one in tried} == {None, 32}
    assert not any(one.rescue for one in tried)


def test_where_operations_can_be_rescued_that_comes_after_the_plans():
    tried = planned(PLAIN, [1] * 20)

    assert [one.share for one in tried[:5]] == [1.0, 0.75, 0.56, 0.42, 0.32]
    assert [(one.rescue, one.eager) for one in tried[5:]] == [(True, False), (True, True)]


def test_a_plan_for_less_is_put_into_words():
    assert str(Configuration(4, share=0.75)) == "micro-batches of at most 4 and a plan for 75% of the memory"


def test_what_was_refused_address_space_needs_nothing_smaller():
    assert next_configuration([Configuration(4)], 4, reserved=True) == Configuration(4, reserves=True)
    assert str(Configuration(reserves=True)) == "no limit on address space"
