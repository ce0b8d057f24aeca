"""The scripts' training steps as jobs: what a dry run sees is compared with an estimate of the same step.

Each function takes a script's module and its parsed arguments and gives the job; its decorator names the script and
arguments to pair it with. Models and losses are the scripts' own. A job repeats what of a script's loop decides the
peak: tensors that outlive their step (`Kept`), gradients that are dropped only after the forward pass (`zeroed_late`).
What is left out, and how much that is, a comment says.
"""

import argparse
import gc
import importlib.util
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import memfit
from memfit import Job
from memfit.api.jobs import mend_torchvision

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Pair:
    """A script with arguments, and the job that is to have the same peak."""

    script: str
    arguments: tuple[str, ...]
    make: Callable[[ModuleType, argparse.Namespace], Job]
    count: int = 1

    def job(self) -> Job:
        script = load(self.script)
        parser = script.get_parser() if hasattr(script, "get_parser") else script.parser
        return self.make(script, parser.parse_args(list(self.arguments)))


PAIRS: dict[str, Pair] = {}


def paired(script: str, arguments: str, count: int = 1):
    """Registers the job that a function makes, under the function's name."""

    def register(make):
        PAIRS[make.__name__] = Pair(script, tuple(shlex.split(arguments)), make, count)
        return make

    return register


def load(script: str) -> ModuleType:
    """The script's module, as an import and not as a program."""
    mend_torchvision()
    name = f"zoo_{Path(script).stem}"
    if name not in sys.modules:
        specification = importlib.util.spec_from_file_location(name, FOLDER / script)
        sys.modules[name] = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(sys.modules[name])
    return sys.modules[name]


Kept = SimpleNamespace
"""Variables of a script's loop that hold their tensors until the next step assigns them anew."""


class LateZero:
    """Keeps the last step's gradients alive until `release`, as a loop does that calls zero_grad() only then."""

    def __init__(self) -> None:
        self._first: torch.Tensor | None = None
        self._gradients: list[torch.Tensor | None] = []

    def watch(self, model: nn.Module) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]
        if self._first is not parameters[0]:
            # The estimate gives the model new parameters for each of its traces.
            self._first, self._gradients = parameters[0], []
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(lambda p: self._gradients.append(p.grad))

    def release(self) -> None:
        self._gradients = []


def zeroed_late(loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """`loss` in a loop that calls zero_grad() between forward and backward."""
    zero = LateZero()

    def late(model: nn.Module, batch: Any) -> Any:
        zero.watch(model)
        value = loss(model, batch)
        zero.release()
        return value

    return late


def images(batch_size: int, size: int, classes: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(batch_size, 3, size, size), torch.zeros(batch_size, dtype=torch.int64)


def tokens(batch_size: int, length: int) -> torch.Tensor:
    return torch.zeros(batch_size, length, dtype=torch.int64)


# The meters' scalars and the logits of the last step (batch x 1000 x 4 bytes, 0.1 MiB) are left out.
@paired("imagenet_classic.py", "--arch resnet50 --image-size 224 --batch-size 32 --train-size 128")
def imagenet_classic(script, args):
    def loss(model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1])

    return Job(
        lambda: script.models.resnet50(num_classes=args.num_classes),
        zeroed_late(loss),
        images(args.batch_size, args.image_size),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-4),
    )


# The batch fetched ahead (2 x batch x block x 8 bytes, 32 KiB) is left out.
@paired(
    "gpt_trainer.py",
    "--batch-size 8 --block-size 256 --vocab-size 4096 --n-layer 4 --n-head 4 --n-embd 256 --dropout 0.1 "
    "--gradient-accumulation-steps 2 --max-iters 4",
)
def gpt_trainer(script, args):
    kept = Kept(logits=None)

    def micro_step(model, batch):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            kept.logits, value = model(*batch)
            return value / args.gradient_accumulation_steps

    def loss(model, batch):
        for _ in range(args.gradient_accumulation_steps - 1):
            micro_step(model, batch).backward()
        return micro_step(model, batch)

    return Job(
        lambda: script.GPT(script.GPTConfig(**script.model_args_of(args))),
        loss,
        (tokens(args.batch_size, args.block_size), tokens(args.batch_size, args.block_size)),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, fused=True),
    )


