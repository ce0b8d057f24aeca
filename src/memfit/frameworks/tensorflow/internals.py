"""What is used of TensorFlow beyond its public interface; seen in 2.18 to 2.21.

Without the graph optimizer and the compiler's text no step can be traced, without the rest only some can't.
"""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from memfit.core.private_names import PrivateNames

NAMES = PrivateNames("tensorflow", "2.18 to 2.21")

_PATHS = {
    "op_definition": "tensorflow.python.framework.op_def_registry:get",
    "stop_recording": "tensorflow.python.eager.record:stop_recording",
}
_CALLING = ("PartitionedCall", "While", "If", "Case")
__getattr__ = NAMES.table(_PATHS, globals())


def optimize_graph(config: Any, meta: Any, devices: list[Any]) -> Any:
    """The graph after Grappler, for described devices and without any session."""
    cluster = NAMES.find("tensorflow.python.grappler.cluster:Cluster")(devices=devices)
    optimize = NAMES.find("tensorflow.python.grappler.tf_optimizer:OptimizeGraph")
    return optimize(config, meta, verbose=False, cluster=cluster)


def output_properties(meta: Any) -> Any:
    """Type and shape of every tensor of a graph, by its node's name."""
    item = NAMES.find("tensorflow.python.grappler.item:Item")
    return item(meta, ignore_colocation=True, ignore_user_placement=True).GetOpProperties()


def graphs_called_by(operation: Any) -> Iterator[Any]:
    """Graphs of the functions that an operator calls: of `tf.function`, loops and branches; none that is elsewhere."""
    if not operation.type.endswith(_CALLING):
        return
    for attribute in operation.node_def.attr.values():
        for named in (attribute.func, *attribute.list.func):
            function = NAMES.of(operation.graph, "_get_function")(named.name) if named.name else None
            if function is not None:
                yield function.graph


def run_kernel(op: str, num_outputs: int, inputs: list[Any], attributes: tuple[Any, ...]) -> list[Any]:
    """What a kernel makes; `tf.raw_ops` has other names for some arguments than graphs."""
    execute = NAMES.find("tensorflow.python.eager.execute:quick_execute")
    context = NAMES.find("tensorflow.python.eager.context:context")
    return list(execute(op, num_outputs, inputs, attributes, context()))


def compiled_text(function: Any) -> str:
    """The program that XLA makes of a `ConcreteFunction`."""
    compiler = NAMES.find("tensorflow.python.eager.polymorphic_function.compiler_ir:from_concrete_function")
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in function.inputs if tensor.dtype != tf.resource]
    return str(compiler(function, specs)(stage="optimized_hlo"))


def new_graph(name: str) -> tuple[Any, Any]:
    """(a graph as that of a function, what puts operators with side effects in order)."""
    graph = NAMES.find("tensorflow.python.framework.func_graph:FuncGraph")(name)
    order = NAMES.find("tensorflow.python.framework.auto_control_deps:AutomaticControlDependencies")()
    return graph, order


def is_compiled(function: Any) -> bool:
    """Whether XLA compiles a `tf.function`."""
    return bool(getattr(function, "_jit_compile", False))
