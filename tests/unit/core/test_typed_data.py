"""Data of the wrong type are noticed when they are read, not when they are used."""

import json
from dataclasses import asdict, dataclass
from typing import Any, NotRequired, TypedDict

import pytest

import memfit  # noqa: F401  the words that results have for themselves
from memfit.core.dryrun import DryRun
from memfit.core.errors import BadFile
from memfit.core.estimate import Estimate
from memfit.core.plan import Plan
from memfit.core.supervised import SupervisedRun
from memfit.core.timeline import Phase, Timeline
from memfit.core.typed_data import Count, made_of, mismatch
from tests.unit.core.supervised_builders import make_supervised
from tests.unit.reports.builders import make_estimate, make_timeline
from tests.unit.reports.plan_builders import make_plan
from tests.unit.reports.run_builders import ADVICE, make_run, make_run_estimate, make_scan


class Named(TypedDict):
    size: Count
    words: list[str]
    more: NotRequired[Count]


@dataclass(frozen=True)
class Part:
    size: int | None
    share: float = 0.5
    phase: Phase = Phase.FORWARD


@dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...]
    pair: tuple[int, str] = (1, "x")
    table: dict[str, int] | None = None
    anything: Any = None


@pytest.mark.parametrize(
    ("value", "hint", "words"),
    [
        (3, int, ""),
        (True, int, "it is True, and int was expected"),
        (2**63, int, "and int was expected"),
        (3, float, ""),
        (10**400, float, "and float was expected"),
        ("x", float, "it is 'x', and float was expected"),
        (-1, Count, "it is -1, and at least 0 was expected"),
        ("a", Count, "it is 'a', and int was expected"),
        (None, int | None, ""),
        ("x", int | None, "it is 'x', and int | None was expected"),
        ([1, "x"], list[int], "[1] is 'x', and int was expected"),
        ((1, 2, 3), tuple[int, int], "it is (1, 2, 3), and tuple[int, int] was expected"),
        ({"a": None}, dict[str, int], "a is None, and int was expected"),
        ({1: 1}, dict[str, int], "a key of it is 1, and str was expected"),
        ({"size": 1, "words": []}, Named, ""),
        ({"size": 1, "words": [], "more": "x"}, Named, "more is 'x', and int was expected"),
        ({"size": 1}, Named, "words is missing"),
        ({"size": 1, "words": [2]}, Named, "words[0] is 2, and str was expected"),
        ([], Named, "it is [], and Named was expected"),
        ({"parts": [{"size": 1}, {"size": None}]}, Whole, ""),
        ({"parts": [{"size": 1}, {"size": "x"}]}, Whole, "parts[1].size is 'x', and int | None was expected"),
        ({"parts": [{"size": 1, "phase": "up"}]}, Whole, "parts[0].phase is 'up', and Phase was expected"),
        ({"parts": [{"size": 1, "share": None}]}, Whole, "parts[0].share is None, and float was expected"),
        ({"parts": [], "pair": [1, 2]}, Whole, "pair[1] is 2, and str was expected"),
        ({"parts": [], "table": {"a": "b"}}, Whole, "table.a is 'b', and int was expected"),
        ({"parts": {}}, Whole, "parts is {}, and tuple[tests.unit.core.test_typed_data.Part, ...] was expected"),
    ],
)
def test_what_is_not_of_its_type_is_named(value, hint, words):
    found = mismatch(value, hint)
    assert found.endswith(words) and bool(found) == bool(words)


DEEP = json.loads("[" * 300 + "]" * 300)
WRONG = ["x", None, -1, 10**30, 10**400, 1.5, float("nan"), float("inf"), True, DEEP, ["x"], {"x": 1}]
# Each is read more than a thousand times.
SMALL = make_timeline(num_layers=2, num_steps=1)
RESULTS = {
    "timeline": SMALL,
    "estimate": make_estimate(SMALL),
    "plan": make_plan(),
    "dry run": make_run(
        estimate=make_run_estimate(timeline=SMALL), scan=make_scan(), advice=ADVICE, redirected={"a.pt": "b/a.pt"}
    ),
    "run": make_supervised(),
}


def leaves(value, path=()):
    """Where everything is, containers too; of lists, the first entry."""
    yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, part in parts:
        yield from leaves(part, (*path, key))


def changed(data, path, wrong):
    if not path:
        return wrong
    copy = data.copy()
    copy[path[0]] = changed(data[path[0]], path[1:], wrong)
    return copy


@pytest.mark.parametrize("name", RESULTS)
def test_any_wrong_value_in_a_file_is_refused_or_harmless(name):
    result = RESULTS[name]
    data = json.loads(json.dumps(result.to_json()))
    num_refused = 0
    for path in leaves(data):
        if path[:1] == ("estimate",) and len(path) > 1:
            continue  # one of the others here
        for wrong in WRONG:
            try:
                read = type(result).from_json(changed(data, path, wrong))
            except BadFile:
                num_refused += 1
                continue
            if read == result:
                continue  # a figure that is computed anew
            # What is taken can be shown and written again.
            assert isinstance(read, Timeline | Estimate | Plan | DryRun | SupervisedRun)
            assert str(read) and repr(read), path
            read.to_json()
    assert num_refused > 100


def test_a_dataclass_is_made_of_what_asdict_and_json_made_of_it():
    @dataclass(frozen=True)
    class Inner:
        size: tuple[int, ...]
        phase: Phase | None = None

    @dataclass(frozen=True)
    class Outer:
        parts: tuple[Inner, ...]
        by_name: dict[str, int]
        last: Inner | None = None

    value = Outer((Inner((1, 2)), Inner((), Phase.FORWARD)), {"a": 1}, Inner((3,)))
    data = json.loads(json.dumps(asdict(value)))

    assert made_of(Outer, {**data, "unknown": 1}) == value
    assert made_of(Outer, list(data.values())) == value
    with pytest.raises(TypeError):
        made_of(Outer, {"parts": []})
