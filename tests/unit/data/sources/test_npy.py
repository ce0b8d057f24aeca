import io
import os
import pickle
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.lib import format as npy_format

from memfit.core.errors import BadFile, BadInput
from memfit.data.sources.npy import NpySource

ANY_FOLDER = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def saved(tmp_path, array, name="x.npy"):
    path = tmp_path / name
    np.save(path, array)
    return path


def read(source, start, stop, dtype=None):
    out = [np.empty((stop - start, *field.shape), dtype or field.dtype) for field in source.fields]
    source.read(start, stop, out)
    return out[0] if len(out) == 1 else out


def numbers(shape, dtype="float32"):
    return np.random.default_rng(0).normal(size=shape, scale=50).astype(dtype)


@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", ">f4", ">f8", "i1", "u1", ">i2", "<u4", "i8", "?", "c8", ">c16"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_samples_are_those_of_the_array(tmp_path, dtype, order):
    array = np.array(numbers((37, 3, 5), "f8").astype(dtype), order=order)
    source = NpySource(saved(tmp_path, array))

    assert source.num_samples == 37
    (field,) = source.fields
    assert (field.name, field.shape, field.is_label) == ("x", (3, 5), False)
    assert field.dtype == array.dtype.newbyteorder("=")
    assert field.dtype.isnative
    for start, stop in [(0, 37), (5, 6), (36, 37), (10, 30), (4, 4)]:
        found = read(source, start, stop)
        np.testing.assert_array_equal(found, array[start:stop])
        assert found.flags.c_contiguous


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize(("stored", "wanted"), [("f8", "f4"), ("u1", "f4"), ("f2", "f8"), (">i4", "f2"), ("f4", "i8")])
def test_values_are_converted_as_by_astype(tmp_path, stored, wanted, order):
    # GIVEN more than the scratch memory holds, also of bytes and of a single column
    array = np.array(np.abs(numbers((280_000, 2))).astype(stored), order=order)

    found = read(NpySource(saved(tmp_path, array)), 3, 279_999, wanted)

    np.testing.assert_array_equal(found, array[3:279_999].astype(wanted))


@pytest.mark.parametrize("dtype", ["M8[s]", "m8[ms]", "S5", "U3", ">U2"])
def test_times_and_texts_are_given_as_stored(tmp_path, dtype):
    array = np.arange(12).astype("i8").astype(dtype)

    source = NpySource(saved(tmp_path, array))

    np.testing.assert_array_equal(read(source, 2, 9), array[2:9])


def test_one_axis_gives_a_number_a_sample(tmp_path):
    source = NpySource(saved(tmp_path, np.asfortranarray(np.arange(9))), name="y")

    assert source.fields[0].shape == ()
    assert not source.layout.is_sequential
    assert read(source, 2, 4).tolist() == [2, 3]


def test_an_array_of_its_dtype_is_filled_without_scratch(tmp_path, monkeypatch):
    source = NpySource(saved(tmp_path, numbers((10, 4))))
    out = np.empty((10, 4), np.float32)
    targets = []
    original = source._arrays[0].file.read_into
    monkeypatch.setattr(source._arrays[0].file, "read_into", lambda at, to: (targets.append(to), original(at, to)))

    source.read(0, 10, [out])

    assert len(targets) == 1
    assert np.shares_memory(targets[0], out)


def test_fortran_order_is_said_to_be_sequential_and_why(tmp_path):
    layout = NpySource(saved(tmp_path, np.asfortranarray(numbers((9, 4))))).layout

    assert layout.is_sequential
    assert "is in Fortran order, which scatters each sample" in layout.reason
    assert "np.ascontiguousarray" in layout.reason


def test_c_order_has_no_natural_blocks(tmp_path):
    layout = NpySource(saved(tmp_path, numbers((9, 4)))).layout

    assert (layout.edges, layout.is_sequential, layout.reason) == (None, False, "")
    assert 0 < layout.scratch_bytes <= 1 << 20


def test_hints_are_for_the_bytes_of_the_samples(tmp_path, monkeypatch):
    source = NpySource(saved(tmp_path, numbers((100, 4))))
    said = []
    monkeypatch.setattr(source._arrays[0].file, "drop", lambda *span: said.append(span))

    source.drop(10, 20)

    assert said == [(128 + 160, 160)]


