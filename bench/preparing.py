"""`outlast data prepare` beside the tokenizer library by itself, and orders of samples by size.

The library's own way is one call with all documents, which it spreads over all processors, with
texts and ids in memory; of its two calls, with and without the place of each token in the text, the
faster one counts. `outlast data prepare` begins as a user's command, reads
and checks JSON lines, and its files of tokens are complete in the end.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
import tracemalloc
from pathlib import Path
from typing import Any

from bench.results import Claim
from trainer.core.batch import BatchPlan

_VOCAB = 8_192
_DOCUMENT_BYTES = 4_096
_ORDERS = (10**3, 10**6, 10**9)
_STEPS = 200
# In a process of its own, so that nothing of ours is in its memory.
_LIBRARY = """
import json, sys, time
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
texts = [json.loads(line)["text"] for line in open(sys.argv[2])]
took_s = []
for encode in (tokenizer.encode_batch, tokenizer.encode_batch_fast):
    began_s = time.perf_counter()
    found = encode(texts, add_special_tokens=False)
    took_s.append(time.perf_counter() - began_s)
    num_tokens = sum(map(len, found))
print(json.dumps({"seconds": min(took_s), "tokens": num_tokens}))
"""


def preparing(folder: Path, *, rounds: int, num_bytes: int) -> list[dict[str, Any]]:
    """Rows: both make tokens of the same JSON lines, in turns."""
    texts = _documents(num_bytes)
    lines, tokenizer = folder / "corpus.jsonl", folder / "tokenizer.json"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    _train(texts[: len(texts) // 4], tokenizer)
    rows = []
    for _ in range(rounds):
        library = [sys.executable, "-c", _LIBRARY, str(tokenizer), str(lines)]
        done = subprocess.run(library, check=True, stdout=subprocess.PIPE)
        rows.append({"kind": "tokenizers", "bytes": num_bytes, **json.loads(done.stdout)})
        rows.append({"kind": "outlast", "bytes": num_bytes, **_prepare(lines, tokenizer, folder)})
        for row in rows[-2:]:
            rate = row["tokens"] / row["seconds"]
            print(f"{row['kind']}: {row['tokens']:,} tokens, {rate:,.0f} tokens/s", flush=True)
    return rows


def _documents(num_bytes: int) -> list[str]:
    """Parts of Python's standard library, again and again until there is so much."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "".join(path.read_text(errors="ignore") for path in files)
    parts = [text[at : at + _DOCUMENT_BYTES] for at in range(0, len(text), _DOCUMENT_BYTES)]
    return [parts[number % len(parts)] for number in range(num_bytes // _DOCUMENT_BYTES)]


def _train(texts: list[str], to: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB, special_tokens=["<|endoftext|>"], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(to))


def _prepare(lines: Path, tokenizer: Path, folder: Path) -> dict[str, Any]:
    out = folder / "prepared"
    shutil.rmtree(out, ignore_errors=True)
    program = Path(sysconfig.get_path("scripts")) / "outlast"
    command = [*map(str, (program, "data", "prepare", lines, "--output", out))]
    command += ["--tokenizer", str(tokenizer)]
    began_s = time.perf_counter()
    done = subprocess.run([*command, "--json"], check=True, stdout=subprocess.PIPE)
    seconds = time.perf_counter() - began_s
    splits = json.loads(done.stdout)["splits"].values()
    return {"seconds": seconds, "tokens": sum(split["tokens"] for split in splits)}


def orders() -> list[dict[str, Any]]:
    """Rows: what it takes to say which samples steps all over a pass read, by their number."""
    rows = []
    # The first one is for what Python keeps once.
    for num_samples in (_ORDERS[0], *_ORDERS):
        tracemalloc.start()
        plan = BatchPlan(
            num_samples=num_samples, global_batch=1_024, micro_batch=1, num_replicas=1, seed=1
        )
        began_s, num_steps = time.perf_counter(), num_samples // 1_024 + 1
        for number in range(_STEPS):
            step = number * num_steps // _STEPS + 1
            for micro_batch in range(plan.num_micro_batches):
                plan.samples(step, 0, micro_batch)
        seconds = time.perf_counter() - began_s
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        each_s = seconds / _STEPS / 1_024
        rows.append(
            {"kind": "order", "samples": num_samples, "bytes": peak_bytes, "seconds": each_s}
        )
    return rows[1:]


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Both rates, and the memory of the longest order beside that of the shortest."""
    rates = {
        kind: [row["tokens"] / row["seconds"] for row in rows if row["kind"] == kind]
        for kind in ("outlast", "tokenizers")
    }
    # Of pairs: how fast the machine is changes from minute to minute.
    ratios = [ours / theirs for ours, theirs in zip(*rates.values(), strict=True)]
    medians = {kind: statistics.median(each) for kind, each in rates.items()}
    ordered = [row for row in rows if row["kind"] == "order"]
    return [
        Claim(
            claim="data_prepare_vs_tokenizer_library",
            value=statistics.median(ratios),
            unit="x",
            goal=">= 0.9",
            baseline="tokenizers on all processors, the faster of its two calls, texts in memory",
            how="median of paired ratios, start included; medians "
            f"{medians['outlast']:,.0f} against {medians['tokenizers']:,.0f} tokens/s",
        ),
        Claim(
            claim="memory_of_an_order_of_1e9_samples",
            value=ordered[-1]["bytes"],
            unit="bytes",
            goal="<= 10,000",
            baseline=f"{ordered[0]['bytes']:,} bytes for 1,000 samples",
            how="peak of what is allocated, steps all over a pass; "
            f"{ordered[-1]['seconds'] * 1e6:.1f} us a sample against "
            f"{ordered[0]['seconds'] * 1e6:.1f}",
        ),
    ]
