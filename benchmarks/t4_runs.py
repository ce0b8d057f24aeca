"""Predicted against measured memory of training steps on a Tesla T4 (torch-preflight's runs).

    python -m benchmarks.t4_runs [--csv PATH]

Columns: model, gpu, batch_size, seq_len or image_size, precision, optimizer, gradient_checkpointing, flash_attention,
and the measured allocated_peak_bytes, reserved_peak_bytes, context_bytes and params. Models come from transformers
(default configuration of the architecture, published sizes of its larger variants), torchvision or timm, by name.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import transformers
from torch import Tensor

import memfit
from benchmarks import rows
from benchmarks.reporting import Bar, bullets, percent, publish, table
from memfit.core.units import MIB

DEFAULT_CSV = rows.DATA / "t4_runs.csv"
ALLOCATED_LIMIT = 0.02
TOTAL_LIMIT = 0.04

# bfloat16 as the measuring script chose it; the page says how.
PRECISIONS = {"amp": "amp-bf16", "fp32": None}

# Where a published model differs from the defaults of its architecture's configuration; from the models' own
# config.json.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "distilgpt2": ("gpt2", {"n_layer": 6}),
    "gpt2-medium": ("gpt2", {"n_layer": 24, "n_head": 16, "n_embd": 1024}),
    "gpt2-large": ("gpt2", {"n_layer": 36, "n_head": 20, "n_embd": 1280}),
    "gpt2-xl": ("gpt2", {"n_layer": 48, "n_head": 25, "n_embd": 1600}),
    "bert-base-cased": ("bert", {"vocab_size": 28996}),
    "bert-large-uncased": (
        "bert",
        {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096},
    ),
    "distilbert-base-cased": ("distilbert", {"vocab_size": 28996}),
    "roberta-base": ("roberta", {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}),
    "distilroberta-base": (
        "roberta",
        {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1, "num_hidden_layers": 6},
    ),
    "roberta-large": (
        "roberta",
        {
            "vocab_size": 50265,
            "max_position_embeddings": 514,
            "type_vocab_size": 1,
            "num_hidden_layers": 24,
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        },
    ),
    "t5-base": ("t5", {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}),
    "t5-large": ("t5", {"d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_heads": 16}),
}

PRECISION = """\
## Precision

The rows say "amp" without a type, and `flash_attention` is False in all of them: the script that measured them
(`tests/calibration/measure_cuda.py` of torch-preflight) writes that as a constant and switches nothing off. It takes
bfloat16 where `torch.cuda.is_bf16_supported()` says yes, else float16, and that counts emulation: it is yes on a T4.
PyTorch has no fused attention kernel for bfloat16 on a T4, so `scaled_dot_product_attention` runs the math kernel, and
that keeps the matrices of attention weights in float32. So with `precision="amp-bf16"` PyTorch's own choice of kernel
is what was measured. In float16 it would be the memory-efficient one, and BERT at 8 x 256 would need a quarter less."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A row beside its prediction.

    Args:
        row: as measured.
        estimate: as predicted.
    """

    row: rows.Row
    estimate: memfit.Estimate

    @property
    def label(self) -> str:
        """The row in words."""
        length = self.row["seq_len"] or self.row["image_size"]
        return f"{self.row['model']}, {self.row['batch_size']} x {length}, {self.row['precision']}"

    @property
    def allocated_error(self) -> float:
        """Of the allocated peak."""
        return self.estimate.allocated_peak_bytes / int(self.row["allocated_peak_bytes"]) - 1

    @property
    def total_error(self) -> float:
        """Of reserved memory and CUDA context together."""
        return self.estimate.peak_bytes / (int(self.row["reserved_peak_bytes"]) + int(self.row["context_bytes"])) - 1

    @property
    def is_same_model(self) -> bool:
        """Whether the model that was built has as many parameters as the measured one."""
        return not self.row.get("params") or int(self.row["params"]) == self.estimate.num_parameters


def is_on(text: str) -> bool:
    """Whether a column says yes."""
    return text.strip().lower() in ("true", "1", "yes")


def language_model(name: str, *, checkpointing: bool) -> tuple[Callable[[], Any], Callable[[Any, Any], Tensor]] | None:
    """(builder, loss) of a model of transformers; None when its name is none of theirs."""
    bare = name.rpartition("/")[2].lower()
    kind, changes = VARIANTS.get(bare, (None, {}))
    if kind is None:
        known = [key for key in transformers.CONFIG_MAPPING if bare.startswith(key.lower())]
        if not known:
            return None
        kind = max(known, key=len)
    config = transformers.AutoConfig.for_model(kind, **changes)
    # Encoders can often be used as decoders too; being made for masked words tells them apart.
    if config.is_encoder_decoder:
        # The decoder's inputs are the labels moved by one; T5 starts them with its padding.
        config.decoder_start_token_id = getattr(config, "decoder_start_token_id", None) or config.pad_token_id or 0
        auto, loss = transformers.AutoModelForSeq2SeqLM, labelled_loss
    elif type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING:
        auto, loss = transformers.AutoModel, encoder_loss
    else:
        auto, loss = transformers.AutoModelForCausalLM, labelled_loss

    def build() -> Any:
        model = auto.from_config(config)
        if checkpointing:
            model.gradient_checkpointing_enable()
        return model.train()

    return build, loss


def labelled_loss(model: Any, batch: Tensor) -> Tensor:
    """The model's own loss, with the inputs as labels."""
    output = model(input_ids=batch, labels=batch)
    return rows.keep(output.loss, output.logits, getattr(output, "past_key_values", None))


