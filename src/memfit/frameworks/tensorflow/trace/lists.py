"""Lists of tensors, in which loops keep what the backward pass needs (`tensorflow/core/kernels/list_kernels.h`).

A list is a small object that shares its elements: a copy of it costs nothing but users of them. An element that was
never set takes nothing; sums take the other one's element in its place.
"""

from typing import final

from memfit.frameworks.tensorflow.trace.memory import Buffer, Memory, Node, Shape, Tensor

_ARITHMETIC = frozenset({"ZerosLike", "AddN", "AddV2", "Add"})


@final
class Lists:
    """Runs the operators of lists."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def outputs(self, number: int, node: Node, inputs: list[Tensor]) -> list[Tensor | None] | None:
        """What an operator makes; None if it has nothing to do with lists."""
        op = node.op
        if op.startswith("TensorListConcat"):
            return self._joined(number, node, inputs)
        if op == "TensorListPopBack":
            return self._popped(number, node, inputs)
        if op in ("EmptyTensorList", "TensorListReserve"):
            is_sized = op == "TensorListReserve" and inputs[1].value is not None
            return [self._list(number, [Tensor(None, (), 0) for _ in range(int(inputs[1].value) if is_sized else 0)])]
        if op == "TensorListFromTensor":
            # Each element is a copy, aligned or not.
            shape = inputs[0].shape
            count = shape[0] if shape else 0
            parts = [self._memory.make(shape[1:], inputs[0].item_bytes, number) for _ in range(count)]
            return [self._list(number, parts)]
        if op in ("TensorListPushBack", "TensorListSetItem"):
            return [self._changed(number, node, inputs)]
        if op.startswith("TensorList"):
            return [self._read(number, node, inputs)]
        source = inputs[0].buffer if op in _ARITHMETIC and inputs else None
        if source is None or source.items is None:
            return None
        if op != "ZerosLike":
            return [self._sum(number, inputs)]
        zeros = [
            item if item.buffer is None else self._memory.make(item.shape, item.item_bytes, number)
            for item in source.items
        ]
        return [self._list(number, zeros)]

    def _list(self, number: int, items: list[Tensor]) -> Tensor:
        made = Buffer(0, number, self._memory.tick)
        made.items = items
        return Tensor(made, (), 0)

    def _own(self, source: Buffer | None, number: int) -> Buffer:
        """A list that may be changed: the given one if nobody else holds it, else a copy with the same elements."""
        if source is not None and source.refs == 1:
            source.refs += 1
            return source
        made = Buffer(0, number, self._memory.tick)
        made.items = [] if source is None or source.items is None else list(source.items)
        for item in made.items:
            if item.buffer is not None:
                item.buffer.refs += 1
        return made

    def _changed(self, number: int, node: Node, inputs: list[Tensor]) -> Tensor:
        made = self._own(inputs[0].buffer, number)
        assert made.items is not None
        pushed = node.op == "TensorListPushBack"
        element = inputs[1] if pushed else inputs[2]
        kept = self._memory.same(element, element.shape)
        place = None if pushed or inputs[1].value is None else int(inputs[1].value)
        if place is None or not 0 <= place < len(made.items):
            made.items.append(kept)
        else:
            self._memory.release(made.items[place].buffer)
            made.items[place] = kept
        return Tensor(made, (), 0)

    def _popped(self, number: int, node: Node, inputs: list[Tensor]) -> list[Tensor | None]:
        """The list without its last element, and that."""
        made = self._own(inputs[0].buffer, number)
        assert made.items is not None
        last = made.items.pop() if made.items else Tensor(None, (), 0)
        if last.buffer is None:
            last = self._memory.make(node.shapes[1] or (), node.item_bytes[1], number)
        return [Tensor(made, (), node.item_bytes[0]), last]

    def _sum(self, number: int, inputs: list[Tensor]) -> Tensor:
        """Element by element; where only one of two is set, it is the sum."""
        first, *others = (tensor.buffer.items or [] for tensor in inputs if tensor.buffer is not None)
        total = [self._memory.same(item, item.shape) for item in first]
        for items in others:
            for place, (one, other) in enumerate(zip(total, items, strict=False)):
                if other.buffer is None:
                    continue
                if one.buffer is None:
                    total[place] = self._memory.same(other, other.shape)
                else:
                    total[place] = self._memory.make(one.shape, one.item_bytes, number)
                    self._memory.release(one.buffer)
        return self._list(number, total)

    def _joined(self, number: int, node: Node, inputs: list[Tensor]) -> list[Tensor | None]:
        """All elements end to end, and how long each was."""
        items = _items(inputs)
        shape = node.shapes[0]
        if shape is None:
            rows = sum(item.shape[0] for item in items if item.shape)
            shape = (rows, *_element(items)[1:])
        lengths = self._memory.make((len(items),), node.item_bytes[1], number) if len(node.item_bytes) > 1 else None
        return [self._memory.make(shape, node.item_bytes[0], number), lengths]

    def _read(self, number: int, node: Node, inputs: list[Tensor]) -> Tensor:
        items = _items(inputs)
        item_bytes = node.item_bytes[0] if node.item_bytes else 0
        known = node.shapes[0] if node.shapes else None
        if node.op == "TensorListLength":
            made = self._memory.make((), 4, number)
            made.value = len(items)
            return made
        if node.op == "TensorListGetItem":
            place = None if inputs[1].value is None else int(inputs[1].value)
            if place is not None and 0 <= place < len(items) and items[place].buffer is not None:
                return self._memory.same(items[place], items[place].shape)
            known = _element(items) if known is None else known
        elif node.op == "TensorListStack" and known is None:
            known = (len(items), *_element(items))
        return self._memory.make(() if known is None else known, item_bytes, number)


def _items(inputs: list[Tensor]) -> list[Tensor]:
    source = inputs[0].buffer if inputs else None
    return [] if source is None or source.items is None else source.items


def _element(items: list[Tensor]) -> Shape:
    """The shape of the first element that is set."""
    return next((item.shape for item in items if item.buffer is not None), ())
