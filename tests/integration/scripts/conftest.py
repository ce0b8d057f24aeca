"""The scripts here are run, not imported: some train, exit or fail at module level."""

collect_ignore_glob = ["*.py", "bad/*.py"]
