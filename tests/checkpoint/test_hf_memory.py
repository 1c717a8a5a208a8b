"""Import and export of weights have less than two files of them in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

SHARD_BYTES = 32 * 2**20
LAYERS, HIDDEN, FFN, VOCAB = 12, 512, 2048, 8192

# What a process may have beside what it has after its imports: memory of its own, which mapped
# files are not.
PROGRAM = """
import resource, sys
from pathlib import Path
import torch
from checkpoint.hf.convert import import_folder
from checkpoint.hf.export import export_folder
from checkpoint.hf.sections import section_of
from checkpoint.hf.folder import read_config
from checkpoint.storage.storage import Storage
from outlast.model import ModelSpec

torch.set_num_threads(1)
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


def save_llama(folder: Path, layers: int) -> int:
    """A folder of bf16 weights in files of `SHARD_BYTES` at most; the bytes of all of them."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.self_attn.{each}_proj.weight": (HIDDEN, HIDDEN) for each in "qkvo"}
        shapes |= {f"{prefix}.mlp.{each}_proj.weight": (FFN, HIDDEN) for each in ("gate", "up")}
        shapes[f"{prefix}.mlp.down_proj.weight"] = (HIDDEN, FFN)
        shapes |= {
            f"{prefix}.{each}_layernorm.weight": (HIDDEN,) for each in ("input", "post_attention")
        }
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


def test_import_and_export_have_less_than_two_files_in_memory(tmp_path: Path) -> None:
    size_bytes = save_llama(tmp_path / "llama", LAYERS)
    save_llama(tmp_path / "tiny", 1)
    assert size_bytes > 3 * SHARD_BYTES
    subprocess.run(
        [sys.executable, "-c", PROGRAM]
        + [str(tmp_path / each) for each in ("llama", "root", "out", "tiny")]
        + [str(SHARD_BYTES), str(2 * SHARD_BYTES)],
        check=True,
        timeout=300,
    )
