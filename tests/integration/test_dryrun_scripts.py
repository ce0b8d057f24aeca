"""Unmodified training scripts of many styles, each dry-run by the real command in a process of its own.

`scripts/` holds the scripts; they never mention memfit and run for real on any machine. Where `scripts/jobs.py` has the
same step as a job, the peak of the dry run must be that of the estimate.
"""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.integration.scripts.jobs import PAIRS

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
DEVICE = "a100-40gb"
TOLERANCE = 0.01
CHECKPOINTS = {".pt", ".pth", ".tar", ".ckpt", ".safetensors", ".h5", ".keras"}

# One of each style that the documentation names; the rest of the zoo is for `make soak`.
QUICK_PAIRS = {
    "imagenet_classic",
    "gpt_trainer",
    "dcgan",
    "dqn",
    "hf_trainer_gpt2",
    "hf_no_trainer_accelerate",
    "lightning_module",
    "keras_torch",
    "ddp",
    "fsdp2",
}


@dataclass(frozen=True)
class Case:
    """A run of a script and how it is to end.

    Args:
        name: of the test.
        script: its path below `scripts/`.
        arguments: what it is given.
        outcome: how the run ends.
        num_steps: steps it takes.
        exit_code: of the command.
        steps: steps asked for.
        count: devices.
        device: simulated.
        says: part of the error or of what is printed.
        environment: variables that are set for it.
        slow: left to `make soak`.
    """

    name: str
    script: str
    arguments: str = ""
    outcome: str = "completed"
    num_steps: int = 3
    exit_code: int = 0
    steps: int = 3
    count: int = 1
    device: str = DEVICE
    says: str = ""
    environment: dict[str, str] = field(default_factory=dict, hash=False)
    slow: bool = True


@dataclass(frozen=True)
class Done:
    """A finished run: the command's exit code, its answer, what it printed, and the folder it ran in."""

    exit_code: int
    answer: dict
    printed: str
    folder: Path


def quick(*args, **options):
    return Case(*args, **options, slow=False)


# Their peaks are data-dependent or have no counterpart in a job: that they run is what counts.
STYLES = [
    Case("diffusion", "diffusion.py"),
    Case("moe", "moe.py"),
    quick("detection", "detection.py", "--images 16"),
    Case("simclr", "simclr.py", "--fp16-precision"),
    Case("rnn_ctc", "rnn_ctc.py"),
    Case("siamese_hard", "siamese_hard_mining.py", "--mining hard"),
    Case("siamese_semihard", "siamese_hard_mining.py"),
    Case("graph_network", "graph_network.py"),
    Case("maml", "maml.py"),
    Case("custom_function", "checkpointed_custom_function.py"),
    Case("custom_function_reentrant", "checkpointed_custom_function.py", "--reentrant"),
    Case("style_transfer_lbfgs", "style_transfer_lbfgs.py", "--num-steps 100"),
    Case("distillation", "distillation.py"),
    Case("lora_finetune", "lora_finetune.py"),
    quick("flex_attention", "modern_attention.py", "--compile --selective"),
    quick("triton_and_compile", "triton_and_compile.py"),
    Case("triton_after_compile", "triton_and_compile.py", "--compile-first"),
    Case("flex_attention_uncompiled", "modern_attention.py"),
    Case("nested_sequences", "modern_attention.py", "--attention jagged"),
    Case("packed_sequences", "modern_attention.py", "--attention varlen --selective"),
    quick("qlora", "qlora_peft.py", "--checkpointing"),
    Case("qlora_8bit", "qlora_peft.py", "--bits 8 --optimizer AdamW8bit"),
    Case("qlora_dora", "qlora_peft.py", "--dora --optimizer PagedAdamW32bit"),
    Case("default_device", "default_device.py"),
    Case("stream_prefetcher", "stream_prefetcher.py"),
    Case("thread_prefetcher", "stream_prefetcher.py", "--mode thread"),
    # Five steps of the critic for one of the generator; all optimizers must have taken three.
    Case("wgan_gp_amp", "wgan_gp_amp.py", "--images 96", num_steps=11),
    Case("gpt_compiled", "gpt_trainer.py", "--compile --no-flash --dropout 0.1 --dtype float16"),
    Case("timm_mixup", "timm_train.py", "--mixup 0.8 --cutmix 1.0 --reprob 0.3 --no-prefetcher --train-size 48"),
    Case("imagenet_data_parallel", "imagenet_classic.py", "--data-parallel"),
    Case("mnist", "mnist.py"),
    Case("actor_critic", "actor_critic.py"),
    Case("super_resolution", "super_resolution.py"),
    Case("time_sequence", "time_sequence.py", "--steps 4"),
    Case("graph_attention", "graph_attention.py"),
    Case("graph_attention_sparse", "graph_attention.py", "--sparse"),
    Case("fast_neural_style", "fast_neural_style.py"),
    Case("torchvision_references", "torchvision_references.py", "--amp"),
    Case("keras_mixed", "keras_torch.py", "--mixed --samples 64"),
]

