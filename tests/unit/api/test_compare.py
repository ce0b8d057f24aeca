import memfit
from tests import jobs


def test_compare_estimates_each():
    made = memfit.compare([jobs.conv_job(), jobs.contrastive_job()], device="rtx-3090")

    assert [estimate.subject for estimate in made] == ["ConvNet", "Contrastive"]
    assert made[0].replay == memfit.estimate(jobs.conv_job(), device="rtx-3090").replay
    assert memfit.compare([], device="rtx-3090") == []


def test_compare_at_one_batch_size():
    estimates = memfit.compare([jobs.conv_job(), jobs.conv_job()], device="t4", batch_size=6)

    assert [e.batch_size for e in estimates] == [6, 6]
