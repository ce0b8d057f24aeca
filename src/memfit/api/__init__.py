"""The public verbs: each checks its arguments, picks the adapter of a framework and calls a driver."""

import sys

from memfit.api.result_reports import use_reports
from memfit.processes import process_tree

process_tree.DRYRUN = (sys.executable, "-m", "memfit.api.dryrun_child")
process_tree.SUPERVISED = (sys.executable, "-m", "memfit.api.supervised_child")
use_reports()
