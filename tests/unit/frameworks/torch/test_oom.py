import threading
import weakref

import torch
from torch import nn

from memfit.core.guarding import Where
from memfit.frameworks.torch import oom


def test_release_collects_cycles():
    class Node:
        pass

    node = Node()
    node.itself, node.tensor = node, torch.ones(1000)
    reference = weakref.ref(node.tensor)
    del node
    oom.release()
    assert reference() is None


def test_release_works_in_any_thread():
    errors = []

    def run():
        try:
            oom.release()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not errors


def test_whose_memory_a_model_takes():
    assert oom.where_of(nn.Linear(2, 2)) is Where.HOST
    assert oom.where_of(nn.Linear(2, 2, device="meta")) is Where.DEVICE
    assert oom.where_of(nn.Identity()) is Where.HOST
