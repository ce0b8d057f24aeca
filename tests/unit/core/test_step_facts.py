from memfit.core.step_facts import StepFacts, StepPart


def test_what_is_not_known_is_not_promised():
    facts = StepFacts("jax", ("amp-bf16",), frozenset())

    assert facts.time_forward() is None
    assert facts.parts == ()
    assert StepPart("block", 1.0, 2.0).path == "block"
