import numpy as np
import pytest

from memfit.core.errors import BadInput
from memfit.data.sources import text_labels
from memfit.data.sources.npy import NpySource
from memfit.data.sources.text_labels import as_labels


def opened(tmp_path, array):
    np.save(tmp_path / "y.npy", array)
    return NpySource(tmp_path / "y.npy", name="y", is_label=True)


@pytest.mark.parametrize("dtype", ["U5", "S5", ">U5"])
def test_texts_become_numbers_of_sorted_classes(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(text_labels, "_BLOCK_BYTES", 64)
    texts = np.random.default_rng(0).choice(["dog", "cat", "bird"], 100)
    plain = opened(tmp_path, texts.astype(dtype))

    source = as_labels(plain)

    assert source.classes == ("bird", "cat", "dog")
    assert source.fields[0].dtype == np.int64
    assert source.fields[0].is_label
    assert (source.name, source.num_samples, source.fingerprint()) == (plain.name, 100, plain.fingerprint())
    assert source.layout.scratch_bytes > plain.layout.scratch_bytes
    out = np.empty(80, np.int64)
    source.read(15, 95, [out])
    assert [source.classes[number] for number in out] == texts[15:95].tolist()
    source.drop(0, 10)
    source.close()


def test_numbers_stay_as_they_are(tmp_path):
    source = opened(tmp_path, np.arange(5))

    assert as_labels(source) is source


def test_too_many_texts_are_no_classes(tmp_path, monkeypatch):
    monkeypatch.setattr(text_labels, "_MAX_CLASSES", 50)

    with pytest.raises(BadInput, match=r"y\.npy holds more than 50 different texts, too many to be classes"):
        as_labels(opened(tmp_path, np.arange(60).astype("U3")))


def test_several_texts_a_sample_are_no_class(tmp_path):
    with pytest.raises(BadInput, match=r"text of the shape \(2,\) a sample"):
        as_labels(opened(tmp_path, np.zeros((3, 2), "U3")))
