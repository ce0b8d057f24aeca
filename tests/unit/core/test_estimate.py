import copy
import dataclasses
import json

import pytest

from memfit.core.device import Origin
from memfit.core.errors import BadFile, BadInput
from memfit.core.estimate import CACHED, CONTEXT, DRY_RUN, Estimate, HostMemory, _source_of
from memfit.core.replay import OutOfMemory
from memfit.core.reporters import Reporters
from memfit.core.timeline import Block, Category, Phase, Timeline
from memfit.core.units import MIB
from tests.unit.reports.builders import MYSTERY, RTX_3090, make_estimate, make_failed_estimate


@pytest.fixture
def reporters(monkeypatch):
    """Fresh reporters: as if nobody had set any."""
    monkeypatch.setattr(Estimate, "reporters", Reporters())


def test_the_peak_is_reserved_memory_and_context():
    estimate = make_estimate()

    assert estimate.peak_bytes == estimate.replay.reserved_peak_bytes + estimate.context_bytes
    assert estimate.allocated_peak_bytes == estimate.replay.allocated_peak_bytes


@pytest.mark.parametrize(("usable_bytes", "fits"), [(None, None), (10**12, True), (100 * MIB, False)])
def test_fits_when_the_peak_is_no_more_than_there_is(usable_bytes, fits):
    estimate = make_estimate(device=dataclasses.replace(RTX_3090, usable_bytes=usable_bytes))

    assert estimate.fits is fits
    assert estimate.capacity_bytes == usable_bytes


def test_a_peak_of_exactly_the_capacity_fits():
    peak_bytes = make_estimate().peak_bytes

    assert make_estimate(device=dataclasses.replace(RTX_3090, usable_bytes=peak_bytes)).fits is True
    assert make_estimate(device=dataclasses.replace(RTX_3090, usable_bytes=peak_bytes - 1)).fits is False


def test_what_ran_out_does_not_fit_even_where_the_capacity_is_unknown():
    failed = make_failed_estimate()

    assert failed.fits is False
    assert dataclasses.replace(failed, device=MYSTERY).fits is False


def test_every_view_of_the_breakdown_adds_up_to_the_peak():
    estimate = make_estimate()

    for view in dataclasses.asdict(estimate.breakdown).values():
        assert sum(view.values()) == estimate.peak_bytes
        assert view[CONTEXT] == estimate.context_bytes
        assert view[CACHED] > 0


def test_the_moment_names_phase_operator_module_and_line():
    moment = make_estimate().moment

    assert moment.startswith("in the backward pass of step 2, at aten.convolution_backward (2.00 MiB) in layer4.")
    assert moment.endswith(", train.py:19")


def test_an_empty_step_has_no_moment():
    empty = make_estimate(Timeline((), 0))

    assert empty.moment == "nothing is allocated"
    assert empty.peak_block is None
    assert empty.peak_tick == 0


def test_host_memory_is_the_sum_of_its_parts():
    assert HostMemory({"a": 3, "b": 4}).total_bytes == 7
    assert HostMemory({}).total_bytes == 0


@pytest.mark.parametrize("make", [make_estimate, make_failed_estimate])
def test_json_gives_the_same_estimate_back(make):
    estimate = make()
    text = json.dumps(estimate.to_json())

    # THEN tuples are tuples again and enumerations members: nothing tells the two apart
    for given in (text, text.encode(), json.loads(text)):
        back = Estimate.from_json(given)
        assert back == estimate
        assert type(back.device.capability) is tuple
        assert type(back.replay.allocated) is type(back.notes) is tuple
        assert type(back.device.context_origin) is Origin
        assert back.breakdown == estimate.breakdown


def test_json_carries_what_a_program_wants_to_know():
    estimate = make_failed_estimate()
    data = estimate.to_json()

    assert data["peak_bytes"] == estimate.peak_bytes
    assert data["fits"] is False
    assert data["moment"] == estimate.moment
    assert data["breakdown"]["by_category"] == estimate.breakdown.by_category
    assert data["origin"] == {"peak_bytes": "simulated", "capacity_bytes": "measured", "context_bytes": "assumed"}


def test_an_estimate_from_a_file_stays_at_its_batch_size():
    back = Estimate.from_json(make_estimate().to_json())

    with pytest.raises(BadInput, match=r"read from a file\. Estimate the job again with the batch size wanted"):
        back.at_batch(8)


def test_a_step_can_be_moved_by_the_one_who_traced_it():
    estimate = make_estimate(rescale=lambda n: make_estimate(batch_size=n))

    assert estimate.at_batch(8).batch_size == 8


