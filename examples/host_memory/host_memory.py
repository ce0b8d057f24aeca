"""What feeding the GPU takes from the host: `python examples/host_memory/host_memory.py`."""

import shutil
from dataclasses import replace

import memfit

GIB = 2**30


def main():
    job = memfit.named_job("torchvision:resnet50")
    limit_bytes = memfit.find_device("cpu").usable_bytes
    shared_bytes = shutil.disk_usage("/dev/shm").total
    print(f"this machine: {limit_bytes / GIB:.1f} GiB for a process, {shared_bytes / GIB:.2f} GiB in /dev/shm")
    for num_workers, pin_memory in ((0, False), (4, False), (4, True), (32, True)):
        loading = replace(job, num_workers=num_workers, prefetch_factor=2, pin_memory=pin_memory)
        host = memfit.estimate(loading, device="a100", batch_size=256).host
        verdict = "fits" if host.total_bytes <= limit_bytes else "does not fit here"
        pinned = ", pinned" if pin_memory else ""
        print(f"{num_workers} workers{pinned}: {host.total_bytes / GIB:.2f} GiB, {verdict}")
        for part, size_bytes in host.parts.items():
            print(f"    {part:<62}{size_bytes / GIB:6.2f} GiB")


if __name__ == "__main__":
    main()
