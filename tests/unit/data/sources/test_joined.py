import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.core.errors import BadFile, BadInput
from memfit.data.source import Field, Layout, SampleSource, Source
from memfit.data.sources.joined import Concatenated, Paired, Passing, as_labels, class_names, concatenate, named
from memfit.data.sources.npy import NpySource
from tests.sources import ArraySource, read


class Memory(Source):
    """A source over arrays, with any layout."""

    def __init__(self, name, arrays, *, labels=(), layout=None, classes=(), is_ragged=False):
        self.name = name
        self.arrays = arrays
        self.layout = layout or Layout()
        self.classes = classes
        self.fields = tuple(
            Field(key, value.dtype, value.shape[1:], key in labels, is_ragged) for key, value in arrays.items()
        )
        self.num_samples = len(next(iter(arrays.values())))
        self.calls = []

    def fingerprint(self):
        return f"{self.name}:{self.num_samples}"

    def read(self, start, stop, out):
        for array, target in zip(self.arrays.values(), out, strict=True):
            target[...] = array[start:stop]

    def drop(self, start, stop):
        self.calls.append(("drop", start, stop))

    def close(self):
        self.calls.append("close")


class Pictures(Memory, SampleSource):
    num_skipped = 1

    @property
    def skipped(self):
        return [f"{self.name}/1"]

    def read_sample(self, sample):
        return None if sample == 1 else tuple(array[sample] for array in self.arrays.values())

    def stored_bytes(self, sample):
        return 100 + sample

    def sample_name(self, sample):
        return f"{self.name}/{sample}"


def part(name, start, stop, **options):
    numbers = np.arange(start, stop, dtype="f4")
    return Memory(name, {"x": np.stack([numbers, -numbers], 1)}, **options)


# One after the other.


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.data())
def test_samples_come_one_after_the_other(lengths, data):
    edges = np.concatenate([[0], np.cumsum(lengths)])
    parts = [part(str(i), edges[i], edges[i + 1]) for i in range(len(lengths))]
    source = Concatenated(parts)
    start = data.draw(st.integers(0, int(edges[-1])))
    stop = data.draw(st.integers(start, int(edges[-1])))

    assert source.num_samples == edges[-1]
    (found,) = read(source, start, stop)
    assert found[:, 0].tolist() == list(range(start, stop))


def test_hints_and_close_are_passed_on():
    parts = [part("a", 0, 10), part("b", 10, 20), part("c", 20, 30)]
    source = Concatenated(parts)

    source.drop(18, 30)
    source.close()

    assert parts[0].calls == ["close"]
    assert parts[1].calls == [("drop", 8, 10), "close"]
    assert parts[2].calls == [("drop", 0, 10), "close"]


def test_layouts_are_merged():
    def layout(*edges, scratch_bytes):
        return Layout(np.array(edges), scratch_bytes=scratch_bytes)

    natural = Concatenated(
        [
            part("a", 0, 10, layout=layout(0, 4, 10, scratch_bytes=7)),
            part("b", 10, 13, layout=layout(0, 3, scratch_bytes=9)),
        ]
    )
    assert natural.layout.edges.tolist() == [0, 4, 10, 13]
    assert natural.layout.scratch_bytes == 9
    assert not natural.layout.is_sequential

    assert Concatenated([part("a", 0, 10), part("b", 10, 13)]).layout.edges is None


def test_a_part_without_natural_blocks_is_cut_into_runs_where_others_have_them():
    source = Concatenated([part("a", 0, 40_000), part("b", 0, 10, layout=Layout(np.array([0, 10])))])

    assert source.layout.edges.tolist() == [0, 16384, 32768, 40000, 40010]


def test_one_sequential_part_makes_all_sequential():
    source = Concatenated([part("a", 0, 3), part("b", 3, 5, layout=Layout(is_sequential=True, reason="packed"))])

    assert source.layout.is_sequential
    assert source.layout.reason == "packed"


