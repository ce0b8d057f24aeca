from memfit.core.replaced_methods import replace_method


class Base:
    def fit(self, x, scale=1):
        """Fits."""
        return x * scale


class Derived(Base):
    pass


def test_the_first_replacement_of_a_method_counts_and_reaches_all_that_inherit_it():
    calls = []

    def instead(plain, model, arguments, named):
        calls.append((type(model), arguments, named))
        return plain(model, *arguments, **named) + 1

    replace_method(Derived, "fit", instead)
    replace_method(Base, "fit", lambda *_: None)
    replace_method(Base, "evaluate", instead)

    assert (Derived().fit(3, scale=2), Base().fit(5)) == (7, 6)
    assert calls == [(Derived, (3,), {"scale": 2}), (Base, (5,), {})]
    assert (Base.fit.__name__, Base.fit.__doc__) == ("fit", "Fits.")
    assert not hasattr(Base, "evaluate")
