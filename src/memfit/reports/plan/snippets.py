"""Pieces of the programs that `code` puts together: plain PyTorch, Keras and JAX, each the shortest that is right."""

from memfit.core.settings import Settings

STANDARD_MODULES = ("contextlib", "dataclasses", "functools", "os", "weakref")
STANDARD_NAMES = {"Mapping": "collections.abc"}
MODULES = ("torch", "torch.nn.functional as F")
NAMES = {
    "CPUOffloadPolicy": "torch.distributed.fsdp",
    "checkpoint": "torch.utils.checkpoint",
    "fully_shard": "torch.distributed.fsdp",
    "init_device_mesh": "torch.distributed.device_mesh",
    "tree_flatten": "torch.utils._pytree",
    "tree_map": "torch.utils._pytree",
    "tree_unflatten": "torch.utils._pytree",
}
"""Names that a program may use, and the modules that they come from."""

WITHOUT_CACHE = (
    '    if hasattr(model, "config"):',
    "        model.config.use_cache = False  # keys and values would be cached twice",
)

EXPANDABLE_SEGMENTS = (
    "# Before torch is imported; PYTORCH_CUDA_ALLOC_CONF is the name before PyTorch 2.9.",
    'os.environ["PYTORCH_ALLOC_CONF"] = os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"',
)

_PARTS = '''\
def parts(batch, NUMBER):
    """The batch in LIMIT, SHARES."""
    leaves, structure = tree_flatten(as_tree(batch))
    size = next(len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim)
    count = NUM_PARTS
    columns = [
        leaf.tensor_split(count) if isinstance(leaf, torch.Tensor) and leaf.ndim else [leaf] * count for leaf in leaves
    ]
    found = [like(batch, tree_unflatten(list(column), structure)) for column in zip(*columns)]
'''

TREES = '''\
def as_tree(batch):
    """The batch as PyTorch's functions on trees take it."""
    if dataclasses.is_dataclass(batch) and not isinstance(batch, Mapping):
        return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return dict(batch) if isinstance(batch, Mapping) else batch


def like(batch, tree):
    is_plain = isinstance(batch, Mapping) or not dataclasses.is_dataclass(batch)
    return tree if is_plain else dataclasses.replace(batch, **tree)
'''

PARTS = (
    _PARTS.replace(", SHARES", "")
    + """\
    return found
"""
)

PARTS_BY_SAMPLES = (
    _PARTS.replace("SHARES", "each with its share of the samples")
    + """\
    shares = [len(part) / size for part in torch.arange(size).tensor_split(count)]
    return list(zip(found, shares))
"""
)

PARTS_BY_COUNT = (
    _PARTS.replace("SHARES", "each with its share of what the loss counts")
    + """\
    # A part in which nothing counts would be a mean over nothing.
    return [(part, counted(part) / counted(batch)) for part in found if counted(part)]


def counted(tree):
    return COUNTED
"""
)

RECOMPUTE = '''\
def recompute(module):
    """Computes the module again in the backward pass instead of keeping its activations."""
    module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
'''

RECOMPUTE_KEEPING_STATISTICS = '''\
def recompute(module):
    """Computes the module again in the backward pass instead of keeping its activations."""
    contexts = functools.partial(first_and_second_time, module)
    module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False, context_fn=contexts)


def first_and_second_time(module):
    return contextlib.nullcontext(), statistics_kept(module)


@contextlib.contextmanager
def statistics_kept(module):
    """What batch norms count when they are computed again goes into copies that nobody keeps."""
    norms = [inner for inner in module.modules() if getattr(inner, "track_running_stats", False)]
    kept = [dict(norm.named_buffers(recurse=False)) for norm in norms]
    for norm, buffers in zip(norms, kept):
        norm._buffers.update({name: buffer.clone() for name, buffer in buffers.items()})
    try:
        yield
    finally:
        for norm, buffers in zip(norms, kept):
            norm._buffers.update(buffers)
'''

