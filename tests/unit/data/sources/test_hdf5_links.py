import numpy as np
import pytest

import memfit
from memfit.core.errors import BadFile
from memfit.data.sources.hdf5 import open_hdf5

h5py = pytest.importorskip("h5py")


@pytest.fixture
def place(tmp_path):
    """A folder for data, beside one with a file that is none of its business."""
    (tmp_path / "data").mkdir()
    (tmp_path / "away").mkdir()
    for path in (tmp_path / "away" / "secret.h5", tmp_path / "data" / "part.h5"):
        with h5py.File(path, "w") as file:
            file["x"] = np.arange(10.0)
            file["inner/x"] = h5py.SoftLink("/x")
    (tmp_path / "away" / "raw.bin").write_bytes(np.arange(10.0).tobytes())
    return tmp_path / "data"


def virtual(file, source, name="x"):
    layout = h5py.VirtualLayout((10,), "f8")
    layout[:] = h5py.VirtualSource(source, name, (10,))
    file.create_virtual_dataset("x", layout)


def through_group(file):
    file["all"] = h5py.ExternalLink("../away/secret.h5", "/")
    file["x"] = h5py.SoftLink("/all/x")


WAYS_OUT = {
    "link": lambda file: file.__setitem__("x", h5py.ExternalLink("../away/secret.h5", "/x")),
    "link beside": lambda file: file.__setitem__("x", h5py.ExternalLink("part.h5", "/x")),
    "soft link through a link": through_group,
    "virtual": lambda file: virtual(file, "../away/secret.h5"),
    "plain file": lambda file: file.create_dataset("x", (10,), "f8", external=[("../away/raw.bin", 0, 80)]),
}


@pytest.mark.parametrize("way", WAYS_OUT)
def test_other_files_are_not_read_unasked(place, monkeypatch, way):
    monkeypatch.chdir(place)
    with h5py.File("main.h5", "w") as file:
        WAYS_OUT[way](file)

    with pytest.raises(BadFile, match=r"dataset 'x' of 'main.h5' .*which isn't read unasked.* follow_links=True"):
        memfit.stream("main.h5", columns="x", batch_size=5)
    with pytest.raises(BadFile, match="isn't read unasked"):
        memfit.open_array("main.h5", key="x")

    (batch, *_) = memfit.stream("main.h5", columns="x", batch_size=10, shuffle=False, follow_links=True)
    np.testing.assert_array_equal(batch, np.arange(10))


def test_a_part_that_refers_to_others_is_refused_too(place):
    with h5py.File(place / "middle.h5", "w") as file:
        file["x"] = h5py.ExternalLink("../away/secret.h5", "/x")
    with h5py.File(place / "main.h5", "w") as file:
        virtual(file, "middle.h5")

    with pytest.raises(BadFile, match=r"is a link into another file, '\.\./away/secret\.h5'"):
        open_hdf5(place / "main.h5", columns="x")


@pytest.mark.parametrize("way", ["part", "inside", "soft link"])
def test_what_belongs_to_the_file_is_read(place, way):
    with h5py.File(place / "main.h5", "w") as file:
        file["own"] = np.arange(10.0)
        if way == "soft link":
            file["x"] = h5py.SoftLink("own")
        else:
            virtual(file, *(("part.h5", "inner/x") if way == "part" else (".", "own")))

    (batch, *_) = memfit.stream(place / "main.h5", columns="x", batch_size=10, shuffle=False)
    np.testing.assert_array_equal(batch, np.arange(10))


def test_soft_links_in_a_circle_lead_nowhere(place):
    with h5py.File(place / "main.h5", "w") as file:
        file["x"], file["y"] = h5py.SoftLink("/y"), h5py.SoftLink("/x")

    with pytest.raises(memfit.BadInput):
        open_hdf5(place / "main.h5", columns="x")