# To their own end: evaluation, sampling, saving and loading again run too.
WHOLE = [
    quick("imagenet_whole", "imagenet_classic.py", "--gpu 0", "ended", 3, steps=99),
    Case("mnist_whole", "mnist.py", "--save-model", "ended", 4, steps=99),
    Case("super_resolution_whole", "super_resolution.py", "", "ended", 4, steps=99),
    Case("fast_neural_style_whole", "fast_neural_style.py", "", "ended", 4, steps=99),
    Case("gpt_whole", "gpt_trainer.py", "--sample 3", "ended", 3, steps=99),
    Case("vae_whole", "vae.py", "", "ended", 4, steps=99),
    Case("word_language_model_whole", "word_language_model.py", "", "ended", 4, steps=99),
    Case("dqn_whole", "dqn.py", "", "ended", 9, steps=99),
    Case("ppo_whole", "ppo.py", "", "ended", 16, steps=99),
    Case("seq2seq_whole", "seq2seq_transformer.py", "", "ended", 4, steps=99),
    Case("unet_whole", "unet_segmentation.py", "--amp --bilinear", "ended", 4, steps=99),
    Case("detection_whole", "detection.py", "", "ended", 4, steps=99),
    Case("timm_whole", "timm_train.py", "--amp --model-ema --channels-last", "ended", 4, steps=99),
    Case("hf_trainer_whole", "hf_trainer.py", "--fp16", "ended", 4, steps=99),
    Case("accelerate_whole", "hf_no_trainer_accelerate.py", "--mixed-precision bf16", "ended", 2, steps=99),
    Case("lightning_whole", "lightning_module.py", "--precision 16-mixed", "ended", 4, steps=99),
    Case("keras_whole", "keras_transformer_torch.py", "", "ended", 3, steps=99),
    Case("ddp_whole", "ddp.py", "--sync-bn", "ended", 4, steps=99, count=2),
    Case("fsdp2_whole", "fsdp2.py", "--mixed-precision", "ended", 3, steps=99, count=2),
]

BAD = [
    Case("exits_early", "bad/exits_early.py", "", "no step", 0, 5, says="run prepare.py first"),
    quick("raises", "bad/raises.py", "", "failed", 0, 4, says="raises.py:18"),
    quick("no_step", "bad/no_step.py", "", "no step", 0, 5, says="24 predictions"),
    Case("needs_two_devices", "bad/needs_two_devices.py", "", "failed", 0, 4, says="--count 2"),
    quick("custom_operator", "bad/custom_operator.py", "", "failed", 0, 4, says="fused_gate"),
    Case("spawns_process", "bad/spawns.py"),
    Case("spawns_subprocess", "bad/spawns.py", "--how subprocess"),
    quick(
        "out_of_memory",
        "imagenet_classic.py",
        "-a resnet18 --image-size 224 --batch-size 32 --train-size 64 --workers 0",
        "out of memory",
        0,
        3,
        device="512MiB",
        says="CUDA out of memory",
    ),
    quick(
        "out_of_memory_handled",
        "bad/oom_handled.py",
        "--batch-size 512 --image-size 128",
        device="2GiB",
        says="retrying with batch size 128",
    ),
    Case(
        "out_of_memory_handled_by_text",
        "bad/oom_handled.py",
        "--batch-size 512 --image-size 128 --by-text",
        device="2GiB",
        says="retrying with batch size 128",
    ),
]

# Two devices and eight share the same parameters.
SHARDED = [
    Case(f"fsdp2_on_{count}", "fsdp2.py", "--dim 512 --n-heads 8 --n-layers 4 --batch-size 1", count=count)
    for count in (2, 8)
]

PAIRED = [
    Case(name, pair.script, " ".join(pair.arguments), count=pair.count, slow=name not in QUICK_PAIRS)
    for name, pair in PAIRS.items()
]


def parameters(cases):
    return [pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.slow else []) for case in cases]


def environment(**variables):
    # Its own caches, so that neither a user's settings nor an earlier run matter.
    plain = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "KERAS_BACKEND")}
    return {**plain, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), **variables}


def command(case):
    options = ["--device", case.device, "--steps", str(case.steps), "--count", str(case.count), "--json"]
    return [sys.executable, "-m", "memfit", "dryrun", *options, str(SCRIPTS / case.script), *case.arguments.split()]


def dry_run(case, folder):
    done = subprocess.run(
        command(case),
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment(**case.environment),
        stdin=subprocess.DEVNULL,
        timeout=300,
    )
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        answer = {}
    # The timeline is not looked at here and may be large.
    (answer.get("estimate") or {}).pop("timeline", None)
    return Done(done.returncode, answer, done.stderr, folder)


