"""Import and export of weights have less than two files of them in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

SHARD_BYTES = 128 * 2**20
# Of a table in float32, which is as large as two files, a frame is made once: room for it is set
# apart, which counts, and never touched.
FRAME_BYTES = 16 * 2**20
# Each table of the vocabulary is a whole file.
LAYERS, HIDDEN, FFN, VOCAB = 2, 512, 2048, 131_072

# What a process may have beside what it has after its imports: memory of its own, which mapped
# files are not.
PROGRAM = """
import resource, sys, threading
from pathlib import Path
import torch
from checkpoint.hf.convert import import_folder
from checkpoint.hf.export import export_folder
from checkpoint.hf.sections import section_of
from checkpoint.hf.folder import read_config
from checkpoint.storage.storage import Storage
from outlast.model import ModelSpec

torch.set_num_threads(1)
# What is set apart for the stacks of threads counts, too.
threading.stack_size(1 << 18)
source, root, out, tiny, shard_bytes, over = sys.argv[1:]
def both(source, root, out, file_bytes):
    model = ModelSpec.model_validate(section_of(read_config(Path(source))))
    import_folder(Path(source), Storage(root), part_bytes=file_bytes)
    export_folder(Storage(root), 0, model, Path(out), file_bytes=file_bytes)

def own_bytes():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024

both(tiny, root + "-tiny", out + "-tiny", 2**20)
limit = own_bytes() + int(over)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
both(source, root, out, int(shard_bytes))
"""


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}
# Inputs of all experts of a layer, which are one tensor of ours, are as much as a file.
EXPERTS, EXPERT_FFN = 16, 4096
MIXTRAL = {
    **LLAMA,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "intermediate_size": EXPERT_FFN,
    "num_local_experts": EXPERTS,
    "vocab_size": 1024,
}


def save(folder: Path, config: dict[str, Any], layers: int) -> int:
    """A folder of bf16 weights in files of `SHARD_BYTES` at most; the bytes of all of them."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    vocab = config["vocab_size"]
    shapes = {
        "model.embed_tokens.weight": (vocab, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (vocab, HIDDEN),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.self_attn.{each}_proj.weight": (HIDDEN, HIDDEN) for each in "qkvo"}
        shapes |= {
            f"{prefix}.{each}_layernorm.weight": (HIDDEN,) for each in ("input", "post_attention")
        }
        shapes |= dict(mlp_shapes(f"{prefix}", config.get("num_local_experts", 0)))
    files: list[dict[str, torch.Tensor]] = [{}]
    for name, shape in shapes.items():
        tensor = torch.full(shape, 0.5, dtype=torch.bfloat16)
        if sum(each.nbytes for each in files[-1].values()) + tensor.nbytes > SHARD_BYTES:
            files.append({})
        files[-1][name] = tensor
    of_tensor = {}
    for number, tensors in enumerate(files):
        save_file(tensors, folder / f"model-{number}.safetensors")
        of_tensor |= dict.fromkeys(tensors, f"model-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": of_tensor}))
    return sum(tensor.nbytes for tensors in files for tensor in tensors.values())


def mlp_shapes(prefix: str, experts: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    if not experts:
        for name in ("gate", "up"):
            yield f"{prefix}.mlp.{name}_proj.weight", (FFN, HIDDEN)
        yield f"{prefix}.mlp.down_proj.weight", (HIDDEN, FFN)
        return
    yield f"{prefix}.block_sparse_moe.gate.weight", (experts, HIDDEN)
    for expert in range(experts):
        for name in ("w1", "w3"):
            yield (
                f"{prefix}.block_sparse_moe.experts.{expert}.{name}.weight",
                (EXPERT_FFN, HIDDEN),
            )
        yield f"{prefix}.block_sparse_moe.experts.{expert}.w2.weight", (HIDDEN, EXPERT_FFN)


@pytest.mark.parametrize(
    ("config", "layers"), [(LLAMA, LAYERS), (MIXTRAL, 2)], ids=["llama", "mixtral"]
)
def test_import_and_export_have_less_than_two_files_in_memory(
    config: dict[str, Any], layers: int, tmp_path: Path
) -> None:
    size_bytes = save(tmp_path / "model", config, layers)
    save(tmp_path / "tiny", {**LLAMA, "vocab_size": 1024}, 1)
    assert size_bytes > 2 * SHARD_BYTES
    subprocess.run(
        [sys.executable, "-c", PROGRAM]
        + [str(tmp_path / each) for each in ("model", "root", "out", "tiny")]
        + [str(SHARD_BYTES), str(2 * SHARD_BYTES + FRAME_BYTES)],
        check=True,
        timeout=300,
    )
