from dataclasses import replace

import pytest

from memfit.core.device import Origin
from memfit.core.dryrun import Advice, Outcome, Scan
from memfit.core.estimate import AT_MOST, CACHED, CONTEXT, HostMemory, Note
from memfit.core.timeline import Phase, Timeline
from memfit.core.units import GIB, KIB, MIB
from memfit.reports.dryrun import figures as run_figures
from tests.unit.reports.builders import MYSTERY
from tests.unit.reports.run_builders import (
    ADVICE,
    SMALL,
    make_dead_run,
    make_failure,
    make_run,
    make_run_estimate,
    make_scan,
)

PEAK = "peak 1.13 GiB of 23.7 GiB"
TITLE = "NVIDIA GeForce RTX 3090"


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (make_run(), f"train.py on {TITLE}: ran 3 steps, {PEAK}: fits (99%)"),
        (make_run(num_steps=1, steps_wanted=1), f"train.py on {TITLE}: ran 1 step, {PEAK}: fits (99%)"),
        (make_run(num_devices=4), f"train.py on 4 x {TITLE}: ran 3 steps, {PEAK}: fits (99%)"),
        (
            make_run(outcome=Outcome.ENDED, num_steps=2),
            f"train.py on {TITLE}: ended by itself after 2 of 3 steps, {PEAK}: fits (99%)",
        ),
        (
            make_run(scan=make_scan()),
            f"train.py on {TITLE}: ran 3 steps, {PEAK}: fits at step 1; "
            "the longest batch, 4,812 tokens at index 311, does not",
        ),
        (
            make_run(scan=make_scan(largest_tokens=None)),
            f"train.py on {TITLE}: ran 3 steps, {PEAK}: fits at step 1; "
            "the largest batch, 301.0 KiB at index 311, does not",
        ),
        (make_dead_run(), f"train.py would run out of memory on {TITLE} at train.py:88, in step 1, forward"),
        (
            make_dead_run(failures=(make_failure(phase=Phase.SETUP, step=0, source=""),)),
            f"train.py would run out of memory on {TITLE} in set-up",
        ),
        (make_dead_run(failures=()), f"train.py would run out of memory on {TITLE}"),
        (
            make_run(outcome=Outcome.FAILED, num_steps=1, error="ValueError: no (train.py:3)"),
            f"train.py on {TITLE}: after 1 step, failed for a reason of its own: ValueError: no (train.py:3)",
        ),
        (
            make_run(outcome=Outcome.FAILED, num_steps=0, exit_code=9),
            f"train.py on {TITLE}: before its first step, failed for a reason of its own: exit code 9",
        ),
        (
            make_run(outcome=Outcome.NO_STEP, num_steps=0),
            f"train.py on {TITLE}: ended without an optimizer step, peak 1.13 GiB of 23.7 GiB: fits as far as it went",
        ),
        (
            make_run(outcome=Outcome.INTERRUPTED, num_steps=2),
            f"train.py on {TITLE}: interrupted after 2 steps, so whether it fits is unknown",
        ),
        (
            make_run(outcome=Outcome.INTERRUPTED, num_steps=0),
            f"train.py on {TITLE}: interrupted before its first step, so whether it fits is unknown",
        ),
        (make_run(outcome=Outcome.CRASHED, estimate=None, error="gone"), "train.py crashed: gone"),
        (
            make_run(estimate=make_run_estimate(MYSTERY)),
            "train.py on Mystery accelerator: ran 3 steps, peak 1.13 GiB of unknown: whether it fits is unknown",
        ),
    ],
)
def test_verdicts(run, text):
    assert run_figures.verdict(run) == text


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (Outcome.COMPLETED, "fits (99%)"),
        (Outcome.OUT_OF_MEMORY, "does not fit"),
        (Outcome.FAILED, "failed"),
        (Outcome.CRASHED, "crashed"),
        (Outcome.NO_STEP, "no step taken"),
        (Outcome.INTERRUPTED, "interrupted"),
    ],
)
def test_answers(outcome, text):
    assert run_figures.answer(make_run(outcome=outcome)) == text


def test_a_run_that_fits_has_nothing_to_add():
    assert run_figures.details(make_run()) == []


def test_several_devices_are_said_to_be_one():
    assert run_figures.details(make_run(num_devices=2)) == ["all figures are those of one device"]


def test_where_it_died_and_what_it_would_need():
    assert run_figures.details(make_dead_run()) == [
        "train.py:88  logits = model(tokens)",
        "aten.convolution in layer2.3.conv asked for 64.0 MiB: 40.0 MiB free on the device, "
        "20.0 MiB unused in the allocator's cache (simulated)",
        "without a limit it would need 1.13 GiB (simulated): 260.0 MiB more than the 900.0 MiB usable (measured)",
        "that peak would be in the backward pass of step 2, at aten.convolution_backward (2.00 MiB) in layer4.11.conv, "
        "train.py:19",
    ]