# Both networks are updated by one Adam in the job and by one each in the script: its temporaries, of the size of the
# parameters, are far from the peak.
@paired("dcgan.py", "--batch-size 128 --ngf 64 --ndf 64 --dataset-size 512 --workers 0")
def dcgan(script, args):
    kept, generator_zero = Kept(fake=None), LateZero()

    def loss(model, real):
        generator, discriminator = model["generator"], model["discriminator"]
        generator_zero.watch(generator)
        # After the first iteration samples are drawn with their graph, which lives until the next ones replace it.
        kept.fake = generator(torch.randn(args.batch_size, args.nz, 1, 1, device=real.device))
        model.zero_grad()
        label = torch.full((args.batch_size,), 1.0, device=real.device)
        functional.binary_cross_entropy(discriminator(real), label).backward()
        kept.fake = generator(torch.randn(args.batch_size, args.nz, 1, 1, device=real.device))
        functional.binary_cross_entropy(discriminator(kept.fake.detach()), label).backward()
        generator_zero.release()
        return functional.binary_cross_entropy(discriminator(kept.fake), label)

    return Job(
        lambda: nn.ModuleDict(
            {"generator": script.Generator(args.nz, args.ngf), "discriminator": script.Discriminator(args.ndf)}
        ),
        loss,
        torch.zeros(args.batch_size, 3, 64, 64),
        optimizer=torch.optim.Adam,
    )


# One Adam for two, as above. The labels, the noise and the outputs of the discriminator are left out (1 MiB).
@paired("gan_legacy.py", "--batch-size 4096 --n-samples 16384")
def gan_legacy(script, args):
    kept = Kept(generated=None)
    shape = (args.channels, args.img_size, args.img_size)

    def loss(model, batch):
        real, noise = batch
        generator, discriminator = model["generator"], model["discriminator"]
        valid, fake = torch.ones(len(real), 1, device=real.device), torch.zeros(len(real), 1, device=real.device)
        kept.generated = generator(noise)
        functional.binary_cross_entropy(discriminator(kept.generated), valid).backward()
        discriminator.zero_grad()
        real_loss = functional.binary_cross_entropy(discriminator(real), valid)
        return (real_loss + functional.binary_cross_entropy(discriminator(kept.generated.detach()), fake)) / 2

    return Job(
        lambda: nn.ModuleDict(
            {"generator": script.Generator(args.latent_dim, shape), "discriminator": script.Discriminator(shape)}
        ),
        loss,
        (torch.zeros(args.batch_size, *shape), torch.zeros(args.batch_size, args.latent_dim)),
        optimizer=torch.optim.Adam,
    )


@paired("vae.py", "--batch-size 8192 --train-size 32768")
def vae(script, args):
    kept = Kept(outputs=None)

    def loss(model, batch):
        kept.outputs = model(batch)
        reconstruction, mu, logvar = kept.outputs
        return script.loss_function(reconstruction, batch, mu, logvar)

    return Job(
        lambda: script.VAE(args.hidden), loss, torch.zeros(args.batch_size, 1, 28, 28), optimizer=torch.optim.Adam
    )


# The whole text is on the device (rows x batch x 8 bytes, 0.1 MiB): left out.
@paired(
    "word_language_model.py",
    "--ntokens 8000 --emsize 256 --nhid 512 --bptt 35 --batch-size 64 --train-batches 4",
)
def word_language_model(script, args):
    kept = Kept(output=None, hidden=None)

    def loss(model, batch):
        data, targets, *hidden = batch
        kept.output, kept.hidden = model(data, tuple(hidden))
        return functional.nll_loss(kept.output, targets)

    state = torch.zeros(args.nlayers, args.batch_size, args.nhid)
    return Job(
        lambda: script.RNNModel(args.model, args.ntokens, args.emsize, args.nhid, args.nlayers, args.dropout),
        loss,
        (tokens(args.bptt, args.batch_size), tokens(1, args.bptt * args.batch_size)[0], state, state.clone()),
    )


