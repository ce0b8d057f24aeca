"""Iterations that may run at once."""

from memfit.frameworks.tensorflow.trace.frames import Frame


def test_only_so_many_iterations_run_at_once():
    frame = Frame(None, "loop", num_entries=0, limit=2)
    assert not frame.is_full
    frame.iterations[0].num_active = 1
    frame.following()
    assert frame.is_full and frame.ended() is None
    frame.iterations[0].num_active = 0
    assert frame.ended() is frame.iterations[0]
    assert not frame.is_full


def test_iterations_end_in_their_order():
    frame = Frame(None, "loop", limit=3)
    first, second = frame.iterations[0], frame.following()
    first.num_frames = 1
    assert frame.ended() is None
    first.num_frames = 0
    assert [frame.ended(), frame.ended(), frame.ended()] == [first, second, None]
    assert frame.is_done


def test_a_loop_waits_for_all_that_enters_it():
    frame = Frame(None, "loop", num_entries=1)
    assert frame.ended() is None and not frame.is_done
    frame.num_entries = 0
    assert frame.ended() is frame.iterations[0] and frame.is_done


def test_ways_out_count_for_the_last_iteration_alone():
    frame = Frame(None, "loop", limit=2)
    frame.dead_exits.append(3)
    frame.following()
    assert frame.dead_exits == []