@pytest.mark.parametrize("key", ["format", "version", "subject", "device", "timeline", "replay", "host", "tight_bytes"])
def test_a_missing_part_is_refused(key):
    data = make_estimate().to_json()
    del data[key]

    with pytest.raises(BadFile, match=f"not an estimate written by memfit: .*'{key}'"):
        Estimate.from_json(data)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(device=None),
        lambda d: d["device"].update(kind="toaster"),
        lambda d: d["device"].update(capability=[8]),
        lambda d: d.update(replay=[]),
        lambda d: d["replay"].update(allocated="x"),
        lambda d: d["replay"].update(out_of_memory={}),
        lambda d: d.update(host=[1]),
        lambda d: d.update(notes=[{"colour": "green"}]),
        lambda d: d.update(context_bytes="much"),
        lambda d: d.update(tight_bytes=None),
        lambda d: d.update(seconds=[]),
        lambda d: d["timeline"].update(num_ticks=1),
    ],
)
def test_a_damaged_estimate_is_refused(change):
    data = copy.deepcopy(make_estimate().to_json())
    change(data)

    with pytest.raises(BadFile, match=r"not an? (estimate|timeline) written by memfit"):
        Estimate.from_json(data)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", b"\xff", '{"format": "memfit.estimate"}'])
def test_what_is_no_estimate_is_refused(text):
    with pytest.raises(BadFile, match="not an estimate written by memfit"):
        Estimate.from_json(text)


@pytest.mark.parametrize("change", [{"version": 99}, {"format": "memfit.timeline"}])
def test_another_format_is_told(change):
    with pytest.raises(BadFile, match=r"expected a memfit\.estimate of version 1, got"):
        Estimate.from_json(make_estimate().to_json() | change)


def test_without_reports_an_estimate_still_says_what_it_is(reporters):
    estimate = make_estimate()

    assert str(estimate) == repr(estimate)
    with pytest.raises(NotImplementedError, match="import memfit"):
        estimate.report("memory.html")


def test_reporters_are_used(reporters):
    written = []
    Estimate.reporters.use(lambda estimate: f"about {estimate.subject}", lambda estimate, path: written.append(path))

    assert str(make_estimate()) == "about ResNet"
    make_estimate().report("memory.html")
    assert written == ["memory.html"]


def test_layers_stand_for_lines_where_no_block_has_one():
    def named(source):
        blocks = (
            Block(8, 0, None, Category.ACTIVATION, Phase.FORWARD, "conv", "op"),
            Block(4, 1, None, Category.ACTIVATION, Phase.FORWARD, "", "op", source),
        )
        timeline = Timeline(blocks, 2)
        return timeline.breakdown(1, _source_of(timeline))

    assert named("") == {"(framework) in conv": 8, "(framework)": 4}
    assert named("train.py:3") == {"(framework)": 8, "train.py:3": 4}


def test_what_is_given_back_does_not_decide():
    # GIVEN a device that has what is allocated and 2.5% more, but not what cuDNN may take on top
    estimate = make_estimate()
    usable = round(1.025 * estimate.tight_bytes)
    tight = dataclasses.replace(estimate, device=dataclasses.replace(estimate.device, usable_bytes=usable))

    # THEN only spreads that decide count
    assert 0.9 < tight.fit_probability < 0.99 or tight.fits is False
    wide = tuple(dataclasses.replace(spread, above_bytes=10**12) for spread in tight.spreads if not spread.decides)
    decisive = tuple(spread for spread in tight.spreads if spread.decides)
    assert dataclasses.replace(tight, spreads=(*decisive, *wide)).fit_probability == tight.fit_probability


def test_the_interval_ends_where_a_full_device_does():
    estimate = make_estimate()
    full = dataclasses.replace(estimate.device, usable_bytes=estimate.peak_bytes + 10)
    squeezed = dataclasses.replace(estimate, device=full, replay=dataclasses.replace(estimate.replay, num_retries=1))

    assert squeezed.interval_bytes[1] == estimate.peak_bytes + 10
    assert dataclasses.replace(estimate, device=full).interval_bytes[1] > estimate.peak_bytes + 10


def test_a_program_that_broke_off_surely_does_not_fit():
    lost = dataclasses.replace(make_estimate().replay, out_of_memory=OutOfMemory(1, 2, 3, 4))

    assert make_estimate(mode=DRY_RUN, replay=lost).fit_probability == pytest.approx(0.01)


def test_the_cache_is_varied_when_an_interval_is_asked_for():
    # GIVEN an estimate whose step can be replayed with other workspaces
    asked = []
    plain = make_estimate()

    def vary():
        asked.append(1)
        return (dataclasses.replace(plain.replay, reserved_peak_bytes=plain.replay.reserved_peak_bytes - 100 * MIB),)

    estimate = make_estimate(vary=vary)

    # THEN the verdict does without, the interval is wider, and a file has what was found
    assert estimate.fit_probability == plain.fit_probability and not asked
    assert estimate.interval_bytes[1] > plain.interval_bytes[1]
    back = Estimate.from_json(estimate.to_json())
    assert (len(asked), back.interval_bytes, back.vary) == (1, estimate.interval_bytes, None)
