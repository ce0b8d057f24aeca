import pytest

from memfit.adapters.torch.fitting.race import Race
from memfit.core.settings import Settings

FAST, CLOSE, SLOW = (Settings(micro_batches=parts) for parts in (1, 2, 3))
SECONDS = {FAST: 1.0, CLOSE: 1.04, SLOW: 2.0}


@pytest.mark.parametrize("moment", [1, 4, 7])
def test_a_fast_moment_of_the_machine_goes_to_nobody(moment):
    # GIVEN a machine that is three times as fast for the length of one run of the second, in any turn
    race = Race(SECONDS)
    order: list[Settings] = []

    def run(settings: Settings) -> float:
        order.append(settings)
        return SECONDS[settings] / (3.0 if len(order) - 1 == moment else 1.0)

    # WHEN the slow may drop out after each turn
    for _ in range(3):
        race.turn(run)
        race.drop()

    # THEN it does not win by it
    assert order[moment] is CLOSE
    assert race.running == [FAST, CLOSE]
    assert race.seconds(FAST) < race.seconds(CLOSE) < race.seconds(SLOW)


def test_a_machine_that_slows_down_hits_all_alike():
    race = Race(SECONDS)
    for pace in (1.0, 4.0, 1.5):
        race.turn(lambda settings, pace=pace: pace * SECONDS[settings])

    assert race.seconds(CLOSE) / race.seconds(FAST) == pytest.approx(1.04)
    assert race.seconds(SLOW) / race.seconds(FAST) == pytest.approx(2.0)


def test_those_that_are_clearly_slower_drop_out_and_keep_their_times():
    race = Race(SECONDS)
    for _ in range(2):
        race.turn(SECONDS.__getitem__)
        race.drop()

    # THEN nobody drops out after two turns; after three, a slow one does, and turns are shorter by it
    assert race.running == [FAST, CLOSE, SLOW] and race.turn_seconds == pytest.approx(4.04)
    race.turn(SECONDS.__getitem__)
    race.drop()
    assert race.running == [FAST, CLOSE] and race.turn_seconds == pytest.approx(2.04)
    race.turn(SECONDS.__getitem__)
    assert race.seconds(SLOW) == pytest.approx(2.0)

    # WHEN more turns show that a small difference is no chance
    for _ in range(8):
        race.turn(SECONDS.__getitem__)
    assert not race.is_decided
    race.drop()
    assert race.running == [FAST] and race.is_decided


def test_one_alone_runs_a_few_turns_too():
    race = Race((FAST, FAST))
    for _ in range(2):
        race.turn(SECONDS.__getitem__)
        assert not race.is_decided
    race.turn(SECONDS.__getitem__)

    assert race.is_decided and race.seconds(FAST) == pytest.approx(1.0)


def test_runs_go_there_and_back_again():
    seen: list[Settings] = []

    def run(settings: Settings) -> float:
        seen.append(settings)
        return 1.0

    race = Race((FAST, CLOSE, FAST))
    race.turn(run)
    race.turn(run)

    assert seen == [FAST, CLOSE, CLOSE, FAST]


def test_what_is_forgotten_does_not_count():
    race = Race((FAST, CLOSE))
    race.turn(lambda settings: 100 * SECONDS[settings])
    race.forget()
    race.turn(SECONDS.__getitem__)

    assert race.seconds(FAST) == pytest.approx(1.0)


def test_those_for_whom_there_is_no_time_drop_out():
    race = Race(SECONDS)
    race.turn(SECONDS.__getitem__, end=0.0)

    # THEN the first has run, and of the others nothing is known
    assert race.running == [FAST]
    assert race.seconds(FAST) == pytest.approx(1.0)
    assert race.seconds(CLOSE) is race.seconds(SLOW) is None


def test_equal_ones_need_not_go_on():
    race = Race((FAST, CLOSE))
    for _ in range(5):
        race.turn(lambda settings: 1.0)
        race.drop()
        assert not race.is_decided
    race.turn(lambda settings: 1.0)

    assert race.running == [FAST, CLOSE]
    assert race.is_decided
