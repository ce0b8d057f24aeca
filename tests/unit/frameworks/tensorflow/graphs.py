"""Graphs of operators made by hand, for tests."""

from tensorflow.core.framework import node_def_pb2, types_pb2

from memfit.frameworks.tensorflow.trace.memory import Graph, Node

_KINDS = {bool: "b", int: "i", bytes: "s"}


def node(name, op, inputs=(), shape=(256,), item_bytes=4, controls=(), value=None, num_outputs=1, **attributes):
    """An operator; `inputs` are names, "name:1" for another output than the first."""
    definition = node_def_pb2.NodeDef(name=name, op=op)
    # What loops count with.
    definition.attr["T"].type = types_pb2.DT_INT32
    for key, given in attributes.items():
        setattr(definition.attr[key], _KINDS[type(given)], given)
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
