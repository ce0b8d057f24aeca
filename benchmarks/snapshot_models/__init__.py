"""The programs behind snapshots that others published, written anew from their descriptions."""
