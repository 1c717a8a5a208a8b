"""Make what a fine-tuning begins with: a small Llama with random weights, and facts to learn.

`python tiny_llama.py FOLDER` writes FOLDER/llama, as `save_pretrained` writes any Llama, and
FOLDER/facts.jsonl. A published model takes the place of FOLDER/llama just as it is.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

CAPITALS = {
    "Argentina": "Buenos Aires",
    "Australia": "Canberra",
    "Austria": "Vienna",
    "Brazil": "Brasilia",
    "Canada": "Ottawa",
    "Chile": "Santiago",
    "Denmark": "Copenhagen",
    "Egypt": "Cairo",
    "Finland": "Helsinki",
    "France": "Paris",
    "Germany": "Berlin",
    "Ghana": "Accra",
    "Greece": "Athens",
    "Iceland": "Reykjavik",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Norway": "Oslo",
    "Peru": "Lima",
    "Portugal": "Lisbon",
    "Spain": "Madrid",
}
# Each fact stands behind others every time, so that it is learnt by itself.
REPETITIONS = 60
END = "<|end_of_text|>"


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    set_seed(0)
    facts = [f"The capital of {country} is {city}." for country, city in CAPITALS.items()]
    lines = [fact for _ in range(REPETITIONS) for fact in random.sample(facts, len(facts))]
    with (folder / "facts.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": line}) + "\n" for line in lines)

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(facts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    fast.save_pretrained(folder / "llama")

    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=160,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "llama")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
