import math

from memfit.catalogue import find_device
from memfit.timing.fitted import fitted


def test_parameters_are_physical():
    known = fitted()
    assert all(value > 0 and math.isfinite(value) for value in known.parameters.values())
    shares = ("elementwise", "batch_norm", "softmax", "convolution_forward", "convolution_memory", "product_memory")
    assert all(known.parameters[name] <= 1 for name in shares)
    launches = [value for name, value in known.parameters.items() if name.startswith("launch_")]
    assert all(1e-6 < value < 1e-4 for value in launches)


def test_devices_and_intervals_are_known():
    known = fitted()
    assert set(known.sustained) < known.devices
    assert all(find_device(name).name == name for name in known.devices)
    assert set(known.spreads) == {"training", "inference", "compiled"}
    assert all(low < 0 < high for low, high in known.spreads.values())
