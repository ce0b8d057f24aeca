import keras
import numpy as np
import pytest
from keras import layers

from memfit.core.errors import BadModel
from memfit.frameworks.keras.apply.units import recorded, units


def paths(model, inputs=None):
    return [unit.path for unit in units(model, inputs)]


def convolved(x, width, name):
    x = layers.Conv2D(width, 3, padding="same", name=f"{name}_conv")(x)
    x = layers.BatchNormalization(name=f"{name}_norm")(x)
    return layers.ReLU(name=f"{name}_relu")(x)


def test_blocks_of_a_residual_network():
    found = units(keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3), classes=10))
    assert len(found) == 17
    assert found[1].path == "conv2_block1_1_conv:conv2_block1_out"
    assert all(unit.kept_bytes > 0 for unit in found)
    # 4.1e9 multiplications and additions for 224x224, each counted as two operations.
    assert sum(unit.work for unit in found) * (224 / 64) ** 2 == pytest.approx(7.7e9, rel=0.1)


@pytest.mark.parametrize(
    ("name", "some", "number"),
    [
        pytest.param("VGG16", "block1_conv1:block1_pool", 5, marks=pytest.mark.slow),
        ("MobileNetV2", "block_2_expand:block_2_add", 19),
        pytest.param("DenseNet121", "conv2_block2_0_bn:conv2_block2_concat", 59, marks=pytest.mark.slow),
        pytest.param("EfficientNetB0", "block2b_expand_conv:block2b_add", 25, marks=pytest.mark.slow),
    ],
)
def test_applications(name, some, number):
    made = getattr(keras.applications, name)(weights=None, input_shape=(64, 64, 3), classes=10)
    found = paths(made)
    assert some in found
    assert len(found) == number


def test_levels_of_a_network_with_long_skips():
    x = inputs = layers.Input((32, 32, 3))
    skips = []
    for level in range(3):
        x = convolved(convolved(x, 8, f"down{level}a"), 8, f"down{level}b")
        skips.append(x)
        x = layers.MaxPooling2D(name=f"pool{level}")(x)
    for level in (2, 1, 0):
        x = layers.UpSampling2D(name=f"up{level}")(x)
        x = layers.Concatenate(name=f"join{level}")([x, skips[level]])
        x = convolved(convolved(x, 8, f"up{level}a"), 8, f"up{level}b")
    found = paths(keras.Model(inputs, x))
    assert len(found) > 2
    assert found[0] == "down0a_conv:down0b_relu"


def test_recurrent_layers_are_units_by_themselves_and_embeddings_are_none():
    made = [
        layers.Input((6,)),
        layers.Embedding(9, 4, mask_zero=True),
        layers.LSTM(5, return_sequences=True, name="one"),
    ]
    assert paths(keras.Sequential([*made, layers.LSTM(5, name="two"), layers.Dense(1)])) == ["one", "two"]


class Block(layers.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.up, self.down = layers.Dense(16, activation="gelu"), layers.Dense(4)

    def call(self, x):
        return x + self.down(self.up(x))


class Stack(keras.Model):
    def __init__(self):
        super().__init__()
        self.blocks = [Block(name=f"block{index}") for index in range(3)]

    def call(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_layers_of_a_model_without_a_graph():
    model, x = Stack(), np.zeros((2, 4), "float32")
    model(x)
    first, *rest = units(model, x)
    assert [first.path, *(unit.path for unit in rest)] == ["block0", "block1", "block2"]
    # What each dense layer makes, and what gelu was given.
    assert (first.kept_bytes, first.work) == (4 * (16 + 16 + 4), 2 * 2 * 4 * 16)
    with pytest.raises(BadModel, match="doesn't say what it takes, since it is no Functional or Sequential model"):
        units(model)


def test_a_model_inside_of_a_model():
    x = inputs = layers.Input((8,))
    for index in range(2):
        y = layers.Dense(32, activation="gelu", name=f"up{index}")(x)
        x = layers.Add(name=f"add{index}")([x, layers.Dense(8, name=f"down{index}")(y)])
    backbone = keras.Model(inputs, x, name="backbone")
    outer = layers.Input((8,))
    model = keras.Model(outer, layers.Dense(1, name="head")(backbone(outer)))
    assert paths(model) == ["backbone.up0:backbone.add0", "backbone.up1:backbone.add1"]


def test_parts_that_cannot_be_followed():
    class Odd(keras.Model):
        def call(self, x):
            raise RuntimeError("only with numbers")

    model = Odd(name="odd")
    with pytest.raises(BadModel, match="the parts of 'odd' can't be found"):
        units(model, np.zeros((2, 4)))


def work(*parts, shape=(6, 4)):
    model = keras.Sequential([layers.Input(shape), *parts])
    call = recorded(model, np.zeros((3, *shape), "float32"))
    one = call.calls[-1]
    return one.made_bytes, one.inner_bytes, one.flops


def test_known_kinds_of_layers():
    assert work(layers.Dense(5)) == (6 * 5 * 4, 0, 2 * 6 * 4 * 5)
    assert work(layers.Dense(5, activation="gelu")) == (6 * 5 * 4, 6 * 5 * 4, 2 * 6 * 4 * 5)
    assert work(layers.EinsumDense("abc,cd->abd", (6, 5))) == (6 * 5 * 4, 0, 2 * 6 * 4 * 5)
    assert work(layers.Conv1D(5, 3, padding="same")) == (6 * 5 * 4, 0, 2 * 6 * 5 * 3 * 4)
    assert work(layers.DepthwiseConv1D(3, padding="same")) == (6 * 4 * 4, 0, 2 * 6 * 4 * 3)
    assert work(layers.Conv1DTranspose(5, 3, padding="same")) == (6 * 5 * 4, 0, 2 * 6 * 4 * 3 * 5)
    assert work(layers.LSTM(5, return_sequences=True)) == (6 * 5 * 4, 6 * 5 * 10 * 4, 2 * 6 * 4 * 5 * 9)
    assert work(layers.Flatten()) == (0, 0, 0)
    assert work(layers.LayerNormalization()) == (6 * 4 * 4, 0, 0)


def test_attention_counts_its_scores():
    inputs = layers.Input((6, 4))
    model = keras.Model(inputs, layers.MultiHeadAttention(2, 3)(inputs, inputs))
    one = recorded(model, np.zeros((3, 6, 4), "float32")).calls[-1]
    assert one.inner_bytes == 4 * (4 * 6 * 2 * 3 + 2 * 2 * 6 * 6)
    assert one.flops == 2 * (4 * 6 * 2 * 3) * 4 + 4 * (2 * 6 * 6) * 3


def test_layers_of_layers_keep_what_these_make():
    inner = keras.Sequential([layers.Dense(5), layers.Dense(7)])
    assert work(inner) == (6 * 7 * 4, 4 * 6 * (5 + 7), 2 * 6 * (4 * 5 + 5 * 7))


def test_what_cannot_be_followed_is_none_and_layers_are_as_before():
    class Odd(keras.Model):
        def call(self, x):
            raise RuntimeError("only with numbers")

    plain = layers.Layer.__call__
    assert recorded(Odd(), np.zeros((3, 4), "float32")) is None
    assert layers.Layer.__call__ is plain