OFFLOAD = '''\
def offload(module):
    """Lets what the module saves for its backward pass wait in host memory."""
    module.forward = functools.partial(offloaded, module, module.forward)


def offloaded(module, forward, *arguments, **options):
    # Weights stay where they are: they are there anyway.
    weights = {weight.untyped_storage().data_ptr() for weight in module.parameters()}
    known = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() in weights:
            return tensor.device, tensor
        # What is saved twice waits once, unless it was written to in between. An address may come back for another.
        place = storage.data_ptr(), tensor.storage_offset(), tensor.size(), tensor.stride()
        source, copy = known.get((*place, tensor.dtype, tensor._version), (None, None))
        waiting = copy() if source is not None and source() is storage else None
        if waiting is None:
            waiting = torch.empty(tensor.size(), dtype=tensor.dtype, layout=tensor.layout, pin_memory=tensor.is_cuda)
            waiting.copy_(tensor, non_blocking=tensor.is_cuda)
            known[*place, tensor.dtype, tensor._version] = weakref.ref(storage), weakref.ref(waiting)
        return tensor.device, waiting

    def unpack(packed):
        device, tensor = packed
        return tensor.to(device, non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return forward(*arguments, **options)
'''

CHUNKED_CROSS_ENTROPY = '''\
def chunked_cross_entropy(hidden, weight, labels, bias=None, ignore_index=-100):
    """Write this in your loss for F.cross_entropy(F.linear(hidden, weight, bias), labels): the logits of all samples
    and positions are never there at once. `hidden` is [positions, features], `labels` [positions].
    """

    def one(hidden, labels):
        logits = F.linear(hidden, weight, bias)
        return F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum")

    pairs = zip(hidden.chunk(NUM_CHUNKS), labels.chunk(NUM_CHUNKS))
    total = sum(checkpoint(one, *pair, use_reentrant=False) for pair in pairs)
    return total / (labels != ignore_index).sum()
'''

HOST_COPY = '''\
def host_copy(optimizer, parameter):
    """A copy of the parameter in host memory, for which the optimizer keeps its state there."""
    waiting = parameter.detach().to("cpu", copy=True).requires_grad_(parameter.requires_grad)
    if parameter in optimizer.state:
        state = optimizer.state.pop(parameter)
        optimizer.state[waiting] = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
    return waiting
'''

UPDATE_IN_BACKWARD = '''\
def alone(optimizer):
    """An optimizer with the same state, to be given one parameter at a time."""
    made = object.__new__(type(optimizer))
    made.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    return made


def update(single, group, parameter):
    """Updates one parameter as soon as its gradient is there."""
    single.param_groups = [{**group, "params": [parameter]}]
    single.step()
    parameter.grad = None
'''

UPDATE_HOOKS = (
    "    for group in optimizer.param_groups:",
    '        for parameter in group["params"]:',
    "            if parameter.requires_grad:",
    "                # The same state, for one parameter at a time.",
    "                hook = functools.partial(update, alone(optimizer), group)",
    "                parameter.register_post_accumulate_grad_hook(hook)",
)

HOST_GROUPS = (
    "    for group in optimizer.param_groups:",
    '        for index, parameter in enumerate(list(group["params"])):',
    '            group["params"][index] = waiting = host_copy(optimizer, parameter)',
    "            on_host.append((parameter, waiting))",
)

PLACED = '''\
def placed(tree, device):
    """Tensors where the model is; the whole batch may wait in host memory."""
    moved = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, as_tree(tree))
    return like(tree, moved)
'''

PLACED_CHANNELS_LAST = '''\
def placed(tree, device):
    """Tensors where the model is, images in its memory format."""
    moved = tree_map(lambda leaf: placed_one(leaf, device) if isinstance(leaf, torch.Tensor) else leaf, as_tree(tree))
    return like(tree, moved)


def placed_one(tensor, device):
    return tensor.to(device, memory_format=torch.channels_last) if tensor.ndim == 4 else tensor.to(device)
'''

_BY_COUNT = {"NUMBER": "count", "LIMIT": "`count` parts along its first dimension", "NUM_PARTS": "min(count, size)"}
_BY_SIZE = {"NUMBER": "most", "LIMIT": "parts of up to `most` samples", "NUM_PARTS": "-(-size // most)"}


