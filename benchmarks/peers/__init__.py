"""Other libraries on the data of the benchmarks of streams: one script each, in an environment of its own.

Each script has two forms: `prepare SOURCE FOLDER` writes the library's own format, where it has one, and `read FOLDER
--batch-size --workers --seconds` goes through a shuffled epoch and prints what it counted. Nothing here imports memfit.
"""
