"""What to say of a worker process of a stream that ended before its work was done."""

import signal

_FAULT = "It crashed in native code that the source or the transform calls."
_CAUSES = dict.fromkeys(("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT"), _FAULT) | {
    "SIGKILL": "The usual cause is memory: the kernel's OOM killer ends (signal 9) the process that takes most of the "
    "machine or the container. Give the stream less memory, or fewer workers, and look at what the transform holds on "
    "to."
}


def describe_end(who: str, exit_code: int | None) -> str:
    """How a worker ended, why that may be, and what to do.

    Args:
        who: the worker.
        exit_code: of its process, negative for a signal; None where it isn't known.
    """
    if exit_code is not None and exit_code < 0:
        number = -exit_code
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        cause = _CAUSES.get(name, "Another program killed it.")
        return f"{who} was ended by {name} before its last batch. {cause}"
    return (
        f"{who} ended with exit code {exit_code} before its last batch; what it wrote is above. A program whose "
        "workers are started anew, not forked, must begin its work under `if __name__ == '__main__':`."
    )
