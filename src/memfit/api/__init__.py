"""The public verbs: each checks its arguments, picks the adapter of a framework and calls a driver."""

from memfit.processes import programs

programs.DRYRUN = programs.module_command("memfit.api.dryrun_child")
programs.SUPERVISED = programs.module_command("memfit.api.supervised_child")
