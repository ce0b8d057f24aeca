import weakref

from memfit.core import heap


def test_freed_memory_goes_back_to_the_system():
    heap.map_large_blocks(True)
    heap.give_back()
    heap.map_large_blocks(False)


def test_release_collects_cycles():
    class Node:
        pass

    node = Node()
    node.itself = node
    reference = weakref.ref(node)
    del node
    heap.release()
    assert reference() is None