def test_classes_are_brought_to_one_list():
    def labelled(name, numbers, classes):
        arrays = {"x": np.zeros(len(numbers), "f4"), "y": np.array(numbers)}
        return Memory(name, arrays, labels=("y",), classes=classes)

    source = Concatenated([labelled("a", [0, 1, 1], ("cat", "dog")), labelled("b", [0, 1], ("bird", "dog"))])

    assert source.classes == ("bird", "cat", "dog")
    assert [source.classes[number] for number in read(source, 0, 5)[1]] == ["cat", "dog", "dog", "bird", "dog"]
    same = Concatenated([labelled("a", [0, 1], ("cat", "dog")), labelled("b", [1, 0], ("cat", "dog"))])
    assert same.classes == ("cat", "dog")
    assert read(same, 0, 4)[1].tolist() == [0, 1, 1, 0]
    with pytest.raises(BadInput, match=r"a and b can.t .*: one has names as labels and the other has numbers"):
        Concatenated([labelled("a", [0], ("cat",)), labelled("b", [0], ())])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"y": np.zeros((3, 2), "f4")}, "the fields of one are x and those of the other y"),
        ({"x": np.zeros((3, 2), "f8")}, "x is float32 in one and float64 in the other"),
        ({"x": np.zeros((3, 4), "f4")}, r"a sample of x has the shape \(2,\) in one and \(4,\) in the other"),
    ],
)
def test_parts_that_differ_are_named_with_the_difference(other, message):
    with pytest.raises(BadInput, match=f"first and second can't be read one after the other: {message}"):
        Concatenated([part("first", 0, 3), Memory("second", other)])


def test_parts_that_differ_in_what_is_a_label_are_refused():
    with pytest.raises(BadInput, match="x is a label in only one of them"):
        Concatenated([part("a", 0, 3), part("b", 0, 3, labels=("x",))])


def test_numbers_of_tables_may_differ_in_their_type():
    def table(name, dtype):
        source = Memory(name, {"features": np.arange(6).reshape(3, 2).astype(dtype)})
        source.fields = (replace(source.fields[0], is_tabular=True),)
        return source

    source = Concatenated([table("a", "i8"), table("b", "f4")])

    assert source.fields[0].dtype == np.float64
    assert read(source, 2, 4)[0].tolist() == [[4, 5], [0, 1]]


def test_its_name_and_fingerprint_come_from_the_parts():
    source = Concatenated([part("a", 0, 3), part("b", 3, 5), part("c", 5, 6)])

    assert source.name == "a ... c (3 files)"
    assert source.fingerprint() == Concatenated([part("a", 0, 3), part("b", 3, 5), part("c", 5, 6)]).fingerprint()
    assert source.fingerprint() != Concatenated([part("a", 0, 3), part("b", 3, 5), part("c", 5, 7)]).fingerprint()


def test_a_single_source_stays_as_it_is():
    only = part("a", 0, 3)

    assert concatenate([only]) is only


def test_samples_that_are_read_one_by_one_stay_so():
    def pictures(name, numbers, classes, shape):
        arrays = {"image": np.ones((len(numbers), *shape)), "class": np.array(numbers)}
        layout = Layout(is_by_sample=True)
        return Pictures(name, arrays, labels=("class",), classes=classes, layout=layout, is_ragged=True)

    source = concatenate([pictures("a", [0, 0, 0], ("dog",), (2,)), pictures("b", [0, 0, 1], ("cat", "dog"), (3,))])

    assert isinstance(source, SampleSource)
    assert source.layout.is_by_sample
    assert source.fields[0].is_ragged
    assert source.read_sample(1) is None
    image, label = source.read_sample(3)
    assert (image.shape, int(label)) == ((3,), 0)
    assert int(source.read_sample(0)[1]) == 1
    assert source.stored_bytes(4) == 101
    assert source.sample_name(5) == "b/2"
    assert (source.num_skipped, source.skipped) == (2, ["a/1", "b/1"])
    same = concatenate([pictures("a", [0, 0, 0], ("dog",), (2,)), pictures("b", [0, 0, 0], ("dog",), (3,))])
    assert int(same.read_sample(5)[1]) == 0
    with pytest.raises(BadInput, match="a holds images and b doesn't"):
        concatenate([pictures("a", [0], ("dog",), (2,)), part("b", 0, 3)])


