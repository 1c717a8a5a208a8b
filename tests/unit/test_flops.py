"""Model FLOPs and utilization, held to published figures and formulas."""

from __future__ import annotations

import pytest

from outlast.devices import DEVICES, find_device, parse_quantity, reported_device
from outlast.flops import (
    Convention,
    ModelShape,
    flops_per_token,
    hardware_flops_per_token,
    mean_keys,
    recomputed_flops_per_token,
    utilization,
)
from outlast.spec.parse import parse_spec

# MegaScale (NSDI '24), section 6: the 175B model.
GPT_175B = ModelShape(
    layers=96,
    hidden=12288,
    heads=96,
    kv_heads=96,
    mlp_hidden=4 * 12288,
    vocab_size=64000,
    seq_len=2048,
)
A100 = find_device("a100-80gb").peak_flops_per_s["bf16"]


def mfu(batch: int, devices: int, step_s: float, convention: Convention) -> float:
    per_step = batch * GPT_175B.seq_len * flops_per_token(GPT_175B, convention)
    return 100 * utilization(per_step / step_s, devices=devices, peak_flops_per_s=A100)


# Table 2 of MegaScale: (sequences a step, GPUs, seconds a step, printed MFU). Its Megatron-LM
# rows count full attention; the MegaScale rows, of a model with windows, count half of it.
@pytest.mark.parametrize(
    ("batch", "devices", "step_s", "printed"),
    [
        (768, 256, 40.0, 53.0),
        (768, 1024, 11.9, 44.7),
        (6144, 3072, 29.02, 48.7),
        (6144, 8192, 12.24, 43.3),
        (6144, 12288, 8.57, 41.2),
    ],
)
def test_megatron_rows_follow_from_full_attention(
    batch: int, devices: int, step_s: float, printed: float
) -> None:
    assert mfu(batch, devices, step_s, Convention.FULL) == pytest.approx(printed, abs=0.25)


@pytest.mark.parametrize(
    ("batch", "devices", "step_s", "printed"),
    [
        (768, 256, 32.0, 65.3),
        (768, 1024, 8.9, 59.0),
        (6144, 3072, 23.66, 59.1),
        (6144, 8192, 9.56, 54.9),
        (6144, 12288, 6.34, 55.2),
    ],
)
def test_megascale_rows_follow_from_what_a_causal_mask_lets_through(
    batch: int, devices: int, step_s: float, printed: float
) -> None:
    assert mfu(batch, devices, step_s, Convention.WINDOWED) == pytest.approx(printed, abs=0.25)


def test_a_step_without_recompute_is_korthikantis_formula() -> None:
    """72 B s l h^2 (1 + s/6h + V/12lh), arXiv 2205.05198."""
    shape, batch = GPT_175B, 768
    layers, hidden, seq, vocab = shape.layers, shape.hidden, shape.seq_len, shape.vocab_size
    formula = 72 * batch * seq * layers * hidden**2
    formula *= 1 + seq / (6 * hidden) + vocab / (12 * layers * hidden)
    assert batch * seq * flops_per_token(shape, Convention.FULL) == pytest.approx(formula)


def test_a_step_with_full_recompute_is_equation_3_of_ptd_p() -> None:
    """96 B s l h^2 (1 + s/6h + V/16lh), arXiv 2104.04473."""
    shape, batch = GPT_175B, 768
    layers, hidden, seq, vocab = shape.layers, shape.hidden, shape.seq_len, shape.vocab_size
    formula = 96 * batch * seq * layers * hidden**2
    formula *= 1 + seq / (6 * hidden) + vocab / (16 * layers * hidden)
    again = recomputed_flops_per_token(shape, ("full",) * layers, Convention.FULL)
    per_token = flops_per_token(shape, Convention.FULL) + again
    assert batch * seq * per_token == pytest.approx(formula)


def test_hardware_flops_are_the_models_and_what_is_computed_again() -> None:
    model = flops_per_token(GPT_175B, Convention.FULL)
    none, full = (
        hardware_flops_per_token(GPT_175B, (mode,) * GPT_175B.layers, Convention.FULL)
        for mode in ("none", "full")
    )
    assert none == model
    # The blocks' forward pass is a third of what they take; the output projection is kept.
    head = 6 * GPT_175B.hidden * GPT_175B.vocab_size
    assert full - model == pytest.approx((model - head) / 3)


def test_selective_recompute_repeats_the_attention_products_only() -> None:
    modes = ("selective",) * 95 + ("none",)
    again = recomputed_flops_per_token(GPT_175B, modes, Convention.FULL)
    assert again == 95 * 4 * GPT_175B.hidden * GPT_175B.seq_len


def tiny(**changes: object) -> ModelShape:
    document = {"layers": 3, "hidden": 16, "heads": 4, "seq_len": 8, **changes}
    return parse_spec({"name": "a", "model": document}).model.shape


@pytest.mark.parametrize("window", [1, 3, 8, None])
def test_mean_keys_are_those_that_the_mask_lets_through(window: int | None) -> None:
    shape = tiny()
    limit = window or shape.seq_len
    counted = [min(place + 1, limit) for place in range(shape.seq_len)]
    assert mean_keys(shape, window, Convention.WINDOWED) == sum(counted) / len(counted)
    assert mean_keys(shape, window, Convention.FULL) == shape.seq_len


def test_a_window_takes_work_away_from_local_layers_only() -> None:
    shape = tiny(window=2, window_pattern=["local", "local", "global"])
    assert [shape.window_of(layer) for layer in range(3)] == [2, 2, None]
    plain = flops_per_token(tiny(), Convention.WINDOWED)
    missing = mean_keys(shape, None, Convention.WINDOWED) - mean_keys(shape, 2, Convention.WINDOWED)
    assert plain - flops_per_token(shape, Convention.WINDOWED) == 2 * 12 * 16 * missing
    full = Convention.FULL
    assert flops_per_token(shape, full) == flops_per_token(tiny(), full)


def test_grouped_queries_and_a_gate_change_the_projections() -> None:
    shape = tiny(kv_heads=2, activation="swiglu", ffn_hidden=24)
    assert shape.block_weights(0) == 16 * (16 + 2 * 8) + 16 * 16 + 3 * 16 * 24
    assert tiny().block_weights(0) == 12 * 16 * 16


def test_devices_are_found_by_name_and_by_peak() -> None:
    assert find_device("H100").peak_flops_per_s["bf16"] == pytest.approx(989.4e12)
    assert find_device("90G").peak_flops_per_s["fp32"] == 90e9
    assert find_device("a100-40gb").memory_bytes == 40e9
    with pytest.raises(ValueError, match=r"'z80' is not known; allowed: .*h100"):
        find_device("z80")
    assert len({device.name for device in DEVICES}) == len(DEVICES)


@pytest.mark.parametrize(
    ("cuda_name", "expected"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        # Of the same family, with other clocks, links or memory.
        ("NVIDIA A100-PCIE-40GB", None),
        ("NVIDIA A100 80GB PCIe", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA B200", None),
        ("x86_64", None),
        ("", None),
    ],
)
def test_a_device_is_known_by_the_whole_name_that_cuda_has_for_it(
    cuda_name: str, expected: str | None
) -> None:
    found = reported_device(cuda_name)
    assert (None if found is None else found.name) == expected


@pytest.mark.parametrize("text", ["", "0", "fast", "-3G", "3X"])
def test_a_quantity_is_a_positive_number(text: str) -> None:
    with pytest.raises(ValueError, match="such as 25G"):
        parse_quantity(text, "B/s")
    assert parse_quantity("2.5GB/s", "B/s") == 2.5e9