# Each state is a tensor of its own in the script: 512 bytes each.
@paired("reinforce.py", "--hidden 4096 --horizon 20 --episodes 4")
def reinforce(script, args):
    def loss(model, batch):
        states, returns = batch
        log_probabilities = []
        for state in states:
            distribution = script.Categorical(model(state[None]))
            log_probabilities.append(distribution.log_prob(distribution.sample()))
        pieces = [-value * weight for value, weight in zip(log_probabilities, returns, strict=True)]
        return torch.cat(pieces).sum()

    return Job(
        lambda: script.Policy(args.hidden),
        zeroed_late(loss),
        (torch.zeros(args.horizon, script.TrackingEnv.observation_size), torch.zeros(args.horizon)),
        optimizer=torch.optim.Adam,
    )


# No episode ends at this speed, so that every next state is there. The dictionary of the target's new weights outlives
# the soft update: a third network here.
@paired("dqn.py", "--batch-size 512 --speed 1 --learning-starts 16 --total-steps 24")
def dqn(script, args):
    kept = Kept(values=None)

    def loss(model, batch):
        states, next_states, actions, rewards, mask = batch
        kept.values = model["policy"](states).gather(1, actions[:, None])
        following = torch.zeros(args.batch_size, device=states.device)
        with torch.no_grad():
            following[mask] = model["target"](next_states).max(1).values
        expected = following * args.gamma + rewards
        return functional.smooth_l1_loss(kept.values, expected[:, None])

    actions = script.CatchEnv.num_actions
    frames = torch.zeros(args.batch_size, 4, args.frame_size, args.frame_size, dtype=torch.uint8)
    return Job(
        lambda: nn.ModuleDict({name: script.DQN(args.frame_size, actions) for name in ("policy", "target", "state")}),
        zeroed_late(loss),
        (
            frames,
            frames.clone(),
            tokens(1, args.batch_size)[0],
            torch.zeros(args.batch_size),
            torch.ones(args.batch_size, dtype=torch.bool),
        ),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, amsgrad=True),
    )


# Of the rollout only the observations are counted; the seven other buffers are steps x environments x 4 bytes each,
# 0.9 MiB in all.
@paired(
    "ppo.py",
    "--num-envs 4096 --num-steps 8 --batch-size 16384 --observation-size 64 --hidden 1024 --num-iterations 1",
)
def ppo(script, args):
    def loss(model, batch):
        *minibatch, _ = batch
        return script.ppo_loss(model, minibatch, args)[0]

    scalars = [torch.zeros(args.batch_size) for _ in range(4)]
    rollout = torch.zeros(args.num_steps * args.num_envs, args.observation_size)
    return Job(
        lambda: script.Agent(args.observation_size, args.hidden),
        zeroed_late(loss),
        [torch.zeros(args.batch_size, args.observation_size), *scalars, rollout],
        optimizer=torch.optim.Adam,
    )


HF_SIZES = "--batch-size 8 --min-length 256 --max-length 256 --vocab-size 8000 --hidden-size 512 --num-layers 4 "


def _hf_model_loss(model, batch):
    return model(**batch).loss


# Without the mask (16 KiB): an estimate does not know that it masks nothing, and would take another attention kernel.
def _hf_batch(args, classes: bool):
    ids = tokens(args.batch_size, args.max_length)
    return {"input_ids": ids, "labels": ids[:, 0].clone() if classes else ids.clone()}


# accelerate converts what the model returns to float32, in the forward pass; the next batch is fetched ahead (48 KiB).
@paired("hf_trainer.py", HF_SIZES + "--num-heads 8 --bf16 --train-size 32")
def hf_trainer_gpt2(script, args):
    from accelerate.utils import convert_outputs_to_fp32

    def loss(model, batch):
        def forward(**inputs):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                return model(**inputs)

        return convert_outputs_to_fp32(forward)(**batch).loss

    def make():
        model = script.build_model(args)
        model.config.use_cache = False  # as the Trainer sets it
        return model

    return Job(
        make,
        loss,
        _hf_batch(args, classes=False),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, fused=True),
    )


