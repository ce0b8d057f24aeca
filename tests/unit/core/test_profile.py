from memfit.core.profile import Call, Drop, Measurement, Unit
from tests.unit.planner.profiles import Chain


def test_a_profile_names_units_outer_before_inner():
    profile = Chain([1, 1]).profile()
    paths = [unit.path for unit in profile.units]
    assert paths.index("layers.0") < paths.index("layers.0.a") < paths.index("layers.1")


def test_drops_lie_inside_the_timeline():
    profile = Chain([1, 2]).profile()
    for unit in profile.units:
        for call in unit.calls:
            for drop in call.drops:
                block = profile.timeline.blocks[drop.block]
                assert block.start < drop.start <= drop.end <= profile.timeline.num_ticks


def test_parts_of_a_profile_are_plain_values():
    call = Call((0, 2), (4, 6), (Drop(0, 1, 4),), (), 0, (0, 1))
    assert Unit("a", "Block", (call,)) == Unit("a", "Block", (call,), "")
    assert Measurement(1, 0.1, 0.2, {}) == Measurement(1, 0.1, 0.2, {})
