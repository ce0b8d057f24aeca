"""Children of dry runs without the seconds that importing PyTorch takes: each is forked from a process that has."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from memfit.catalogue import find_device
from memfit.core.dryrun import DryRun, Request

ROOT = Path(__file__).parents[4]

# Reads (request, folder of the outputs, working folder) line by line, and writes the return code of each child.
TEMPLATE = """
import json, os, sys, traceback
os.environ["PYTORCH_JIT"] = "0"
import torch._dynamo
import memfit.frameworks.torch.script.script
from memfit.api.dryrun_child import main

for line in sys.stdin:
    request, outputs, folder = json.loads(line)
    child = os.fork()
    if not child:
        code = 99
        try:
            for number, name in ((0, os.devnull), (1, outputs + "/stdout"), (2, outputs + "/stderr")):
                os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
            os.chdir(folder)
            code = main(request)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@dataclass
class Child:
    """What a child left."""

    run: DryRun
    data: dict
    return_code: int
    stdout: str
    stderr: str


class Children:
    """Runs scripts, each in a process of its own.

    Args:
        folder: where scripts are written; each child has a folder of its own in it.
    """

    def __init__(self, folder):
        self._folder = folder
        self._number = 0
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        self._template = subprocess.Popen(
            [sys.executable, "-c", TEMPLATE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def run(self, script, *arguments, folder=None, **options):
        """The dry run of a script given as its text, or as a path."""
        self._number += 1
        place = self._folder / str(self._number)
        place.mkdir()
        if isinstance(script, str) and "\n" in script:
            (place / "train.py").write_text(script, encoding="utf-8")
            script = str(place / "train.py")
        result = place / "result.json"
        options = {"module": False, "device": find_device("t4"), **options}
        request = Request(str(script), arguments=arguments, result_path=str(result), **options)
        (place / "request.json").write_text(json.dumps(request.to_json()), encoding="utf-8")
        line = json.dumps([str(place / "request.json"), str(place), str(folder or place)])
        self._template.stdin.write(line + "\n")
        self._template.stdin.flush()
        return_code = int(self._template.stdout.readline())
        stdout, stderr = ((place / name).read_text(encoding="utf-8") for name in ("stdout", "stderr"))
        assert result.exists(), f"no result: return code {return_code}\n{stderr}"
        data = json.loads(result.read_text(encoding="utf-8"))
        return Child(DryRun.from_json(data), data, return_code, stdout, stderr)

    def close(self):
        self._template.stdin.close()
        self._template.stdout.close()
        self._template.wait()
