"""Runs functions in processes of their own that share what was imported, some under a limit of memory."""

import json
import os
import resource
import sys

from memfit.frameworks.torch.oom import release


def data_bytes() -> int:
    """What RLIMIT_DATA counts of this process."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmData:"))


def forked(function, headroom_bytes: int | None = None):
    """What `function()` returns, or the text of its exception, with so much more memory than there is in use now."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        try:
            if headroom_bytes is not None:
                release()
                limit = data_bytes() + headroom_bytes
                resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
            answer = function()
        except BaseException as error:
            answer = str(error) or type(error).__name__
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return json.loads(text)