def test_what_it_would_need_is_said_only_where_it_is_known():
    # GIVEN an estimate that ends where the script died
    cut = make_run_estimate(SMALL, timeline=Timeline((), 0))

    assert len(run_figures.details(make_dead_run(estimate=cut))) == 2
    assert run_figures.details(make_dead_run(estimate=None))[1].endswith(
        "asked for 64.0 MiB: 20.0 MiB unused in the allocator's cache (simulated)"
    )


def test_an_unknown_line_is_named_so():
    lines = run_figures.failure_lines(make_dead_run(), make_failure(source="", code="", module="", op=""))

    assert lines[0] == "unknown line"
    assert lines[1].startswith("an allocation asked for 64.0 MiB")


def test_a_need_within_the_capacity_is_not_called_more():
    roomy = make_run_estimate()

    assert run_figures.need(roomy) == "without a limit it would need 1.13 GiB (simulated); 23.7 GiB usable (measured)"
    assert run_figures.need(make_run_estimate(MYSTERY)) == "without a limit it would need 1.13 GiB (simulated)"


def test_errors_that_were_caught_are_told():
    caught = make_failure(handled=True)

    assert run_figures.details(make_run(failures=(caught,))) == [
        "the script ran out of memory once, caught the error and went on; first at train.py:88, in step 1, forward"
    ]
    assert "2 times" in run_figures.details(make_run(failures=(caught, caught)))[0]


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.INTERRUPTED])
def test_a_run_that_broke_off_has_a_partial_report(outcome):
    run = make_run(outcome=outcome)

    assert run_figures.details(run) == [f"until then: {PEAK} (simulated)"]
    assert "95% interval" not in [figure.label for figure in run_figures.run_figures(run)]
    assert "95% interval" in [figure.label for figure in run_figures.run_figures(make_run())]


def test_a_run_that_allocated_nothing_has_no_peak():
    run = make_run(outcome=Outcome.NO_STEP, estimate=make_run_estimate(timeline=Timeline((), 0), notes=()))

    assert run_figures.details(run) == []
    assert run_figures.parts(run) == []


def test_every_figure_has_its_origin():
    figures = run_figures.run_figures(make_run())

    assert {figure.origin for figure in figures} <= {origin.value for origin in Origin}
    assert "host memory" not in [figure.label for figure in figures]
    known = make_run(estimate=make_run_estimate(host=HostMemory({"a": 1})))
    assert "host memory" in [figure.label for figure in run_figures.run_figures(known)]


def test_what_held_the_memory_adds_up():
    groups = run_figures.failure_groups(make_dead_run(), make_failure())

    assert groups[CACHED] == 22 * MIB
    assert groups[CONTEXT] == 300 * MIB
    assert sum(groups.values()) == 560 * MIB + 300 * MIB


def test_parts_come_in_the_order_of_their_use():
    titles = [part.title.partition(" (")[0] for part in run_figures.parts(make_dead_run(redirected={"a": "b"}))]

    assert titles == [
        "Held at that moment, in step 1, forward",
        "Changes that would save most, each alone",
        "Largest modules at the peak without a limit",
        "Largest source lines at the peak without a limit",
        "Figures and their origin",
        "Files that went elsewhere, so that yours were not overwritten",
        "Notes",
    ]


@pytest.mark.parametrize(
    ("advice", "text"),
    [
        (ADVICE[0], "saves about 400.0 MiB, leaves about 700.0 MiB: may fit (assumed; same results)"),
        (ADVICE[1], "saves 100.0 MiB, leaves 1000.0 MiB: still too much (simulated; same up to rounding)"),
        (
            ADVICE[2],
            "saves about 90.0 MiB, leaves about 1010.0 MiB: probably still too much (assumed; changes training)",
        ),
    ],
)
def test_advice_says_what_is_left_and_whether_that_fits(advice, text):
    assert run_figures.advice_title(advice, make_dead_run()) == f"{advice.title}: {text}"


def test_advice_where_the_capacity_is_unknown():
    advice = Advice("less", GIB, GIB, "exact", "so", Origin.ASSUMED)

    assert run_figures.advice_title(advice, make_run(estimate=None)) == (
        "less: saves about 1.00 GiB, leaves about 1.00 GiB (assumed; same results)"
    )


def test_a_scan_says_how_batches_vary():
    assert run_figures.scan_lines(make_run(scan=make_scan())) == [
        "500 of 1,204 looked at: 7.00 KiB to 301.0 KiB, median 44.0 KiB",
        "input_ids: int64, 8 x 112 to 8 x 4812",
        "labels: int64, 8",
        "the longest batch, 4,812 tokens at index 311: peak 26.0 GiB (simulated): does not fit",
        "it runs out at train.py:88, in step 2, forward",
        "train.py:88  logits = model(tokens)",
        "aten.convolution in layer2.3.conv asked for 64.0 MiB: 22.9 GiB free on the device, "
        "20.0 MiB unused in the allocator's cache (simulated)",
    ]


