import os

from memfit.core.folder_listing import LayerEntry, Listing


def test_an_entry_tells_of_a_file_what_the_system_does(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "nowhere").symlink_to("missing")
    for plain in [*os.scandir(tmp_path)]:
        entry = LayerEntry(str(tmp_path), str(tmp_path), plain.name)
        for given in (entry, plain):
            assert os.fspath(given) == str(tmp_path / plain.name)
        for follows in (True, False):
            assert entry.is_file(follow_symlinks=follows) == plain.is_file(follow_symlinks=follows)
            assert entry.is_dir(follow_symlinks=follows) == plain.is_dir(follow_symlinks=follows)
        assert entry.is_symlink() == plain.is_symlink()
        assert entry.inode() == plain.inode()
        assert entry.stat(follow_symlinks=False) == plain.stat(follow_symlinks=False)


def test_names_are_bytes_where_the_folder_was_given_so(tmp_path):
    entry = LayerEntry(str(tmp_path), os.fsencode(tmp_path), "file")
    assert (entry.name, entry.path) == (b"file", os.fsencode(tmp_path / "file"))


def test_a_listing_is_closed_like_the_systems():
    with Listing([1], [2]) as listing:
        assert list(listing) == [1, 2]
    listing.close()
