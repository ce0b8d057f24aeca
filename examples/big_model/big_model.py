"""A language model of 8 billion parameters, from its configuration alone: `python examples/big_model/big_model.py`."""

import resource
from pathlib import Path

import memfit

CONFIG = Path(__file__).with_name("config.json")


def main():
    for device in ("h100", "h200"):
        for optimizer in ("adamw", "sgd"):
            job = memfit.named_job(f"hf:{CONFIG}", optimizer=optimizer, sequence_length=2048)
            estimate = memfit.estimate(job, device=device, precision="bf16", batch_size=1)
            print(
                f"{estimate.device.title:<22}{optimizer:<7}{estimate.peak_bytes / 2**30:6.1f} GiB needed, "
                f"{estimate.capacity_bytes / 2**30:.1f} usable: {'fits' if estimate.fits else 'does not fit'}"
            )
    billions = estimate.num_parameters / 1e9
    # ru_maxrss is in KiB on Linux.
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{billions:.1f} billion parameters, 2048 tokens; this process used {used:.1f} GiB of host memory.")


if __name__ == "__main__":
    main()