def test_batches_of_one_size_are_called_so():
    scan = make_scan(smallest_bytes=KIB, largest_bytes=KIB, total=None, failure=None, fits=None)

    assert run_figures.scan_lines(make_run(scan=scan))[0] == "500 looked at: all of 1.00 KiB"


def test_a_scan_without_batches_says_why():
    lines = run_figures.scan_lines(make_run(scan=Scan(problem="the script has no DataLoader")))

    assert lines == ["no step with the largest batch: the script has no DataLoader"]
    assert run_figures.scan_lines(make_run()) == []


def test_notes_name_their_place_and_stand_ins_are_summed_up():
    assert run_figures.note_lines(make_run()) == [
        "data-dependent shape at train.py:88: nonzero: its size depends on data; upper bound used",
        "2 values were read from the device and replaced by a stand-in, which changes no size by itself: "
        "train.py:91, train.py:97",
    ]


def test_many_stand_ins_stay_one_line():
    notes = tuple(Note("stand-in-value", "a value", f"train.py:{line}") for line in (1, 1, 2, 3, 4, 5))
    run = make_run(estimate=make_run_estimate(notes=notes))

    assert run_figures.note_lines(run) == [
        "6 values were read from the device and replaced by a stand-in, which changes no size by itself: "
        "train.py:1, train.py:2, train.py:3 and 2 more"
    ]


def test_a_single_stand_in_without_a_place():
    run = make_run(estimate=make_run_estimate(notes=(Note("stand-in-value", "a value"),)))

    assert run_figures.note_lines(run) == [
        "1 value was read from the device and replaced by a stand-in, which changes no size by itself"
    ]
    assert run_figures.note_lines(make_run(estimate=None)) == []


def test_redirected_checkpoints_are_listed_up_to_three():
    redirected = {f"{name}.pt": f"elsewhere/{name}.pt" for name in "abcde"}
    (part,) = [p for p in run_figures.parts(make_run(redirected=redirected)) if p.title.startswith("Files that went")]

    assert part.lines == ("a.pt -> elsewhere/a.pt", "b.pt -> elsewhere/b.pt", "c.pt -> elsewhere/c.pt", "and 2 more")


def test_files_that_were_not_kept_are_said_to_be_gone():
    (part,) = [p for p in run_figures.parts(make_run(redirected={"a.pt": ""})) if p.title.startswith("Files that went")]

    assert part.lines == ("a.pt", "They were not kept; --keep-checkpoints FOLDER keeps them")


def test_the_command_is_shown_as_it_was_given():
    assert run_figures.command(make_run()) == "train.py --batch-size 64"


def test_a_peak_of_upper_bounds_is_at_most():
    run = make_run(estimate=make_run_estimate(notes=(Note(AT_MOST, "1 GiB"),)))
    assert "peak at most 1.13 GiB of 23.7 GiB: fits" in run_figures.verdict(run)


def test_an_upper_bound_that_does_not_fit_may_fit():
    # GIVEN a run that would go beyond the device only if every size were the largest it can be
    dead = make_dead_run()
    notes = (*dead.estimate.notes, Note(AT_MOST, "1 GiB"))
    surely = replace(dead, estimate=replace(dead.estimate, notes=notes, certain_bytes=10**12))
    maybe = replace(dead, estimate=replace(dead.estimate, notes=notes, certain_bytes=1))
    assert "would run out of memory" in run_figures.verdict(dead)
    assert "would run out of memory" in run_figures.verdict(surely)
    assert "could run out of memory" in run_figures.verdict(maybe)


def test_a_failure_that_the_simulation_may_be_the_reason_of_asks_for_a_report():
    run = make_run(outcome=Outcome.FAILED, num_steps=0, error="IndexError: x", suspicion="it had read values")
    assert "failed, and the simulation may be the reason: IndexError: x" in run_figures.verdict(run)
    assert any("it had read values. If it runs on a GPU, please report" in line for line in run_figures.details(run))
    assert type(run).from_json(run.to_json()).suspicion == run.suspicion


def test_a_script_that_puts_nothing_on_the_device_tells_nothing_of_it():
    run = make_run(estimate=make_run_estimate(timeline=Timeline((), 0)))
    assert run.fits is None
    assert run.exit_code_of_command == 5
    assert "put nothing on the device, so whether it fits is unknown" in run_figures.verdict(run)


def test_a_run_without_a_step_has_its_peak_and_says_what_is_missing():
    run = make_run(outcome=Outcome.NO_STEP, num_steps=0)

    assert run_figures.details(run)[0].startswith("training was not seen")


def test_each_process_has_its_part():
    run = make_run(processes={"the script itself": 2**20, "Process-1": 3 * 2**20})
    titles = {part.title: part.rows for part in run_figures.parts(run)}

    assert len(titles["Held by each process at the device's peak (simulated)"]) == 2
    assert not any("each process" in part.title for part in run_figures.parts(make_run(processes={"a": 1})))
