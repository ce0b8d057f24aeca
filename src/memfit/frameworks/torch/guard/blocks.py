"""The modules that recomputation takes one by one where no plan says which: the repeated blocks of a model."""

import torch


def blocks(model: torch.nn.Module) -> tuple[str, ...]:
    """Paths of the model's repeated blocks, or else of its large parts; none inside of another.

    A list or sequence of several modules that have parts of their own is what models repeat: layers of a transformer,
    blocks of the stages of a convolutional network.
    """
    paths = _repeated(model, "") or [path for path, _ in _with_parts(model, "")]
    return tuple(paths) if len(paths) > 1 else ()


def _repeated(module: torch.nn.Module, prefix: str) -> list[str]:
    """Paths of the repeated blocks inside of a module."""
    parts = _with_parts(module, prefix)
    if isinstance(module, torch.nn.ModuleList | torch.nn.Sequential) and len(parts) > 1:
        return [inner for path, child in parts for inner in (_repeated(child, f"{path}.") or [path])]
    return [inner for path, child in parts for inner in _repeated(child, f"{path}.")]


def _with_parts(module: torch.nn.Module, prefix: str) -> list[tuple[str, torch.nn.Module]]:
    """The children that are trained and have children of their own."""
    return [
        (f"{prefix}{name}", child)
        for name, child in module.named_children()
        if next(child.children(), None) is not None and any(p.requires_grad for p in child.parameters())
    ]
