from memfit.core.supervised import Sample
from memfit.runs.history import History


def test_few_samples_are_all_kept():
    history = History(max_samples=10)
    samples = [Sample(index, index) for index in range(10)]
    for sample in samples:
        history.add(sample)

    assert list(history.samples) == samples


def test_many_samples_are_thinned_and_no_peak_is_lost():
    history = History(max_samples=16)
    for index in range(10_000):
        history.add(Sample(index, 999_999 if index == 7777 else 1, index % 7, None if index < 5000 else index))

    found = history.samples
    assert len(found) <= 16
    assert max(sample.script_bytes for sample in found) == 999_999
    assert max(sample.others_bytes for sample in found) == 6
    assert found[-1].group_bytes == 9999
    assert [sample.seconds for sample in found] == sorted(sample.seconds for sample in found)
    # The peak is still about where it was.
    at = next(index for index, sample in enumerate(found) if sample.script_bytes == 999_999)
    assert found[at].seconds <= 7777


def test_attempts_are_not_merged_with_each_other():
    history = History(max_samples=4)
    for index in range(7):
        history.add(Sample(index, 5))
    history.end_stretch()
    history.add(Sample(100, 1))

    assert history.samples[-1] == Sample(100, 1)
