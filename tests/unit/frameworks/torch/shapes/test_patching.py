from memfit.core.patching import replaced
from memfit.frameworks.torch import internals
from memfit.frameworks.torch.shapes.patching import in_extension


def test_functions_of_the_extension_are_there_while_it_lasts():
    with replaced(in_extension({"_cuda_of_a_test": lambda: "stand-in"})):
        assert internals.extension._cuda_of_a_test() == "stand-in"

    assert not hasattr(internals.extension, "_cuda_of_a_test")