@paired("hf_trainer.py", HF_SIZES + "--num-heads 8 --model bert --gradient-checkpointing --train-size 32")
def hf_trainer_bert(script, args):
    def make():
        model = script.build_model(args)
        model.gradient_checkpointing_enable()
        return model

    return Job(
        make,
        _hf_model_loss,
        _hf_batch(args, classes=True),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, fused=True),
    )


@paired(
    "hf_no_trainer_accelerate.py",
    HF_SIZES + "--num-heads 8 --mixed-precision fp16 --gradient-accumulation-steps 1 --train-size 40",
)
def hf_no_trainer_accelerate(script, args):
    return Job(
        lambda: script.build_model(args),
        _hf_model_loss,
        _hf_batch(args, classes=True),
        optimizer=torch.optim.AdamW,
        precision="amp-fp16",
    )


# The metrics' states and the logits they look at are a few KiB.
@paired("lightning_module.py", "--batch-size 64 --image-size 64 --width 32 --train-size 256 --precision 16-mixed")
def lightning_module(script, args):
    def loss(model, batch):
        with torch.autocast("cuda", dtype=torch.float16):
            return functional.cross_entropy(model(batch[0]), batch[1])

    return Job(
        lambda: script.Classifier(args.width, args.num_classes).net,
        zeroed_late(loss),
        images(args.batch_size, args.image_size),
        optimizer=torch.optim.AdamW,
    )


# timm's loader has the next batch on the device while the model works on this one.
@paired(
    "timm_train.py",
    "--model vit_small_patch16_224 --img-size 224 --batch-size 16 --amp --opt adamw --clip-grad 1.0 --model-ema "
    "--train-size 64 --channels-last",
)
def timm_train(script, args):
    kept = Kept(inputs=None)

    def loss(model, batch):
        inputs, labels, _ = batch
        kept.inputs = None
        kept.inputs = inputs.contiguous(memory_format=torch.channels_last)
        with torch.autocast("cuda", dtype=torch.float16):
            output = model["model"](kept.inputs)
            return script.build_loss(args)(output, labels)

    def make():
        model = script.build_model(args).to(memory_format=torch.channels_last)
        average = script.build_model(args).to(memory_format=torch.channels_last).requires_grad_(False).eval()
        return nn.ModuleDict({"model": model, "average": average})

    inputs, labels = images(args.batch_size, args.img_size)
    return Job(make(), loss, (inputs, labels, inputs.clone()), optimizer=torch.optim.AdamW)


@paired("ddp.py", "--batch-size 64 --image-size 64 --width 32 --train-size 512", count=2)
def ddp(script, args):
    def loss(model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1])

    return Job(
        lambda: script.ConvNet(args.width),
        loss,
        images(args.batch_size, args.image_size),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        data_parallel=2,
    )


# The batch is random and made on the host.
@paired("ddp_spawn.py", "--batch-size 65536 --width 512 --steps 4", count=2)
def ddp_spawn(script, args):
    def loss(model, batch):
        return functional.mse_loss(model(batch[0]), batch[1])

    return Job(
        lambda: script.ToyModel(args.width),
        loss,
        (torch.zeros(args.batch_size, 10), torch.zeros(args.batch_size, 5)),
        optimizer=torch.optim.SGD,
        keep_outputs=True,
        data_parallel=2,
    )


# The job's parameters are whole and the script's are sharded, with two blocks gathered at a time: 0.3% of the peak.
@paired("fsdp2.py", "--batch-size 32 --seq-len 256 --dim 64 --n-layers 4 --steps 4", count=2)
def fsdp2(script, args):
    kept = Kept(logits=None)

    def loss(model, batch):
        kept.logits = model(batch[:, :-1])
        return functional.cross_entropy(kept.logits.flatten(0, 1), batch[:, 1:].flatten())

    return Job(
        lambda: script.Transformer(args.vocab_size, args.seq_len, args.dim, args.n_layers, args.n_heads),
        loss,
        tokens(args.batch_size, args.seq_len + 1),
        optimizer=torch.optim.AdamW,
    )


