import pytest

from memfit.core.errors import MissingDependency
from memfit.core.private_names import PrivateNames

NAMES = PrivateNames("numpy", "1.26 to 2.4")


def test_a_name_is_found_where_a_version_has_it():
    assert NAMES.find("no_such_module:path", "os:no_such_name", "os:path.join")("a", "b") == "a/b"
    assert NAMES.of("text", "upper")() == "TEXT"


def test_a_name_that_no_table_has_is_no_attribute_of_the_module():
    known = {"__name__": "memfit.frameworks.numpy.internals"}
    look_up = NAMES.table({"join": "os:path.join"}, known)

    assert look_up("join")("a", "b") == "a/b" and "join" in known
    with pytest.raises(AttributeError, match=r"module 'memfit\.frameworks\.numpy\.internals' has no attribute 'x'"):
        look_up("x")


def test_a_name_that_is_gone_gives_one_message_with_the_version():
    with pytest.raises(MissingDependency, match=r"memfit uses os\._gone of numpy.* numpy [\d.]+ .*numpy 1\.26 to 2\.4"):
        NAMES.find("os:_gone", "numpy:_gone_too")
    with pytest.raises(MissingDependency, match=r"memfit uses str\._gone of numpy"):
        NAMES.of("text", "_gone")
