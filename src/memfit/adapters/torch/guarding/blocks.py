"""The modules that recomputation takes one by one where no plan says which: the repeated blocks of a model."""

import torch


def blocks(model: torch.nn.Module) -> tuple[str, ...]:
    """Paths of the model's repeated blocks, or of its largest parts; none inside of another.

    A list or sequence of several modules with parameters, as near to the root as possible, is what models repeat:
    layers of a transformer, stages of a convolutional network.
    """
    found = _repeated(model, "")
    return tuple(found) if len(found) > 1 else ()


def _repeated(module: torch.nn.Module, prefix: str) -> list[str]:
    children = [(f"{prefix}{name}", child) for name, child in module.named_children() if _is_trained(child)]
    if isinstance(module, torch.nn.ModuleList | torch.nn.Sequential) and len(children) > 1:
        if all(_is_leaf(child) for _, child in children):
            return []
        return [inner for path, child in children for inner in (_repeated(child, f"{path}.") or [path])]
    found = []
    for path, child in children:
        inner = _repeated(child, f"{path}.")
        if inner:
            found += inner
        elif isinstance(child, torch.nn.Sequential) or (not _is_leaf(child) and _is_called(child)):
            found.append(path)
    return found


def _is_leaf(module: torch.nn.Module) -> bool:
    return next(module.children(), None) is None


def _is_called(module: torch.nn.Module) -> bool:
    return not isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict)


def _is_trained(module: torch.nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