@paired(
    "seq2seq_transformer.py",
    "--min-length 60 --max-length 60 --batch-size 64 --emb-size 256 --nhead 8 --ffn-hid-dim 512 --layers 3 "
    "--vocab-size 4000 --train-size 256",
)
def seq2seq_transformer(script, args):
    loss_function = nn.CrossEntropyLoss(ignore_index=script.PAD_IDX, label_smoothing=args.label_smoothing)

    def loss(model, batch):
        return script.forward_loss(model, *batch, loss_function)

    length = args.max_length + 2
    return Job(
        lambda: script.Seq2SeqTransformer(args.layers, args.emb_size, args.nhead, args.vocab_size, args.ffn_hid_dim),
        loss,
        (tokens(length, args.batch_size), tokens(length, args.batch_size)),
        optimizer=torch.optim.Adam,
    )


@paired("unet_segmentation.py", "--image-size 256 --width 32 --batch-size 4 --images 20 --amp")
def unet_segmentation(script, args):
    criterion = nn.CrossEntropyLoss()

    def loss(model, batch):
        with torch.autocast("cuda", dtype=torch.float16):
            return script.segmentation_loss(model, *batch, criterion)

    inputs = torch.zeros(args.batch_size, 3, args.image_size, args.image_size)
    return Job(
        script.UNet(3, args.classes, args.width).to(memory_format=torch.channels_last),
        zeroed_late(loss),
        (inputs.to(memory_format=torch.channels_last), inputs[:, 0].long()),
        optimizer=lambda parameters: torch.optim.RMSprop(parameters, momentum=0.999, weight_decay=1e-8, foreach=True),
    )


def keras_job(keras, model, batch) -> Job:
    """The job of a compiled Keras model: its variables are pointed at the parameters that the estimate swaps in.

    PyTorch's Adam stands for Keras's: its temporaries are far from the peak.
    """
    places = {id(parameter): place for place, parameter in enumerate(model.parameters())}
    variables = [(v, places[id(v._value)]) for v in model.variables if id(v._value) in places]

    def loss(model, batch):
        # Keras's calls leave cycles that hold their inputs, and an estimate runs without Python's collector.
        gc.collect()
        parameters = list(model.parameters())
        for variable, place in variables:
            variable._value = parameters[place]
        inputs, labels = batch
        with keras.device("gpu:0"):
            predictions = model(inputs, training=True)
            return model._compute_loss(x=inputs, y=labels, y_pred=predictions, training=True)

    return Job(model, zeroed_late(loss), batch, optimizer=torch.optim.Adam)


@paired("keras_torch.py", "--batch-size 64 --image-size 64 --width 32 --samples 384")
def keras_torch(script, args):
    model = script.build_model(args.image_size, args.width)
    model.compile(loss="categorical_crossentropy")
    size = args.image_size
    return keras_job(
        script.keras,
        model,
        (torch.zeros(args.batch_size, size, size, 1), torch.zeros(args.batch_size, script.num_classes)),
    )


@paired(
    "keras_transformer_torch.py",
    "--batch-size 64 --maxlen 128 --vocab-size 2000 --embed-dim 128 --num-heads 4 --ff-dim 256 --blocks 2 "
    "--samples 384",
)
def keras_transformer_torch(script, args):
    model = script.build_model(args)
    model.compile(loss=script.keras.losses.SparseCategoricalCrossentropy())
    return keras_job(script.keras, model, (tokens(args.batch_size, args.maxlen).int(), tokens(1, args.batch_size)[0]))


def main(names: list[str]) -> None:
    """Prints one line of JSON per job: what `memfit.estimate` says of it."""
    for name in names:
        answer = memfit.estimate(PAIRS[name].job(), device="a100-40gb")
        figures = {"allocated_peak_bytes": answer.allocated_peak_bytes, "peak_bytes": answer.peak_bytes}
        print(json.dumps({"name": name, **figures}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
