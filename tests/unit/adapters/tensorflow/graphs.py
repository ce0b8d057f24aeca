"""Graphs of operators made by hand, for tests."""

from types import SimpleNamespace

from memfit.adapters.tensorflow.nodes import Graph, Node


class Attributes(dict):
    def __missing__(self, key):
        return SimpleNamespace(b=False, i=0, s=b"")


def node(name, op, inputs=(), shape=(256,), item_bytes=4, controls=(), value=None, num_outputs=1, **attributes):
    """An operator; `inputs` are names, "name:1" for another output than the first."""
    definition = SimpleNamespace(attr=Attributes({k: SimpleNamespace(b=v, i=v, s=v) for k, v in attributes.items()}))
    made = Node(name, op, definition, list(inputs), list(controls), value=value)
    made.shapes = [shape] * num_outputs
    made.item_bytes = [item_bytes] * num_outputs
    return made


def graph(*nodes, results=()):
    """A graph of such operators."""
    numbers = {one.name: number for number, one in enumerate(nodes)}

    def place(text):
        name, _, port = text.partition(":")
        return numbers[name], int(port or 0)

    consumers = [[] for _ in nodes]
    control_consumers = [[] for _ in nodes]
    for number, one in enumerate(nodes):
        one.inputs = [place(text) for text in one.inputs]
        one.controls = [numbers[name] for name in one.controls]
        for slot, (made, port) in enumerate(one.inputs):
            consumers[made].append((port, number, slot))
        for made in one.controls:
            control_consumers[made].append(number)
    arguments = {one.name: numbers[one.name] for one in nodes if one.op == "Placeholder"}
    roots = [number for number, one in enumerate(nodes) if not one.inputs and not one.controls]
    return Graph(list(nodes), consumers, control_consumers, [place(text) for text in results], arguments, roots)
