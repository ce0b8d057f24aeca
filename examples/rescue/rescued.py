"""The same script, not edited, with the rescue: `python examples/rescue/rescued.py [MIB]`."""

import runpy
from pathlib import Path

from memfit.adapters.torch.rescue import enable

enable()
runpy.run_path(str(Path(__file__).with_name("train.py")), run_name="__main__")
