"""A plain training loop over random data: plain_loop.py MODEL BATCH_SIZE [STEPS].

MODEL is resnet50, vit_small or gpt2.
"""

import sys

import torch
import transformers


def make(name: str, batch_size: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """The model, and a batch on the host."""
    if name == "gpt2":
        tokens = torch.randint(0, 50257, (batch_size, 128))
        return transformers.GPT2LMHeadModel(transformers.GPT2Config()), {"input_ids": tokens, "labels": tokens}
    # One image, seen as often as the batch is large: the host holds it once.
    images = torch.randn(1, 3, 224, 224).expand(batch_size, -1, -1, -1)
    labels = torch.randint(0, 1000, (batch_size,))
    if name == "resnet50":
        model = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=1000))
    else:
        small = transformers.ViTConfig(hidden_size=384, num_attention_heads=6, intermediate_size=1536, num_labels=1000)
        model = transformers.ViTForImageClassification(small)
    return model, {"pixel_values": images, "labels": labels}


def main() -> None:
    """Trains for a few steps."""
    name, batch_size = sys.argv[1], int(sys.argv[2])
    num_steps = int(sys.argv[3]) if len(sys.argv) > 3 else 1000
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, batch = make(name, batch_size)
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(num_steps):
        loss = model(**{key: value.to(device, non_blocking=True) for key, value in batch.items()}).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