def test_structured_arrays_have_one_field_a_column(tmp_path):
    array = np.zeros(50, [("a", ">f4"), ("image", "u1", (2, 3)), ("class", "i8")])
    array["a"], array["class"] = np.arange(50), np.arange(50) % 3
    array["image"] = np.arange(300).reshape(50, 2, 3)
    path = saved(tmp_path, array)

    source = NpySource(path, labels="class")

    assert [(f.name, f.shape, f.is_label) for f in source.fields] == [
        ("a", (), False),
        ("image", (2, 3), False),
        ("class", (), True),
    ]
    for found, name in zip(read(source, 7, 45), ("a", "image", "class"), strict=True):
        np.testing.assert_array_equal(found, array[name][7:45])
    chosen = NpySource(path, columns=["class", "image"], labels="class")
    assert [field.name for field in chosen.fields] == ["image", "class"]
    with pytest.raises(BadInput, match=r"has no column 'b'. It has: 'a', 'image', 'class'"):
        NpySource(path, columns=["b"])


def test_structured_arrays_are_read_by_small_pieces(tmp_path):
    array = np.zeros((30_000, 2), [("a", "f4"), ("b", "i2")])
    array["a"] = numbers((30_000, 2))

    found, _ = read(NpySource(saved(tmp_path, array)), 1, 30_000)

    np.testing.assert_array_equal(found, array["a"][1:])


def test_names_in_other_alphabets_are_kept(tmp_path):
    path = tmp_path / "x.npy"
    with pytest.warns(UserWarning, match="can only be read"):
        np.save(path, np.zeros(3, [("größe", "f4"), ("размер", "f4")]))

    assert [field.name for field in NpySource(path).fields] == ["größe", "размер"]


def test_columns_of_a_plain_array_are_refused(tmp_path):
    path = saved(tmp_path, numbers((4, 2)))

    with pytest.raises(BadInput, match=r"has no columns, and 'a' was asked for\. Leave `columns` out"):
        NpySource(path, columns=["a"])
    with pytest.raises(BadInput, match="give the path of a file with as many labels"):
        NpySource(path, labels="y")


def refusal(tmp_path, array=None, contents=None):
    path = tmp_path / "bad.npy"
    if contents is None:
        np.save(path, array, allow_pickle=True)
    else:
        path.write_bytes(contents)
    with pytest.raises(BadFile) as caught:
        NpySource(path)
    assert "bad.npy" in str(caught.value)
    return str(caught.value)


def test_objects_are_refused_and_never_unpickled(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (exec, ("raise SystemExit('unpickled')",))

    message = refusal(tmp_path, np.array([Bomb(), Bomb()], object))

    assert "holds Python objects, stored as a pickle" in message
    assert "Save a plain array of numbers instead" in message
    assert "Python objects" in refusal(tmp_path, np.array([(1, None)], [("a", "i4"), ("b", "O")]))


def test_bfloat16_is_recognised(tmp_path):
    message = refusal(tmp_path, np.zeros((3, 2), "V2"))

    assert "|V2" in message and "bfloat16" in message and "x.view('uint16')" in message


def test_other_refusals_say_why(tmp_path):
    assert "single value without axes" in refusal(tmp_path, np.float32(3))
    assert "can't be streamed" in refusal(tmp_path, np.zeros(3, "V7"))
    assert "can't be streamed" in refusal(
        tmp_path, contents=with_header("{'descr': '|S0', 'fortran_order': False, 'shape': (3,), }")
    )
    assert "is structured itself" in refusal(tmp_path, np.zeros(3, [("a", [("b", "f4")])]))
    assert "is empty: 0 bytes" in refusal(tmp_path, contents=b"")
    assert "or is damaged: the magic string is not correct" in refusal(tmp_path, contents=b"hello, this is a text")
    assert "isn't in .npy form" in refusal(tmp_path, contents=b"\x93NUMPY")
    assert "version 9.0" in refusal(tmp_path, contents=b"\x93NUMPY\x09\x00" + bytes(20))
    assert "reading array header, expected 65535 bytes got 20" in refusal(
        tmp_path, contents=b"\x93NUMPY\x01\x00" + b"\xff\xff" + bytes(20)
    )
    assert "isn't in .npy form, or is damaged" in refusal(tmp_path, contents=with_header("not a dict"))
    assert "declares the shape (-3,)" in refusal(
        tmp_path, contents=with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (-3,), }")
    )


