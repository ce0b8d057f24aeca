import contextlib
import os
import pickle
import random
import struct
import subprocess
import sys

import pytest

from memfit.snapshots.plain_pickle import CutOff, NamesCode, load_plain

VALUE = {
    "text": ["", "a" * 300, "\u00e4\udc80", "\U0001f600"],
    "numbers": [0, 255, 256, 65536, -1, 1 << 40, 1 << 3000, 1.5],
    "others": [None, True, (), (1,), (1, 2, 3, 4), {1, 2}, b"bytes" * 100],
}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_data_in_every_protocol(protocol):
    value = {**VALUE, "others": VALUE["others"] if protocol > 3 else [None, True, (1, 2)]}
    many = [[number] for number in range(2000)]

    assert load_plain(pickle.dumps([value, many, many], protocol)) == [value, many, many]


def test_text_in_another_encoding_gets_question_marks():
    # GIVEN a path in Latin-1, as PyTorch writes it, twice
    name = "caf\u00e9/train.py".encode("latin-1")
    text = b"X" + struct.pack("<I", len(name)) + name
    data = b"\x80\x02](" + text + b"q\x01h\x01" + text + b"e."

    assert load_plain(data) == ["caf?/train.py"] * 3


class RunsCode:
    def __reduce__(self):
        return (os.system, ("echo no",))


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (pickle.dumps(RunsCode()), NamesCode, r"\w+\.system"),
        (b"cos\nsystem\n(S'echo no'\ntR.", NamesCode, r"os\.system"),
        (b"Pother\n.", NamesCode, "an object of another file"),
        (pickle.dumps(VALUE)[:-20], CutOff, None),
        (b"]", CutOff, None),
        # An entry of the machine's table that would take gigabytes, in each way to write one.
        (b"]r\xff\xff\xff\x7f.", pickle.UnpicklingError, "writes entry 2147483647 of a table after 2 bytes"),
        (b"]p99999999999\n.", pickle.UnpicklingError, "writes entry 99999999999 of a table"),
        (b"]p" + b"9" * 5000 + b"\n.", pickle.UnpicklingError, "of a table"),
        (b"\x96" + b"\xff" * 7 + b"\x7f.", pickle.UnpicklingError, "an array of bytes"),
        (b"I" + b"9" * 5000 + b"\n.", pickle.UnpicklingError, "ValueError"),
        (b"a.", pickle.UnpicklingError, None),
        (b"hello", pickle.UnpicklingError, None),
    ],
)
def test_what_is_refused(data, error, message):
    with pytest.raises(error, match=message):
        load_plain(data)


def test_damaged_data_is_refused_or_read_and_never_more():
    draw = random.Random(0)
    whole = pickle.dumps(VALUE, 2)
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 6)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        with contextlib.suppress(pickle.UnpicklingError):
            load_plain(bytes(data))


def test_deep_nesting_and_many_objects_end_within_little_memory():
    # GIVEN a process with 1 GiB of addresses, the interpreter's own included
    script = """
import pickle, resource
from memfit.snapshots.plain_pickle import load_plain
resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
load_plain(b"](" * 10**6 + b"e" * 10**6 + b".")
try:
    load_plain(b"]" * 2**26)
except pickle.UnpicklingError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

    assert "more than 33,554,432 lists, dictionaries and numbers" in run.stdout, run.stderr
