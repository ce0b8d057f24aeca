"""Streams from S3: a server of the real protocol on this machine, and the sources as users name them."""

import subprocess
import sys

import numpy as np
import pytest

from memfit.api.stream import StreamOptions, stream
from memfit.core.errors import BadFile, BadInput
from memfit.data.remote_files import RemoteFile, glob_remote, list_remote

fsspec = pytest.importorskip("fsspec")
s3fs = pytest.importorskip("s3fs")
pytest.importorskip("moto")
pytest.importorskip("flask")

NUM_SAMPLES = 300
FEATURES = np.arange(NUM_SAMPLES * 3, dtype="float32").reshape(-1, 3)
LABELS = np.arange(NUM_SAMPLES, dtype="int64") % 7

# In a process of its own: the server's threads and warnings stay there.
SERVER = """
import logging, sys
logging.getLogger("werkzeug").setLevel(logging.ERROR)
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def server():
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    port = int(process.stdout.readline())
    with pytest.MonkeyPatch.context() as patch:
        # What a user of another S3 than Amazon's sets.
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "testing")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "testing-secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        s3fs.S3FileSystem.clear_instance_cache()
        fill(s3fs.S3FileSystem())
        yield
    s3fs.S3FileSystem.clear_instance_cache()
    process.communicate("")


def fill(system):
    system.mkdir("data")
    for name, contents in {"x.npy": FEATURES, "y.npy": LABELS}.items():
        with system.open(f"data/{name}", "wb") as file:
            np.save(file, contents)
    rows = [f"{a},{b},{c},{label}" for (a, b, c), label in zip(FEATURES, LABELS, strict=True)]
    system.pipe("data/table.csv", "\n".join(["a,b,c,label", *rows]).encode() + b"\n")
    for part in range(2):
        half = slice(part * 150, part * 150 + 150)
        with system.open(f"data/parts/{part}.npy", "wb") as file:
            np.save(file, FEATURES[half])


@pytest.fixture
def parquet(server):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    table = pa.table({"a": FEATURES[:, 0], "b": FEATURES[:, 1], "c": FEATURES[:, 2], "label": LABELS})
    with s3fs.S3FileSystem().open("data/table.parquet", "wb") as file:
        pq.write_table(table, file, row_group_size=100)
    return "s3://data/table.parquet"


@pytest.fixture
def hdf5(server, tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=FEATURES, chunks=(64, 3), compression="gzip")
        file.create_dataset("y", data=LABELS)
    s3fs.S3FileSystem().put(str(tmp_path / "x.h5"), "data/x.h5")
    return "s3://data/x.h5"


def check(source, **options):
    """An epoch has every sample once with its own label, shuffled, and is the same again."""
    options = {"batch_size": 20, "memory": "64MiB"} | options
    batches = [list(stream(source, **options)) for _ in range(2)]
    features, labels = (np.concatenate([batch[part] for batch in batches[0]]) for part in (0, 1))
    order = np.argsort(features[:, 0])
    assert not np.array_equal(order, np.arange(NUM_SAMPLES))
    np.testing.assert_array_equal(features[order], FEATURES)
    np.testing.assert_array_equal(labels[order], LABELS)
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(*batches, strict=True))


def test_npy_files(server):
    check(("s3://data/x.npy", "s3://data/y.npy"))


def test_csv(server):
    check("s3://data/table.csv", labels="label")


def test_parquet(parquet):
    check(parquet, labels="label")


def test_hdf5(hdf5):
    check(hdf5, columns="x", labels="y")


def test_several_files_by_pattern(server):
    given = np.concatenate(list(stream("s3://data/parts/*.npy", batch_size=20, shuffle=False, memory="64MiB")))

    np.testing.assert_array_equal(given, FEATURES)
    assert glob_remote("s3://data/parts/*.npy") == ["s3://data/parts/0.npy", "s3://data/parts/1.npy"]
    assert [entry.name for entry in list_remote("s3://data/parts")] == ["0.npy", "1.npy"]


def test_workers(server):
    source = ("s3://data/x.npy", "s3://data/y.npy")
    alone = list(stream(source, batch_size=20, memory="64MiB"))

    together = list(stream(source, batch_size=20, memory="64MiB").parallel(2))

    assert len(alone) == len(together)
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(alone, together, strict=True))


def test_resumed_on_the_same_object_and_not_on_another(server, caplog):
    address, system = "s3://data/changing.npy", s3fs.S3FileSystem()
    system.copy("data/x.npy", "data/changing.npy")
    first = stream(address, batch_size=30, memory="64MiB")
    batches = iter(first)
    for _ in range(4):
        next(batches)
    state = first.state_dict()
    rest = [batch.copy() for batch in batches]

    second = stream(address, batch_size=30, memory="64MiB")
    second.load_state_dict(state)

    assert all(np.array_equal(a, b) for a, b in zip(rest, second, strict=True))
    assert not caplog.text
    with system.open("data/changing.npy", "wb") as file:
        np.save(file, FEATURES + 1)
    with pytest.raises(BadInput, match="written or copied since"):
        stream(address, batch_size=30, memory="64MiB").load_state_dict(state)
    stream(address, batch_size=30, memory="64MiB", options=StreamOptions(on_change="warn")).load_state_dict(state)
    assert "written or copied since" in caplog.text
    with system.open("data/changing.npy", "wb") as file:
        np.save(file, FEATURES[1:])
    with pytest.raises(BadInput, match="the state is of other data"):
        stream(address, batch_size=30, memory="64MiB").load_state_dict(state)


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("s3://data/none.npy", "'s3://data/none.npy' doesn't exist"),
        ("s3://nobucket/x.npy", "there is no such bucket"),
    ],
)
def test_what_is_not_there(server, address, text):
    with pytest.raises(BadFile, match=text):
        RemoteFile(address)
    with pytest.raises(BadFile, match=text):
        stream(address, batch_size=1)


def test_no_credentials(server, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    s3fs.S3FileSystem.clear_instance_cache()

    with pytest.raises(BadFile, match="no credentials were found") as caught:
        RemoteFile("s3://data/x.npy")

    assert "testing-secret" not in str(caught.value)
    s3fs.S3FileSystem.clear_instance_cache()


def test_other_addresses(tmp_path):
    np.save(tmp_path / "x.npy", FEATURES)
    np.save(tmp_path / "y.npy", LABELS)
    check((f"file://{tmp_path}/x.npy", f"file://{tmp_path}/y.npy"))
    memory = fsspec.filesystem("memory")
    for name in ("x.npy", "y.npy"):
        memory.pipe(f"/streamed/{name}", (tmp_path / name).read_bytes())
    check(("memory://streamed/x.npy", "memory://streamed/y.npy"))
    memory.rm("/streamed", recursive=True)
