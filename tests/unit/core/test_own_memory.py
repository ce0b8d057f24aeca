from memfit.core.own_memory import read_sizes

STATUS = """Name:\tpython
VmPeak:\t  4000 kB
VmHWM:\t    1000 kB
VmRSS:\t     400 kB
VmData:\t    800 kB
"""


def test_sizes_are_read(tmp_path):
    status = tmp_path / "status"
    status.write_text(STATUS)
    assert read_sizes(status) == tuple(size * 1024 for size in (4000, 1000, 400, 800))
    assert read_sizes(tmp_path / "missing") is None
