"""Fine-tunes a small language model with adapters on quantised weights, as peft and bitsandbytes document it."""

import argparse
import tempfile

import bitsandbytes
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--bits", type=int, default=4, choices=(4, 8))
parser.add_argument("--dora", action="store_true")
parser.add_argument("--checkpointing", action="store_true")
parser.add_argument("--optimizer", default="PagedAdamW8bit")
parser.add_argument("--steps", type=int, default=4)
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def load(bits, place):
    config = LlamaConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=688, num_hidden_layers=2, num_attention_heads=4
    )
    how = (
        {"load_in_8bit": True}
        if bits == 8
        else {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": torch.bfloat16,
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=BitsAndBytesConfig(**how), dtype=torch.bfloat16, device_map={"": place}
        )


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    model = load(args.bits, 0 if torch.cuda.is_available() else "cpu")
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=args.checkpointing)
    adapters = LoraConfig(r=8, lora_dropout=0.05, use_dora=args.dora, target_modules=PROJECTIONS, task_type="CAUSAL_LM")
    model = get_peft_model(model, adapters)
    model.print_trainable_parameters()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = getattr(bitsandbytes.optim, args.optimizer)(trained, lr=1e-4)
    device = trained[0].device
    model.train()
    for step in range(args.steps):
        tokens = torch.randint(1000, (4, 128), device=device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
