"""How processes ended: names of signals, and what to say of a worker of a stream that ended too early."""

import signal

_FAULT = "It crashed in native code that the source or the transform calls."
_CAUSES = dict.fromkeys(("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT"), _FAULT) | {
    "SIGKILL": "The usual cause is memory: the kernel's OOM killer ends (signal 9) the process that takes most of the "
    "machine or the container. Give the stream less memory, or fewer workers, and look at what the transform holds on "
    "to."
}


def name_of_signal(number: int) -> str:
    """The signal's name, or its number in words.

    >>> name_of_signal(9), name_of_signal(250)
    ('SIGKILL', 'signal 250')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_end(who: str, exit_code: int | None) -> str:
    """How a worker ended, why that may be, and what to do; `exit_code` is negative for a signal, None if unknown."""
    if exit_code is not None and exit_code < 0:
        name = name_of_signal(-exit_code)
        cause = _CAUSES.get(name, "Another program killed it.")
        return f"{who} was ended by {name} before its last batch. {cause}"
    return (
        f"{who} ended with exit code {exit_code} before its last batch; what it wrote is above. A program whose "
        "workers are started anew, not forked, must begin its work under `if __name__ == '__main__':`."
    )