def encoder_loss(model: Any, batch: Tensor) -> Tensor:
    """Mean of the squared last hidden state, in float32."""
    output = model(input_ids=batch)
    hidden = output.last_hidden_state
    return rows.keep(hidden.float().pow(2).mean(), hidden, getattr(output, "pooler_output", None))


def row_job(row: rows.Row) -> memfit.Job:
    """The training step that a row describes, at any batch size."""
    checkpointing = is_on(row["gradient_checkpointing"])
    found = None if row.get("image_size") else language_model(row["model"], checkpointing=checkpointing)
    batch: Callable[[int], Any]
    if found is not None:
        length = int(row["seq_len"])
        build, loss = found
        batch = lambda count: torch.empty(count, length, dtype=torch.int64, device="meta")  # noqa: E731
    else:
        build, loss = image_model(row["model"], checkpointing=checkpointing), rows.classify
        batch = rows.images(int(row.get("image_size") or 224))
    precision = row["precision"]
    return memfit.Job(
        model=build,
        loss=loss,
        batch=batch,
        optimizer=rows.optimizer_named(row["optimizer"]),
        precision=PRECISIONS.get(precision, precision),
    )


def image_model(name: str, *, checkpointing: bool) -> Callable[[], Any]:
    """A builder of the image classifier called `name`, torchvision's before timm's."""
    try:
        made = memfit.named_job(f"torchvision:{name}").model
    except memfit.BadInput:
        made = memfit.named_job(f"timm:{name}").model

    def build() -> Any:
        model = made()
        if checkpointing:
            if not hasattr(model, "set_grad_checkpointing"):
                raise ValueError(f"{name} knows no gradient checkpointing.")
            model.set_grad_checkpointing()
        return model

    return build


def predict(row: rows.Row) -> Outcome:
    """A row beside its prediction."""
    device = memfit.find_device(row["gpu"], stack=f"torch=={row['torch']}")
    with rows.quietly():
        estimate = memfit.estimate(row_job(row), device=device, batch_size=int(row["batch_size"]))
    return Outcome(row, estimate)


def bars(outcomes: list[Outcome]) -> list[Bar]:
    """The claims about these rows."""
    worst = max(abs(o.allocated_error) for o in outcomes)
    mean = fmean(abs(o.total_error) for o in outcomes)
    return [
        Bar("allocated peak, worst row", f"{worst:.2%}", f"within {ALLOCATED_LIMIT:.0%}", worst <= ALLOCATED_LIMIT),
        Bar("reserved and context, mean of all rows", f"{mean:.2%}", f"within {TOTAL_LIMIT:.0%}", mean <= TOTAL_LIMIT),
    ]


def sections(outcomes: list[Outcome]) -> list[str]:
    """The page's body."""
    headers = ("run", "allocated, MiB", "error", "reserved and context, MiB", "error")
    cells = [
        (
            o.label,
            f"{o.estimate.allocated_peak_bytes / MIB:,.0f}",
            percent(o.allocated_error),
            f"{o.estimate.peak_bytes / MIB:,.0f}",
            percent(o.total_error),
        )
        for o in outcomes
    ]
    means = f"Mean error without sign: allocated {fmean(abs(o.allocated_error) for o in outcomes):.2%}, "
    means += f"reserved and context {fmean(abs(o.total_error) for o in outcomes):.2%}."
    strange = [o for o in outcomes if not o.is_same_model]
    notes = [f"{o.label}: measured {o.row['params']} parameters, built {o.estimate.num_parameters}" for o in strange]
    extra = ["Not the measured model, by its number of parameters:\n\n" + bullets(notes)] if notes else []
    return ["## Rows", table(headers, cells), means, *extra, PRECISION]


def main() -> None:
    """Score every row and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=DEFAULT_CSV, help="measured rows")
    path: Path = parser.parse_args().csv
    transformers.logging.set_verbosity_error()
    outcomes, skipped = [], []
    for row in rows.read_rows(path):
        try:
            outcomes.append(predict(row))
        except (memfit.MemfitError, ValueError) as error:
            skipped.append(f"{row['model']}, batch {row['batch_size']}: {str(error).splitlines()[0]}")
    left_out = [f"## Skipped\n\n{bullets(skipped)}"] if skipped else []
    title = "Memory of training steps on a Tesla T4"
    publish("t4_runs", title, bars(outcomes), [*sections(outcomes), *left_out], save=path == DEFAULT_CSV)


if __name__ == "__main__":
    main()
