"""The scripts here are run in processes of their own, not imported."""

collect_ignore_glob = ["*.py"]