def with_header(text):
    return b"\x93NUMPY\x01\x00" + len(text + "\n").to_bytes(2, "little") + text.encode() + b"\n"


def test_a_header_that_promises_more_than_any_disk_holds_is_refused(tmp_path):
    text = "{'descr': '<f8', 'fortran_order': False, 'shape': (" + "9" * 30 + ", 7), }"

    assert "is cut short" in refusal(tmp_path, contents=with_header(text))


def test_later_versions_of_the_format_are_read(tmp_path):
    array = numbers((6, 2))
    for version in [(1, 0), (2, 0), (3, 0)]:
        path = tmp_path / f"{version[0]}.npy"
        with open(path, "wb") as file:
            npy_format.write_array(file, array, version=version)
        np.testing.assert_array_equal(read(NpySource(path), 0, 6), array)


def test_a_file_with_more_behind_the_array_is_read(tmp_path):
    path = saved(tmp_path, numbers((6, 2)))
    with open(path, "ab") as file:
        file.write(b"more")

    assert NpySource(path).num_samples == 6


def test_a_cut_file_says_what_is_missing_and_where(tmp_path):
    path = saved(tmp_path, numbers((100, 3, 4)))
    os.truncate(path, 128 + 48 * 31 + 5)

    with pytest.raises(BadFile) as caught:
        NpySource(path)

    message = str(caught.value)
    assert "x.npy' is cut short: its header declares 100 samples of float32 (3, 4), 4928 bytes in all" in message
    assert "1621 bytes are there, so it ends in sample 31" in message
    assert "Copy or save it again" in message


@ANY_FOLDER
@given(st.integers(0, 128 + 400 - 1), st.booleans())
def test_cut_anywhere_it_is_a_bad_file_with_its_name(tmp_path, length, is_fortran):
    whole = io.BytesIO()
    np.save(whole, np.array(np.arange(100, dtype="i4").reshape(25, 4), order="F" if is_fortran else "C"))
    path = tmp_path / "cut.npy"
    path.write_bytes(whole.getvalue()[:length])

    with pytest.raises(BadFile, match=r"cut\.npy"):
        NpySource(path)


@ANY_FOLDER
@given(st.lists(st.tuples(st.integers(0, 127), st.integers(0, 255)), min_size=1, max_size=6))
def test_a_damaged_header_is_a_bad_file_or_another_array(tmp_path, changes):
    whole = io.BytesIO()
    np.save(whole, np.arange(100, dtype="i4").reshape(25, 4))
    contents = bytearray(whole.getvalue())
    for place, value in changes:
        contents[place] = value
    path = tmp_path / "damaged.npy"
    path.write_bytes(contents)

    try:
        source = NpySource(path)
    except BadFile as error:
        assert "damaged.npy" in str(error)
    else:
        read(source, 0, min(source.num_samples, 1))


def test_a_file_cut_while_it_is_read_is_named(tmp_path):
    path = saved(tmp_path, numbers((100, 100)))
    source = NpySource(path)
    read(source, 0, 1)

    os.truncate(path, 10_000)

    with pytest.raises(BadFile, match=r"x\.npy' ends too early: of 40000 bytes at offset 128 the last 30128"):
        read(source, 0, 100)


def test_it_is_read_by_threads_after_a_fork_and_from_a_pickle(tmp_path):
    array = numbers((500, 20), "f8")
    source = NpySource(saved(tmp_path, array))
    failures = []

    def check(copy):
        for start in range(0, 480, 7):
            if not np.array_equal(read(copy, start, start + 20), array[start : start + 20]):
                failures.append(start)

    threads = [
        threading.Thread(target=check, args=(copy,)) for copy in (source, source, pickle.loads(pickle.dumps(source)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    child = os.fork() if hasattr(os, "fork") else None
    if child == 0:
        check(source)
        os._exit(len(failures) > 0)

    assert failures == []
    assert child is None or os.waitpid(child, 0)[1] == 0
    source.close()
    check(source)
    assert failures == []


def test_its_description_and_fingerprint(tmp_path):
    path = saved(tmp_path, numbers((5, 2)))
    source = NpySource(path)
    before = source.fingerprint()

    assert source.name == str(path)
    assert repr(source) == f"NpySource({str(path)!r})"
    assert source.classes == ()
    assert NpySource(path).fingerprint() == before
    np.save(path, numbers((6, 2)))
    assert NpySource(path).fingerprint() != before
