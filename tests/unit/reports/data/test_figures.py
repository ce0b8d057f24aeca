from dataclasses import replace

from memfit.data.convert import Conversion, ConvertedField
from memfit.data.inspection import InspectedField, Inspection, Streaming
from memfit.data.precision import Statistics, ValueSummary
from memfit.data.speed import StreamSpeed
from memfit.reports.data import figures as data_figures

GIB = 2**30

STREAMING = Streaming(2**29, 32, 6242, 344_038, 12, 33_472_512, 194.6, 0.005, 0.0002, False)
INSPECTION = Inspection(
    "x.npy",
    262_144,
    (
        InspectedField("x", "float64", (1024,), False, False, 2 * GIB, ValueSummary(1000, 3, 0, -4.5, 4.75)),
        InspectedField("y", "int64", (), True, False, 2**21, ValueSummary(1000, 0, 0, 0, 9)),
    ),
    ("cat", "dog"),
    2 * GIB + 256,
    2 * GIB + 2**21,
    (".npy: samples one after the other",),
    4 * GIB,
    True,
    {"float32": GIB},
    STREAMING,
    ("stored as float64",),
)
CONVERSION = Conversion(
    "x.npy",
    "small.npy",
    1000,
    (ConvertedField("x", (4,), "float64", "float32", Statistics(4000, 1, 2, -1.0, 1.0, 3, 4, 5, 1e-9, 5.9e-8)),),
    32_128,
    16_128,
    2.0,
)
SPEED = StreamSpeed("x.npy", 1000, 2 * GIB, 32, 2, 2**29, 5000.0, 10e6, 20e6, 0.25, 2**28, 10_000, 2.0, True)


def test_an_inspection_says_all_it_found():
    said = str(data_figures.inspection_report(INSPECTION))

    assert said.startswith(
        "x.npy: 262,144 samples, 2.00 GiB when loaded, 50% of the limit of this container (4.00 GiB, measured)\n"
    )
    for expected in (
        "-4.5 to 4.75 in 1,000, 3 NaN",
        "y (label)",
        "one number",
        "on disk: 2.00 GiB (measured)",
        "2 classes: cat, dog",
        "as float32 it would take 1.00 GiB less (50%, computed)",
        "6,242 blocks of about 336.0 KiB; more than 12 workers would read some of them twice",
        "0.50% of samples are followed by one of the same block (0.02% in a full shuffle)",
        "stored as float64",
    ):
        assert expected in said


def test_what_is_unknown_is_not_made_up():
    ragged = replace(INSPECTION.fields[0], is_ragged=True, size_bytes=None, seen=None)
    found = replace(INSPECTION, fields=(ragged,), loaded_bytes=None, disk_bytes=None, streaming=None, classes=())

    said = str(data_figures.inspection_report(found))

    assert "262,144 samples of different shapes" in said
    assert "differs" in said
    assert "unknown" in said
    assert "Streamed" not in said
    assert "on disk" not in said
    assert data_figures.inspection_report(found).is_good is None
    nowhere = replace(INSPECTION, host_bytes=None)
    assert data_figures.inspection_report(nowhere).verdict.endswith("2.00 GiB when loaded")


def test_whether_it_can_be_loaded():
    assert data_figures.inspection_report(INSPECTION).is_good
    assert not data_figures.inspection_report(replace(INSPECTION, host_bytes=GIB)).is_good
    assert "memory of this machine" in data_figures.inspection_report(replace(INSPECTION, is_limited=False)).verdict


def test_unpacking_many_classes_and_one_lane_are_told():
    streaming = replace(STREAMING, is_unpacked_first=True, num_lanes=1)
    found = replace(INSPECTION, streaming=streaming, classes=tuple(f"class {number}" for number in range(20)))

    said = str(data_figures.inspection_report(found))

    assert "after it was unpacked to a scratch folder" in said
    assert "more than 1 worker would read some of them twice" in said
    assert "20 classes: class 0, class 1, class 2" in said
    assert "class 7 and 12 more" in said


def test_a_conversion_says_what_it_did_to_the_values():
    said = str(data_figures.conversion_report(CONVERSION))

    assert said.startswith("small.npy: 1,000 samples, 31.4 KiB to 15.8 KiB in 2.0 s, 15.7 KiB/s")
    for expected in (
        "5.9e-08",
        "1e-09",
        "4 of 4,000 values became zero, too small for float32",
        "5 of 4,000 values became subnormal",
        "3 of 4,000 values became infinite",
        "1 of 4,000 values were NaN before",
        "2 of 4,000 values were infinite before",
    ):
        assert expected in said
    assert data_figures.conversion_report(CONVERSION).details == []


def test_a_conversion_that_went_on_has_no_speed():
    resumed = replace(CONVERSION, resumed_at=400)

    assert "/s" not in data_figures.conversion_report(resumed).verdict
    told = data_figures.conversion_report(replace(resumed, classes=("cat", "dog"))).details
    assert told == ["went on after 400 samples that an interrupted run had written", "2 classes: cat, dog"]


def test_a_type_that_stays_has_no_errors():
    field = replace(CONVERSION.fields[0], dtype_after="float64", statistics=Statistics(4000))

    said = str(data_figures.conversion_report(replace(CONVERSION, fields=(field,))))

    assert said.split()[-4:] == ["unknown", "unknown", "none", "none"]


def test_speed_is_told_with_what_it_is_compared_to():
    said = str(data_figures.speed_report(SPEED))

    assert said.startswith("x.npy: 5,000 samples/s, 9.54 MiB/s, 0.50 of a plain read (measured)")
    for expected in ("19.1 MiB/s (measured)", "0.25 s (measured)", "256.0 MiB (measured)", "512.0 MiB (given)"):
        assert expected in said
    assert "dropped from the page cache" in said
    remote = replace(SPEED, bytes_per_second=None, raw_bytes_per_second=None, is_cold=False, num_workers=0)
    said = str(data_figures.speed_report(remote))
    assert said.startswith("x.npy: 5,000 samples/s (measured)")
    assert "partly in the page cache" in said


def test_speed_is_judged_in_words():
    slow = replace(SPEED, batch_size=32, rows_per_second=16_000.0, bytes_per_second=24e6, raw_bytes_per_second=100e6)
    keeps_up, limit = data_figures.speed_judgement(replace(slow, num_workers=0, is_cold=True))
    assert keeps_up.startswith("It keeps up with training whose steps take 2 ms or more for a batch of 32")
    assert limit.startswith("Making batches (unpacking, decoding, shuffling) is what limits it, not the reading.")
    assert "try --num-workers 2," in limit

    assert "--num-workers 8," in data_figures.speed_judgement(replace(slow, num_workers=4))[1]
    assert "came from the page cache" in data_figures.speed_judgement(replace(slow, is_cold=False))[1]
    fast = replace(slow, bytes_per_second=90e6)
    assert data_figures.speed_judgement(fast)[1].startswith("Reading the files is what limits it")
    assert len(data_figures.speed_judgement(replace(slow, bytes_per_second=None))) == 1
    assert data_figures.speed_judgement(replace(slow, rows_per_second=0.0)) == []
    assert "take 2 s or more" in data_figures.speed_judgement(replace(slow, rows_per_second=16.0))[0]