# Side by side.


def test_pairs_are_features_and_labels():
    labels = Memory("y.npy", {"x": np.arange(5)}, classes=("a", "b"), layout=Layout(scratch_bytes=3))
    source = Paired(part("x.npy", 0, 5, layout=Layout(np.array([0, 2, 5]), scratch_bytes=4)), labels)

    assert [(field.name, field.is_label) for field in source.fields] == [("x", False), ("y", True)]
    assert source.name == "x.npy and y.npy"
    assert source.num_samples == 5
    assert source.classes == ("a", "b")
    assert source.layout.scratch_bytes == 7
    assert source.layout.edges.tolist() == [0, 2, 5]
    features, targets = read(source, 2, 4)
    assert features.tolist() == [[2, -2], [3, -3]]
    assert targets.tolist() == [2, 3]


def test_natural_blocks_are_those_of_the_larger_samples():
    small = Memory("y", {"y": np.arange(5)}, layout=Layout(np.array([0, 1, 5])))
    large = Memory("x", {"x": np.zeros((5, 9))}, layout=Layout(np.array([0, 4, 5])))

    assert Paired(small, large).layout.edges.tolist() == [0, 4, 5]
    assert Paired(large, small).layout.edges.tolist() == [0, 4, 5]
    assert Paired(Memory("x", {"x": np.zeros((5, 9))}), small).layout.edges is None


def test_one_sequential_side_makes_both_sequential():
    labels = Memory("y", {"y": np.arange(5)}, layout=Layout(is_sequential=True, reason="packed"))

    layout = Paired(part("x", 0, 5), labels).layout

    assert (layout.is_sequential, layout.reason) == (True, "packed")


def test_hints_reach_both_sides():
    features, labels = part("x", 0, 5), Memory("y", {"y": np.arange(5)})
    source = Paired(features, labels)

    source.drop(1, 2)
    source.close()

    assert features.calls == labels.calls == [("drop", 1, 2), "close"]


def test_different_lengths_are_told():
    with pytest.raises(BadInput, match=r"x\.npy has 5 samples, y\.npy has 4: one label is needed for each sample"):
        Paired(part("x.npy", 0, 5), part("y.npy", 0, 4))


def test_labels_twice_are_refused():
    with pytest.raises(BadInput, match="labels are given twice: x has labels already, and y was given"):
        Paired(part("x", 0, 5, labels=("x",)), part("y", 0, 5))


def test_sources_that_are_read_file_by_file_are_not_paired():
    with pytest.raises(BadInput, match="x is read file by file and can't be paired"):
        Paired(part("x", 0, 5, layout=Layout(is_by_sample=True)), part("y", 0, 5))


def test_several_features_side_by_side_keep_distinct_names():
    source = Paired(part("a", 0, 5), part("b", 0, 5), are_labels=False)
    source = Paired(source, part("c", 0, 5), are_labels=False)
    source = Paired(source, part("d", 0, 5))

    assert [field.name for field in source.fields] == ["x", "y", "x_2", "x_3"]
    assert [field.is_label for field in source.fields] == [False, False, False, True]
    assert [array[0, 0] for array in read(source, 3, 4)] == [3, 3, 3, 3]


def test_a_field_under_another_name():
    inner = part("a", 0, 5, classes=("k",))
    source = named(inner, "picture")

    assert source.fields == (replace(inner.fields[0], name="picture"),)
    assert (source.name, source.num_samples, source.classes) == ("a", 5, ("k",))
    assert source.layout is inner.layout
    assert source.fingerprint() == inner.fingerprint()
    assert read(source, 1, 3)[0][:, 0].tolist() == [1, 2]
    source.drop(0, 1)
    source.close()
    assert inner.calls == [("drop", 0, 1), "close"]
    with pytest.raises(BadInput, match="was given for 'picture' and has 2 fields: 'a', 'b'"):
        named(Memory("f", {"a": np.zeros(2), "b": np.zeros(2)}), "picture")


