"""Whether an exception that ended a script is about memory, where no adapter of a framework can tell."""

import errno
import re
from collections.abc import Iterator

_MAX_CHAIN = 20
# What Python, the dynamic loader, and the runtimes of TensorFlow and JAX say.
_TEXT = re.compile(
    r"failed to map segment from shared object|cannot allocate memory|can't start new thread|std::bad_alloc"
    r"|RESOURCE_EXHAUSTED|\bOOM when allocating",
    re.IGNORECASE,
)
_TYPES = ("ResourceExhaustedError", "XlaRuntimeError", "JaxRuntimeError", "OutOfMemoryError")


def is_about_memory(error: BaseException) -> bool:
    """Whether an exception, or one that led to it, is a failure to get memory.

    >>> is_about_memory(MemoryError()), is_about_memory(ValueError("out of cheese"))
    (True, False)
    """
    return any(map(_is_about_memory, _chain(error)))


def _is_about_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    if type(error).__name__ in ("ResourceExhaustedError", "OutOfMemoryError"):
        return True
    may_say_so = isinstance(error, ImportError | RuntimeError | SystemError) or type(error).__name__ in _TYPES
    # JAX raises a plain ValueError where an operation runs by itself.
    may_say_so = may_say_so or (isinstance(error, ValueError) and "RESOURCE_EXHAUSTED" in str(error))
    return may_say_so and _TEXT.search(str(error)) is not None


def importing(error: BaseException) -> str:
    """Name of the module whose import was under way when an exception was raised, or "".

    The outermost one that belongs to a library: that is the name that the script knows.
    """
    found = ""
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        code = frame.f_code
        if code.co_name in ("_find_and_load", "_find_and_load_unlocked") and code.co_filename.startswith("<frozen"):
            name = frame.f_locals.get("name")
            if isinstance(name, str) and not found:
                found = name
        traceback = traceback.tb_next
    return found


def _chain(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    for _ in range(_MAX_CHAIN):
        if current is None:
            return
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
