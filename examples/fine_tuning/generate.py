"""Let a model of Hugging Face go on with a text: `python generate.py FOLDER PROMPT`."""

from __future__ import annotations

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

folder, prompt = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
tokens = tokenizer(prompt, return_tensors="pt")
longer = model.generate(**tokens, max_new_tokens=16, do_sample=False)
print(tokenizer.decode(longer[0], skip_special_tokens=True))
