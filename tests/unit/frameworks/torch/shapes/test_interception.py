import threading

import pytest
import torch
import torch.nn.functional as F

from memfit.frameworks.torch.shapes import interception
from memfit.frameworks.torch.shapes.interception import (
    call_plain,
    intercepting,
    overload,
    switch_off,
    switched_on,
)

KEY = torch._C.DispatchKey.AutocastPrivateUse1


def meta(*shape):
    return torch.empty(shape, device="meta")


class Watch:
    """Notes each call and lets it pass."""

    def __init__(self):
        self.calls = 0

    def __call__(self, op, *args, **kwargs):
        self.calls += 1
        return call_plain(op, *args, **kwargs)


def test_an_interceptor_stands_in_front_of_its_operator():
    watch = Watch()
    with intercepting({"linear": watch}):
        out = F.linear(meta(2, 3), meta(4, 3))

    assert watch.calls == 1
    assert out.shape == (2, 4)


def test_calls_from_cplusplus_are_intercepted_as_well():
    # GIVEN an operator that calls softmax from C++
    watch = Watch()
    query = meta(1, 2, 4, 8)

    # WHEN only softmax is intercepted
    with intercepting({"_safe_softmax": watch}):
        torch.ops.aten._scaled_dot_product_attention_math(query, query, query)

    assert watch.calls == 1


def test_an_interceptor_decides_the_result():
    with intercepting({"dropout": lambda op, tensor, p, train: tensor}):
        tensor = meta(2)
        assert F.dropout(tensor, 0.5) is tensor


def test_a_plain_call_leaves_the_inner_ones_alone_too():
    watch = Watch()
    query = meta(1, 2, 4, 8)
    attend = torch.ops.aten._scaled_dot_product_attention_math.default
    with intercepting({"_safe_softmax": watch}):
        call_plain(attend, query, query, query)

    assert watch.calls == 0


def test_gradients_flow_through_intercepted_operators():
    weight = torch.ones(4, 3, requires_grad=True)
    with intercepting({"linear": Watch()}):
        F.linear(torch.ones(2, 3), weight).sum().backward()

    assert torch.equal(weight.grad, torch.full((4, 3), 2.0))


def test_afterwards_the_interception_is_inert():
    watch = Watch()
    with intercepting({"linear": watch}):
        pass
    F.linear(meta(2, 3), meta(4, 3))

    assert watch.calls == 0
    assert torch._C._dispatch_tls_is_dispatch_key_excluded(KEY)
    assert not torch._C._dispatch_tls_is_dispatch_key_included(KEY)


def test_it_is_inert_after_an_error_as_well():
    watch = Watch()
    with pytest.raises(KeyError), intercepting({"linear": watch}):
        raise KeyError
    F.linear(meta(2, 3), meta(4, 3))

    assert watch.calls == 0
    assert not interception._active


def test_blocks_nest_and_the_inner_one_counts():
    outer, inner = Watch(), Watch()
    with intercepting({"linear": outer}):
        with intercepting({"linear": inner}):
            F.linear(meta(2, 3), meta(4, 3))
        F.linear(meta(2, 3), meta(4, 3))

    assert (outer.calls, inner.calls) == (1, 1)


def test_an_operator_of_an_earlier_block_is_left_alone():
    first = Watch()
    with intercepting({"linear": first}):
        pass
    with intercepting({"relu": Watch()}):
        out = F.linear(meta(2, 3), meta(4, 3))

    assert first.calls == 0
    assert out.shape == (2, 4)


def test_an_operator_of_an_earlier_block_does_not_hide_those_inside_of_it():
    # GIVEN an operator that is made of others, registered for a device that is no longer simulated
    with intercepting({"cross_entropy_loss": Watch()}):
        pass

    # WHEN another device intercepts one of the others
    watch = Watch()
    with intercepting({"log_softmax.int": watch}):
        F.cross_entropy(meta(2, 3), torch.zeros(2, dtype=torch.int64, device="meta"))

    assert watch.calls == 1


def test_other_threads_are_left_alone():
    watch = Watch()
    shapes = []

    def elsewhere():
        shapes.append(F.linear(meta(2, 3), meta(4, 3)).shape)

    with intercepting({"linear": watch}):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    assert watch.calls == 0
    assert shapes == [(2, 4)]


def test_operators_that_this_torch_lacks_are_left_out():
    assert overload("no_such_operator") is None
    assert overload("linear.no_such_overload") is None
    with intercepting({"no_such_operator": Watch()}):
        pass


def test_names_of_operators():
    assert overload("linear") is torch.ops.aten.linear.default
    assert overload("norm.Scalar") is torch.ops.aten.norm.Scalar


def test_numbers_computed_afterwards_are_the_same():
    # GIVEN real results from before any interception, in the user's own autocast
    torch.manual_seed(0)
    data, weight = torch.randn(4, 8), torch.randn(8, 8)

    def compute():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.manual_seed(1)
            return F.dropout(F.softmax(F.linear(data, weight), -1), 0.5)

    before = compute()
    with intercepting({"linear": Watch(), "dropout": Watch(), "softmax.int": Watch()}):
        pass

    assert torch.equal(compute(), before)


def in_thread(work):
    failed = []

    def run():
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert failed == []


def is_on():
    return torch._C._dispatch_tls_is_dispatch_key_included(KEY) and not torch._C._dispatch_tls_is_dispatch_key_excluded(
        KEY
    )


def test_another_thread_can_be_switched_on():
    watch = Watch()
    states = []

    def elsewhere():
        with switched_on():
            states.append(is_on())
            F.linear(meta(2, 3), meta(4, 3))
        states.append(is_on())
        F.linear(meta(2, 3), meta(4, 3))

    with intercepting({"linear": watch}):
        in_thread(elsewhere)
        assert is_on()

    assert states == [True, False]
    assert watch.calls == 1


def test_switching_on_ends_after_an_error():
    with pytest.raises(KeyError), switched_on():
        raise KeyError

    assert not is_on()


def test_switched_on_without_interceptors_nothing_happens():
    with switched_on():
        out = F.linear(torch.ones(2, 3), torch.ones(4, 3))

    assert out.tolist() == [[3.0] * 4] * 2


def test_a_thread_can_be_switched_off_for_good():
    # GIVEN a thread in the middle of an interception, as a process is that was forked off
    watch = Watch()
    results = []

    def elsewhere():
        with switched_on():
            switch_off()
            results.append(is_on())
            results.append(F.linear(torch.ones(2, 3), torch.ones(4, 3)).shape)

    with intercepting({"linear": watch}):
        in_thread(elsewhere)
        # This thread goes on.
        F.linear(meta(2, 3), meta(4, 3))

    assert results == [False, (2, 4)]
    assert watch.calls == 1
