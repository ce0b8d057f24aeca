"""The environment variables that memfit reads or sets, in one place."""

import os
import re

RUN_REQUEST = "MEMFIT_RUN"
"""Set by `memfit run` for the script it starts: the path of the file with what this attempt is to be."""

SIMULATION = "MEMFIT_SIMULATION"
"""Set in a dry run for the processes that the script starts: the path of the file with what is simulated."""


REDIRECTED_FILES = "MEMFIT_FILES"
"""Set in a dry run for the processes that the script starts: the folder with the files that it has written."""


def allocator_settings() -> str:
    """The settings of PyTorch's caching allocator, in PyTorch's own syntax; the newer name counts first."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""


def set_allocator_settings(text: str) -> None:
    """Gives PyTorch's caching allocator these settings, as long as it hasn't started yet; "" takes them back."""
    name = "PYTORCH_ALLOC_CONF" if "PYTORCH_ALLOC_CONF" in os.environ else "PYTORCH_CUDA_ALLOC_CONF"
    if text:
        os.environ[name] = text
    else:
        os.environ.pop(name, None)


def cublas_workspace_bytes() -> int | None:
    """What CUBLAS_WORKSPACE_CONFIG asks for, ":4096:2:16:8" in KiB and numbers; None where it says nothing."""
    pairs = re.findall(r":([0-9]+):([0-9]+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    return sum(int(size) * 1024 * int(count) for size, count in pairs) if pairs else None


def run_request() -> str:
    """Path of the request of the `memfit run` that started this process; "" outside of one."""
    return os.environ.get(RUN_REQUEST, "")


def with_run_request(path: str) -> dict[str, str]:
    """This process's environment, with the request of a supervised run in it."""
    return {**os.environ, RUN_REQUEST: path}


def wants_progress() -> bool:
    """Whether memfit may say what it is doing while that takes long: MEMFIT_PROGRESS, on by default."""
    return os.environ.get("MEMFIT_PROGRESS", "1").strip().lower() not in ("0", "off", "no", "false")


def visible_cuda_devices() -> str | None:
    """Which NVIDIA devices a program may see, in CUDA's own syntax; None where all of them."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def quiet_profiler() -> None:
    """PyTorch's profiler no longer tells on standard error that it begins and ends, unless somebody wants it to."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def keras_backend() -> str:
    """The backend that Keras is told to use; "" where nobody says."""
    return os.environ.get("KERAS_BACKEND", "")


def keras_home() -> str:
    """The folder of Keras's settings; "" where it is Keras's own choice."""
    return os.environ.get("KERAS_HOME", "")


def launched_rank() -> tuple[int, int] | None:
    """(number of this process, number of processes) as torchrun sets them; None for a process that stands alone."""
    try:
        rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None
    return (rank, num_ranks) if 0 <= rank < num_ranks and num_ranks > 1 else None


def num_local_ranks() -> int:
    """Processes that torchrun has started on this machine; 1 for a process that stands alone."""
    try:
        return max(1, int(os.environ["LOCAL_WORLD_SIZE"]))
    except (KeyError, ValueError):
        return 1


def cache_folder() -> str:
    """Where findings are kept between runs: MEMFIT_CACHE, else the user's cache folder."""
    given = os.environ.get("MEMFIT_CACHE")
    if given:
        return given
    home = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or os.path.join("~", ".cache")
    return os.path.join(os.path.expanduser(home), "memfit")


def spool_folder() -> str:
    """Where data that can't be streamed as it is gets unpacked to: MEMFIT_SPOOL, else a part of the cache folder."""
    return os.environ.get("MEMFIT_SPOOL") or os.path.join(cache_folder(), "spool")


def download_folders() -> list[str]:
    """Where libraries keep what they fetched, to be used again by other programs."""
    names = ("XDG_CACHE_HOME", "TORCH_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "KERAS_HOME")
    given = [os.environ.get(name, "") for name in names]
    return [os.path.expanduser(root) for root in (*given, "~/.cache", "~/.keras") if root]