def estimates(names):
    """What `memfit.estimate` says of these jobs, in a process that may load every framework."""
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "jobs.py"), *names], capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    return {line["name"]: line for line in lines}


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """A function that gives the finished run of a case. All that were selected run two at a time, from the start."""
    wanted = set()
    for item in request.session.items:
        if item.path == request.path and "case" in getattr(getattr(item, "callspec", None), "params", {}):
            case = item.callspec.params["case"]
            wanted |= set(case) if isinstance(case, list) else {case}
    with ThreadPoolExecutor(2) as pool:
        futures = {
            case: pool.submit(dry_run, case, tmp_path_factory.mktemp(case.name))
            for case in [*PAIRED, *STYLES, *WHOLE, *BAD, *SHARDED]
            if case in wanted
        }
        yield lambda case: futures[case].result()
        for future in futures.values():
            future.cancel()


@pytest.fixture(scope="module")
def estimated(request):
    """The estimates of all jobs that were selected."""
    items = (item for item in request.session.items if item.path == request.path)
    cases = [item.callspec.params["case"] for item in items if item.originalname == "test_peak_is_that_of_the_estimate"]
    return estimates([case.name for case in cases])


def check_end(case, done):
    assert done.answer, done.printed[-2000:]
    shown = f"{done.answer['error']}\n{done.printed[-2000:]}"
    assert done.answer["outcome"] == case.outcome, shown
    assert done.answer["num_steps"] == case.num_steps, shown
    assert done.exit_code == case.exit_code == done.answer["exit_code_of_command"], shown
    assert case.says in done.printed + done.answer["error"], shown


@pytest.mark.parametrize("case", parameters(PAIRED))
def test_peak_is_that_of_the_estimate(case, runs, estimated):
    # GIVEN a script, and its step as a job

    # WHEN the script is dry-run
    done = runs(case)

    # THEN it takes its steps, and its peak is that of the job
    check_end(case, done)
    expected = estimated[case.name]["allocated_peak_bytes"]
    assert done.answer["estimate"]["allocated_peak_bytes"] == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize("case", parameters(STYLES))
def test_takes_its_steps(case, runs):
    done = runs(case)

    check_end(case, done)
    assert done.answer["fits"] is True
    assert done.answer["estimate"]["allocated_peak_bytes"] > 0


@pytest.mark.parametrize("case", parameters([case for case in STYLES if case.script == "triton_and_compile.py"]))
def test_kernels_of_triton_and_of_the_compiler_go_together(case, runs):
    done = runs(case)

    assert "running it once more" not in done.printed
    assert "not-compiled" not in {note["code"] for note in done.answer["estimate"]["notes"]}


@pytest.mark.parametrize("case", parameters(WHOLE))
def test_runs_to_its_own_end(case, runs):
    # GIVEN a script that takes fewer steps than are asked for

    # WHEN it is dry-run
    done = runs(case)

    # THEN all of it ran, and the checkpoints it wrote are not where the user's are
    check_end(case, done)
    written = [path.name for path in done.folder.rglob("*") if path.suffix in CHECKPOINTS]
    assert written == []


@pytest.mark.parametrize("case", parameters(BAD))
def test_a_run_that_goes_wrong_says_so(case, runs):
    check_end(case, runs(case))


@pytest.mark.slow
@pytest.mark.parametrize("case", parameters([case for case in BAD if case.name == "out_of_memory"]))
def test_stops_at_the_same_operation_every_time(case, runs, tmp_path):
    # GIVEN a script that ran on a device that is too small
    first = runs(case)

    # WHEN it does so again
    second = dry_run(case, tmp_path)

    # THEN it stops at the same operation
    assert first.answer["failures"] == second.answer["failures"] != []


@pytest.mark.slow
@pytest.mark.parametrize("case", [SHARDED])
def test_more_devices_hold_less_each(case, runs):
    # GIVEN a sharded model, small activations

    # WHEN it is dry-run on two devices and on eight
    on_two, on_eight = (runs(part).answer["estimate"]["allocated_peak_bytes"] for part in case)

    # THEN a device of eight needs much less
    assert on_eight < 0.75 * on_two


@pytest.mark.slow
def test_an_endless_script_can_be_interrupted(tmp_path):
    # GIVEN a script that never takes a step and never ends
    case = Case("endless", "bad/endless.py")
    with subprocess.Popen(
        command(case), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment()
    ) as process:
        line = process.stderr.readline()
        while line and "turn 100" not in line:
            line = process.stderr.readline()

        # WHEN it is interrupted
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=120)

    # THEN the command says what it knows by then
    assert process.returncode == 130
    assert json.loads(printed)["outcome"] == "interrupted"


@pytest.mark.slow
def test_a_cuda_extension_is_named(tmp_path):
    # GIVEN a script that compiles a CUDA kernel of its own, on a machine without a compiler for it
    case = Case(
        "cuda_extension",
        "bad/cuda_extension.py",
        environment={"CUDA_HOME": str(tmp_path / "none"), "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")},
    )

    # WHEN it is dry-run
    done = dry_run(case, tmp_path)

    # THEN it fails and the message names the extension
    assert (done.exit_code, done.answer["outcome"]) == (4, "failed")
    assert "scale_extension" in done.answer["error"]