def parts(text: str, by_size: bool) -> str:
    """One of the functions that split a batch, by the size of the parts or by their number."""
    for name, value in (_BY_SIZE if by_size else _BY_COUNT).items():
        text = text.replace(name, value)
    return text


STEP = (
    "    if isinstance(optimizer, torch.optim.LBFGS):",
    "        # It asks for the loss and its gradients as often as it needs them.",
    "        return optimizer.step(lambda: gradients(model, optimizer, loss, batch))",
    "    value = gradients(model, optimizer, loss, batch)",
    "    optimizer.step()",
    "    return value",
)

FUSED_COUNTERS = (
    "    # Counters of steps that were taken before must be where the parameters are.",
    "    for parameter, state in optimizer.state.items():",
    '        if isinstance(state.get("step"), torch.Tensor):',
    '            state["step"] = state["step"].to(parameter.device)',
)

EIGHT_BIT = (
    "    import bitsandbytes  # pip install bitsandbytes",
    "",
    "    # Its state begins anew: steps that the optimizer has taken before are forgotten.",
    '    kept = ("params", "lr", "betas", "eps", "weight_decay")',
    "    groups = [{key: group[key] for key in kept if key in group} for group in optimizer.param_groups]",
    '    optimizer = getattr(bitsandbytes.optim, f"{type(optimizer).__name__}8bit")(groups)',
)

_ONLY_TRAINED = (
    "    # The optimizer trains the adapters alone.",
    "    optimizer.state.clear()",
    "    for group in optimizer.param_groups:",
    '        group["params"] = []',
    '    optimizer.param_groups[0]["params"] = [p for p in model.parameters() if p.requires_grad]',
)


def lora(rank: int, quantized: bool) -> list[str]:
    """Lines that train adapters in place of the linear layers."""
    lines = ["    import peft  # pip install peft", ""]
    if quantized:
        lines += [
            "    # The frozen weights have 4 bits when the model is loaded so (pip install bitsandbytes):",
            "    #     from_pretrained(..., quantization_config=BitsAndBytesConfig(load_in_4bit=True))",
        ]
    lines += [
        "    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]",
        "    # All linear layers but the last, which makes the output.",
        f"    config = peft.LoraConfig(r={rank}, lora_alpha={rank}, target_modules=linear[:-1])",
        "    model = peft.get_peft_model(model, config)",
    ]
    return [*lines, *_ONLY_TRAINED]


def shard(settings: Settings, device_type: str) -> list[str]:
    """Lines that shard parameters, gradients and optimizer state (FSDP2)."""
    options = ", offload_policy=CPUOffloadPolicy()" if settings.shard_offload else ""
    return [
        f'    mesh = init_device_mesh("{device_type}", ({settings.num_devices},))',
        "    names = {parameter: name for name, parameter in model.named_parameters()}",
        "    sharded = set()",
        "    lists = [m for m in model.modules() if isinstance(m, (torch.nn.ModuleList, torch.nn.Sequential))]",
        "    for block in (block for blocks in lists for block in blocks):",
        "        if block not in sharded and any(True for _ in block.parameters()):",
        "            sharded.update(block.modules())",
        f"            fully_shard(block, mesh=mesh{options})",
        f"    fully_shard(model, mesh=mesh{options})",
        "    # The optimizer works on the shards from here on; it must not have taken a step yet.",
        "    shards = dict(model.named_parameters())",
        "    for group in optimizer.param_groups:",
        '        group["params"] = [shards[names[parameter]] for parameter in group["params"]]',
    ]


_KERAS_TENSORFLOW = '''\
class MicroBatched(keras.Model):
    """Gradients of each part with its share of the batch, one update; samples have no weights."""

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        size = tf.shape(keras.tree.flatten(y)[0])[0]

        def add(start, loss, *total):
            x_part, y_part = keras.tree.map_structure(lambda array: array[start : start + PART], (x, y))
            count = tf.shape(keras.tree.flatten(y_part)[0])[0]
            with tf.GradientTape() as tape:
                y_pred = self(x_part, training=True)
                share = tf.cast(count, "float32") / tf.cast(size, "float32")
                value = share * self.compute_loss(x=x_part, y=y_part, y_pred=y_pred)
            gradients = tape.gradient(value, self.trainable_variables)
            return start + PART, loss + value, *(a + b for a, b in zip(total, gradients))

        zeros = [tf.zeros_like(variable) for variable in self.trainable_variables]
        _, loss, *total = tf.while_loop(
            lambda start, *_: start < size, add, [0, 0.0, *zeros], parallel_iterations=1
        )
        self.optimizer.apply(total, self.trainable_variables)
        return {"loss": loss}'''

