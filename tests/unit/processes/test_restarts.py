from memfit.core.supervised import Configuration
from memfit.processes.restarts import next_configuration

PLAIN = Configuration()


def all_of(first, sizes):
    """What attempts are told one after another, where each uses what `sizes` says."""
    tried = [first]
    for size in sizes:
        following = next_configuration(tried, size(tried[-1]))
        if following is None:
            break
        tried.append(following)
    return tried


def test_a_guard_is_told_half_of_what_it_used():
    assert next_configuration([PLAIN], 12) == Configuration(6)
    assert next_configuration([PLAIN, Configuration(6)], 5) == Configuration(2)


def test_a_guard_is_taken_down_to_one_sample_and_then_rescued():
    tried = all_of(PLAIN, [lambda told: told.micro_batch_size or 8] * 20)

    assert tried == [
        PLAIN,
        Configuration(4),
        Configuration(2),
        Configuration(1),
        Configuration(1, rescue=True),
        Configuration(1, rescue=True, eager=True),
    ]


def test_without_a_guard_there_is_only_the_rescue():
    tried = all_of(PLAIN, [lambda told: None] * 20)

    assert tried == [PLAIN, Configuration(rescue=True), Configuration(rescue=True, eager=True)]


def test_a_rescue_that_was_wanted_from_the_start_becomes_eager():
    tried = all_of(Configuration(rescue=True), [lambda told: None] * 20)

    assert tried == [Configuration(rescue=True), Configuration(rescue=True, eager=True)]


def test_nothing_is_told_twice_even_to_a_script_that_does_not_listen():
    # GIVEN a guard that uses 16 whatever it is told
    tried = all_of(PLAIN, [lambda told: 16] * 20)

    assert len(set(tried)) == len(tried)
    assert len(tried) < 20


def planned(first, sizes, **options):
    tried = [first]
    for size in sizes:
        following = next_configuration(tried, size, plans=True, **options)
        if following is None:
            break
        tried.append(following)
    return tried


def test_a_guard_that_plans_is_given_less_memory_to_plan_for():
    # GIVEN a model whose batches may not be split, so that 64 samples are used whatever it is told
    tried = planned(PLAIN, [64] * 20, rescues=False)

    assert [one.share for one in tried] == [1.0, 0.75, 0.56, 0.42, 0.32]
    assert {one.micro_batch_size for one in tried} == {None, 32}
    assert not any(one.rescue for one in tried)


def test_where_operations_can_be_rescued_that_comes_after_the_plans():
    tried = planned(PLAIN, [1] * 20)

    assert [one.share for one in tried[:5]] == [1.0, 0.75, 0.56, 0.42, 0.32]
    assert [(one.rescue, one.eager) for one in tried[5:]] == [(True, False), (True, True)]


def test_a_plan_for_less_is_put_into_words():
    assert str(Configuration(4, share=0.75)) == "micro-batches of at most 4 and a plan for 75% of the memory"


def test_what_was_refused_address_space_needs_nothing_smaller():
    assert next_configuration([Configuration(4)], 4, reserved=True) == Configuration(4, reserves=True)
    assert str(Configuration(reserves=True)) == "no limit on address space"