def test_joined_sources_can_be_pickled():
    source = Paired(Concatenated([part("a", 0, 3), part("b", 3, 5)]), named(part("y", 0, 5), "label"))

    copy = pickle.loads(pickle.dumps(source))

    assert copy.fingerprint() == source.fingerprint()
    assert read(copy, 2, 4)[0].tolist() == read(source, 2, 4)[0].tolist()


def test_numbers_without_a_name_are_told():
    first = Memory("a", {"y": np.array([0, 2])}, labels=("y",), classes=("cat", "dog"))
    second = Memory("b", {"y": np.array([0, 1])}, labels=("y",), classes=("ant", "dog"))

    with pytest.raises(BadFile, match="a has a label between 0 and 2 that none of the names of its 2 classes is for"):
        concatenate([first, second]).read(0, 4, [np.empty(4, np.int64)])


def test_all_but_the_fields_is_the_sources():
    source = ArraySource(np.arange(10.0), edges=[0, 5, 10])
    passing = Passing(source, (replace(source.fields[0], name="other"),))
    out = np.empty(3)

    passing.read(2, 5, [out])
    passing.drop(0, 5)
    passing.close()

    assert out.tolist() == [2, 3, 4]
    assert passing.fields[0].name == "other"
    assert (passing.name, passing.num_samples, passing.classes) == (source.name, 10, ())
    assert passing.layout is source.layout
    assert passing.fingerprint() == source.fingerprint()


def opened(tmp_path, array):
    np.save(tmp_path / "y.npy", array)
    return NpySource(tmp_path / "y.npy", name="y")


@pytest.mark.parametrize("dtype", ["U5", "S5", ">U5"])
def test_texts_become_numbers_of_sorted_classes(tmp_path, dtype):
    # More than is looked at together.
    texts = np.random.default_rng(0).choice(["dog", "cat", "bird"], 60_000)
    plain = opened(tmp_path, texts.astype(dtype))

    source = as_labels(plain)

    assert source.classes == ("bird", "cat", "dog")
    assert source.fields[0].dtype == np.int64
    assert (source.name, source.num_samples, source.fingerprint()) == (plain.name, 60_000, plain.fingerprint())
    assert source.layout.scratch_bytes > plain.layout.scratch_bytes
    out = np.empty(59_980, np.int64)
    source.read(15, 59_995, [out])
    assert [source.classes[number] for number in out] == texts[15:59_995].tolist()
    source.drop(0, 10)
    source.close()


def test_numbers_stay_as_they_are(tmp_path):
    source = opened(tmp_path, np.arange(5))

    assert as_labels(source) is source


def test_too_many_texts_are_no_classes(tmp_path):
    with pytest.raises(BadInput, match=r"y\.npy holds more than 100000 different texts, too many to be classes"):
        as_labels(opened(tmp_path, np.arange(100_001).astype("S6")))


def test_several_texts_a_sample_are_no_class(tmp_path):
    with pytest.raises(BadInput, match=r"text of the shape \(2,\) a sample"):
        as_labels(opened(tmp_path, np.zeros((3, 2), "U3")))


def test_names_of_classes_belong_to_single_whole_numbers():
    number = Field("y", np.dtype("u1"), ())
    names = [str(number) for number in range(100_001)]

    assert class_names(["cat", "dog"], number) == ("cat", "dog")
    assert len(class_names(names[:-1], number)) == 100_000
    for other in (names, ["a", "a"], [1, 2], ("a",), None):
        assert class_names(other, number) == ()
    assert class_names(["cat"], Field("y", np.dtype("f4"), ())) == ()
    assert class_names(["cat"], Field("y", np.dtype("i8"), (2,))) == ()
