import os
from array import array

import pytest

from memfit.core.errors import BadFile
from memfit.data.sources import image_index
from memfit.data.sources.image_index import build_index


def touch(path, data=b"x"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def paths(index, root):
    return [os.path.relpath(index.path(sample), root).replace(os.sep, "/") for sample in range(index.num_images)]


def test_classes_are_the_first_folders_in_sorted_order(tmp_path):
    for name in ["dog/b.PNG", "dog/a.jpg", "cat/deep/er/z.webp", "cat/y.tiff", "ant/x.jpeg", "dog/notes.txt", "x.csv"]:
        touch(tmp_path / name)
    touch(tmp_path / ".hidden" / "a.png")
    touch(tmp_path / "dog" / "._a.jpg")
    index = build_index(str(tmp_path))
    assert index.classes == ("ant", "cat", "dog")
    assert paths(index, tmp_path) == ["ant/x.jpeg", "cat/y.tiff", "cat/deep/er/z.webp", "dog/a.jpg", "dog/b.PNG"]
    assert index.numbers.tolist() == [0, 1, 1, 2, 2]
    assert index.notes == ()


def test_all_is_held_in_arrays(tmp_path):
    for number in range(20):
        touch(tmp_path / f"c{number % 2}" / f"ä{number}.png", b"x" * number)
    index = build_index(str(tmp_path))
    assert isinstance(index.sizes, array) and isinstance(index.numbers, array)
    assert index.sizes.tolist() == sorted(range(20), key=lambda n: (n % 2, f"ä{n}.png"))
    assert os.path.exists(index.path(7))


def test_a_flat_folder_has_no_classes(tmp_path):
    touch(tmp_path / "b.png")
    touch(tmp_path / "a.png")
    (tmp_path / "empty").mkdir()
    index = build_index(str(tmp_path))
    assert index.classes == ()
    assert paths(index, tmp_path) == ["a.png", "b.png"]
    assert index.notes == ("the images lie in no class folders, and have no labels",)


def test_what_may_surprise_is_noted(tmp_path):
    touch(tmp_path / "train" / "a.png")
    touch(tmp_path / "beside.png")
    (tmp_path / "val" / "x").mkdir(parents=True)
    index = build_index(str(tmp_path))
    assert index.classes == ("train", "val")
    assert index.notes == (
        "1 images beside the class folders are left out",
        "class folders without images: 'val'",
        "the classes are 'train', 'val'; if these are parts of the data, give the folder of one of them",
    )
    for number in range(7):
        (tmp_path / f"z{number}").mkdir()
    assert "'z2', 'z3' and 3 more" in build_index(str(tmp_path)).notes[1]


def test_the_digest_changes_with_what_is_there(tmp_path):
    path = touch(tmp_path / "a" / "1.png")
    touch(tmp_path / "b" / "2.png")
    digests = [build_index(str(tmp_path)).digest]
    assert digests == [build_index(str(tmp_path)).digest]
    os.utime(path, (5, 5))
    digests.append(build_index(str(tmp_path)).digest)
    touch(path, b"longer")
    os.utime(path, (5, 5))
    digests.append(build_index(str(tmp_path)).digest)
    (tmp_path / "b").rename(tmp_path / "c")
    digests.append(build_index(str(tmp_path)).digest)
    (tmp_path / "d").mkdir()
    digests.append(build_index(str(tmp_path)).digest)
    assert len(set(digests)) == 5


@pytest.fixture
def linked(tmp_path):
    """A folder of two images, with links to folders of all kinds in it, and another image outside."""
    touch(tmp_path / "stored" / "1.png")
    root = tmp_path / "root"
    for name in ("a/1.png", "b/deep/2.png"):
        touch(root / name)
    try:
        (root / "a" / "out").symlink_to(tmp_path / "stored", target_is_directory=True)
        (root / "a" / "circle").symlink_to(root / "a", target_is_directory=True)
        (root / "b" / "up").symlink_to(root, target_is_directory=True)
        (root / "b" / "deep" / "everything").symlink_to("/", target_is_directory=True)
        (root / "c").symlink_to(root / "b", target_is_directory=True)
        (root / "a" / "broken.png").symlink_to(tmp_path / "nothing")
    except OSError:
        pytest.skip("links can't be made here")
    return root


def test_links_to_folders_are_not_followed_unasked(linked):
    index = build_index(str(linked))

    assert paths(index, linked) == ["a/1.png", "a/broken.png", "b/deep/2.png"]
    assert index.classes == ("a", "b")
    assert index.left_out.startswith(
        "5 links to folders were not followed ('c', 'a/circle', 'a/out', ...); --follow-links"
    )
    assert index.left_out in index.notes


def test_links_that_lead_out_of_the_folder_are_followed_on_demand_and_others_never(linked):
    index = build_index(str(linked), follow_links=True)

    assert paths(index, linked) == ["a/1.png", "a/broken.png", "a/out/1.png", "b/deep/2.png"]
    assert index.left_out.startswith("4 links to folders were not followed")


def test_a_folder_is_looked_into_once_however_many_links_lead_there(linked):
    (linked / "b" / "again").symlink_to(linked.parent / "stored", target_is_directory=True)

    assert build_index(str(linked), follow_links=True).num_images == 4


def test_a_folder_that_holds_nothing_but_links_is_told_of(tmp_path):
    touch(tmp_path / "stored" / "1.png")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "cat").symlink_to(tmp_path / "stored", target_is_directory=True)

    with pytest.raises(BadFile, match=r"holds no images .* 1 links to folders were not followed \('cat'\); --follow"):
        build_index(str(tmp_path / "root"))
    assert build_index(str(tmp_path / "root"), follow_links=True).classes == ("cat",)


def test_no_images_and_no_folder(tmp_path):
    touch(tmp_path / "a" / "notes.txt")
    with pytest.raises(BadFile, match=r"holds no images \(.png, .*one folder of images for each class was expected"):
        build_index(str(tmp_path))
    with pytest.raises(BadFile, match="missing' can't be looked into: No such file"):
        build_index(str(tmp_path / "missing"))


def test_folders_behind_an_address(monkeypatch):
    fsspec = pytest.importorskip("fsspec")
    system = fsspec.filesystem("memory")
    for name in ["/pictures/b/2.png", "/pictures/a/deep/1.png", "/pictures/a/.hidden.png"]:
        with system.open(name, "wb") as file:
            file.write(b"12345")
    index = build_index("memory://pictures/")
    assert index.classes == ("a", "b")
    assert [index.path(sample) for sample in range(2)] == [
        "memory://pictures/a/deep/1.png",
        "memory://pictures/b/2.png",
    ]
    assert index.sizes.tolist() == [5, 5]
    system.rm("/pictures", recursive=True)


def test_endings_are_those_that_are_documented():
    assert set(image_index.ENDINGS) == {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"}


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="this system has no links")
def test_a_link_to_itself_is_passed_over(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.png").write_bytes(b"1")
    (tmp_path / "a" / "loop").symlink_to(tmp_path / "a" / "loop")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert build_index(str(tmp_path)).num_images == 1
