"""Text classification with a Transformer block, Keras on PyTorch, with layers of one's own."""

import argparse
import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
from keras import layers, ops

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--maxlen", type=int, default=32)
parser.add_argument("--vocab-size", type=int, default=500)
parser.add_argument("--embed-dim", type=int, default=32)
parser.add_argument("--num-heads", type=int, default=2)
parser.add_argument("--ff-dim", type=int, default=32)
parser.add_argument("--blocks", type=int, default=1)
parser.add_argument("--samples", type=int, default=32)
parser.add_argument("--epochs", type=int, default=1)


class TransformerBlock(layers.Layer):
    def __init__(self, embed_dim, num_heads, ff_dim, rate=0.1):
        super().__init__()
        self.att = layers.MultiHeadAttention(num_heads=num_heads, key_dim=embed_dim // num_heads)
        self.ffn = keras.Sequential([layers.Dense(ff_dim, activation="relu"), layers.Dense(embed_dim)])
        self.layernorm1 = layers.LayerNormalization(epsilon=1e-6)
        self.layernorm2 = layers.LayerNormalization(epsilon=1e-6)
        self.dropout1 = layers.Dropout(rate)
        self.dropout2 = layers.Dropout(rate)

    def call(self, inputs, training=None):
        attn_output = self.dropout1(self.att(inputs, inputs), training=training)
        out1 = self.layernorm1(inputs + attn_output)
        ffn_output = self.dropout2(self.ffn(out1), training=training)
        return self.layernorm2(out1 + ffn_output)


class TokenAndPositionEmbedding(layers.Layer):
    def __init__(self, maxlen, vocab_size, embed_dim):
        super().__init__()
        self.token_emb = layers.Embedding(input_dim=vocab_size, output_dim=embed_dim)
        self.pos_emb = layers.Embedding(input_dim=maxlen, output_dim=embed_dim)

    def call(self, x):
        positions = ops.arange(start=0, stop=ops.shape(x)[-1], step=1)
        return self.token_emb(x) + self.pos_emb(positions)


def build_model(args):
    inputs = layers.Input(shape=(args.maxlen,), dtype="int32")
    x = TokenAndPositionEmbedding(args.maxlen, args.vocab_size, args.embed_dim)(inputs)
    for _ in range(args.blocks):
        x = TransformerBlock(args.embed_dim, args.num_heads, args.ff_dim)(x)
    x = layers.GlobalAveragePooling1D()(x)
    x = layers.Dropout(0.1)(x)
    x = layers.Dense(20, activation="relu")(x)
    outputs = layers.Dense(2, activation="softmax")(x)
    return keras.Model(inputs=inputs, outputs=outputs)


def main():
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    lengths = rng.integers(args.maxlen // 2, args.maxlen, size=args.samples)
    sequences = [rng.integers(1, args.vocab_size, size=n).tolist() for n in lengths]
    x = keras.utils.pad_sequences(sequences, maxlen=args.maxlen)
    y = rng.integers(2, size=args.samples)
    split = 3 * args.samples // 4

    model = build_model(args)
    model.compile(
        optimizer=keras.optimizers.AdamW(1e-3, clipnorm=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    model.fit(
        x[:split], y[:split], batch_size=args.batch_size, epochs=args.epochs, validation_data=(x[split:], y[split:])
    )
    model.save_weights("classifier.weights.h5")
    print(dict(zip(model.metrics_names, model.evaluate(x[split:], y[split:], verbose=0), strict=False)))


if __name__ == "__main__":
    main()
