"""A Llama whose losses and layers are Liger's kernels of Triton, as its own documentation patches it."""

import torch
from liger_kernel.transformers import apply_liger_kernel_to_llama
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, HIDDEN, BATCH, LENGTH = 32000, 512, 4, 512

apply_liger_kernel_to_llama()
config = LlamaConfig(
    hidden_size=HIDDEN,
    intermediate_size=1408,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=VOCABULARY,
)
model = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(2):
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), device="cuda")
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step)
