"""Checkpoints in which something is other than it was written, with hashes that say that all is well."""

import hashlib

from memfit.guard import checkpoint_manifest


def nodes(value, path=()):
    """Where everything is; of long lists, the first and the last entry."""
    yield path
    entries = list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if type(value) is list else []
    for key, part in entries if len(entries) < 8 or isinstance(value, dict) else (entries[0], entries[-1]):
        yield from nodes(part, (*path, key))


def changed(data, path, wrong):
    if not path:
        return wrong
    copied = data.copy()
    copied[path[0]] = changed(data[path[0]], path[1:], wrong)
    return copied


def forge(checkpoint, name, content):
    """Puts something else into a file of a checkpoint, with a manifest to match."""
    (checkpoint / name).write_bytes(content)
    manifest = checkpoint_manifest.read(checkpoint)
    files = {**manifest.files, name: checkpoint_manifest.FileEntry(len(content), hashlib.sha256(content).hexdigest())}
    forged = checkpoint_manifest.Manifest(manifest.number, manifest.step, manifest.created, files, manifest.info)
    (checkpoint / checkpoint_manifest.NAME).write_bytes(forged.to_bytes())
