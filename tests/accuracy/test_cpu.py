"""Predicted against measured peaks on the CPU, a sample of the zoo; `python -m benchmarks.cpu_accuracy` scores all."""

import importlib.util

import pytest

MISSING = [name for name in ("torch", "timm", "torchvision", "transformers") if importlib.util.find_spec(name) is None]
if MISSING:
    pytest.skip(f"not installed: {', '.join(MISSING)}", allow_module_level=True)

from benchmarks.cpu_accuracy import LIMIT, Measured, error, read_measured  # noqa: E402

# One or two optimizers of each kind of model: SGD peaks in the backward pass, Adam may peak in the optimizer.
SAMPLE = (
    ("unet", "sgd"),
    ("diffusion_unet", "adam"),
    ("autoencoder", "sgd"),
    ("vae", "sgd"),
    ("bert_eager_masked", "adamw"),
    ("gpt2", "sgd"),
    ("llama", "adam"),
    ("wav2vec2", "sgd"),
    ("resnet18", "sgd"),
    ("resnet18", "adamw"),
    ("mobilenet_v3_large", "adam"),
    ("squeezenet", "sgd"),
    ("r3d", "sgd"),
    ("checkpointed_decoder", "adam"),
    ("resnet18_channels_last", "sgd"),
    ("mobilenet_channels_last", "adam"),
    ("gan", "sgd"),
    ("lstm_language_model", "sgd"),
    ("gru_classifier", "adam"),
    ("ctc_speech", "sgd"),
    ("tcn", "sgd"),
    ("graph_attention", "adam"),
    ("dlrm_sparse", "sgd"),
    ("tabular_mlp", "adamw"),
)
MEASURED = {(row.case, row.optimizer): row for row in read_measured()}


def row_of(case: str, optimizer: str) -> Measured:
    row = MEASURED[case, optimizer]
    difference = row.difference_here()
    if difference is not None:
        pytest.skip(difference)
    return row


@pytest.mark.parametrize(("case", "optimizer"), SAMPLE)
def test_peaks_are_within_three_percent(case, optimizer):
    assert abs(error(row_of(case, optimizer))) <= LIMIT


def test_shapes_that_depend_on_data_give_an_upper_bound():
    assert error(row_of("moe_dynamic", "sgd")) >= 0


def test_a_measurement_of_another_machine_is_not_compared():
    row = MEASURED[SAMPLE[0]]

    assert Measured(row.case, row.optimizer, row.peak_bytes, row.torch, "AVX1024").difference_here() is not None
    assert Measured(row.case, row.optimizer, row.peak_bytes, "0.4.1", row.cpu_capability).difference_here() is not None
