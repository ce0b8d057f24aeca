"""Whether an exception that ended a script is about memory, where no adapter of a framework can tell."""

import errno
import re
import sysconfig
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


def may_stay_unused(error: BaseException) -> bool:
    """Whether what was refused is a mapping or an array of NumPy, which programs ask for ahead and may never fill."""
    return isinstance(error, OSError) or hasattr(error, "_total_size")


def importing(error: BaseException) -> str:
    """Name of the installed module whose import an exception ended, or "".

    Modules of the script's own don't count: a script may do all its work while one of them is imported.
    """
    folders = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(folders):
            return str(frame.f_globals.get("__name__", ""))
        traceback = traceback.tb_next
    return (error.name or "") if isinstance(error, ImportError) else ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    for _ in range(_MAX_CHAIN):
        if current is None:
            return
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
