"""Sessions on a simulated device, for tests that run plain PyTorch code in them."""

from contextlib import contextmanager

import torch

from memfit.allocator import LiveAllocator
from memfit.catalogue import find_device
from memfit.core.replay import AllocatorOptions
from memfit.frameworks.torch.script.session import Session

T4 = find_device("t4")


def make_session(capacity_bytes=None, *, device=T4, **options):
    """A session whose device gives `capacity_bytes`, or whatever it is asked for when None."""
    return Session(device, LiveAllocator(AllocatorOptions(), capacity_bytes), **options)


@contextmanager
def running(capacity_bytes=None, **options):
    """A session that runs."""
    session = make_session(capacity_bytes, **options)
    with session.running():
        yield session


@contextmanager
def visiting(capacity_bytes=None, **options):
    """A session after which this process goes on as if nothing had been."""
    session = make_session(capacity_bytes, **options)
    with session.visiting():
        yield session


def really(tensor):
    """Where a tensor is, whatever it is shown as."""
    with torch._C.DisableTorchFunction():
        return tensor.device.type


def timeline(session):
    return session.estimate("test", 0.0, died=False).timeline


def phases(session):
    """(phase, step) of each mark, in order."""
    return [(str(mark.phase), mark.step) for mark in timeline(session).marks]


def made(session, *, op="", category=None, phase=None):
    """The blocks of a session, of one operator, category or phase."""
    return [
        block
        for block in timeline(session).blocks
        if block.op.endswith(op)
        and (category is None or block.category is category)
        and (phase is None or block.phase is phase)
    ]


def codes(session):
    """Codes of the notes."""
    return [note.code for note in session.simulation.notes.found.values()]