_KERAS_TORCH = '''\
class MicroBatched(keras.Model):
    """Gradients of each part with its share of the batch, one update; samples have no weights."""

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        self.zero_grad()
        loss, size = 0.0, len(keras.tree.flatten(y)[0])
        for start in range(0, size, PART):
            x_part, y_part = keras.tree.map_structure(lambda array: array[start : start + PART], (x, y))
            y_pred = self(x_part, training=True)
            share = min(PART, size - start) / size
            value = self.compute_loss(x=x_part, y=y_part, y_pred=y_pred) * share
            value.backward()
            loss = loss + value.detach()
        gradients = [variable.value.grad for variable in self.trainable_weights]
        with torch.no_grad():
            self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss}'''

_KERAS_JAX = '''\
class MicroBatched(keras.Model):
    """Gradients of equal parts, one update; batches have a multiple of PART samples, without weights.

    State of layers, such as seeds of dropout, is taken from the last part.
    """

    def train_step(self, state, data):
        trained, other, optimizer_state, metrics = state
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        count = jax.tree.leaves(y)[0].shape[0] // PART
        gradient = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)

        def add(carry, part):
            total, other = carry
            (value, (_, _, other, *_)), gradients = gradient(
                trained, other, metrics, *part, None, training=True, optimizer_variables=optimizer_state
            )
            return (jax.tree.map(jnp.add, total, gradients), other), value

        parts = jax.tree.map(lambda array: array.reshape(count, PART, *array.shape[1:]), (x, y))
        zeros = [jnp.zeros_like(variable) for variable in trained]
        (total, other), values = jax.lax.scan(add, (zeros, other), parts)
        total = [gradient / count for gradient in total]
        trained, optimizer_state = self.optimizer.stateless_apply(optimizer_state, total, trained)
        return {"loss": values.mean()}, (trained, other, optimizer_state, metrics)'''

KERAS_STEPS = {
    "tensorflow": (("import tensorflow as tf",), _KERAS_TENSORFLOW),
    "torch": (("import torch",), _KERAS_TORCH),
    "jax": (("import jax", "import jax.numpy as jnp"), _KERAS_JAX),
}
"""By backend: imports, and the class of a model that trains on parts of its batches."""

JAX_WHOLE = """\
def gradients(params, batch):
    return jax.value_and_grad(loss)(params, batch)"""

JAX_IN_PARTS = '''\
def gradients(params, batch):
    """Sums over parts of PART samples, then over what is left; the loss is a mean over samples."""
    size = jax.tree.leaves(batch)[0].shape[0]

    def add(total, start, length):
        part = jax.tree.map(lambda array: jax.lax.dynamic_slice_in_dim(array, start, length), batch)
        new = jax.value_and_grad(loss)(params, part)
        return jax.tree.map(lambda a, b: a + b * (length / size), total, new)

    shapes = jax.eval_shape(jax.value_and_grad(loss), params, batch)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    starts = jnp.arange(size // PART) * PART
    total, _ = jax.lax.scan(lambda total, start: (add(total, start, PART), None), zeros, starts)
    return add(total, size - size % PART, size % PART) if size % PART else total'''

JAX_NARROW = '''\
def loss(params, batch):
    """The loss in bfloat16, of parameters that stay in float32."""
    narrow = lambda leaf: leaf.astype(jnp.bfloat16) if leaf.dtype == jnp.float32 else leaf
    params, batch = jax.tree.map(narrow, (params, batch))
    return own_loss(params, batch).astype(jnp.float32)'''

JAX_STEP = """
def step(params, state, batch):
    value, found = gradients(params, batch)
    changes, state = optimizer.update(found, state, params)
    return optax.apply_updates(params, changes), state, value"""
