"""Run with the server's Python: make tiny random Llamas, and say what transformers generates with them.

python model.py make FOLDER SEED [tie]
python model.py greedy FOLDER COUNT TOKEN...     prints a JSON list
python model.py lora FOLDER                      a random PEFT adapter for such a model
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

LORA_CONFIG: dict[str, Any] = {
    "r": 4,
    "lora_alpha": 64,
    "target_modules": ["q_proj", "v_proj"],
    "bias": "none",
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
}


def make(folder: str, seed: str, tie: str = "") -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(int(seed))
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=bool(tie),
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            # Wide enough that the greedy token is never a matter of rounding.
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.15)
    model.save_pretrained(folder, max_shard_size="200KB")


def greedy(folder: str, count: str, *tokens: str) -> None:
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = torch.tensor([[int(token) for token in tokens]])
    with torch.no_grad():
        made = model.generate(prompt, do_sample=False, max_new_tokens=int(count), min_new_tokens=int(count))
    print(json.dumps(made[0, prompt.shape[1] :].tolist()))


def lora(folder: str) -> None:
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(5)
    tensors = {}
    for layer in range(2):
        for module, width in (("q_proj", 64), ("v_proj", 32)):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(4, 64) * 0.3
            tensors[f"{stem}.lora_B.weight"] = torch.randn(width, 4) * 0.3
    Path(folder).mkdir(parents=True, exist_ok=True)
    save_file(tensors, Path(folder) / "adapter_model.safetensors")
    (Path(folder) / "adapter_config.json").write_text(json.dumps(LORA_CONFIG))


if __name__ == "__main__":
    {"make": make, "greedy": greedy, "lora": lora}[sys.argv[1]](*sys.argv[2:])
