"""Reports on files of samples."""
