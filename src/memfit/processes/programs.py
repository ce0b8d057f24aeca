"""The programs that memfit starts in processes of their own. They lie above this package, which is told their names."""

import sys

DRYRUN: tuple[str, ...] = ()  # runs a script on a simulated device; the path of a request is added

SUPERVISED: tuple[str, ...] = ()
"""Runs a supervised script; the path of a request and the number of a descriptor are added."""


def module_command(name: str) -> tuple[str, ...]:
    """The words that start a module as a program, with the Python that runs this.

    >>> module_command("memfit.api.dryrun_child")[1:]
    ('-m', 'memfit.api.dryrun_child')
    """
    return (sys.executable, "-m", name)
