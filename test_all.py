"""One file of tests; each section is headed by the sentence it proves. No network, one core, fixed seeds.

pytest test_all.py                 what an outside library must confirm skips where it is missing
pytest test_all.py -m slow         kill -9, forty times, and every recipe in 2 and 4 processes
"""

import collections
import copy
import dataclasses
import importlib
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
import types
import weakref
from pathlib import Path
from pydoc_data.topics import topics

os.environ["TRITON_INTERPRET"] = "1"  # kernels run on this CPU, slowly

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import distill
import evaluate
import kernels
import mixers
import surgery
import train
from mixers import MIXERS, build, chunked, recurrent, scan

CELLS = list(itertools.product(("none", "head", "channel"), ("add", "delta", "own key")))
cells = pytest.mark.parametrize("decay, write", CELLS)
decaying = pytest.mark.parametrize("decay, write", CELLS[3:])
FORMS = {"recurrent": recurrent, "chunked": chunked}


@pytest.fixture(autouse=True)
def own_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "TOKENS", tmp_path / ".tokens")


def close(got, wanted, tolerance=1e-10):
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def distance(got, wanted):
    return ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()


# ---------------------------------------------------------------- 1. The forms are one equation


def draw(decay, write, T, *, B=2, H=2, K=6, V=5, level=None, strength=None, dtype=torch.float64):
    """Arguments of a cell: unit keys sharing a direction, decays from 0 to -60 or all `level`, beta from 0, 1, 2."""
    g = torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    x = dict(q=random(B, T, H, K), k=F.normalize(random(B, 1, H, K) + 0.3 * random(B, T, H, K), dim=-1))
    x |= dict(v=random(B, T, H, V), S=random(B, H, K, V))
    if decay != "none":
        shape = B, T, H, (1 if decay == "head" else K)
        some = -60 * torch.rand(shape, generator=g, dtype=torch.float64) ** 8  # half of them above -0.25
        x["log_decay"] = some if level is None else torch.full(shape, level, dtype=torch.float64)
    if write == "delta":
        beta = torch.randint(3, (B, T, H, 1), generator=g).double()
        x["beta"] = beta if strength is None else torch.full_like(beta, strength)
    if write == "own key":
        x["e"] = F.normalize(x["k"] + 0.3 * random(B, T, H, K), dim=-1)
        x["b"] = torch.rand(B, T, H, K, generator=g, dtype=torch.float64) * x["e"]
    return {name: z.to(dtype).requires_grad_() for name, z in x.items()}


def pack(x):
    """erase = (e, b)."""
    return {n: z for n, z in x.items() if n not in ("e", "b")} | ({"erase": (x["e"], x["b"])} if "e" in x else {})


def run(form, x, **more):
    """-> o, S and the gradient of every argument, by name."""
    o, S = form(**pack(x), **more)
    g = torch.Generator().manual_seed(1)
    loss = sum((z * torch.randn(z.shape, generator=g, dtype=torch.float64).to(z)).sum() for z in (o, S))
    return dict(o=o.detach(), S_out=S.detach()) | dict(zip(x, torch.autograd.grad(loss, list(x.values()))))


def same(x, tolerance, chunk):
    got, wanted = run(chunked, x, chunk=chunk), run(recurrent, x)
    for name in wanted:
        assert got[name].isfinite().all(), name
        close(got[name], wanted[name], tolerance)


@cells
@pytest.mark.parametrize("C, T", [(C, T) for C in (16, 64) for T in (1, 2, 3, C - 1, C, C + 1, 3 * C + 5)])
def test_chunked_is_recurrent(decay, write, C, T):
    same(draw(decay, write, T), 1e-10, C)


@decaying
@pytest.mark.parametrize("C", (16, 32, 64))
@pytest.mark.parametrize("level", ("one at -60", -2.0, -20.0, -60.0))
def test_strong_decay_float32(decay, write, C, level):
    x = draw(decay, write, 2 * C + 5, strength=1.0, level=-0.1 if level == "one at -60" else level, dtype=torch.float32)
    if level == "one at -60":  # one head, or one channel of one head
        x["log_decay"].data[:, :, 0, 0] = -60
    same(x, 2e-5, C)


@cells
def test_float32_is_accurate(decay, write):
    x = draw(decay, write, 256, K=16, V=16, level=-1e-3, strength=1.0)
    got, wanted = run(chunked, {name: z.float() for name, z in x.items()}), run(recurrent, x)
    errors = {name: distance(got[name], wanted[name]) for name in wanted}
    assert max(errors.values()) < 5e-6, errors


@cells
@pytest.mark.parametrize("T", (16 * 8, 20 * 8 + 3))  # all kept for the backward pass; the first five computed again
def test_pieces_of_a_sequence_are_the_whole(monkeypatch, decay, write, T):
    x = draw(decay, write, T, B=2, H=2, K=4, V=3)
    whole = run(chunked, x, chunk=8)
    monkeypatch.setattr(kernels, "PIECE", 8 * 2 * 2 * 4)
    same(x, 1e-10, 8)
    for name, z in run(chunked, x, chunk=8).items():
        close(z, whole[name], 1e-12)


def test_a_second_backward_pass_and_constants(monkeypatch):
    x = draw("channel", "delta", 100, K=4, V=3)
    for name in ("q", "log_decay", "S"):
        x[name].requires_grad_(False)
    wanted = torch.autograd.grad(recurrent(**x)[0].sum(), [x["k"], x["beta"]])
    monkeypatch.setattr(kernels, "PIECE", 1)
    o, _ = chunked(**x, chunk=4)
    for _ in range(2):
        for a, b in zip(torch.autograd.grad(o.sum(), [x["k"], x["beta"]], retain_graph=True), wanted):
            close(a, b)


def test_gradients_under_autocast_are_float32(monkeypatch):
    monkeypatch.setattr(kernels, "PIECE", 1)
    for T in (64, 32 * 20):  # kept; the first four computed again
        found = []
        for on in (False, True):
            x = draw("head", "delta", T, level=-0.1, strength=0.5, dtype=torch.float32)
            o, _ = chunked(**pack(x))
            with torch.autocast("cpu", torch.bfloat16, enabled=on):
                distill.share(o.square().sum(), torch.Tensor.backward)
            found.append([z.grad for z in x.values()])
        for a, b in zip(*found):
            assert torch.equal(a, b)


@decaying
def test_nothing_is_left_of_what_fades_at_once(decay, write):
    x = draw(decay, write, 40, level=-0.1, strength=1.0)
    x["log_decay"].data[:, 7] = -math.inf
    got, wanted = run(chunked, x), run(recurrent, x)
    for name in wanted.keys() - {"log_decay"}:
        close(got[name], wanted[name], 1e-10)


def test_strong_writes_among_like_keys_keep_their_digits():
    x = {n: z.detach() for n, z in draw("none", "delta", 1024, B=1, K=64, V=64, strength=2.0).items()}
    x["k"] = F.normalize(x["k"] + 2 * x["k"][:, :1], dim=-1)
    o, S = chunked(**{n: z.float() for n, z in x.items()})
    wanted = recurrent(**x)
    assert max(distance(a, b) for a, b in zip((o, S), wanted)) < 2e-5  # an inverse in float32 leaves 1e-4


@cells
def test_gradcheck(decay, write):
    x = draw(decay, write, 8 + 3, B=1, H=1, K=2, V=3, level=-0.5)
    form = lambda *values: chunked(**pack(dict(zip(x, values))), chunk=8)
    assert torch.autograd.gradcheck(form, tuple(x.values()))


@pytest.mark.parametrize("form", FORMS.values())
@pytest.mark.parametrize("write", ("add", "delta"))
def test_cells_contain_each_other(form, write):
    x, decayed = draw("none", write, 133), draw("head", write, 133)
    for got, wanted in zip(form(**x, log_decay=torch.zeros(2, 133, 2, 1)), form(**x)):
        assert torch.equal(got, wanted)
    wide = decayed | {"log_decay": decayed["log_decay"].expand(-1, -1, -1, 6)}
    for got, wanted in zip(form(**wide), form(**decayed)):
        close(got, wanted, 1e-12)


@cells
@pytest.mark.parametrize("first, then", list(itertools.product(FORMS, FORMS)))
def test_state_passes_between_forms(decay, write, first, then):
    x = draw(decay, write, 100)
    cut = lambda part: pack({name: z[:, part] for name, z in x.items() if name != "S"})
    o, S = FORMS[first](**cut(slice(0, 70)), S=x["S"])
    rest, S = FORMS[then](**cut(slice(70, 100)), S=S)
    close(torch.cat([o, rest], 1), recurrent(**pack(x))[0])
    close(S, recurrent(**pack(x))[1])


@torch.no_grad()
@cells
def test_beyond_65536_tokens(decay, write):
    x, T = draw(decay, write, 65537, B=1, H=1, K=2, V=2, level=-1e-4), 65537 - 100
    S = chunked(**pack({name: z[:, :T] if name != "S" else z for name, z in x.items()}))[1]
    tail = recurrent(**pack({name: z[:, T:] if name != "S" else S for name, z in x.items()}))
    o, S = chunked(**pack(x))
    close(o[:, T:], tail[0], 1e-9)
    close(S, tail[1], 1e-9)


@cells
@pytest.mark.parametrize("form", FORMS.values())
def test_zeros_are_no_tokens(decay, write, form):
    x, at = draw(decay, write, 40), torch.arange(40) * 2 + 3  # zeros before, between and after
    wide = lambda z: torch.zeros(2, 90, *z.shape[2:], dtype=z.dtype).index_copy(1, at, z)
    o, S = form(**pack({name: z if name == "S" else wide(z) for name, z in x.items()}))
    close(o[:, at], form(**pack(x))[0], 1e-12)
    close(S, form(**pack(x))[1], 1e-12)


DAMAGE = dict(rank=lambda x: x[0], dtype=lambda x: x.long(), device=lambda x: x.to("meta"), rows=lambda x: x[:, 1:])
DAMAGE |= dict(empty=lambda x: x[:, :0], width=lambda x: x[..., 1:], layout=lambda x: x.mT, flat=lambda x: x[..., 0])
ARGUMENTS = ("k", "v", "log_decay", "beta", "S", "erase[0]", "erase[1]")
WRONG = [(name, kind) for name in ARGUMENTS for kind in ("rank", "dtype", "device", "rows")]
WRONG += [("q", "rank"), ("q", "dtype"), ("q", "empty"), ("k", "width"), ("log_decay", "width"), ("log_decay", "flat")]
WRONG += [("beta", "width"), ("beta", "flat"), ("S", "layout")]


@pytest.mark.parametrize("form", FORMS.values())
@pytest.mark.parametrize("name, kind", WRONG)
def test_wrong_arguments_are_named(form, name, kind):
    x = {n: z.detach() for n, z in (draw("channel", "own key", 5) | draw("channel", "delta", 5)).items()}
    x |= {"erase[0]": x.pop("e"), "erase[1]": x.pop("b")}
    x[name] = DAMAGE[kind](x[name])
    x["erase"] = x.pop("erase[0]"), x.pop("erase[1]")
    with pytest.raises(ValueError, match=rf"^(q, )?{re.escape(name)}[:,].* wanted .* got "):
        form(**x)


def test_wrong_options_are_named():
    x = draw("none", "add", 5)
    with pytest.raises(ValueError, match="^chunk: .* 48"):
        chunked(**x, chunk=48)
    with pytest.raises(ValueError, match="^form: .*'loop'"):
        scan(**x, form="loop")
    with pytest.raises(ValueError, match="^mixer 'none'"):
        build("none", CONFIG)
    with pytest.raises(ValueError, match="window"):
        build("delta", CONFIG, widow=4)
    for wrong in (dict(conv="abc"), dict(conv=-1), dict(gate="relu"), dict(norm=True), dict(sinks=None)):
        with pytest.raises(ValueError, match=f"^option {next(iter(wrong))} = .*: wanted "):
            build("delta", CONFIG, **wrong)
    with pytest.raises(ValueError, match="'softmax' takes no options"):
        build("softmax", CONFIG, window=4)
    with pytest.raises(ValueError, match="wanted an even one"):
        build("delta", types.SimpleNamespace(**vars(CONFIG) | dict(head_dim=7)), window=4)
    for mask in (torch.ones(2, 5), torch.ones(5, dtype=torch.bool), torch.ones(2, 4, dtype=torch.bool)):
        with pytest.raises(ValueError, match="^x, mask: wanted"):
            make("delta")(tokens(5), mask=mask)
    with pytest.raises(ValueError, match="^x, mask: wanted"):
        make("softmax")(tokens(5)[:, :0])


@cells
@pytest.mark.parametrize("form", FORMS.values())
def test_bfloat16_inputs(decay, write, form):
    x = {name: z.bfloat16() for name, z in draw(decay, write, 70, level=-0.1, strength=1.0).items()}
    o, S = form(**pack(x))
    assert o.dtype == torch.bfloat16 and S.dtype == torch.float32
    exact = recurrent(**pack({name: z.double() for name, z in x.items()}))
    assert distance(S, exact[1]) < 5e-6 and distance(o, exact[0]) < 2**-8


PEERS = {
    ("none", "add"): ("linear_attn", "naive_recurrent_linear_attn", "q k v"),
    ("none", "delta"): ("delta_rule", "delta_rule_recurrence", "q k v beta"),
    ("head", "add"): ("simple_gla", "naive_recurrent_simple_gla", "q k v log_decay"),
    ("head", "delta"): ("gated_delta_rule", "naive_recurrent_gated_delta_rule", "q k v beta log_decay"),
    ("channel", "add"): ("gla", "naive_recurrent_gla", "q k v log_decay"),
    ("channel", "delta"): ("kda", "naive_recurrent_kda", "q k v log_decay beta"),
    ("channel", "own key"): ("generalized_delta_rule.dplr", "dplr_recurrence", "q k v e b log_decay"),
}


@pytest.mark.parametrize("decay, write", PEERS)
def test_oracle_flash_linear_attention(decay, write):
    pytest.importorskip("fla", reason="optional: pip install --no-deps flash-linear-attention fla-core")
    folder, name, arguments = PEERS[decay, write]
    x = {name: z.detach() for name, z in draw(decay, write, 70, dtype=torch.float32).items()}
    wanted, S = recurrent(**pack(x) | {"q": x["q"] * 6**-0.5})
    if "e" in x:  # theirs reads S before the decay
        x["e"] = -x["e"] * x["log_decay"].exp()
    # theirs: one number per head has no last axis, and the oldest functions put heads before time
    theirs = [x[a][..., 0] if x[a].size(-1) == 1 else x[a] for a in arguments.split()]
    turned = folder in ("delta_rule", "generalized_delta_rule.dplr")
    theirs = [z.transpose(1, 2) for z in theirs] if turned else theirs
    form = getattr(importlib.import_module(f"fla.ops.{folder}.naive"), name)
    o, final = form(*theirs, initial_state=x["S"], output_final_state=True)
    close(o.transpose(1, 2) if turned else o, wanted, 1e-5)
    close(final, S, 1e-5)


def test_oracle_retention():
    pytest.importorskip("fla", reason="optional: pip install --no-deps flash-linear-attention fla-core")
    from fla.ops.retention.naive import naive_retention

    x, log_decay = draw("none", "add", 70, H=3, dtype=torch.float32), make("retnet").log_decay.float()
    o = naive_retention(*(x[n].transpose(1, 2) for n in "qkv")).transpose(1, 2)
    close(recurrent(x["q"] * 6**-0.5, x["k"], x["v"], log_decay=log_decay.expand(2, 70, 3, 1))[0], o, 1e-5)


@pytest.mark.parametrize("D", (1, 16))
def test_weak_decays_among_strong_ones_keep_their_digits(D):
    x = draw("head" if D == 1 else "channel", "delta", 256, K=16, V=16, strength=0.5, dtype=torch.float32)
    x = {n: z.detach() for n, z in x.items()}
    g = torch.Generator().manual_seed(0)
    strong = torch.rand(x["log_decay"].shape, generator=g) < 0.3
    x["log_decay"] = torch.where(strong, -40.0, -0.01 * torch.rand(strong.shape, generator=g))
    wanted = recurrent(**{n: z.double() for n, z in x.items()})[0]
    assert distance(chunked(**x)[0], wanted) < 1e-6  # differences of long float32 sums leave 1e-5


@pytest.fixture
def poisoned(monkeypatch):
    """Memory that nobody has written is NaN."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@cells
def test_oracle_kernels_are_recurrent(poisoned, decay, write):
    pytest.importorskip("triton")
    for T, K, V in ((1, 16, 20), (15, 60, 16), (16, 16, 100), (17, 20, 64), (64, 64, 16), (65, 16, 16), (130, 32, 60)):
        x = draw(decay, write, T, B=1, K=K, V=V, dtype=torch.float32)
        got = run(kernels.kernel, x)
        wanted = run(recurrent, {n: z.detach().double().requires_grad_() for n, z in x.items()})
        for name in wanted:
            assert got[name].isfinite().all() and distance(got[name], wanted[name]) < 1e-5, name
        with torch.no_grad():  # at T = 1 the step kernel
            for a, name in zip(kernels.kernel(**pack(x)), ("o", "S_out")):
                assert distance(a, wanted[name]) < 1e-5


@pytest.mark.parametrize("T", (1, 20))
def test_oracle_kernels_take_half_precision(poisoned, T):
    pytest.importorskip("triton")
    x = {n: z.detach() for n, z in draw("channel", "delta", T, K=16, V=16, dtype=torch.float16).items()}
    (o, S), (wanted, last) = (form(**x) for form in (kernels.kernel, recurrent))
    assert o.dtype == torch.float16 and S.dtype == torch.float32
    close(o, wanted, 2e-3)
    close(S, last, 1e-4)


def test_kernels_fall_back_aloud(capsys):
    x = draw("head", "delta", 9)
    kernels.fall_back.cache_clear()
    for _ in range(2):
        for a, b in zip(scan(**x, form="kernel"), chunked(**x)):
            assert torch.equal(a, b)  # float64
    assert capsys.readouterr().err.count("chunked, in PyTorch, runs instead") == 1


def test_bench_counts_and_fits(capsys):
    sizes = [1024, 2048, 8192]
    assert kernels.exponent(sizes, [3e-3 * n**1.5 for n in sizes]) == pytest.approx(1.5)
    assert kernels.exponent([1, 2, 4], [2, 2, 8]) == pytest.approx(1)  # a line through three points, not through two
    shape = dict(vocab=300, width=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=96)
    _, students = kernels.of_140m(**shape)
    cells = {"softmax": 4 * 20 * 4 * 16, "gated_delta": 7 * 4 * 16 * 16}  # twice T / 2 keys; a decay, 2 reads, a write
    for name, student in students.items():
        mixer = student.blocks[0].mixer
        weights = sum(p.numel() for block in student.blocks for p in block.parameters()) + 300 * 64
        assert kernels.forward_flops(student, 40) == 2 * weights + 2 * cells[name]
        assert evaluate.mixing(mixer, 20) == cells[name]
    kernels.step(1, 20, **shape)
    kernels.decoding((16,), 32, **shape)
    told = capsys.readouterr().out
    assert "over softmax" in told and "over teacher at 16" in told


def test_oracle_kernels_fit_their_cards():
    pytest.importorskip("triton")
    quiet = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    words = [sys.executable, "-W", "ignore", kernels.__file__]
    told = subprocess.run(words, env=quiet, capture_output=True, text=True, check=True).stdout
    rows = re.findall(r"sm_(\d+) (\w+) +(\d+) registers, +(\d+) bytes spilled, (\d+) KiB shared", told)
    assert len(rows) == 6 and {row[3] for row in rows} == {"0"}
    assert all(int(shared) <= {"80": 100, "90": 228}[arch] for arch, *_, shared in rows)
    assert all(float(x) < 1e-5 for x in re.findall(r"largest difference (\S+)", told)) and "add" in told


# ---------------------------------------------------------------- 2. A mixer is its cell on every path

CONFIG = types.SimpleNamespace(width=24, heads=3, kv_heads=1, head_dim=8, rope_base=1e4)
every_mixer = pytest.mark.parametrize("name", MIXERS)
WINDOW, SHARED = dict(window=4, sinks=2), dict(window=4, sinks=2, blend="shared", feature="t2r", denominator=True)
PATHS = [(n, o) for n in MIXERS for o in ({}, WINDOW) if n != "softmax" or not o]
PATHS += [("linear", dict(feature=f, denominator=mixers.FEATURES[f][1])) for f in mixers.FEATURES]
PATHS += [("hedgehog", SHARED | dict(feature="hedgehog")), ("supra", SHARED), ("metala", SHARED)]
PATHS += [("delta", dict(expand_k=2, expand_v=3, rope=True)), ("gated_delta", WINDOW | dict(expand_k=2, expand_v=2))]
PATHS += [("t2r", SHARED | dict(expand_v=2, sinks=0)), ("delta", dict(negative=True)), ("mamba2", dict(discrete=True))]
PATHS += [(n, dict(expand_k=2)) for n in ("gla", "dfw", "metala", "hgrn2", "kda", "rwkv7")]
PATHS += [(n, dict(feature="hedgehog", rope=True)) for n in ("metala", "rwkv7", "kda")] + [("gla", dict(qk_norm=True))]
PATHS += [("kda", dict(norm="rms", gate="silu", conv=0)), ("rwkv7", dict(norm="layer", rope=True, gate="none"))]
paths = pytest.mark.parametrize("name, options", PATHS, ids=[" ".join([n, *map(str, o.values())]) for n, o in PATHS])


def make(name, options=None, *, moved=True):
    """A float64 mixer; moved: every parameter a little off its start, where taps and gates would do nothing."""
    torch.manual_seed(0)
    mixer = build(name, CONFIG, **options or {})
    with torch.no_grad():
        for p in mixer.parameters() if moved else ():
            p += 0.2 * torch.randn_like(p)
    return mixer.double()


def tokens(T, B=2):
    return torch.randn(B, T, CONFIG.width, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def pieces(mixer, x, sizes, state=None, **more):
    parts = []
    for part in x.split(sizes, 1):
        y, state = mixer(part, state, **more)
        parts.append(y)
    return torch.cat(parts, 1), state


@torch.no_grad()
@paths
@pytest.mark.parametrize("sizes, form", [([1] * 16, "auto"), ([5, 1, 7, 3], "auto"), ([16], "recurrent")])
def test_pieces_are_one_pass(name, options, sizes, form):
    mixer, x = make(name, options), tokens(16)
    wanted, end = mixer(x, form="chunked")
    got, state = pieces(mixer, x, sizes, form=form)
    close(got, wanted)
    assert state.keys() == end.keys()
    for part in end:
        close(state[part], end[part])


@paths
def test_gradients_agree_between_forms(name, options):
    mixer, x, grads = make(name, options), tokens(70).requires_grad_(), []
    for form in ("recurrent", "chunked"):
        y, state = mixer(x, form=form)
        loss = (y * y.detach().roll(1, 1)).sum() + sum(z.square().sum() for n, z in state.items() if n == "S")
        grads.append(torch.autograd.grad(loss, [x, *mixer.parameters()]))
    for got, wanted in zip(*grads):
        close(got / wanted.abs().max(), wanted / wanted.abs().max())


@pytest.mark.parametrize("name", [n for n in MIXERS if hasattr(build(n, CONFIG), "fade")])
def test_strong_gates_of_a_mixer(name):
    mixer, x, grads = make(name), tokens(70), []
    mixer.fade.bias.data[0] = 60 / float(torch.as_tensor(mixer.fade.rate()).detach().flatten()[0])  # log_decay near -60
    for form in ("recurrent", "chunked"):
        y = mixer(x, form=form)[0]
        grads.append(torch.autograd.grad((y * x.roll(1, 1)).sum(), list(mixer.parameters())))
    for got, wanted in zip(*grads):
        assert got.isfinite().all()
        close(got, wanted, 1e-8)


@paths
def test_same_seed_same_bits(name, options):
    a, b = make(name, options), make(name, options)
    assert torch.equal(a(tokens(20))[0], b(tokens(20))[0]) and torch.equal(a(tokens(20))[0], a(tokens(20))[0])


@torch.no_grad()
@paths
def test_causal(name, options):
    mixer, x = make(name, options), tokens(16)
    other = torch.cat([x[:, :9], -x[:, 9:]], 1)
    a, b = mixer(x)[0], mixer(other)[0]
    close(a[:, :9], b[:, :9], 1e-12)
    assert (a[:, 9:] - b[:, 9:]).abs().amax(-1).min() > 1e-6


LAYOUTS = {  # prompts of two sequences in pieces; 1 = a token, 0 = padding
    "left": ["000111111111 111111111111"],
    "right": ["111111111000 111111111111"],
    "mixed": ["010110111010 111011000111"],
    "right, then left": ["111111100 111111111", "0001 0111"],
    "a piece without tokens": ["0000111 0110101", "000 110", "01 00", "1 0", "11111110 01111111"],
}


@torch.no_grad()
@paths
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_padding_changes_nothing(name, options, layout):
    mixer, x, state, start = make(name, options), tokens(40), None, [0, 0]
    alone = [mixer(row[None])[0][0] for row in x]
    for piece in layout:
        mask = torch.tensor([[c == "1" for c in row] for row in piece.split()])
        padded = 1e3 * torch.randn(*mask.shape, CONFIG.width, dtype=x.dtype)
        stop = [a + n for a, n in zip(start, mask.sum(1).tolist())]
        padded[mask] = torch.cat([row[a:b] for row, a, b in zip(x, start, stop)])
        y, state = mixer(padded, state, mask=mask)
        assert y.isfinite().all()
        close(y[mask], torch.cat([row[a:b] for row, a, b in zip(alone, start, stop)]))
        start = stop
    for t in range(10):  # decode without a mask
        y, state = mixer(torch.stack([row[a + t] for row, a in zip(x, start)])[:, None], state)
        close(y[:, 0], torch.stack([row[a + t] for row, a in zip(alone, start)]))


@torch.no_grad()
@every_mixer
def test_what_stands_in_padding_is_never_read(name):
    mixer, x, mask = make(name), tokens(8), torch.tensor([[False] * 3 + [True] * 5, [True] * 6 + [False] * 2])
    want = [mixer(row[m][None])[0][0] for row, m in zip(x, mask)]
    y = mixer(x.masked_fill(~mask[..., None], math.nan), mask=mask)[0]
    for row, m, wanted in zip(y, mask, want):
        close(row[m], wanted)


@torch.no_grad()
@pytest.mark.parametrize("window, sinks", [(3, 2), (70, 3), (64, 0)])
def test_padding_between_blocks_of_the_window(window, sinks):
    mixer, x, g = make("delta", dict(window=window, sinks=sinks)), tokens(300), torch.Generator().manual_seed(0)
    alone, state, at = [mixer(row[None])[0][0] for row in x], None, [0, 0]
    for T in (130, 1, 2, 60, 130):
        mask = torch.rand(2, T, generator=g) < torch.tensor([[0.5], [0.1 if T != 60 else 0]])
        stop = [a + int(n) for a, n in zip(at, mask.sum(1))]
        padded = torch.zeros(2, T, CONFIG.width, dtype=x.dtype)
        padded[mask] = torch.cat([row[a:b] for row, a, b in zip(x, at, stop)])
        y, state = mixer(padded, state, mask=mask)
        close(y[mask], torch.cat([row[a:b] for row, a, b in zip(alone, at, stop)]))
        at = stop


VALUES = dict(conv=(0, 1, 3), qk_norm=(True,), rope=(True, False), norm=("rms", "layer"), gate=mixers.GATES)
VALUES |= dict(feature=mixers.FEATURES, denominator=(True, False), expand_k=(2,), expand_v=(3,), window=(1, 5))
VALUES |= dict(sinks=(0, 9), blend=("shared",), negative=(True,), discrete=(True,))


@torch.no_grad()
@pytest.mark.parametrize("name", [n for n in MIXERS if n != "softmax"])
def test_every_option_works_or_says_why_not(name):
    for option, values in VALUES.items():
        for value in values:
            more = dict(window=4) if option in ("sinks", "blend") else {}
            try:
                mixer = build(name, CONFIG, **{option: value} | more)
            except ValueError as error:
                assert re.match("option .*wanted", str(error)), (option, value)
                continue
            x = tokens(9).float()
            y, state = mixer(x)
            assert y.isfinite().all(), (option, value)
            close(torch.cat([mixer(x[:, :5])[0], mixer(x[:, 5:], mixer(x[:, :5])[1])[0]], 1), y, 2e-4)


@paths
@pytest.mark.parametrize("T", (1, 2, 3))
def test_gradients_of_pieces_shorter_than_the_taps(name, options, T):
    mixer, x = make(name, options), tokens(2 + 2 * T).requires_grad_()
    wanted = lambda y: torch.autograd.grad((y * tokens(2 + 2 * T).roll(1, 0)).sum(), [x, *mixer.parameters()])
    one, cut = mixer(x)[0], pieces(mixer, x, [2, T, T])[0]
    close(cut, one)
    for got, want in zip(wanted(cut), wanted(one)):
        close(got, want)


@paths
@pytest.mark.parametrize("moved", (False, True))
def test_every_parameter_learns(name, options, moved):
    mixer = make(name, options, moved=moved).float()
    y = mixer(tokens(12).float())[0]
    y.square().sum().backward()
    for part, p in mixer.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.abs().max() > 0, part


@torch.no_grad()
@paths
def test_bfloat16_module(name, options):
    mixer = make(name, options, moved=False).bfloat16()
    assert all(p.isfinite().all() for p in mixer.state_dict().values())
    y, _ = mixer(tokens(12).bfloat16())
    assert y.dtype == torch.bfloat16 and y.isfinite().all()
    assert distance(y, make(name, options, moved=False)(tokens(12))[0]) < 0.03


def decay_gradients(name, enabled, options=None):
    """-> the gradient of log_decay itself and that of the parameters that make it, as one vector.

    One vector, because a sum over all tokens such as A_log's may cancel to nearly 0 and has no relative error then.
    """
    mixer, kept, x = make(name, options).float(), {}, tokens(150).float()
    cell = mixer.cell
    mixer.cell = lambda *inputs: (kept.update(cell(*inputs)), kept["log_decay"].retain_grad(), dict(kept))[-1]
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        y = mixer(x)[0]
    (y.float() * x.roll(1, 0)).sum().backward()
    parts = [p.grad.flatten() for n, p in mixer.named_parameters() if n.split(".")[0] in ("fade", "w", "bound")]
    return kept["log_decay"].grad, torch.cat(parts)


@pytest.mark.parametrize("name", [n for n, m in MIXERS.items() if m.decay in ("head", "channel")])
def test_decay_gradient_under_bfloat16_autocast(name):
    if name in ("retnet", "supra"):
        pytest.skip("its decay is fixed")
    # xlstm's denominator over signed keys cancels, in any implementation: 119% off here; with keys ≥ 0 it does not
    options = dict(feature="relu") if name == "xlstm" else {}
    for got, wanted in zip(decay_gradients(name, True, options), decay_gradients(name, False, options)):
        assert distance(got, wanted) < 0.02


@torch.no_grad()
@paths
def test_state_size(name, options):
    mixer, floats = make(name, options), lambda s: sum(z.numel() for z in s.values() if z.is_floating_point()) // 2
    for T in (1, 8, 40):
        wanted = mixer.state_size(T) if name == "softmax" else mixer.state_size()
        assert floats(mixer(tokens(T))[1]) == wanted


@torch.no_grad()
@paths
def test_matrix(name, options):
    plain, x = {} if name == "softmax" else dict(norm="none", gate="none", conv=0, expand_v=1), tokens(12)
    for changed in (options, options | plain):
        mixer = make(name, changed)
        A = mixer.matrix(x)  # (B, H, T, T)
        assert A.shape == (2, 3, 12, 12) and torch.equal(A, A.tril())
    v = mixer.v(x).unflatten(-1, (-1, 8)).transpose(1, 2)  # (B, H | 1, T, K)
    close(mixer(x)[0], mixer.o((A @ v).transpose(1, 2).flatten(2)))
    if name == "softmax" or (options.get("blend") == "shared" and name != "metala"):  # metala adds the token itself
        close(A.sum(-1), torch.ones(2, 3, 12, dtype=A.dtype), 1e-12)


@torch.no_grad()
@pytest.mark.parametrize("window, sinks", [(20, 4), (16, 0), (4, 0), (4, 2), (1, 0), (1, 3), (5, 7)])
@pytest.mark.parametrize("T", (1, 3, 16))
def test_window_is_masked_softmax(window, sinks, T):
    teacher, mixer, x = make("softmax"), make("delta", dict(window=window, sinks=sinks)), tokens(T)
    mixer.q.weight, mixer.o.weight = teacher.q.weight, teacher.o.weight
    for mine, shared in ((mixer.k, teacher.k), (mixer.v, teacher.v)):
        mine.weight[:] = shared.weight.view(1, 8, 24).repeat_interleave(3, 0).flatten(0, 1)
    mixer.scale.zero_()  # the recurrent half says nothing
    q, k, v = (z(x).unflatten(-1, (-1, 8)) for z in (mixer.q, mixer.k, mixer.v))
    q, k = (mixer.rotary(z, torch.arange(T)[None]) for z in (q, k))
    i, j = torch.arange(T)[:, None], torch.arange(T)
    allowed = (j <= i) & ((i - j < window) | (j < sinks))
    A = torch.einsum("bihk,bjhk->bhij", q, k) * 8**-0.5
    A = A.masked_fill(~allowed, -torch.inf).softmax(-1)
    close(mixer(x)[0], mixer.o(torch.einsum("bhij,bjhk->bihk", A, v).flatten(2)), 1e-12)
    if window >= T:
        close(mixer(x)[0], teacher(x)[0], 1e-12)


@torch.no_grad()
@pytest.mark.parametrize("name", ("t2r", "hedgehog"))
@pytest.mark.parametrize("T", (3, 8, 80))
def test_a_shared_denominator_gives_each_token_to_one_half(name, T):
    mixer, x = make(name, dict(window=4, sinks=2, blend="shared", conv=0)), tokens(T)
    position, (q, k, v), c = mixer.streams(x, mixers.Past())
    q, k = (mixer.rotary(z, position) for z in (q, k))
    exact = torch.einsum("bihk,bjhk->bhij", q, k) * 8**-0.5
    features = torch.einsum("bihk,bjhk->bhij", c["q"], c["k"]) * (mixer.level * mixer.scale).abs()[:, :, None]
    i, j = torch.arange(T)[:, None], torch.arange(T)
    near = (j <= i) & ((i - j < 4) | (j < 2))
    exact = exact.masked_fill(~near, -torch.inf)
    A = (exact - exact.amax(-1, keepdim=True)).exp() + features * ((j <= i) & ~near)
    close(mixer.matrix(x), A / A.sum(-1, keepdim=True))


@pytest.mark.parametrize("name", [n for n, row in mixers.FEATURES.items() if row[1]])
def test_features_with_a_denominator_do_not_change_sign(name):
    torch.manual_seed(0)
    phi, position = mixers.Feature(name, 3, 16, 64), torch.arange(64)[None]
    q, k = (phi(5 * torch.randn(2, 64, 3, 16), position) for _ in range(2))
    assert torch.einsum("bihk,bjhk->bhij", q, k).min() > -1e-5


unit = lambda z: z / (z.square().sum(-1, keepdim=True) + 1e-6).sqrt()
FORMULAS = {  # φ(q)·φ(k) at the start, written another way than in mixers.py
    "none": lambda q, k, s: s(q, k),
    "relu": lambda q, k, s: s(q.clamp(min=0), k.clamp(min=0)),
    "elu": lambda q, k, s: s(torch.where(q > 0, q + 1, q.exp()), torch.where(k > 0, k + 1, k.exp())),
    "hadamard": lambda q, k, s: 1.1**2 * s(q * (1 + q / 10), k * (1 + k / 10)),
    "t2r": lambda q, k, s: s(q.clamp(min=0), k.clamp(min=0)),
    "hedgehog": lambda q, k, s: (
        s((q / 2).softmax(-1), (k / 2).softmax(-1)) + s((-q / 2).softmax(-1), (-k / 2).softmax(-1))
    ),
    "rebased": lambda q, k, s: s(
        *(((z - z.mean(-1, True)) / (z.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()) ** 2 for z in (q, k))
    ),
    "taylor": lambda q, k, s: 1 + s(q, k) + s(q, k) ** 2 / 2,
    "cosformer": lambda q, k, s: (
        s(q.clamp(min=0), k.clamp(min=0)) * torch.cos(math.pi / 2 / 64 * (torch.arange(20)[:, None] - torch.arange(20)))
    ),
    "performer": lambda q, k, s: s(
        (q - q.square().sum(-1, keepdim=True) / 2).exp(), (k - k.square().sum(-1, keepdim=True) / 2).exp()
    ),
    "rfa": lambda q, k, s: (torch.cos(q[:, :, None] - k[:, None]).sum(-1)).permute(0, 3, 1, 2),
}


@torch.no_grad()
@pytest.mark.parametrize("name", mixers.FEATURES)
def test_features_are_their_formulas(name):
    torch.manual_seed(0)
    phi, q, k = mixers.Feature(name, 3, 16, 64).double(), *torch.randn(2, 2, 20, 3, 16).double()
    dot = lambda a, b: torch.einsum("bihk,bjhk->bhij", a, b)
    got = dot(phi(q, torch.arange(20)[None]), phi(k, torch.arange(20)[None]))
    if name in ("taylor", "performer", "rfa"):  # of q and k at one length, seen along their random directions
        length = 2 if name == "taylor" else 1
        q, k = (torch.einsum("bthk,kj->bthj", length * unit(z), phi.maps[0, 0]) for z in (q, k))
    if name == "performer":  # exp(w·z − |z|²/2), |z| = 1 before the directions
        close(got, dot((q - 0.5).exp(), (k - 0.5).exp()), 1e-6)
    else:
        close(got, FORMULAS[name](q, k, dot), 1e-6)


@torch.no_grad()
def test_random_features_approach_their_kernel():
    """arXiv 2103.02143 eq. 4 for q and k of length 1, over 400 draws; no direction is likelier than its opposite."""
    z, found = unit(torch.randn(12, 16, generator=torch.Generator().manual_seed(0)).double()), 0
    for seed in range(400):
        phi = mixers.Feature("rfa", 1, 16, 64).double()
        phi.maps[:, 0] = mixers.random_maps(16, seed=seed)
        f = phi(z[None, :, None], torch.zeros(1, 12))[0, :, 0]
        found = found + f @ f.T / 16 / 400
    assert distance(found, (-(z[:, None] - z).square().sum(-1) / 2).exp()) < 0.04
    assert abs(sum(mixers.random_maps(16, seed=seed).sign() for seed in range(400)) / 400).max() < 0.25


GATED = {  # log_decay, key and what "now" is, from q, k, v after the (identity) convolution and z = W x + bias
    "retnet": lambda m, q, k, z: ((1 - 2.0 ** (-5 - torch.arange(3).double())).log()[:, None], k, 0),
    "supra": lambda m, q, k, z: (-(2.0 ** (-8 / 3 * torch.arange(1, 4).double()))[:, None], k, 0),
    "gla": lambda m, q, k, z: (((-z).sigmoid() ** (1 / 16)).log(), k, 0),
    "dfw": lambda m, q, k, z: ((-z).sigmoid().log(), k, 0),
    "metala": lambda m, q, k, z: (((-z).sigmoid() ** (1 / 16)).log(), 1 - (-z).sigmoid() ** (1 / 16), m.again),
    "hgrn2": lambda m, q, k, z: (hgrn2_keep(m, z).log(), 1 - hgrn2_keep(m, z), 0),
    "gated_delta": lambda m, q, k, z: (
        -m.fade.A_log.exp() * (1 + z.exp()).log(),
        k / (k.square().sum(-1, True) + 1e-6).sqrt(),
        0,
    ),
    "kda": lambda m, q, k, z: (
        -m.fade.A_log.exp() * (1 + z.exp()).log(),
        k / (k.square().sum(-1, True) + 1e-6).sqrt(),
        0,
    ),
}
hgrn2_keep = lambda m, z: m.bound.sigmoid() + (1 - m.bound.sigmoid()) * (-z).sigmoid()


@torch.no_grad()
@pytest.mark.parametrize("name", GATED)
def test_decays_and_keys_are_their_formulas(name):
    mixer, x, (q, k, v) = bare(name, rope=False, feature="none")
    c = mixer.cell(x, q, k, v)
    z = (
        None
        if name in ("retnet", "supra")
        else (k if mixer.decay == "channel" and name in ("metala", "hgrn2") else mixer.fade.w(x)) + mixer.fade.bias
    )
    log_decay, key, now = GATED[name](mixer, q, k, z)
    close(c["log_decay"], log_decay.expand_as(c["log_decay"]), 1e-6)
    close(c["k"], key, 1e-6)
    close(
        c["now"] if "now" in c else torch.zeros(1).double(),
        (q * now * key).sum(-1, True) if name == "metala" else torch.zeros(1).double(),
    )


def bare(name, **options):
    """A mixer in float64 without convolution, gate and norm, and q, k, v for it."""
    mixer, x = make(name, dict(conv=0, gate="none") | options), tokens(40)
    return mixer, x, [z(x).unflatten(-1, (3, -1)) for z in (mixer.q, mixer.k, mixer.v)]


@torch.no_grad()
def test_xlstm_is_the_stabilised_recurrence():
    """arXiv 2405.04517 eq. 19-27 with a running maximum m, gates capped as in 2503.13427; inputs reach exp(1000)."""
    mixer, x, (q, k, v) = bare("xlstm", qk_norm=False)
    mixer.input.w[0].weight.mul_(3000)
    i, f = (15 * torch.tanh(z / 15) for z in (mixer.input(x)[..., 0], -(mixer.fade.w(x) + mixer.fade.bias)[..., 0]))
    assert mixer.input(x).max() > 710  # more than exp can hold in float64
    C, n, m, outputs = torch.zeros(2, 3, 8, 8).double(), torch.zeros(2, 3, 8).double(), torch.full((2, 3), -1e9), []
    for t in range(40):
        stay, q_t, k_t = F.logsigmoid(f[:, t]) + m, q[:, t], k[:, t] / 8**0.5
        m = torch.maximum(stay, i[:, t])
        fade, write = (stay - m).exp()[..., None], (i[:, t] - m).exp()[..., None]
        C = fade[..., None] * C + write[..., None] * v[:, t, :, :, None] * k_t[:, :, None]
        n = fade * n + write * k_t
        below = torch.maximum((n * q_t).sum(-1).abs(), (-m).exp())
        outputs.append((C @ q_t[..., None])[..., 0] / below[..., None])
    close(mixer(x)[0], mixer.o((torch.stack(outputs, 1) * mixer.scale).flatten(2)), 1e-9)


@torch.no_grad()
@pytest.mark.parametrize("discrete", (False, True))
def test_mamba2_is_its_state_space_model(discrete):
    """arXiv 2405.21060 eq. 1: h = exp(dt A) h + dt B x, y = C h + D x; discrete: dt = 1, A = -softplus."""
    mixer, x, (C, B, v) = bare("mamba2", discrete=discrete)
    z = F.softplus(mixer.fade.w(x) + mixer.fade.bias)  # (B, T, H, 1)
    dt, A = (torch.ones_like(z), -z) if discrete else (z, -mixer.fade.A_log.exp().expand_as(z))
    h, outputs = torch.zeros(2, 3, 8, 8).double(), []
    for t in range(40):
        h = (dt[:, t] * A[:, t]).exp()[..., None] * h + (dt[:, t] * B[:, t])[..., None] * v[:, t, :, None]
        outputs.append(((C[:, t] / 8**0.5)[:, :, None] @ h)[:, :, 0] + mixer.skip * v[:, t])
    close(mixer(x)[0], mixer.o((torch.stack(outputs, 1) * mixer.scale).flatten(2)))


@torch.no_grad()
@pytest.mark.parametrize("tied", (False, True))
def test_rwkv7_erases_before_the_decay(tied):
    """arXiv 2503.14456 eq. 17; tied: the form that the docstring states."""
    mixer, x, (q, k, v) = bare("rwkv7")
    if tied:
        for name in ("w", "a"):
            gate = getattr(mixer, name)
            gate.w[1].weight[:], gate.bias[:] = 0, gate.bias[:, :1].clone()
        mixer.xi[:], mixer.alpha[:], mixer.bonus[:] = 1, 1, 0
    q, k = mixers.unit(q) / 8**0.5, mixers.unit(k)
    w, a, kappa = (-math.exp(-0.5) * mixer.w(x).sigmoid()).exp(), mixer.a(x).sigmoid(), mixers.unit(k * mixer.xi)
    S, outputs = torch.zeros(2, 3, 8, 8).double(), []
    for t in range(40):
        recall = (kappa[:, t, :, None] @ S)[:, :, 0]
        if tied:
            S = w[:, t, :, :, None] * S + kappa[:, t, :, :, None] * (a[:, t] * (v[:, t] - recall))[:, :, None]
        else:
            S = w[:, t, :, :, None] * S - (a[:, t] * kappa[:, t])[..., None] * recall[:, :, None]
            S = S + (k[:, t] * (1 + (a[:, t] - 1) * mixer.alpha))[..., None] * v[:, t, :, None]
        bonus = (8**0.5 * q[:, t] * mixer.bonus * k[:, t] * (1 + (a[:, t] - 1) * mixer.alpha)).sum(-1, keepdim=True)
        outputs.append((q[:, t, :, None] @ S)[:, :, 0] + bonus * v[:, t])
    close(mixer(x)[0], mixer.o((torch.stack(outputs, 1) * mixer.scale).flatten(2)), 1e-6)  # unit has its 1e-6


@torch.no_grad()
def test_mixers_collapse_into_each_other():
    def same(name, other, options=None, more=None, change=lambda mine, theirs: None):
        mine, theirs = make(name, dict(gate="none") | (options or {})), make(other, dict(gate="none") | (more or {}))
        shapes = {n: w.shape for n, w in theirs.state_dict().items()}
        theirs.load_state_dict({n: w for n, w in mine.state_dict().items() if shapes.get(n) == w.shape}, strict=False)
        change(mine, theirs)
        close(mine(tokens(70))[0], theirs(tokens(70))[0], 1e-12)

    def one_a_head(mine, theirs):
        for w in (*mine.fade.w.parameters(), *theirs.fade.w.parameters()):
            w.zero_()
        mine.fade.bias[:] = theirs.fade.bias[:] = torch.tensor([[-3.0], [0.1], [2.0]])

    def no_decay(mine, theirs):
        mine.fade.bias[:] = -1e4

    same("kda", "gated_delta", change=one_a_head)
    same("gated_delta", "delta", change=no_decay)
    same("gla", "mamba2", more=dict(discrete=True), change=lambda a, b: (one_a_head(a, b), rates_of(a, b)))
    same("dfw", "linear", more=dict(feature="none"), change=no_decay)
    same("retnet", "linear", dict(rope=False), dict(feature="none"), lambda a, b: a.log_decay.zero_())


def rates_of(mine, theirs):
    mine.fade.constant = 1
    theirs.skip.zero_()


@pytest.mark.parametrize("name", MIXERS)
def test_a_model_from_scratch_starts_near_ln_vocab(name):
    torch.manual_seed(0)
    model = surgery.Transformer(surgery.Config(257, 48, 3, 6, 2, 8, 64, context=64, mixers=[name] * 3))
    ids = torch.randint(0, 257, (4, 64))
    loss = F.cross_entropy(model(ids)[0].flatten(0, 1), ids.roll(-1, 1).flatten())
    assert loss.item() == pytest.approx(math.log(257), abs=0.2)


@pytest.mark.parametrize("name", [n for n in MIXERS if n != "softmax"])
def test_distillation_brings_every_mixer_nearer(name):
    teacher, _ = tiny_teacher()
    student, losses = surgery.linearize(teacher, name), []
    teacher = copy.deepcopy(teacher)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    for step in range(12):
        ids = torch.randint(0, 257, (4, 32), generator=torch.Generator().manual_seed(step % 3))
        optimizer.zero_grad()
        losses.append(distill.attention(student, teacher, ids, lambda loss: loss.backward())["loss"].item())
        optimizer.step()
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])


def test_the_mixer_that_readme_adds():
    text = Path(mixers.__file__).with_name("README.md").read_text()
    code = text[text.index("    @register") : text.index("`--mixer fading`")]
    try:
        exec(textwrap.dedent(code), vars(mixers))
        student, ids = surgery.linearize(tiny_teacher()[0], "fading"), torch.randint(0, 257, (2, 20))
        whole = student(ids)[0]
        first, state = student(ids[:, :13])
        close(torch.cat([first, student(ids[:, 13:], state)[0]], 1), whole, 1e-5)
    finally:
        MIXERS.pop("fading", None)


# ---------------------------------------------------------------- 3. A teacher comes in whole, and a student goes out
# Every weight has one place, logits equal an independent implementation's, and what was saved is what is loaded.

CACHED = surgery.CACHE / "SmolLM2-135M-Instruct.Q4_1.gguf"
needs_teacher = pytest.mark.skipif(not CACHED.exists(), reason="the teacher is not cached; train.py fetches it")
BYTES = {bytes([b]): b for b in range(256)}


def tiny_teacher(**changes):
    torch.manual_seed(0)
    sizes = dict(vocab=257, width=24, layers=2, heads=6, kv_heads=2, head_dim=4, ffn=32, context=64)
    model = surgery.Transformer(surgery.Config(**sizes | changes))
    return model, surgery.Tokenizer(BYTES, surgery.SPLITS["gpt-2"], {"<|endoftext|>": 256}, 256)


@pytest.fixture
def teacher_folder(tmp_path):
    surgery.save(*tiny_teacher(), tmp_path / "teacher")
    return tmp_path / "teacher"


def tokenizer_json(folder, vocab=300):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    pre = tokenizers.pre_tokenizers
    made.pre_tokenizer = pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)])
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = pre.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=alphabet, special_tokens=["<|end|>"])
    made.train_from_iterator(topics.values(), trainer)
    made.save(str(folder / "tokenizer.json"))
    return made


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("heads, kv_heads", [(9, 3), (4, 2), (4, 1)])
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_oracle_llama_folder(tmp_path, tied, heads, kv_heads, shard):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict(vocab_size=300, hidden_size=8 * heads, intermediate_size=40, num_hidden_layers=3)
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=tied, rope_theta=5e4
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path, max_shard_size=shard)
    reference = tokenizer_json(tmp_path)
    ours, tokenizer = surgery.load_teacher(tmp_path)
    ids = torch.randint(0, 300, (3, 37))
    assert (ours(ids)[0] - theirs(ids).logits).abs().max() < 1e-4
    prompt = reference.encode("what 42 is, é").ids
    assert tokenizer.encode("what 42 is, é") == prompt and tokenizer.decode(prompt) == "what 42 is, é"
    greedy = theirs.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False, eos_token_id=None)
    assert list(ours.generate(prompt, 30)) == greedy[0, len(prompt) :].tolist()


SIZES = dict(vocab_size=300, hidden_size=32, intermediate_size=40, num_hidden_layers=4)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)
LONG = dict(rope_theta=1e4, factor=4.0, original_max_position_embeddings=32)
FAMILIES = {
    "gpt2": ("GPT2", dict(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=128)),
    "llama with biases": ("Llama", SIZES | dict(attention_bias=True, mlp_bias=True)),
    "llama, one key head": ("Llama", SIZES | dict(num_key_value_heads=1, head_dim=12)),
    "llama 3": (
        "Llama",
        SIZES | dict(rope_parameters=LONG | dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0)),
    ),
    "llama, linear": ("Llama", SIZES | dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=3.0))),
    "llama, yarn": ("Llama", SIZES | dict(rope_parameters=LONG | dict(rope_type="yarn"))),
    "yarn, mscale": (
        "Llama",
        SIZES
        | dict(
            rope_parameters=LONG
            | dict(rope_type="yarn", mscale=0.7, mscale_all_dim=1.3, beta_fast=16.0, truncate=False)
        ),
    ),
    "mistral": ("Mistral", SIZES | dict(sliding_window=8, head_dim=8)),
    "qwen2": ("Qwen2", SIZES),
    "qwen2, sliding": ("Qwen2", SIZES | dict(use_sliding_window=True, sliding_window=8, max_window_layers=2)),
    "qwen3": ("Qwen3", SIZES | dict(head_dim=16)),
    "smollm3": ("SmolLM3", SIZES | dict(pad_token_id=0)),
}


@torch.no_grad()
def foreign(name, folder):
    """A small random model of a family by transformers' own class, saved in folder with a tokenizer."""
    transformers, (kind, sizes) = pytest.importorskip("transformers"), FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes, bos_token_id=1, eos_token_id=2)
    theirs = getattr(transformers, {"GPT2": "GPT2LMHeadModel"}.get(kind, f"{kind}ForCausalLM"))(config).eval()
    for p in theirs.parameters():  # biases and norms too
        p += 0.1 * torch.randn_like(p)
    theirs.save_pretrained(folder)
    tokenizer_json(folder)
    return theirs


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_oracle_families(tmp_path, name):
    theirs = foreign(name, tmp_path)
    ours, _ = surgery.load_teacher(tmp_path)
    for B, T in ((1, 1), (1, 37), (3, 100)):  # beyond the 32 tokens of the scaled ones
        ids = torch.randint(3, 300, (B, T))
        assert (ours(ids)[0] - theirs(ids).logits).abs().max() < 1e-4
    mask = torch.arange(100) >= torch.tensor([[0], [13], [60]])  # left padding
    wanted = theirs(ids, attention_mask=mask.long(), position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    assert (ours(ids, mask=mask)[0] - wanted)[mask].abs().max() < 1e-4
    greedy = theirs.generate(ids[:1, :7], max_new_tokens=30, do_sample=False, eos_token_id=None)
    assert list(ours.generate(ids[0, :7].tolist(), 30)) == greedy[0, 7:].tolist()
    assert torch.equal(surgery.linearize(ours, "softmax")(ids)[0], ours(ids)[0])
    student = surgery.linearize(ours, "gla", window=128, sinks=0)  # all softmax once the recurrence is silent
    for block in student.blocks:
        block.mixer.scale.zero_()
    if not theirs.config.to_dict().get("sliding_window"):
        assert (student(ids)[0] - ours(ids)[0]).abs().max() < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_oracle_export_of_softmax(tmp_path, name):
    transformers, theirs = pytest.importorskip("transformers"), foreign(name, tmp_path / "in")
    surgery.export(*surgery.load_teacher(tmp_path / "in"), tmp_path / "out")
    again, ids = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out"), torch.randint(3, 300, (2, 60))
    assert type(again) is type(theirs) and (again(ids).logits - theirs(ids).logits).abs().max() < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("mixer, options", [("gated_delta", {}), ("retnet", dict(window=4, keep=(1,))), ("rwkv7", {})])
def test_oracle_export_of_a_student(tmp_path, mixer, options):
    transformers = pytest.importorskip("transformers")
    teacher, tokenizer = tiny_teacher()
    student = surgery.linearize(teacher, mixer, **options)
    surgery.export(student, tokenizer, tmp_path / "out")
    load = transformers.AutoModelForCausalLM.from_pretrained
    theirs, ids = load(tmp_path / "out", trust_remote_code=True).eval(), torch.randint(0, 257, (2, 30))
    again, _ = surgery.load_teacher(tmp_path / "out")
    assert torch.equal(again(ids)[0], student(ids)[0])
    assert (theirs(ids).logits - student(ids)[0]).abs().max() < 1e-5
    greedy = theirs.generate(ids[:1, :9], max_new_tokens=20, do_sample=False, eos_token_id=None)
    assert greedy[0, 9:].tolist() == list(student.generate(ids[0, :9].tolist(), 20))
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids[:1, :9]], 1)
    mask = (torch.arange(12) >= 3).long()[None]
    left = theirs.generate(padded, attention_mask=mask, max_new_tokens=20, do_sample=False, eos_token_id=None)
    assert left[0, 12:].tolist() == greedy[0, 9:].tolist()
    made = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in TEXTS:
        assert made(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text)


def kind_of(w, quant):
    """Matrices are quantised, the rest is not."""
    return importlib.import_module("gguf").GGMLQuantizationType[quant if w.dim() == 2 else "F32"]


def rounded(w, quant):
    """What is left of w in a GGUF."""
    quants = pytest.importorskip("gguf").quants
    q = kind_of(w, quant)
    return torch.from_numpy(quants.dequantize(quants.quantize(w.detach().numpy(), q), q).copy())


def write_gguf(path, kind, weights, fields, quant, vocab):
    """A GGUF as llama.cpp writes it: q and k of a Llama with the halves of each head interleaved."""
    gguf = pytest.importorskip("gguf")
    writer, byte = gguf.GGUFWriter(path, kind), surgery.byte_of_char()
    for name, value in fields.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{kind}.{name}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm" if kind == "llama" else "gpt-2")
    writer.add_token_list([*byte, "th", *(f"<{i}>" for i in range(vocab - 257))])
    writer.add_token_types([1] * 257 + [3] * (vocab - 257))
    writer.add_token_merges(["t h"])
    for name, w in weights.items():
        q = kind_of(w, quant)
        data = w.numpy() if w.dtype == torch.uint8 else gguf.quants.quantize(w.numpy(), q)
        writer.add_tensor(name, data, raw_dtype=q)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.no_grad()
@pytest.mark.parametrize("quant", ["F32", "F16", "BF16", "Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_oracle_gguf(tmp_path, kind, quant):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "llama":
        scaling = LONG | dict(rope_type="linear")
        config = transformers.LlamaConfig(**SIZES | dict(intermediate_size=64, rope_parameters=scaling))
        fields = {"embedding_length": 32, "block_count": 4, "attention.head_count": 4, "attention.head_count_kv": 2}
        fields |= {"feed_forward_length": 64, "context_length": 128, "attention.layer_norm_rms_epsilon": 1e-6}
        theirs = transformers.LlamaForCausalLM(config).eval()
    else:
        config = transformers.GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=128)
        fields = {"embedding_length": 32, "block_count": 2, "attention.head_count": 4, "feed_forward_length": 128}
        fields |= {"context_length": 128, "attention.layer_norm_epsilon": 1e-5}
        theirs = transformers.GPT2LMHeadModel(config).eval()
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "wte": "token_embd"}
    names |= {"wpe": "position_embd", "ln_f": "output_norm", "input_layernorm": "attn_norm", "ln_1": "attn_norm"}
    names |= {"post_attention_layernorm": "ffn_norm", "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv"}
    names |= {"attn.c_proj": "attn_output", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down", "transformer.": ""}
    names |= {f"self_attn.{n}_proj": f"attn_{n}" for n in "qkv"} | {"self_attn.o_proj": "attn_output"}
    names |= {f"mlp.{n}_proj": f"ffn_{n}" for n in ("gate", "up", "down")} | {"model.layers.": "blk.", "h.": "blk."}
    weights = {}
    for name, p in theirs.named_parameters():
        p += 0.1 * torch.randn_like(p)
        turned = ".c_" in name and p.dim() == 2
        w = rounded((p.T if turned else p).contiguous(), quant)
        p.copy_(w.T if turned else w)  # theirs has what the file will have
        if kind == "llama" and (heads := 4 * ("q_proj" in name) + 2 * ("k_proj" in name)):
            w = w.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        for old, new in names.items():
            name = name.replace(old, new)
        weights[name] = w.detach().clone().contiguous()
    if kind == "llama":  # Llama 3's way to scale: a divisor for each frequency
        weights["rope_freqs.weight"] = torch.full((4,), 4.0)
    write_gguf(tmp_path / "model.gguf", kind, weights, fields, quant, 300)
    ours, tokenizer = surgery.load_teacher(tmp_path / "model.gguf")
    ids = torch.randint(0, 300, (2, 50))
    assert (ours(ids)[0] - theirs(ids).logits).abs().max() < 1e-4
    assert tokenizer.decode(tokenizer.encode("the 42 é")) == "the 42 é" and tokenizer.encode("th") == [256]
    greedy = theirs.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=20, do_sample=False, eos_token_id=None)
    assert list(ours.generate([5, 6, 7], 20)) == greedy[0, 3:].tolist()


def scale_and_least(s):
    """The 8 scales and 8 minima, 6 bits each, in the 12 bytes of a Q4_K block."""
    first, second, high = s[:, 0:4], s[:, 4:8], s[:, 8:12]
    scale = torch.cat([first & 63, (high & 15) | (first >> 6 << 4)], 1)
    return scale, torch.cat([second & 63, (high >> 4) | (second >> 6 << 4)], 1)


def q4_k(raw):
    """Blocks of 144 bytes -> 256 numbers each, by the layout in ggml-common.h (block_q4_K)."""
    d, least = raw[:, :4].contiguous().view(torch.float16).float().split(1, 1)
    (scale, m), q = scale_and_least(raw[:, 4:16].int()), raw[:, 16:].int().unflatten(1, (4, 32))
    q = torch.stack([q & 15, q >> 4], 2).flatten(1, 2)  # (n, 8, 32)
    return ((d * scale)[..., None] * q - (least * m)[..., None]).flatten(1)


def q6_k(raw):
    """Blocks of 210 bytes -> 256 numbers each (block_q6_K): 4 low bits, 2 high ones, 16 scales in int8."""
    low, high = raw[:, :128].int().unflatten(1, (2, 2, 32)), raw[:, 128:192].int().unflatten(1, (2, 1, 32))
    low = torch.cat([low & 15, low >> 4], 2)  # (n, 2, 4, 32)
    high = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], 2)
    d, scale = raw[:, 208:].contiguous().view(torch.float16).float(), raw[:, 192:208].view(torch.int8).float()
    return ((low | high << 4) - 32).flatten(1) * (d * scale).repeat_interleave(16, 1)


@torch.no_grad()
@pytest.mark.parametrize("quant, size, formula", [("Q4_K", 144, q4_k), ("Q6_K", 210, q6_k)])
def test_gguf_k_quants(tmp_path, quant, size, formula):
    sizes = {"token_embd": 300, "blk.0.attn_q": 256, "blk.0.attn_k": 128, "blk.0.attn_v": 128, "blk.0.attn_output": 256}
    sizes |= {"blk.0.ffn_gate": 256, "blk.0.ffn_up": 256, "blk.0.ffn_down": 256}
    weights = {f"{name}.weight": torch.ones(256) for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")}
    g, wanted = torch.Generator().manual_seed(0), {}
    for name, rows in sizes.items():
        raw = torch.randint(0, 256, (rows, size), generator=g, dtype=torch.uint8)
        place = slice(0, 4) if quant == "Q4_K" else slice(208, 210)
        raw[:, place] = torch.rand(rows, (place.stop - place.start) // 2, generator=g).half().view(torch.uint8)
        weights[f"{name}.weight"], wanted[name] = raw, formula(raw)
    fields = {"embedding_length": 256, "block_count": 1, "attention.head_count": 4, "attention.head_count_kv": 2}
    fields |= {"feed_forward_length": 256, "context_length": 64, "attention.layer_norm_rms_epsilon": 1e-6}
    write_gguf(tmp_path / "k.gguf", "llama", weights, fields, quant, 300)
    model, _ = surgery.load_teacher(tmp_path / "k.gguf")
    block = model.blocks[0]
    close(model.embed.weight.data, wanted["token_embd"], 1e-6)
    close(block.mixer.v.weight.data, wanted["blk.0.attn_v"], 1e-6)
    close(block.mlp.down.weight.data, wanted["blk.0.ffn_down"], 1e-6)
    q = wanted["blk.0.attn_q"].unflatten(0, (4, 32, 2)).transpose(1, 2).flatten(0, 2)
    close(block.mixer.q.weight.data, q, 1e-6)


TEXTS = [
    "It's 1234,5  and\n\n x\t7 8's 漢字 🙂\r\n   end  ",
    "año e\u0301 \u00e9 ½ <s> </s> <|end|>",
    " lead",
    "",
    "a\u200bb \ufb01",
]


def odd_tokenizers(kind):
    tk = pytest.importorskip("tokenizers")
    pre, special = tk.pre_tokenizers, ["<s>", "</s>", "<|end|>"]
    made = tk.Tokenizer(
        tk.models.BPE(byte_fallback=kind == "sentencepiece", unk_token="<s>" if kind == "sentencepiece" else None)
    )
    alphabet, text = pre.ByteLevel.alphabet(), list(topics.values())
    if kind == "sentencepiece":
        made.normalizer = tk.normalizers.Sequence([tk.normalizers.Prepend("▁"), tk.normalizers.Replace(" ", "▁")])
        made.decoder = tk.decoders.Sequence(
            [
                tk.decoders.Replace("▁", " "),
                tk.decoders.ByteFallback(),
                tk.decoders.Fuse(),
                tk.decoders.Strip(" ", 1, 0),
            ]
        )
        alphabet, special = [], special + [f"<0x{b:02X}>" for b in range(256)]
    else:
        split = {"llama 3": surgery.SPLITS["llama-bpe"], "qwen": surgery.SPLITS["qwen2"], "gpt2": None}[kind]
        steps = [pre.Split(tk.Regex(split), "isolated")] if split else []
        made.pre_tokenizer = pre.Sequence([*steps, pre.ByteLevel(add_prefix_space=False, use_regex=not split)])
        made.normalizer = tk.normalizers.NFC() if kind == "qwen" else None
        made.decoder = tk.decoders.ByteLevel()
    made.train_from_iterator(
        text, tk.trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, special_tokens=special)
    )
    if kind in ("llama 3", "sentencepiece"):
        made.post_processor = tk.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return made


@pytest.mark.parametrize("kind", ["gpt2", "llama 3", "qwen", "sentencepiece"])
def test_oracle_tokenizers(tmp_path, kind):
    made = odd_tokenizers(kind)
    made.save(str(tmp_path / "tokenizer.json"))
    ours = surgery.read_tokenizer(tmp_path, {"eos_token_id": 1})
    assert isinstance(ours, surgery.Library) == (kind == "sentencepiece")
    assert ours.bos == (0 if kind in ("llama 3", "sentencepiece") else None)
    surgery.save_tokenizer(ours, tmp_path)
    g = torch.Generator().manual_seed(0)
    anything = ["".join(chr(c) for c in torch.randint(32, 0xD7FF, (20,), generator=g).tolist()) for _ in range(50)]
    again, out = surgery.read_tokenizer(tmp_path, {}), type(made).from_str(ours.to_json())
    out.encode_special_tokens = True
    for text in [*TEXTS, Path(train.__file__).read_text()[:5000], *anything]:
        made.encode_special_tokens = True
        ids = made.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == again.encode(text) == ids == out.encode(text, add_special_tokens=False).ids
        if kind != "qwen":  # which brings text to NFC first
            assert ours.decode(ids) == again.decode(ids) == text
        made.encode_special_tokens = False
        assert ours.encode(text, special=True) == made.encode(text, add_special_tokens=False).ids


def test_oracle_any_text_comes_back(tmp_path):
    hypothesis = pytest.importorskip("hypothesis")
    made = {kind: odd_tokenizers(kind) for kind in ("gpt2", "llama 3")}
    ours = {"bytes": surgery.bytes_tokenizer()}
    for kind, theirs in made.items():
        theirs.encode_special_tokens = True
        theirs.save(str(tmp_path / "tokenizer.json"))
        ours[kind] = surgery.read_tokenizer(tmp_path, {})

    @hypothesis.settings(deadline=None, max_examples=500, derandomize=True, database=None)
    @hypothesis.given(hypothesis.strategies.text())
    def back(text):
        for kind, tokenizer in ours.items():
            ids = tokenizer.encode(text)
            assert tokenizer.decode(ids) == text and max(ids, default=0) < tokenizer.vocab
            assert kind == "bytes" or ids == made[kind].encode(text, add_special_tokens=False).ids

    back()


CHATS = {  # of my own, each with what a family's templates use
    "marks": "{%- for m in messages %}{{ '<s>' + m['role'] + '\n' + m.content | trim + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}",
    "turns": "{{ bos_token }}{% for m in messages %}\n  {% if loop.index0 > 1 and m.role == 'system' %}"
    "{{ raise_exception('late system') }}{% endif %}\n  {% if m.role == 'user' %}[Q] {{ m.content }} [/Q]"
    "{% elif loop.last and not add_generation_prompt %}{% break %}{% else %} {{ m.content }}{{ eos_token }}"
    "{% endif %}\n{% endfor %}",
    "tools": "{% if tools is not none %}{{ tools | length }}{% endif %}{{ messages | tojson(indent=2) }}{{ bos_token }}"
    "{{ messages | tojson(ensure_ascii=true, sort_keys=true) }}{{ eos_token }}",
    "answers": "{% set day = strftime_now('%Y') %}{{ day }}{{ messages | tojson }}{% for m in messages %}"
    "{%- if m.role == 'assistant' -%}\n {%- generation -%} {{ m.content }} {%- endgeneration -%}\n{% endif %}"
    "{% endfor %}",
}
TALK = [{"role": "system", "content": " Be <brief>, \u00e9 \n"}, {"role": "user", "content": "2 + 2?"}]


@pytest.mark.parametrize("kind, name", list(itertools.product(("gpt2", "sentencepiece"), CHATS)))
def test_oracle_chat_templates(tmp_path, kind, name):
    transformers = pytest.importorskip("transformers")
    how = dict(bos_token="<s>", eos_token="</s>", chat_template=CHATS[name])
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=odd_tokenizers(kind), **how)
    theirs.save_pretrained(tmp_path)
    ours = surgery.read_tokenizer(tmp_path, {"eos_token_id": 1})
    (tmp_path / "saved").mkdir()
    surgery.save_tokenizer(ours, tmp_path / "saved")
    for tokenizer in (ours, surgery.read_tokenizer(tmp_path / "saved", {})):
        assert (tokenizer.bos, tokenizer.eos, tokenizer.stops) == (0 if kind == "sentencepiece" else None, 1, [1])
        for reply, talk in itertools.product((True, False), (TALK, [*TALK, {"role": "assistant", "content": "4"}])):
            text = theirs.apply_chat_template(talk, tokenize=False, add_generation_prompt=reply)
            assert surgery.dialogue(tokenizer, talk, reply=reply) == text
            ids = theirs(text, add_special_tokens=False)["input_ids"]
            assert tokenizer.encode(text, special=True) == ids


def test_templates_are_strangers():
    tokenizer = surgery.bytes_tokenizer()
    for template in (
        None,
        "{{ 'a' * 10**15 }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ raise_exception('no') }}",
        "{% if %}",
    ):
        tokenizer.chat = template and {"template": template}
        with pytest.raises(surgery.BadInput, match="chat template"):
            surgery.dialogue(tokenizer, TALK)


def test_oracle_vocabulary_and_merges(tmp_path):
    made = odd_tokenizers("gpt2")
    made.model.save(str(tmp_path))
    ours = surgery.read_tokenizer(tmp_path, {"eos_token_id": [1, 2]})
    assert (ours.eos, ours.stops) == (1, [1, 2])
    made.encode_special_tokens = True
    for text in TEXTS[:2]:
        assert ours.encode(text) == made.encode(text).ids and ours.decode(ours.encode(text)) == text


def test_oracle_old_gpt2_files_and_pickles(tmp_path):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**FAMILIES["gpt2"][1])).eval()
    theirs.config.save_pretrained(tmp_path)
    tokenizer_json(tmp_path)
    old = {n.removeprefix("transformer."): w for n, w in theirs.state_dict().items() if n != "lm_head.weight"}
    old |= {"h.0.attn.bias": torch.ones(1, 1, 128, 128).tril(), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    torch.save(old, tmp_path / "pytorch_model.bin")
    ours, ids = surgery.load_teacher(tmp_path)[0], torch.randint(0, 300, (1, 20))
    assert (ours(ids)[0] - theirs(ids).logits).abs().max() < 1e-4
    with pytest.raises(surgery.BadInput, match="129 tokens: this model has learned 128 positions"):
        ours(torch.zeros(1, 129, dtype=torch.long))

    class Hostile:
        def __reduce__(self):
            return exec, ("raise SystemExit('code in a pickle ran')",)

    torch.save(old | {"h.0.ln_1.weight": Hostile()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(surgery.BadInput, match="damaged, or not what it should be"):
        surgery.load_teacher(tmp_path)


@needs_teacher
def test_oracle_packaged_teacher():
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    load = transformers.AutoModelForCausalLM.from_pretrained
    theirs = load(CACHED.parent, gguf_file=CACHED.name, dtype=torch.float32)
    ours, tokenizer = surgery.load_teacher(CACHED)
    ids = torch.tensor([tokenizer.encode(surgery.__doc__)[:200]])
    with torch.no_grad():
        assert (ours(ids)[0] - theirs(ids).logits).abs().max() < 1e-4


@needs_teacher
def test_oracle_packaged_tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    gguf = pytest.importorskip("gguf")
    fields = {k: f.contents() for k, f in gguf.GGUFReader(CACHED).fields.items() if "tokens" in k or "merges" in k}
    vocab = {t: i for i, t in enumerate(fields["tokenizer.ggml.tokens"])}
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"]]
    reference = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    pre = tokenizers.pre_tokenizers
    reference.pre_tokenizer = pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)])
    tokenizer = surgery.load_teacher(CACHED)[1]
    texts = [*itertools.islice(evaluate.documentation(), 20), "año 1234,5  \n\n x\t7 8's 漢字 🙂\r\n   end  "]
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text).ids and tokenizer.decode(ids) == text
    for b in range(256):
        assert all(i < 49152 for i in tokenizer.encode(bytes([b]).decode("latin-1") + "\x00\x01\x07"))


@needs_teacher
def test_packaged_teacher_knows_paris():
    teacher, tokenizer = surgery.load_teacher(CACHED)
    assert tokenizer.decode(list(teacher.generate(tokenizer.encode("The capital of France is"), 2))) == " Paris."


def test_bytes_without_a_token_are_dropped():
    ranks = {b: i for b, i in BYTES.items() if i not in (0, 7, 0xF5)}
    tokenizer = surgery.Tokenizer(ranks, surgery.SPLITS["smollm"], {"<|endoftext|>": 256}, 256)
    assert tokenizer.decode(tokenizer.encode("a\0b\x07c é")) == "abc é"
    assert tokenizer.encode("<|endoftext|>") != [256] == tokenizer.encode("<|endoftext|>", special=True)


def test_merges_that_tiktoken_would_order_otherwise_are_refused():
    with pytest.raises(surgery.BadInput, match="grow along the merges"):
        surgery.Tokenizer.from_merges(
            {"a": 0, "b": 1, "ab": 3, "ba": 2}, ["a b", "b a"], surgery.SPLITS["gpt-2"], {}, 0
        )


def test_softmax_student_is_the_teacher_bit_for_bit():
    teacher, _ = tiny_teacher()
    ids = torch.randint(0, 257, (2, 20))
    for student in (surgery.linearize(teacher, "softmax"), surgery.linearize(teacher, "delta", keep=(0, 1))):
        assert torch.equal(student(ids)[0], teacher(ids)[0])
        for name, stage in distill.STAGES.items():
            assert name in ("ce", "sft") or sum(v for k, v in stage(student, teacher, ids).items() if k != "ce") == 0


def test_untouched_layers_share_memory():
    teacher, _ = tiny_teacher()
    student = surgery.linearize(teacher, "gla")
    theirs = {p.data_ptr() for p in teacher.parameters()}
    for name, p in student.named_parameters():
        assert (p.data_ptr() in theirs) == (student.origin[name] == "shared") == (".mixer." not in name)


def test_every_key_is_accounted_for(capsys):
    teacher, _ = tiny_teacher()
    student = surgery.linearize(teacher, "delta", keep=(1,))
    surgery.report(student)
    last = capsys.readouterr().out.splitlines()[-1]
    told = {origin: int(n.replace(",", "")) for origin, n in re.findall(r"(shared|copied|new) ([\d,]+)", last)}
    counts = {o: sum(p.numel() for n, p in student.named_parameters() if student.origin[n] == o) for o in told}
    assert told == counts and last.endswith("; left out 0") and min(counts.values()) > 0
    assert sum(counts.values()) == sum(p.numel() for p in student.parameters())


@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (9, 3)])
def test_grouped_heads_are_repeated_whole(heads, kv_heads):
    teacher, _ = tiny_teacher(heads=heads, kv_heads=kv_heads)
    teacher, x = teacher.double(), torch.randn(2, 5, 24, dtype=torch.float64)
    for old, new in zip(teacher.blocks, surgery.linearize(teacher, "delta").blocks):
        k = old.mixer.k(x).unflatten(-1, (kv_heads, -1)).repeat_interleave(heads // kv_heads, 2)
        close(new.mixer.k(x).unflatten(-1, (heads, -1)), k, 1e-12)


@every_mixer
def test_saved_is_loaded(tmp_path, name):
    teacher, tokenizer = tiny_teacher()
    student = surgery.linearize(teacher, name, window=4 if name == "delta" else 0)
    surgery.save(student, tokenizer, tmp_path / "run" / "step-00000003")
    again, tokenizer2 = surgery.load(tmp_path / "run")
    ids = torch.randint(0, 257, (2, 20))
    assert torch.equal(student(ids)[0], again(ids)[0]) and tokenizer2.encode("é 1") == tokenizer.encode("é 1")


def test_generate_follows_its_seed_and_its_argmax():
    model = surgery.linearize(tiny_teacher()[0], "delta", window=4)
    how = dict(temperature=1.0, top_k=50, top_p=0.9)
    runs = [list(model.generate([1, 2, 3], 12, seed=seed, **how)) for seed in (0, 0, 1)]
    assert runs[0] == runs[1] and len({tuple(r) for r in runs}) == 2
    ids = [1, 2, 3]
    for token in model.generate([1, 2, 3], 12):
        assert token == model(torch.tensor([ids]))[0][0, -1].argmax()
        ids.append(token)


def test_damaged_models_are_refused(teacher_folder, tmp_path):
    weights = teacher_folder / "model.safetensors"
    whole, config = weights.read_bytes(), (teacher_folder / "config.json").read_text()
    (tmp_path / "short.gguf").write_bytes(b"GGUF\x03\0\0\0" + b"\xff" * 40)
    with pytest.raises(surgery.BadInput, match="short.gguf: damaged.* get it again"):
        surgery.load_teacher(tmp_path / "short.gguf")
    for size in (0, 5, len(whole) // 2):
        weights.write_bytes(whole[:size])
        with pytest.raises(surgery.BadInput, match="teacher: damaged.* an older step"):
            surgery.load_teacher(teacher_folder)
    weights.write_bytes(whole)
    changes = (('"width": 24', '"width": 25'), ('"layers": 2', '"layers": 3'), ('"ffn": 32', '"ffn": "32"'))
    for change in (*changes, ('"rope_base": 10000.0', '"rope_base": "x"'), ('"tied"', '"tide"')):
        (teacher_folder / "config.json").write_text(config.replace(*change))
        with pytest.raises(surgery.BadInput, match="contradict|by its config|wanted a (number|whole)|damaged"):
            surgery.load_teacher(teacher_folder)


def hugging_face_folder(folder):
    """A tiny Llama in the hub's format, written by hand."""
    teacher, _ = tiny_teacher()
    c, weights = teacher.config, {}
    for name, w in teacher.state_dict().items():
        name = re.sub(r"mixer\.([qkvo])", r"self_attn.\1_proj", re.sub(r"mlp\.(\w+)", r"mlp.\1_proj", name))
        name = name.replace("norm1", "input_layernorm").replace("norm2", "post_attention_layernorm")
        name = "model." + name.replace("blocks.", "layers.").replace("embed.", "embed_tokens.")
        weights |= {} if name.startswith("model.head") else {name: w.clone()}
    config = {row[0]: getattr(c, name) for name, row in surgery.FIELDS.items()}
    config |= {"model_type": "llama", "vocab_size": c.vocab, "tie_word_embeddings": True}
    vocab = {char: i for i, char in enumerate(surgery.byte_of_char())}
    tokens = {"model": {"type": "BPE", "vocab": vocab, "merges": []}, "pre_tokenizer": {"type": "ByteLevel"}}
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    return teacher


def test_hugging_face_folder_is_the_teacher(tmp_path):
    teacher = hugging_face_folder(tmp_path / "hf")
    loaded, tokenizer = surgery.load_teacher(tmp_path / "hf")
    ids = torch.tensor([tokenizer.encode("abc é")])
    assert torch.equal(loaded(ids)[0], teacher(ids)[0]) and tokenizer.decode(ids[0].tolist()) == "abc é"


DAMAGED = {  # file, what stands in it
    "a list": ("config.json", "[1]"),
    "no JSON": ("config.json", "{"),
    "another architecture": ("config.json", '{"model_type": "mamba"}'),
    "no sizes": ("config.json", '{"model_type": "llama"}'),
    "wrong types": ("config.json", '{"model_type": "llama", "hidden_size": "24", "num_attention_heads": 0}'),
    "tokenizer cut": ("tokenizer.json", '{"model": {"type": "BPE", "voc'),
    "tokenizer empty": ("tokenizer.json", "{}"),
    "tokenizer of another model": (
        "tokenizer.json",
        '{"model": {"vocab": {"a": 999}, "merges": []}, "pre_tokenizer": {"type": "ByteLevel"}}',
    ),
    "index without map": ("model.safetensors.index.json", "{}"),
    "index to elsewhere": ("model.safetensors.index.json", '{"weight_map": {"a": "../secret.safetensors"}}'),
    "weights cut": ("model.safetensors", "\x08"),
}


@pytest.mark.parametrize("file, text", DAMAGED.values(), ids=DAMAGED)
def test_damaged_hugging_face_folders_are_one_sentence(tmp_path, file, text):
    hugging_face_folder(tmp_path / "hf")
    (tmp_path / "hf" / file).write_text(text)
    with pytest.raises(surgery.BadInput, match=r"hf.*; |config: .*wanted"):
        surgery.load_teacher(tmp_path / "hf")


def header(**tensors):
    """A safetensors header: name -> (shape, first byte, end)."""
    row = lambda shape, *ends: {"dtype": "F32", "shape": shape, "data_offsets": ends}
    return json.dumps({name: row(*values) for name, values in tensors.items()}).encode()


HEADERS = {  # hostile safetensors
    "longer than the file": (2**60, b"{}"),
    "overlapping tensors": (None, header(a=([2], 0, 8), b=([2], 4, 12))),
    "offsets beyond": (None, header(a=([99], 0, 396))),
    "a shape that lies": (None, header(a=([10**6, 10**6], 0, 8))),
    "no JSON": (None, b"\xff\xfe"),
}


@pytest.mark.parametrize("length, start", HEADERS.values(), ids=HEADERS)
def test_hostile_safetensors_are_one_sentence(tmp_path, length, start):
    hugging_face_folder(tmp_path / "hf")
    size = (len(start) if length is None else length).to_bytes(8, "little")
    (tmp_path / "hf" / "model.safetensors").write_bytes(size + start + bytes(16))
    with pytest.raises(surgery.BadInput, match=r"hf: damaged, or not what it should be .*; get it again"):
        surgery.load_teacher(tmp_path / "hf")


CONTRADICTIONS = {
    "more key heads than heads": dict(num_key_value_heads=7),
    "an odd head": dict(head_dim=3),
    "an act of its own": dict(hidden_act="relu2"),
    "part of a head rotates": dict(partial_rotary_factor=0.5),
    "a stretch nobody knows": dict(rope_scaling={"rope_type": "su"}),
    "a stretch without its sizes": dict(rope_scaling={"rope_type": "llama3", "factor": 8.0}),
    "a vocabulary beyond the embedding": dict(vocab_size=500),
    "no layer": dict(num_hidden_layers=0),
}


@pytest.mark.parametrize("change", CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_configs_that_contradict_are_one_sentence(tmp_path, change):
    hugging_face_folder(tmp_path / "hf")
    file = tmp_path / "hf" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(surgery.BadInput):
        surgery.load_teacher(tmp_path / "hf")


# ---------------------------------------------------------------- 4. A stage is a mean per token, whatever the pieces


@pytest.mark.parametrize("name", distill.STAGES)
def test_shares_add_up_to_the_whole_gradient(name):
    teacher, _ = tiny_teacher()
    ids, grads = torch.randint(0, 257, (2, 20)), []
    student = surgery.linearize(teacher, "gated_delta").double()
    teacher = copy.deepcopy(tiny_teacher()[0]).double()
    for backward in (None, lambda loss: loss.backward()):
        student.zero_grad()
        kwargs = {"block": 7} if name in ("logits", "ce") else {}
        loss = distill.STAGES[name](student, teacher, ids, backward, **kwargs)["loss"]
        if backward is None:
            loss.backward()
        grads.append([p.grad.clone() for p in student.parameters() if p.grad is not None])
        assert loss > 0
    assert len(grads[0]) == len(grads[1]) > 0
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", distill.STAGES)
def test_losses_do_not_grow_with_the_batch(name):
    teacher, _ = tiny_teacher()
    student, ids = surgery.linearize(teacher, "delta"), torch.randint(0, 257, (2, 20))
    one, two = (distill.STAGES[name](student, teacher, x)["loss"] for x in (ids, ids.repeat(2, 1)))
    torch.testing.assert_close(one, two)


@pytest.mark.parametrize("name", distill.STAGES)
def test_losses_do_not_grow_with_the_context(name):
    teacher, _ = tiny_teacher()
    student, ids = surgery.linearize(teacher, "gla"), torch.randint(0, 257, (8, 64))
    distill.calibrate(student, teacher, torch.randint(0, 257, (8, 64)))  # else what is recalled adds up
    with torch.no_grad():
        half, whole = (distill.STAGES[name](student, teacher, ids[:, :T])["loss"].item() for T in (32, 64))
    assert whole == pytest.approx(half, rel=0.2)


class Rows:
    """A teacher or a student of one layer whose mixer has this matrix, (1, H, T, T)."""

    def __init__(self, matrix):
        mixer = types.SimpleNamespace(matrix=lambda x: torch.tensor(matrix)[None], __call__=None)
        self.blocks = [types.SimpleNamespace(mixer=mixer)]


def test_matrix_and_weights_by_hand(monkeypatch):
    student, teacher = Rows([[[0.8, 0.2], [0.5, 0.5]]]), Rows([[[1.0, 0.0], [0.25, 0.75]]])
    monkeypatch.setattr(distill, "layers", lambda *_: [(student.blocks[0], None, None, None, None)])
    far = math.sqrt(0.04 + 0.04 + 0.0625 + 0.0625) / math.sqrt(1 + 0.0625 + 0.5625)
    assert distill.matrix(student, teacher, None)["matrix"].item() == pytest.approx(far, rel=1e-5)
    kl = (math.log(1 / 0.8) + 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)) / 2
    assert distill.weights(student, teacher, None)["weights"].item() == pytest.approx(kl, rel=1e-5)
    scaled = Rows([[[8.0, 2.0], [0.05, 0.05]]])  # rows count by their shares
    monkeypatch.setattr(distill, "layers", lambda *_: [(scaled.blocks[0], None, None, None, None)])
    assert distill.weights(scaled, teacher, None)["weights"].item() == pytest.approx(kl, rel=1e-5)


def test_sft_counts_answers_alone():
    teacher, _ = tiny_teacher()
    marked = torch.tensor([[5, 6, 7, 8, 9, 10], [~1, ~2, 3, 4, ~0, 6]])
    marked[0] = ~marked[0]
    marked[0, 4:] = torch.tensor([9, 10])
    ids, learn = distill.unmark(marked)
    assert ids.tolist() == [[5, 6, 7, 8, 9, 10], [1, 2, 3, 4, 0, 6]] and learn.sum() == 5
    log_p = teacher(ids)[0].log_softmax(-1)
    wanted = -(log_p[0, 3, 9] + log_p[0, 4, 10] + log_p[1, 1, 3] + log_p[1, 2, 4] + log_p[1, 4, 6]) / 5
    for backward in (None, lambda loss: loss.backward()):
        assert distill.sft(teacher, None, ids, backward, learn=learn)["sft"].item() == pytest.approx(wanted.item())
    empty = distill.sft(teacher, None, ids, lambda loss: loss.backward(), learn=learn & False)
    assert empty["loss"].item() == 0
    plain, all_of_it = distill.unmark(ids)
    assert all_of_it.all() and torch.equal(plain, ids)


def test_lora_merges_into_the_weights():
    student, ids = surgery.linearize(tiny_teacher()[0], "gla"), torch.randint(0, 257, (2, 20))
    before, plain = student(ids)[0], {k: w.clone() for k, w in student.state_dict().items()}
    distill.set_lora(student, 3)
    assert torch.equal(student(ids)[0], before)  # B starts at 0
    names = distill.trainable(student, "lora")
    assert len(names) == 2 * 2 * 4 and sum(p.requires_grad for p in student.parameters()) == 16
    for p in student.parameters():
        p.data += 0.1 * torch.randn_like(p) * p.requires_grad
    unmerged, told = student(ids)[0], surgery.plain_weights(student)
    lora = student.blocks[0].mixer.q.parametrizations.weight[0]
    torch.testing.assert_close(told["blocks.0.mixer.q.weight"], plain["blocks.0.mixer.q.weight"] + 2 * lora.B @ lora.A)
    distill.set_lora(student, 0)
    assert (student(ids)[0] - unmerged).abs().max() < 1e-6 and (unmerged - before).abs().max() > 1e-3
    after = student.state_dict()
    assert after.keys() == plain.keys() == told.keys() | {"head.weight"}
    assert all(torch.equal(after[name], w) for name, w in told.items())
    changed = {name for name in plain if not torch.equal(plain[name], after[name])}
    assert changed == {f"blocks.{i}.mixer.{n}.weight" for i in range(2) for n in "qkvo"}


def test_layers_are_ranked_by_what_softmax_gains():
    teacher, _ = tiny_teacher(layers=3)
    student, ids = surgery.linearize(teacher, "delta"), torch.randint(0, 257, (2, 20))
    for i, block in enumerate(student.blocks):
        block.mixer.o.weight.data *= (1, 40, 3)[i]
    whole, ranks = distill.rank_layers(student, teacher, ids)
    assert whole == pytest.approx(distill.logits(student, teacher, ids)["kl"].item(), rel=1e-5)
    for kl, i in ranks:
        one = surgery.linearize(teacher, "delta")
        for j, (ours, theirs) in enumerate(zip(one.blocks, student.blocks)):
            ours.mixer = teacher.blocks[i].mixer if i == j else theirs.mixer
        assert kl == pytest.approx(distill.logits(one, teacher, ids)["kl"].item(), rel=1e-5)
    assert ranks == sorted(ranks) and len({kl for kl, _ in ranks}) == 3
    assert all(block.mixer.decay == "none" for block in student.blocks)


def test_schedules():
    leg = lambda name, **more: train.Leg(distill.Stage("ce", 1.0, 2.0, name, warmup=0.1, **more), 5, 105, 1, 16, 0)
    ends = {"wsd": (2, 1), "cosine": (1, 2 * (0.5 + 0.5 * math.cos(0.9 * math.pi))), "linear": (1, 0.2)}
    for name, (half, late) in (ends | {"constant": (2, 2), "plateau": (2, 2)}).items():
        found = [train.rate_at(leg(name), step, 0) for step in (55, 95, 5, 14)]
        assert found[:2] == pytest.approx([half, late]) and found[2] == pytest.approx(0.2, rel=0.02)
        assert found[3] > 1.7  # warmed up in ten steps
    assert train.rate_at(leg("cosine", floor=0.25), 105, 0) == 0.5 and train.rate_at(leg("plateau"), 55, 3) == 0.25
    assert [train.cuts_in(v) for v in ([], [3, 2, 1], [1, 2, 2], [1, 2, 2, 0, 1, 1], [2, 3, 1, 2])] == [0, 0, 1, 2, 0]


def test_aligned_stages_by_hand(monkeypatch):
    x, y, after = torch.zeros(2, 2, 2), torch.tensor([[[3.0, 4], [0, 0]], [[0, 1], [1, 0]]]), torch.ones(2, 2, 2)
    block = lambda z: (after + torch.tensor([[[3.0, 4], [0, 0]], [[0, 2], [0, 0]]]), None)
    block.mixer = lambda z: (torch.zeros_like(y) + torch.tensor([0.0, 1]), None)
    monkeypatch.setattr(distill, "layers", lambda *_: [(block, x, y, x, after)])
    teacher = types.SimpleNamespace(blocks=[0, 0])  # two layers, one of them met here
    wanted = ((9 + 9 + 1) / 25 + (0 + 2) / 2) / 2 / 2
    assert distill.attention(None, teacher, None)["attention"].item() == pytest.approx(wanted)
    wanted = (5 + 0 + 2 + 0) / 4 / math.sqrt(2) / 2
    assert distill.hidden(None, teacher, None)["hidden"].item() == pytest.approx(wanted)


def test_roles_have_rates_and_weights_decay():
    student = surgery.linearize(tiny_teacher()[0], "gla", conv=0)
    stage = distill.Stage("logits", 1.0, 1e-3, rates={"new": 10.0, "trunk": 0.5})
    groups = train.optimizer_for(student, stage).param_groups
    names = {id(p): name for name, p in student.named_parameters()}
    for group in groups:
        for p in group["params"]:
            name = names[id(p)]
            told = 0.5 if ".mixer." not in name else 1.0 if re.search(r"mixer\.[qkvo]\.", name) else 10.0
            assert group["rate"] == told, name
            assert group["weight_decay"] == (0.1 if p.dim() == 2 and name.endswith("weight") else 0.0), name
    run = train.Run(types.SimpleNamespace(micro_batch=None, device="cpu"), None, student, *[None] * 4, torch.float32)
    before = {n: p.clone() for n, p in student.named_parameters()}
    optimizer = train.optimizer_for(student, stage)
    train.one_step(
        run, torch.randint(0, 257, (1, 20)), distill.Stage("ce", 1.0, 1e-3, rates=stage.rates), optimizer, 1e-3
    )
    moved = lambda name: (dict(student.named_parameters())[name] - before[name]).abs().max().item()
    assert moved("blocks.0.mixer.fade.bias") == pytest.approx(1e-2, rel=0.05)
    assert moved("norm.weight") == pytest.approx(5e-4, rel=0.05)


def test_answers_are_marked():
    tokenizer = surgery.bytes_tokenizer()
    tokenizer.chat = {"template": CHATS["marks"]}
    talk = [
        {"role": r, "content": c} for r, c in (("user", "a?"), ("assistant", "b"), ("user", "c?"), ("assistant", "d"))
    ]
    ids = torch.tensor(train.ids_of([*talk, {"role": "user", "content": "never"}], tokenizer, "x"))
    whole, learn = distill.unmark(ids)
    assert tokenizer.decode(whole.tolist()) == surgery.dialogue(tokenizer, talk, reply=False)
    assert tokenizer.decode(ids[learn].tolist()) == "b</s>\nd</s>\n"


def test_recall_is_what_its_paper_says():
    made = evaluate.recall(6, 64, seed=1)
    for _ in range(50):
        x = torch.from_numpy(next(made))
        ids, learn = distill.unmark(x)
        keys, values = ids[:12:2], ids[1:12:2]
        assert len(set(keys.tolist())) == 6 and keys.max() < 256 <= values.min() and not learn[:12].any()
        at = learn.nonzero()[:, 0]
        told = dict(zip(keys.tolist(), values.tolist()))
        assert len(at) == 6 and {ids[i - 1].item(): ids[i].item() for i in at} == told


def test_kl_and_ce_by_hand():
    class Fixed(torch.nn.Module):
        def __init__(self, rows):
            super().__init__()
            self.rows, self.head = torch.tensor(rows).log(), torch.nn.Identity()

        def trunk(self, tokens):
            return self.rows[None], None

    student, teacher = Fixed([[0.5, 0.5], [0.25, 0.75], [1, 1]]), Fixed([[0.9, 0.1], [0.5, 0.5], [1, 1]])
    losses = distill.logits(student, teacher, torch.tensor([[0, 1, 0]]), kl=1.0, ce=1.0)
    kl = (0.9 * math.log(1.8) + 0.1 * math.log(0.2) + 0.5 * math.log(2) + 0.5 * math.log(2 / 3)) / 2
    ce = -(math.log(0.5) + math.log(0.25)) / 2
    assert losses["kl"] == pytest.approx(kl, abs=1e-6) and losses["ce"] == pytest.approx(ce, abs=1e-6)
    assert losses["loss"] == pytest.approx(kl + ce, abs=1e-6)


@pytest.mark.parametrize("kl, ce, temperature", [(1.0, 0.0, 1.0), (0.7, 0.4, 1.0), (0.5, 3.0, 2.0)])
def test_gradient_of_the_divergence(kl, ce, temperature):
    logits, wanted, ids = torch.randn(5, 7).double().requires_grad_(), torch.randn(5, 7).double(), torch.arange(5)
    distill.Divergence.apply(logits, wanted, ids, kl, ce, temperature)[0].backward()
    found, logits.grad = logits.grad, None
    log_p, log_t = (F.log_softmax(z / temperature, -1) for z in (logits, wanted))
    far = F.kl_div(log_p, log_t, log_target=True, reduction="sum") * temperature**2
    (kl * far + ce * F.cross_entropy(logits, ids, reduction="sum")).backward()
    torch.testing.assert_close(found, logits.grad, atol=1e-12, rtol=1e-12)


def test_losses_are_summed_in_float32():
    logits, wanted, ids = torch.randn(40, 3000).bfloat16(), torch.randn(40, 3000).bfloat16(), torch.arange(40)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, kl, ce = distill.Divergence.apply(logits, wanted, ids, 1.0, 1.0, 1.0)
    log_p, log_t = logits.double().log_softmax(-1), wanted.double().log_softmax(-1)
    assert float(kl) == pytest.approx(float(F.kl_div(log_p, log_t, log_target=True, reduction="sum")), rel=1e-5)
    assert float(ce) == pytest.approx(float(F.nll_loss(log_p, ids, reduction="sum")), rel=1e-5)


@pytest.mark.parametrize("trains, inside", [("mixers", ".mixer."), ("blocks", "blocks."), ("all", "")])
def test_only_what_a_stage_says_trains(trains, inside):
    student = surgery.linearize(tiny_teacher()[0], "delta", keep=(1,))
    names = distill.trainable(student, trains)
    chosen = [n for n, _ in student.named_parameters() if inside in n and (trains != "mixers" or "blocks.0" in n)]
    assert names == chosen == [n for n, p in student.named_parameters() if p.requires_grad]


@pytest.mark.parametrize("name, options", [("hedgehog", {}), ("t2r", {}), ("gla", {}), ("linear", dict(feature="elu"))])
def test_maps_are_all_new_parameters_where_no_map_learns(name, options):
    student = surgery.linearize(tiny_teacher()[0], name, keep=(1,), **options)
    new = distill.trainable(student, "new")
    assert distill.trainable(student, "maps") == ([n for n in new if ".phi." in n] or new) != []
    assert (len(distill.trainable(student, "maps")) == len(new)) == (name in ("gla", "linear"))


def test_reach_is_the_median_distance_of_attention():
    matrix = torch.zeros(2, 3, 20, 20)  # (B, H, T, T): 7 tokens back; half 1 back, half 9 back; only the first token
    for i in range(20):
        matrix[:, 0, i, max(i - 7, 0)] = 1
        matrix[:, 1, i, [max(i - 1, 0), max(i - 9, 0)]] += torch.tensor([0.6, 0.4])
    matrix[:, 2, :, 0] = 1
    found = distill.reach(types.SimpleNamespace(matrix=lambda x: matrix.clone()), torch.zeros(2, 20, 4))
    assert found.tolist() == [7.5, 1.5, 19.5]


@torch.no_grad()
@pytest.mark.parametrize("name", ["mamba2", "xlstm", "gla", "dfw", "gated_delta", "kda", "rwkv7"])
def test_a_head_reaches_as_far_as_it_is_told(name):
    mixer, x, half_life = build(name, CONFIG), torch.randn(2, 9, CONFIG.width), torch.tensor([1.5, 6.5, 40.0])
    mixer.remember(half_life)
    log_decay = mixer.streams(x, mixers.Past())[2]["log_decay"]
    torch.testing.assert_close(log_decay.mean((0, 1, 3)), -math.log(2) / half_life, rtol=0.02, atol=1e-4)


def test_calibration_solves_the_output_projection():
    teacher, _ = tiny_teacher()
    student, ids = surgery.linearize(teacher, "delta"), torch.randint(0, 257, (9, 40))
    found = []
    for ridges in (None, (1e-8,)):
        if ridges:
            distill.calibrate(student, teacher, ids, ridges=ridges)
        student.zero_grad()
        loss = distill.attention(student, teacher, ids[:-1])["loss"]
        loss.backward()
        found.append((loss.item(), max(block.mixer.o.weight.grad.abs().max().item() for block in student.blocks)))
    assert found[1][0] < found[0][0] and found[1][1] < 1e-3 * found[0][1]  # lower, and no slope is left in W_o


@pytest.mark.parametrize("options", [{}, dict(expand_k=2, expand_v=2), dict(window=4), dict(feature="t2r")])
def test_calibration_takes_the_nearest_model(options):
    teacher, _ = tiny_teacher()
    student, ids = surgery.linearize(teacher, "gla", **options), torch.randint(0, 257, (4, 40))
    kl = lambda: distill.logits(student, teacher, ids[-1:])["kl"].item()
    before, found = kl(), distill.calibrate(student, teacher, ids)
    assert kl() == pytest.approx(min(found.values()), rel=1e-5)
    assert options or kl() < before


def test_calibration_finds_the_scale_of_a_head():
    teacher, _ = tiny_teacher()
    mixer, x = surgery.linearize(teacher, "gla").blocks[0].mixer, torch.randn(2, 30, 24)
    with torch.no_grad():
        target = distill.before_projection(mixer, x).unflatten(-1, (6, -1)) * torch.arange(1, 7)[:, None]
        read = distill.fit_level(mixer, target.flatten(1), x)
    torch.testing.assert_close(mixer.level[:, 0], torch.arange(1.0, 7.0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(read, target.flatten(1), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- 5. A run ends in the same bits, whatever stopped it


def command(folder, out, *more):
    text = out.parent / "text.txt"
    if not text.exists():
        text.write_text("\n".join(f"{i} times {i} is {i * i}, said number {i}." for i in range(2000)))
    fixed = ["--context", "16", "--tokens", "640", "--save-every", "5", "--calibrate", "2", "--precision", "fp32"]
    return ["--teacher", str(folder), "--data", str(text), "--out", str(out), "--device", "cpu", *fixed, *more]


def call(script, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", [script.__name__ + ".py", *map(str, words)])
    script.main()


def raises(error):
    def call(*_, **__):
        raise error

    return call


def weights_of(out):
    return load_file(surgery.find_checkpoint(out) / "model.safetensors")


def test_interrupted_is_uninterrupted(teacher_folder, tmp_path, monkeypatch):
    call(train, monkeypatch, *command(teacher_folder, tmp_path / "whole"))
    step = train.one_step

    def dies(*args):
        dies.left -= 1
        if not dies.left:
            raise KeyboardInterrupt
        return step(*args)

    dies.left = 8
    monkeypatch.setattr(train, "one_step", dies)
    with pytest.raises(KeyboardInterrupt):
        call(train, monkeypatch, *command(teacher_folder, tmp_path / "cut"))
    monkeypatch.setattr(train, "one_step", step)
    call(train, monkeypatch, *command(teacher_folder, tmp_path / "cut"), "--resume")
    whole, cut = weights_of(tmp_path / "whole"), weights_of(tmp_path / "cut")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    scores = [json.loads((tmp_path / out / "scores.json").read_text())["kl"] for out in ("whole", "cut")]
    assert scores[0] == scores[1] and (tmp_path / "cut" / "loss.png").stat().st_size > 1000


@pytest.mark.parametrize("where, saved", [("validate", 25), ("heldout", 40)])
def test_an_error_in_scoring_loses_no_step(teacher_folder, tmp_path, monkeypatch, where, saved):
    call(train, monkeypatch, *command(teacher_folder, tmp_path / "quiet"))
    module, calls = (train, itertools.count()) if where == "validate" else (evaluate, itertools.count(5))
    real = getattr(module, where)  # train.py validates at steps 0, 5, 10, …
    with monkeypatch.context() as broken, pytest.raises(MemoryError):
        broken.setattr(module, where, lambda *args: raises(MemoryError)() if next(calls) == 5 else real(*args))
        call(train, monkeypatch, *command(teacher_folder, tmp_path / "run"))
    assert surgery.find_checkpoint(tmp_path / "run").name == f"step-{saved:08d}"
    call(train, monkeypatch, *command(teacher_folder, tmp_path / "run"), "--resume")
    quiet, run = weights_of(tmp_path / "quiet"), weights_of(tmp_path / "run")
    assert all(torch.equal(quiet[name], run[name]) for name in quiet)
    assert torch.equal(losses_of(tmp_path / "quiet"), losses_of(tmp_path / "run"))


@pytest.mark.parametrize("loss", distill.STAGES)
def test_a_plateau_is_one_of_the_stages_own_loss(loss):
    teacher, _ = tiny_teacher()
    student, ids = surgery.linearize(teacher, "hedgehog"), torch.randint(0, 257, (4, 20))
    ids = torch.where(torch.rand(4, 20) < 0.5, ~ids, ids) if loss == "sft" else ids
    args, text = types.SimpleNamespace(device="cpu"), types.SimpleNamespace(held=ids)
    run = train.Run(args, None, student, copy.deepcopy(tiny_teacher()[0]), None, text, None, torch.float32)
    kept = train.validate(run, distill.Stage(loss, 1.0, 1e-3, "cosine"))
    row = train.validate(run, distill.Stage(loss, 1.0, 1e-3, "plateau"))
    (tokens, learn), more = distill.unmark(ids), {}
    if loss == "sft":
        more = {"learn": learn}
    wanted = distill.STAGES[loss](student, run.teacher, tokens, **more)["loss"].item()
    assert row == kept | {"own": pytest.approx(wanted, rel=1e-5, abs=1e-5)} and kept.keys() == {"heldout", "value"}
    assert all(p.grad is None for p in student.parameters())


@pytest.mark.parametrize("falls, rates", [("value", {1e-2 * 0.5**i for i in range(5)}), ("own", {1e-2})])
def test_a_plateau_cuts_the_rate_at_the_same_steps_after_a_stop(teacher_folder, tmp_path, monkeypatch, falls, rates):
    validate, stage, step = train.validate, distill.Stage("attention", 1.0, 1e-2, "plateau"), train.one_step
    monkeypatch.setitem(distill.RECIPES, "lolcats", [stage])
    changed = lambda run, stage: {"heldout": "kl", "value": 1.0, "own": 1.0} | {falls: -time.monotonic()}
    monkeypatch.setattr(train, "validate", lambda *a: validate(*a) and changed(*a))
    words = ["--recipe", "lolcats", "--mixer", "hedgehog"]
    call(train, monkeypatch, *command(teacher_folder, tmp_path / "quiet", *words))
    left = itertools.count()
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(train, "one_step", lambda *a: raises(KeyboardInterrupt)() if next(left) > 22 else step(*a))
        call(train, monkeypatch, *command(teacher_folder, tmp_path / "run", *words))
    call(train, monkeypatch, *command(teacher_folder, tmp_path / "run", *words), "--resume", "--save-every", "3")
    quiet, run = (
        [r["lr"] for r in train.rows_of(tmp_path / out / "metrics.jsonl") if "lr" in r] for out in ("quiet", "run")
    )
    assert quiet == run and set(quiet[2:]) == rates


MIXER, ALL = r"blocks\.\d\.mixer\.", ""
NEW = MIXER + r"(?!([qkvo]|[qk]_norm)\.)"
RECIPES = {  # flags; what may train in each stage; steps to be cut in, at least one in each
    "haller": (["--mixer", "gated_delta"], [MIXER, r"blocks\.", ALL], (1, 2, 9)),
    "mohawk": (["--mixer", "mamba2", "--tokens", "1280"], [MIXER, r"blocks\.", ALL], (1, 3, 9)),
    "supra": (["--mixer", "supra"], [ALL], (7,)),
    "t2r": (["--mixer", "t2r", "--recompute"], [ALL], (7,)),
    "hedgehog": (["--mixer", "hedgehog", "--option", "gate=silu"], [MIXER + r"phi\.", ALL], (7, 15)),
    "lolcats": (
        ["--mixer", "hedgehog", "--window", "4", "--option", "blend=shared"],
        [NEW, MIXER + r"[qkvo]\.parametrizations\.weight\.0"],
        (7, 31),
    ),
    "radlads": (
        ["--mixer", "rwkv7", "--rates", "new=3", "--micro-batch", "1", "--tokens-per-step", "32", "--tokens", "2560"],
        [MIXER, ALL, ALL],
        (7, 31, 72),
    ),
    "hybrid": (["--mixer", "delta", "--keep", "auto:1"], [ALL], (7,)),
    "sft": (["--mixer", "kda", "--data", "CHATS"], [ALL], (7,)),
}


def chats(folder):
    """A teacher that talks, and talks for it."""
    teacher, tokenizer = tiny_teacher()
    tokenizer.chat = {"template": CHATS["marks"]}
    surgery.save(teacher, tokenizer, folder / "teacher")
    talk = lambda i: [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": str(i)}] * 2
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": talk(i)}) + "\n" for i in range(200)))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_trains_what_it_says_and_resumes(tmp_path, monkeypatch, recipe):
    chats(tmp_path)
    flags, wanted, deaths = RECIPES[recipe]
    words = ["--recipe", recipe, *(str(tmp_path / "chats.jsonl") if w == "CHATS" else w for w in flags)]
    step, seen, calls = train.one_step, {}, itertools.count()

    def watched(run, tokens, stage, *rest):
        frozen = {n: p.clone() for n, p in run.student.named_parameters() if not p.requires_grad}
        before = {n: p.clone() for n, p in run.student.named_parameters() if p.requires_grad}
        losses = step(run, tokens, stage, *rest)
        after = dict(run.student.named_parameters())
        assert all(torch.equal(after[n], w) for n, w in frozen.items())
        moved = seen.setdefault(stage.loss, (before.keys(), set()))[1]
        moved |= {n for n, w in before.items() if not torch.equal(after[n], w)}
        if next(calls) in watched.deaths:
            raise KeyboardInterrupt
        return losses

    monkeypatch.setattr(train, "one_step", watched)
    watched.deaths = ()
    call(train, monkeypatch, *command(tmp_path / "teacher", tmp_path / "whole", *words, "--save-every", "2"))
    names = [n for n, _ in surgery.load(tmp_path / "whole")[0].named_parameters()]
    assert list(seen) == [stage.loss for stage in distill.RECIPES[recipe]]
    for (loss, (trained, moved)), pattern in zip(seen.items(), wanted):
        assert trained == {n for n in trained if re.match(pattern, n)} and trained
        assert "parametrizations" in pattern or len(trained) == sum(bool(re.match(pattern, n)) for n in names)
        still = trained - moved
        if loss in ("matrix", "weights"):  # they say nothing of values
            still -= {n for n in still if re.search(r"mixer\.([vo]\.|gate|scale)", n)}
        assert not still, (loss, still)
    for died in deaths:
        watched.deaths, calls, out = (died,), itertools.count(), tmp_path / f"cut{died}"
        part = command(tmp_path / "teacher", out, *words, "--save-every", "2")
        with pytest.raises(KeyboardInterrupt):
            call(train, monkeypatch, *part)
        call(train, monkeypatch, *part, "--resume")
        whole, cut = weights_of(tmp_path / "whole"), weights_of(out)
        assert all(torch.equal(whole[name], cut[name]) for name in whole)


@pytest.mark.parametrize("recipe", ["default", *RECIPES])
def test_ten_steps_of_a_stage_leave_the_rest_and_the_teacher_as_they_were(tmp_path, monkeypatch, recipe):
    chats(tmp_path)
    flags, stages = RECIPES.get(recipe, [["--mixer", "delta"]])[0], distill.RECIPES[recipe]
    monkeypatch.setitem(
        distill.RECIPES, recipe, [dataclasses.replace(stage, fraction=1 / len(stages)) for stage in stages]
    )
    step, taken, wanted = train.one_step, collections.Counter(), surgery.load(tmp_path / "teacher")[0].state_dict()

    def watched(run, tokens, stage, *rest):
        params = dict(run.student.named_parameters())
        if not taken[stage.loss]:
            watched.frozen = {name: p.clone() for name, p in params.items() if not p.requires_grad}
        assert all(block._forward_pre_hooks for block in run.student.blocks)  # `calm`, as there is a teacher
        losses = step(run, tokens, stage, *rest)
        taken[stage.loss] += 1
        if taken[stage.loss] == 10:
            theirs = run.teacher.state_dict()
            assert all(torch.equal(params[name], p) for name, p in watched.frozen.items())
            assert theirs.keys() == wanted.keys() and all(torch.equal(theirs[name], w) for name, w in wanted.items())
        return losses

    monkeypatch.setattr(train, "one_step", watched)
    words = [str(tmp_path / "chats.jsonl") if w == "CHATS" else w for w in flags]
    call(train, monkeypatch, *command(tmp_path / "teacher", tmp_path / "run", *words, "--recipe", recipe))
    assert [*taken] == [stage.loss for stage in stages] and min(taken.values()) >= 10


def test_chats_are_distilled(tmp_path, monkeypatch):
    chats(tmp_path)
    more = ["--data", str(tmp_path / "chats.jsonl"), "--recipe", "haller", "--tokens", "3200", "--mixer", "gated_delta"]
    call(train, monkeypatch, *command(tmp_path / "teacher", tmp_path / "run", *more))
    rows = [row for row in train.rows_of(tmp_path / "run" / "metrics.jsonl") if "stage" in row]
    assert [*dict.fromkeys(row["stage"] for row in rows)] == ["attention", "hidden", "logits"]
    losses = [row["loss"] for row in rows if row["stage"] == "logits"]
    assert np.mean(losses[-10:]) < np.mean(losses[:10]) - 0.3


def test_a_student_goes_on(tmp_path, monkeypatch, capsys):
    chats(tmp_path)
    call(train, monkeypatch, *command(tmp_path / "teacher", tmp_path / "run", "--mixer", "gla", "--option", "conv=0"))
    more = ["--data", str(tmp_path / "chats.jsonl"), "--recipe", "sft", "--student", str(tmp_path / "run")]
    words = [w for w in command(tmp_path / "teacher", tmp_path / "tuned", *more)]
    with pytest.raises(surgery.BadInput, match="its own stays; leave --mixer out"):
        call(train, monkeypatch, *words, "--mixer", "kda")
    call(train, monkeypatch, *words, "--calibrate", "0", "--lr", "1e-3")
    a, b = weights_of(tmp_path / "run"), weights_of(tmp_path / "tuned")
    assert a.keys() == b.keys() and not any("taps" in name for name in a)
    assert all((a[name] - b[name]).abs().max() < 0.3 for name in a)  # it began where the other ended
    rows = [r for r in train.rows_of(tmp_path / "tuned" / "metrics.jsonl") if "loss" in r]
    assert rows[-1]["sft"] < rows[0]["sft"]
    told = [r for r in train.rows_of(tmp_path / "tuned" / "metrics.jsonl") if "heldout" in r]
    assert {r["heldout"] for r in told} == {"ce"} and told[-1]["value"] < told[0]["value"]


def test_a_student_keeps_its_kept_layers(teacher_folder, tmp_path, monkeypatch):
    call(train, monkeypatch, *command(teacher_folder, tmp_path / "run", "--keep", "auto:1"))
    ours = surgery.load(tmp_path / "run")[0].config.mixers
    call(
        train,
        monkeypatch,
        *command(teacher_folder, tmp_path / "more", "--student", str(tmp_path / "run"), "--calibrate", "0"),
    )
    assert surgery.load(tmp_path / "more")[0].config.mixers == ours and sorted(ours) == ["delta", "softmax"]


def test_the_layers_that_gain_most_are_kept(tmp_path, monkeypatch, capsys):
    teacher, tokenizer = tiny_teacher(layers=5)
    for block, weight in zip(teacher.blocks, (1, 60, 10, 100, 30)):
        block.mixer.o.weight.data *= weight
    teacher.norm.weight.data *= 20  # a KL far from 0
    surgery.save(teacher, tokenizer, tmp_path / "teacher")
    words = command(tmp_path / "teacher", tmp_path / "run", "--keep", "auto:2", "--tokens", "16")
    call(train, monkeypatch, *words)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "softmax again" in line)
    whole = float(re.match(r"KL ([\d.]+);", line)[1])
    told = [(float(kl), int(i), float(gain)) for i, kl, gain in re.findall(r"(\d): ([\d.]+) \(([+-][\d.]+)\)", line)]
    kept = [i for i, name in enumerate(surgery.load(tmp_path / "run")[0].config.mixers) if name == "softmax"]
    assert len(told) == 5 and kept == sorted(i for _, i, _ in sorted(told)[:2]) and len({kl for kl, *_ in told}) == 5
    assert all(gain == pytest.approx(kl - whole, abs=2e-3) for kl, _, gain in told)


def test_dry_run_writes_nothing(teacher_folder, tmp_path, monkeypatch, capsys):
    words = command(teacher_folder, tmp_path / "run", "--recipe", "radlads", "--dry-run")
    call(train, monkeypatch, *words)
    told = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert not (tmp_path / "run").exists()
    rows = {line[0]: line for line in told if line and line[0] in ("attention", "logits", "ce")}
    assert [row[2] for row in rows.values()] == ["6", "29", "1"] and rows["ce"][3:6] == ["1", "×", "64"]


ROWS = {  # of 640 tokens, 16 at a time: tokens, steps, sequences, lr, schedule, trains; what is not as usual
    "default": ["logits 640 40 1 × 16 7.0e-04 linear all | warmup 0.2"],
    "haller": [
        "attention 16 1 1 × 16 2.0e-04 wsd mixers |",
        "hidden 32 2 1 × 16 2.0e-03 wsd blocks |",
        "logits 592 37 1 × 16 3.0e-04 linear all | ce 1",
    ],
    "mohawk": [
        "matrix 16 1 1 × 16 2.0e-04 wsd mixers |",
        "hidden 32 2 1 × 16 2.0e-03 wsd blocks |",
        "logits 592 37 1 × 16 3.0e-04 wsd all |",
    ],
    "supra": ["ce 640 40 1 × 16 3.0e-04 cosine all | floor 0.03333"],
    "t2r": ["ce 640 40 1 × 16 2.5e-04 linear all |"],
    "hedgehog": ["weights 192 12 1 × 16 1.0e-02 plateau maps |", "ce 448 28 1 × 16 6.0e-04 linear all |"],
    "lolcats": ["attention 320 20 1 × 16 1.0e-02 plateau new |", "ce 320 20 1 × 16 1.0e-04 plateau lora | lora 8"],
    "radlads": [
        "attention 96 6 1 × 16 1.0e-03 cosine mixers | floor 0.01",
        "logits 464 29 1 × 16 1.0e-05 constant all |",
        "ce 64 1 1 × 64 1.0e-05 constant all | 64 tokens a step, as sequences are whole",
    ],
    "hybrid": ["logits 640 40 1 × 16 2.0e-05 linear all |"],
    "sft": ["sft 640 40 1 × 16 2.0e-05 cosine all | floor 0.1"],
    "pretrain": ["ce 640 40 1 × 16 1.0e-03 cosine all | floor 0.1"],
    "recall": ["sft 640 40 1 × 16 1.0e-03 cosine all |"],
}


@pytest.mark.parametrize("recipe", distill.RECIPES)
def test_a_plan_is_told_row_by_row(capsys, recipe):
    student, own = surgery.linearize(tiny_teacher()[0], "hedgehog"), recipe in ("pretrain", "recall")
    words = ["--context", "16", "--tokens", "640", "--tokens-per-step", "16", "--recipe", recipe]
    args = train.read_flags(words + ["--teacher", "none", "--size", "1m"] * own)
    train.announce(args, student, train.plan(args, train.recipe_of(args, student)), 1e9, torch.float32)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = [row for row in rows if row[0] in distill.STAGES]
    assert [" ".join([*row[:9], "|", *row[11:]]) for row in rows] == ROWS[recipe]
    assert all(float(row[9]) == 0 and float(row[10]) >= 1 for row in rows)  # TFLOP, GiB
    stage = distill.Stage("ce", 1.0, 1e-3, rates={"new": 10.0, "trunk": 0.1}, options={"kl": 0.5})
    assert stage.unusual() == ["kl 0.5", "new × 10", "trunk × 0.1"]


WITHOUT = {
    "": "--window 64 --option blend=shared",
    "--window 64": "--option blend=shared",
    "--window 64 --option blend=shared --option sinks=8": "",
}


@pytest.mark.parametrize("words, lacking", WITHOUT.items())
def test_a_recipe_without_what_its_paper_has_beside_it_says_so(capsys, words, lacking):
    student = surgery.linearize(tiny_teacher()[0], "hedgehog")
    for recipe in ("lolcats", "haller"):
        args = train.read_flags(["--tokens", "4k", "--recipe", recipe, *words.split()])
        train.announce(args, student, train.plan(args, train.recipe_of(args, student)), 1e9, torch.float32)
        told = [line for line in capsys.readouterr().out.splitlines() if "its paper" in line]
        wanted = [f"recipe lolcats: its paper trains with {lacking}; this run does not"]
        assert told == wanted * bool(lacking and recipe == "lolcats")


def test_micro_batches_cost_memory_alone(teacher_folder, tmp_path, monkeypatch):
    for loss in distill.STAGES:
        grads = []
        for micro in (1, 3, 4):
            teacher, _ = tiny_teacher()
            student = surgery.linearize(teacher, "hedgehog").double()
            teacher = copy.deepcopy(tiny_teacher()[0]).double()
            torch.manual_seed(1)
            tokens = torch.randint(0, 257, (4, 16))
            tokens = torch.where(torch.rand(4, 16) < 0.5, ~tokens, tokens)
            args = types.SimpleNamespace(micro_batch=micro, device="cpu")
            run = train.Run(args, None, student, teacher, None, None, None, torch.float32)
            optimizer = train.optimizer_for(student, distill.Stage(loss, 1.0, 1e-3))
            losses = train.one_step(run, tokens, distill.Stage(loss, 1.0, 1e-3), optimizer, 0.0)
            grads.append((losses["loss"], [p.grad for p in student.parameters() if p.grad is not None]))
        for loss_value, grad in grads[1:]:
            assert loss_value == pytest.approx(grads[0][0], rel=1e-9)
            for a, b in zip(grad, grads[0][1]):
                torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-11)


def test_no_token_alone_decides_a_step():
    student = surgery.linearize(tiny_teacher()[0], "gla").double()
    ids = torch.randint(0, 257, (2, 20))
    first = student.blocks[0]

    def gradients():
        h = torch.randn(2, 20, student.config.width, generator=torch.Generator().manual_seed(1)).double()
        h.requires_grad_()
        (first(h, None, None)[0] * weights).sum().backward()
        return h.grad

    weights = torch.ones(2, 20, 1).double()
    weights[0, -1] = 1e4  # read by no later token
    weights[1, 10:] = 0  # whose gradients are 0
    plain = gradients()
    train.calm(student)
    got = gradients()
    n, m = plain.norm(dim=-1), got.norm(dim=-1)
    assert n[0, -1] > 11 * n[0].median()
    for b, real in ((0, 20), (1, 10)):
        limit = 10 * n[b, :real].median()
        assert m[b].max() <= limit * (1 + 1e-9) and m[b, :real].min() > 0
        close(got[b][n[b] <= limit], plain[b][n[b] <= limit], 1e-12)  # the others are as they were
        close(F.normalize(got[b, :real], dim=-1), F.normalize(plain[b, :real], dim=-1), 1e-9)
    grads = []
    for student.recompute in (False, True):
        student.zero_grad()
        distill.ce(student, None, ids, lambda loss: loss.backward())
        grads.append([p.grad.clone() for p in student.parameters()])
    for a, b in zip(*grads):
        close(a, b, 1e-12)


def test_recomputed_blocks_have_the_same_gradients():
    teacher, _ = tiny_teacher()
    student, ids, grads = surgery.linearize(teacher, "kda").double(), torch.randint(0, 257, (2, 20)), []
    calls = []
    student.blocks[0].norm1.register_forward_hook(lambda *_: calls.append(1))
    for student.recompute in (False, True):
        student.zero_grad()
        distill.ce(student, None, ids, lambda loss: loss.backward())
        grads.append([p.grad.clone() for p in student.parameters()])
    assert len(calls) == 3  # once, then once and again
    for a, b in zip(*grads):
        close(a, b, 1e-12)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_teacher_of_our_own(tmp_path, monkeypatch, capsys, family):
    monkeypatch.setitem(surgery.SMALL, "1m", (2, 32, 4, 48))
    words = command("none", tmp_path / "teacher", "--mixer", "softmax", "--size", "1m", "--family", family)
    words = [w for w in words if w != "--calibrate"]
    words.remove("2")
    call(train, monkeypatch, *words, "--tokens", "20k")
    rows = [json.loads(line) for line in (tmp_path / "teacher" / "metrics.jsonl").read_text().splitlines()]
    told = [r["value"] for r in rows if r.get("heldout") == "ce"]
    assert told[0] == pytest.approx(math.log(257), abs=0.3) and told[-1] < 0.8 * told[0]
    call(evaluate, monkeypatch, tmp_path / "teacher")
    call(train, monkeypatch, *command(tmp_path / "teacher", tmp_path / "student", "--mixer", "gated_delta"))
    scores = json.loads((tmp_path / "student" / "scores.json").read_text())
    assert scores["teacher_ce"][0] == pytest.approx(told[-1], abs=0.5) and scores["kl"][0] > 0
    call(
        train, monkeypatch, *command("none", tmp_path / "linear", "--mixer", "kda", "--size", "1m"), "--calibrate", "0"
    )


@pytest.mark.slow
def test_kill_minus_nine(teacher_folder, tmp_path, monkeypatch):
    """20 kills at random moments, more of them inside saves as every step saves; then the bits of a quiet run."""
    words = [w if w != "5" else "1" for w in command(teacher_folder, tmp_path / "killed")]
    words[words.index("--tokens") + 1] = "6400"
    call(train, monkeypatch, *[w if w != str(tmp_path / "killed") else str(tmp_path / "quiet") for w in words])
    source, kills, random = Path(train.__file__), 0, torch.Generator().manual_seed(0)
    while True:
        resume = ["--resume"] if (tmp_path / "killed").exists() else []
        process = subprocess.Popen([sys.executable, str(source), *words, *resume], stderr=subprocess.DEVNULL)
        metrics = tmp_path / "killed" / "metrics.jsonl"
        before = metrics.stat().st_size if metrics.exists() else 0
        while process.poll() is None and (not metrics.exists() or metrics.stat().st_size <= before):
            time.sleep(0.01)
        if kills < 20 and process.poll() is None:
            time.sleep(torch.rand(1, generator=random).item() * 0.4)
            process.kill()
            kills += 1
        if process.wait() == 0:
            break
        assert process.returncode == -9
    assert kills >= 20
    quiet, killed = weights_of(tmp_path / "quiet"), weights_of(tmp_path / "killed")
    assert all(torch.equal(quiet[name], killed[name]) for name in quiet)


def processes(n, words):
    """train.py in n processes, started."""
    how = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}", train.__file__]
    quiet = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*how, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=quiet)


def losses_of(out):
    rows = train.rows_of(out / "metrics.jsonl")
    return torch.tensor([[row["step"], row.get("loss", row.get("value"))] for row in rows], dtype=torch.float64)


RUNS = {recipe: ["--mixer", "gated_delta", "--recipe", recipe] for recipe in ("mohawk", "haller", "supra", "radlads")}
RUNS |= {
    recipe: ["--mixer", "hedgehog", "--window", "4", "--option", "blend=shared", "--recipe", recipe]
    for recipe in ("hedgehog", "lolcats")
}
FEW = [("mohawk", 2, ""), ("mohawk", 2, "--shard")]
MANY = [
    (name, n, shard)
    for name in RUNS
    for n in (2, 4)
    for shard in ("", "--shard")
    if (name, shard) != ("lolcats", "--shard")
]
together = pytest.mark.parametrize("name, n, shard", FEW + [pytest.param(*run, marks=pytest.mark.slow) for run in MANY])


@together
def test_several_processes_are_one(teacher_folder, tmp_path, monkeypatch, name, n, shard):
    more = [*RUNS[name], "--tokens-per-step", "256", "--tokens", "5120", *([shard] if shard else [])]
    call(train, monkeypatch, *command(teacher_folder, tmp_path / "one", *more[: -1 if shard else None]))
    process = processes(n, command(teacher_folder, tmp_path / "several", *more))
    assert process.communicate()[1] and process.returncode == 0
    one, several = losses_of(tmp_path / "one"), losses_of(tmp_path / "several")
    assert len(one) >= 20
    close(several, one, 1e-5)


def test_a_run_goes_on_in_more_processes(teacher_folder, tmp_path, monkeypatch):
    more = [*RUNS["mohawk"], "--tokens-per-step", "64", "--tokens", "1280"]
    call(train, monkeypatch, *command(teacher_folder, tmp_path / "quiet", *more))
    step, left = train.one_step, itertools.count()
    monkeypatch.setattr(
        train, "one_step", lambda *args: raises(KeyboardInterrupt)() if next(left) > 12 else step(*args)
    )
    with pytest.raises(KeyboardInterrupt):
        call(train, monkeypatch, *command(teacher_folder, tmp_path / "run", *more))
    process = processes(2, command(teacher_folder, tmp_path / "run", *more, "--resume", "--shard"))
    told = process.communicate()[1]
    assert process.returncode == 0, told
    close(losses_of(tmp_path / "run"), losses_of(tmp_path / "quiet"), 1e-5)


@pytest.mark.slow
def test_a_process_that_dies_ends_the_run_and_loses_nothing(teacher_folder, tmp_path, monkeypatch):
    """Ten times kill -9 of one of two or four, gone on by another number of them; then the losses of a quiet run."""
    more, random = [*RUNS["mohawk"], "--tokens-per-step", "64", "--tokens", "12800"], torch.Generator().manual_seed(0)
    call(train, monkeypatch, *command(teacher_folder, tmp_path / "quiet", *more))
    words, metrics = command(teacher_folder, tmp_path / "run", *more), tmp_path / "run" / "metrics.jsonl"
    for kill in range(10):
        resume, before = ["--resume"] * (kill > 0), metrics.stat().st_size if kill else 0
        process = processes(4 if kill % 3 else 2, [*words, *resume, *["--shard"] * (kill % 2)])
        while process.poll() is None and (not metrics.exists() or metrics.stat().st_size <= before):
            time.sleep(0.02)
        time.sleep(torch.rand(1, generator=random).item())
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[kill % len(children)]), 9)
        began, told = time.time(), process.communicate()[1]
        assert process.returncode and "exitcode  : -9" in told and time.time() - began < 60
        if kill == 4:  # one alone, for a while
            step, left = train.one_step, itertools.count()
            with monkeypatch.context() as alone, pytest.raises(KeyboardInterrupt):
                alone.setattr(
                    train,
                    "one_step",
                    lambda *args, s=step, n=left: raises(KeyboardInterrupt)() if next(n) > 20 else s(*args),
                )
                call(train, monkeypatch, *words, "--resume")
    call(train, monkeypatch, *words, "--resume")
    close(losses_of(tmp_path / "run"), losses_of(tmp_path / "quiet"), 1e-4)


def test_full_disk_keeps_the_last_checkpoint(teacher_folder, tmp_path, monkeypatch):
    save = surgery.save_about

    def full(config, tokenizer, folder):
        save(config, tokenizer, folder)
        if surgery.find_checkpoint(tmp_path / "run"):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(surgery, "save_about", full)
    with pytest.raises(surgery.BadInput, match="No space left .* step-00000005 is whole; make room and --resume"):
        call(train, monkeypatch, *command(teacher_folder, tmp_path / "run"))
    assert [p.name for p in (tmp_path / "run").glob("step*")] == ["step-00000005"]


def test_a_loss_that_is_not_finite_stops_the_run(teacher_folder, tmp_path, monkeypatch):
    stage = distill.STAGES["logits"]
    calls = itertools.count(1)  # the four windows of the validation before step 0 are 12 numbers
    broken = lambda *a, **k: {n: v * (math.nan if next(calls) > 24 else 1) for n, v in stage(*a, **k).items()}
    monkeypatch.setitem(distill.STAGES, "logits", broken)
    with pytest.raises(surgery.BadInput, match=r"step 4, stage logits: loss is nan at lr"):
        call(train, monkeypatch, *command(teacher_folder, tmp_path / "run"))
    assert all(w.isfinite().all() for w in weights_of(tmp_path / "run").values())


def test_weights_that_are_not_finite_are_not_saved(teacher_folder, tmp_path, monkeypatch):
    stage, calls = distill.STAGES["logits"], itertools.count(1)

    def poison(student, *rest, **more):
        if next(calls) > 12:
            student.norm.weight.data[0] = math.nan
        return stage(student, *rest, **more)

    monkeypatch.setitem(distill.STAGES, "logits", poison)
    with pytest.raises(surgery.BadInput, match="not finite and were not saved"):
        call(train, monkeypatch, *command(teacher_folder, tmp_path / "run"))
    kept = surgery.find_checkpoint(tmp_path / "run")
    assert kept is None or all(w.isfinite().all() for w in weights_of(tmp_path / "run").values())


BAD = {
    "unknown mixer": (["--mixer", "gated_dleta"], "did you mean 'gated_delta'"),
    "no data": (["--data", "missing.txt"], "no such file or folder"),
    "empty data": (["--data", "EMPTY"], "no text in it"),
    "binary data": (["--data", "BINARY"], "give UTF-8 text"),
    "short data": (["--data", "SHORT"], "need a context of"),
    "no such teacher": (["--teacher", "missing.gguf"], "no such file or folder"),
    "nothing to resume": (["--resume"], "no run in"),
    "layer beyond": (["--keep", "7"], "go from 0 to 1"),
    "unknown option": (["--option", "colour=3"], "wanted one of conv"),
    "wrong option": (["--option", "gate=relu"], "wanted none, silu, sigmoid"),
    "no number": (["--option", "conv"], "wanted 0,8,16 or auto:4, and NAME=VALUE"),
    "no such device": (["--device", "abacus"], "try --device cpu"),
    "a size to pretrain": (["--size", "1m", "--teacher", "none", "--recipe", "default"], "they alone, have none"),
    "a size without weights": (["--size", "140m", "--teacher", "none"], "go with --teacher none"),
    "a tokenizer of another": (["--tokenizer", "140m"], "brings its own"),
    "one window": (["--calibrate", "1"], "at least 2"),
    "no tokens": (["--tokens", "0"], "wanted a number from"),
    "no context": (["--context", "0"], "wanted a number from"),
    "a part of a sequence": (["--tokens-per-step", "40"], "--tokens-per-step 40: wanted a multiple of 16"),
    "no layers": (["--keep", "auto:0"], "wanted 0,8,16 or auto:4"),
    "more layers than there are": (["--keep", "auto:2"], "wanted fewer than this teacher's 2 layers"),
    "calibrated to nobody": (["--size", "1m", "--teacher", "none"], "nothing to calibrate to"),
    "no role": (["--rates", "old=3"], "wanted factors of trunk, mixer or new"),
    "rows that are no weights": (["--recipe", "hedgehog"], "wanted a mixer whose rows are weights"),
    "nothing new to train": (["--mixer", "softmax", "--recipe", "haller"], "trains new mixers, and here are none"),
    "answers without chats": (["--recipe", "sft"], "no chats in it"),
    "sizes of two kinds": (["--size", "1m,3m"], "a teacher has its own size"),
    "shards of nobody": (["--shard"], "one process has nothing to share"),
    "more needles than text": (["--needles", "1"], "wanted a number from 0 to 0.99"),
    "no such student": (["--student", "missing"], "args.json"),
}


@pytest.mark.parametrize("words, sentence", BAD.values(), ids=BAD)
def test_bad_input_is_one_sentence(teacher_folder, tmp_path, monkeypatch, capsys, words, sentence):
    for name, data in (("EMPTY", b""), ("BINARY", b"\x7fELF\0\xff\xfe"), ("SHORT", b"a few words")):
        (tmp_path / name).write_bytes(data)
    words = [str(tmp_path / w) if w.isupper() else w for w in words]
    monkeypatch.setattr(sys, "argv", ["train.py", *command(teacher_folder, tmp_path / "run"), *words])
    with pytest.raises(SystemExit) as stop:
        surgery.cli(train.main)
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert stop.value.code == 2 and len(error) == 1 and sentence in error[0]
    assert not (tmp_path / "run").exists()


def test_a_run_is_not_overwritten_or_resumed_as_another(teacher_folder, tmp_path, monkeypatch):
    words = command(teacher_folder, tmp_path / "run")
    call(train, monkeypatch, *words)
    with pytest.raises(surgery.BadInput, match="exists; add --resume"):
        call(train, monkeypatch, *words)
    with pytest.raises(surgery.BadInput, match="seed = 0, not 3"):
        call(train, monkeypatch, *words, "--resume", "--seed", "3")
    (tmp_path / "run" / "scores.json").unlink()
    (tmp_path / "text.txt").write_text((tmp_path / "text.txt").read_text().replace("times", "plus"))
    with pytest.raises(surgery.BadInput, match="has changed since .* began"):
        call(train, monkeypatch, *words, "--resume")


@pytest.mark.parametrize("damage", ["cut", "foreign", "incomplete"])
def test_a_damaged_optimizer_is_one_sentence(teacher_folder, tmp_path, monkeypatch, damage):
    words = command(teacher_folder, tmp_path / "run")
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(train, "finish", raises(KeyboardInterrupt))
        call(train, monkeypatch, *words)
    file = surgery.find_checkpoint(tmp_path / "run") / "optimizer.safetensors"
    whole = load_file(file)
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:1000])
    else:
        other = {"another.weight|exp_avg": torch.ones(2)} if damage == "foreign" else {}
        save_file(whole | other if other else dict(list(whole.items())[1:]), file)
    with pytest.raises(surgery.BadInput, match="delete this step and --resume from the one before"):
        call(train, monkeypatch, *words, "--resume")


def test_no_network_and_no_cache_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(surgery, "CACHE", tmp_path)
    monkeypatch.setattr(surgery, "from_hub", lambda name, offline=False: None)
    monkeypatch.setattr(surgery, "from_pypi", lambda target: None)
    with pytest.raises(surgery.BadInput, match="not in a cache and the hub gave no"):
        surgery.load_teacher("140m")


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet"])
def test_every_kind_of_file_is_read(tmp_path, suffix):
    texts, path = ["one text", "another, é"], tmp_path / f"data{suffix}"
    if suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
    else:
        lines = [json.dumps({"text": t}) for t in texts]
        path.write_text("\n<|endoftext|>\n".join(texts) if suffix == ".txt" else "\n".join(lines), encoding="utf-8")
    assert list(evaluate.documents(str(tmp_path))) == list(evaluate.documents(str(path))) == texts


@pytest.mark.parametrize("row", ['{"text": null}', '{"text": 3}', '{"text": "a\\u0000b"}'])
def test_rows_that_are_no_text_are_refused(tmp_path, row):
    (tmp_path / "rows.jsonl").write_text(row)
    with pytest.raises(surgery.BadInput, match="rows.jsonl: .* is no text and no chat"):
        train.Text(types.SimpleNamespace(data=str(tmp_path / "rows.jsonl"), context=16, needles=0), tiny_teacher()[1])


def lines_of_text(tmp_path, monkeypatch, n=300, shard=800):
    (tmp_path / "lines.jsonl").write_text("\n".join(json.dumps({"text": f"line: {i:04d}."}) for i in range(n)))
    monkeypatch.setattr(train, "SHARD", shard)
    args = types.SimpleNamespace(
        data=str(tmp_path / "lines.jsonl"), context=12, tokens=10**6, needles=0
    )  # a line is 12 tokens
    return args, tiny_teacher()[1]


def test_text_is_the_same_from_every_step_on(tmp_path, monkeypatch):
    args, tokenizer = lines_of_text(tmp_path, monkeypatch)
    text = train.Text(args, tokenizer)
    whole = text.rows(0, 900, seed=3)
    numbers = [int(tokenizer.decode(row.tolist())[6:10]) for row in whole]
    held = {int(tokenizer.decode(row.tolist())[6:10]) for row in text.held}
    epoch, everything = 300 - len(held), set(range(300)) - held
    assert set(numbers[:epoch]) == set(numbers[epoch : 2 * epoch]) == everything and numbers[:epoch] != sorted(
        everything
    )
    assert numbers[:epoch] != numbers[epoch : 2 * epoch]
    assert max(numbers[:60]) < 70 and len(list(text.folder.glob("*.bin"))) == 5  # the buffer is a shard
    for made in (text, train.Text(args, tokenizer)):  # the second reads what the first wrote
        for first in (0, 65, 66, 290, 800):
            assert torch.equal(made.rows(first, 7, seed=3), whole[first : first + 7])
    joined = text.rows(0, 3, seed=3, length=36)
    assert joined.shape == (3, 36) and not torch.equal(text.rows(0, 60, seed=4), whole[:60])


def test_shards_are_made_by_one_and_checked(tmp_path, monkeypatch):
    args, tokenizer = lines_of_text(tmp_path, monkeypatch)
    monkeypatch.setattr(train, "identity", lambda data: "the same")
    text = train.Text(args, tokenizer)
    again = train.Text(args, tokenizer)
    monkeypatch.setattr(train, "ids_from", raises(AssertionError("read twice")))
    assert torch.equal(again.first, text.first)
    args.data = str(text.folder)  # taken to another machine
    assert torch.equal(train.Text(args, tokenizer).first, text.first)
    with pytest.raises(surgery.BadInput, match="shards of another vocab than this teacher's"):
        train.Text(args, surgery.bytes_tokenizer(4))
    other = surgery.Tokenizer(BYTES, surgery.SPLITS["smollm"], {"<|endoftext|>": 256}, 256)
    with pytest.raises(surgery.BadInput, match="shards of another tokenizer than this teacher's"):
        train.Text(args, other)
    binary = text.folder / "shard-00000.bin"
    binary.write_bytes(binary.read_bytes()[:-8])
    with pytest.raises(surgery.BadInput, match="not the .* bytes that shard-00000.json tells of"):
        train.Text(args, tokenizer)


def test_a_sweep_is_a_product():
    words = ["--mixer", "gla,delta", "--seed=0,1", "--option", "conv=0,4", "--keep", "0,1", "--lr", "1e-3"]
    runs = train.points(words)
    assert len(runs) == 8 and runs[0] == [
        "--mixer", "gla", "--seed=0", "--option", "conv=0", "--keep", "0,1", "--lr", "1e-3"
    ]  # fmt: skip
    assert len({tuple(run) for run in runs}) == 8 and train.points(["--mixer", "gla"]) == [["--mixer", "gla"]]


def swept(folder, out, *more):
    return command(folder, out, "--mixer", "retnet,delta", "--seed", "0,1", "--tokens", "160,320", *more)


def test_a_stopped_sweep_ends_in_the_table_of_a_quiet_one(teacher_folder, tmp_path, monkeypatch, capsys):
    call(train, monkeypatch, *swept(teacher_folder, tmp_path / "quiet"))
    step, left = train.one_step, itertools.count(1)

    def dies(*args):
        if next(left) % 23 == 0:
            raise KeyboardInterrupt
        return step(*args)

    monkeypatch.setattr(train, "one_step", dies)
    for _ in range(8):
        try:
            call(train, monkeypatch, *swept(teacher_folder, tmp_path / "cut"))
            break
        except KeyboardInterrupt:
            continue
    assert next(left) > 23 * 4
    monkeypatch.setattr(train, "one_step", raises(AssertionError("a finished run runs again")))
    call(train, monkeypatch, *swept(teacher_folder, tmp_path / "cut"))
    quiet, cut = (tmp_path / name / "results.md" for name in ("quiet", "cut"))
    assert quiet.read_text() == cut.read_text() and (tmp_path / "cut" / "results.png").stat().st_size > 1000
    for run in (tmp_path / "cut").glob("*-s*"):  # the report needs no run
        shutil.rmtree(run)
    call(train, monkeypatch, "--report", tmp_path / "cut")
    assert quiet.read_text() == cut.read_text()


@pytest.mark.slow
def test_a_killed_sweep_ends_in_the_table_of_a_quiet_one(teacher_folder, tmp_path, monkeypatch):
    """2 mixers × 2 seeds × 2 budgets × 2 teachers, kill -9 up to ten times at random moments, then to its end."""
    surgery.save(*tiny_teacher(layers=3), tmp_path / "second")
    both, random = f"{teacher_folder},{tmp_path / 'second'}", torch.Generator().manual_seed(0)
    call(train, monkeypatch, *swept(both, tmp_path / "quiet"))
    words, ends = [sys.executable, train.__file__, *swept(both, tmp_path / "cut")], []
    while 0 not in ends:
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(4 + 4 * torch.rand(1, generator=random).item() if len(ends) < 10 else None)
        except subprocess.TimeoutExpired:
            process.kill()
        ends.append(process.wait())
    assert set(ends) == {0, -9} and len(ends) > 3
    quiet, cut = (tmp_path / name / "results.md" for name in ("quiet", "cut"))
    assert quiet.read_text() == cut.read_text()


def test_a_broken_run_is_named_and_the_sweep_goes_on(teacher_folder, tmp_path, monkeypatch, capsys):
    linearize = surgery.linearize

    def breaks(teacher, mixer, **options):
        if mixer == "retnet" and "run 1" in capsys.readouterr().out:
            raise RuntimeError("out of something")
        return linearize(teacher, mixer, **options)

    monkeypatch.setattr(surgery, "linearize", breaks)
    words = command(teacher_folder, tmp_path / "sweep", "--mixer", "retnet,delta", "--tokens", "160")
    with pytest.raises(surgery.BadInput, match="1 of 2 runs are broken: retnet-teacher-s0; the table has the others"):
        call(train, monkeypatch, *words)
    rows = [json.loads(line) for line in (tmp_path / "sweep" / "results.jsonl").read_text().splitlines()]
    assert [row["run"] for row in rows] == ["delta-teacher-s0"]
    (tmp_path / "sweep" / "notes.txt").write_text("mine")
    with pytest.raises(surgery.BadInput, match="notes.txt: no run of a sweep"):
        call(train, monkeypatch, *words)
    with pytest.raises(surgery.BadInput, match="equal budgets: give --tokens"):
        call(train, monkeypatch, "--seed", "0,1")
    with pytest.raises(surgery.BadInput, match="two runs of this sweep would be there"):
        call(train, monkeypatch, *command(teacher_folder, tmp_path / "twice", "--seed", "1,1"))


def test_two_processes_do_not_train_in_one_folder(teacher_folder, tmp_path, monkeypatch):
    words = command(teacher_folder, tmp_path / "run")
    monkeypatch.setattr(surgery, "CACHE", tmp_path / ".cache")

    def second(*_):
        monkeypatch.setattr(train, "go", raises(AssertionError("two at once")))
        call(train, monkeypatch, *words)

    monkeypatch.setattr(train, "go", second)
    with pytest.raises(surgery.BadInput, match="run: another process trains there"):
        call(train, monkeypatch, *words)


def test_only_steps_are_checkpoints(tmp_path):
    for name in ("step-00000005", "step-00000040", "step-123456789", "step-old1", "step.tmp"):
        (tmp_path / name).mkdir()
    assert [p.name for p in surgery.checkpoints(tmp_path)] == ["step-00000005", "step-00000040", "step-123456789"]


# ---------------------------------------------------------------- 6. A score is the same alone and in a batch


def test_mixers_are_told_and_drawn(teacher_folder, tmp_path, monkeypatch, capsys):
    call(mixers, monkeypatch)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    found = {row[0]: row for row in rows if row and row[0] in MIXERS}
    assert found.keys() == MIXERS.keys() and all(float(row[-2]) < 1e-4 for row in found.values())
    assert found["delta"][4] == f"{9 * 64 * 64 + 3 * 3 * 9 * 64:,}"  # S, and three inputs of the convolution
    monkeypatch.setattr(evaluate, "MIXERS", {n: MIXERS[n] for n in ("softmax", "hedgehog", "rwkv7")})
    call(mixers, monkeypatch, "--picture", tmp_path / "p.png", "--teacher", teacher_folder)
    assert (tmp_path / "p.png").stat().st_size > 5000


def test_heldout_of_the_teacher_itself():
    teacher, _ = tiny_teacher()
    scores = evaluate.heldout(teacher, teacher, torch.randint(0, 257, (3, 20)))
    assert scores["kl"] == (0, 0) and scores["agreement"] == (1, 0) and scores["ce"] == scores["teacher_ce"]
    assert scores["ce"][0] == pytest.approx(math.log(257), abs=0.5)


def test_heldout_by_hand():
    teacher, student = tiny_teacher()[0], surgery.linearize(tiny_teacher()[0], "gla")
    tokens = torch.randint(0, 257, (3, 20))
    tokens[1, :15] = ~tokens[1, :15]
    ids, learn = distill.unmark(tokens)
    log_p, log_t = (model(ids)[0][:, :-1].log_softmax(-1) for model in (student, teacher))
    rows = {"kl": (log_t.exp() * (log_t - log_p)).sum(-1), "agreement": (log_t.argmax(-1) == log_p.argmax(-1)).double()}
    rows |= {n: -x.gather(-1, ids[:, 1:, None])[..., 0] for n, x in (("ce", log_p), ("teacher_ce", log_t))}
    found = evaluate.heldout(student, teacher, tokens, block=7)
    for name, values in rows.items():
        each = values.mean(-1)
        assert found[name] == pytest.approx((each.mean().item(), each.std().item() / 3**0.5), rel=1e-4), name
    right = (log_p.argmax(-1) == ids[:, 1:]).double()
    each = [right[i][learn[i, 1:]].mean().item() for i in range(3)]
    assert found["answers"][0] == pytest.approx(sum(each) / 3)
    student.embed.weight.data = torch.eye(257, 24)  # a head that says what it likes
    assert evaluate.heldout(student, None, tokens).keys() == {"ce", "answers"}


def test_likelihoods_do_not_depend_on_the_batch():
    model, tokenizer = tiny_teacher()
    student = surgery.linearize(model, "delta", window=4)
    pairs = [("a b", " c"), ("a longer context, and", " its end"), ("x", " y"), ("no end", ""), ("x", "")]
    for m in (model, student):
        encoded = [evaluate.encode_pair(tokenizer, *pair, 64)[:2] for pair in pairs]
        ids = tokenizer.encode("so")
        for _ in range(6):  # what it says itself is greedy
            ids.append(int(m(torch.tensor([ids]))[0][0, -1].argmax()))
        encoded.append((ids, 2))
        for at_once in (1, 60, 2048):
            found = evaluate.likelihoods(m, encoded, at_once=at_once)
            for (ids, start), (ll, _) in zip(encoded, found):
                log_p = m(torch.tensor([ids]))[0][0].log_softmax(-1)
                assert ll == pytest.approx(sum(log_p[i - 1, ids[i]].item() for i in range(start, len(ids))), abs=1e-4)
            assert [greedy for _, greedy in found] == [False, False, False, True, True, True]
    assert evaluate.encode_pair(tokenizer, "a b  ", "c", 64) == ([97, 32, 98, 32, 32, 99], 3, False)
    assert evaluate.encode_pair(tokenizer, "", "c", 64) == ([256, 99], 1, False)
    assert evaluate.encode_pair(tokenizer, "a" * 80, " b", 64) == ([97] * 63 + [32, 98], 63, True)
    assert evaluate.encode_pair(tokenizer, "a" * 63, " b", 64)[2] is False


def test_windows_predict_each_token_once():
    model, tokenizer = tiny_teacher()
    text = "An odd text of some 130 characters, so that the context of 64 holds it in three windows, one of them short."
    ids = [tokenizer.eos, *tokenizer.encode(text)]
    wanted = 0.0
    for at in range(0, len(ids) - 1, 64):
        end = min(at + 64, len(ids) - 1)
        x, y = torch.tensor([ids[end - 64 : end]]), torch.tensor(ids[at + 1 : end + 1])
        wanted -= F.cross_entropy(model(x)[0][0, -len(y) :], y, reduction="sum").item()
    found = evaluate.answer([evaluate.Page(text, 1, 1)], model, tokenizer)
    assert found == [{"ll": pytest.approx(wanted, rel=1e-5), "tokens": len(ids) - 1}]


@pytest.mark.parametrize("mixer", ["softmax", "gated_delta"])
def test_texts_together_are_texts_alone(mixer):
    tokenizer, prompts = surgery.bytes_tokenizer(), ["a", "some longer prompt", "and another"]
    teacher, _ = tiny_teacher()
    model = surgery.linearize(teacher, mixer)
    together = [text for text, _ in evaluate.generate(model, tokenizer, prompts, 12)]
    assert together == [text for text, _ in evaluate.generate(model, tokenizer, prompts, 12, piece=5)]
    for prompt, text in zip(prompts, together):
        alone = list(model.generate(tokenizer.encode(prompt), 12, stop=tokenizer.stops))
        assert text == tokenizer.decode(alone)
    word = together[1][3:5]
    assert evaluate.generate(model, tokenizer, prompts[1:2], 12, until=(word,)) == [(together[1].split(word)[0], False)]


def test_items_beyond_the_context_are_told_and_kept(teacher_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluate, "CACHE", tmp_path / "cache")
    rows = [{"question": "x" * n, "answer": "#### 2"} for n in (300, 9)]
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k/test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "lambada.jsonl").write_text('{"context": "%s", "continuation": "c"}\n' % ("a b " * 40))
    ask = lambda row: evaluate.gsm8k(row)._replace(new=8)
    monkeypatch.setitem(evaluate.TASKS, "gsm8k", evaluate.TASKS["gsm8k"]._replace(ask=ask))
    words = [teacher_folder, "--data-dir", tmp_path, "--shots", "0", "--out", tmp_path, "--tasks", "gsm8k,lambada"]
    for turn in range(2):  # answers that were kept say so too, by their older name or asked again
        call(evaluate, monkeypatch, *words)
        for file in (tmp_path / "cache").rglob("*.answers"):
            old = "" if "gsm8k" in file.name else '"cut"'
            file.write_text(re.sub(r'(, )?("beyond")(: \w+)', rf"\1{old}\3" if old else "", file.read_text()))
        told = capsys.readouterr().out
        assert f"{teacher_folder}, gsm8k: 1 of 2 items go beyond the context of 64; read whole" in told, turn
        assert "lambada: 1 of 1 items go beyond the context of 64; their beginnings are cut" in told
        assert "(1 beyond the context)" in (tmp_path / "evaluation.md").read_text()
        kept = json.loads((tmp_path / "evaluation.json").read_text())["models"][str(teacher_folder)]["tasks"]
        assert kept["gsm8k"]["beyond"] == 1 and kept["lambada"]["beyond"] == 1
    model, tokenizer = tiny_teacher()
    assert [beyond for _, beyond in evaluate.generate(model, tokenizer, ["x" * 50, "x" * 9], 40)] == [True, False]


def test_learned_positions_cut_what_does_not_fit():
    tokenizer = surgery.bytes_tokenizer()
    model = surgery.from_scratch("1m", "gpt2", tokenizer, context=32)
    (text, cut), (_, short) = evaluate.generate(model, tokenizer, ["x" * 40, "y"], 8)
    assert cut and not short and text == tokenizer.decode(list(model.generate([120] * 24, 8, stop=tokenizer.stops)))
    rows = evaluate.print_decoding([("gpt2", model)], (16, 4096), new=4, repeats=1)
    assert len(rows) == 2


def test_answers_are_kept_and_taken_again(tmp_path, monkeypatch):
    model, tokenizer = tiny_teacher()
    asked = [evaluate.choose(f"{i} is", [f"odd {i}", "even"], i % 2) for i in range(20)]
    whole = evaluate.answers(model, tokenizer, asked)
    answer, calls = evaluate.answer, []

    def stops(part, *more):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(len(part))
        return answer(part, *more)

    monkeypatch.setattr(evaluate, "answer", stops)
    with pytest.raises(KeyboardInterrupt):
        evaluate.answers(model, tokenizer, asked, tmp_path / "a.jsonl", chunk=6)
    monkeypatch.setattr(evaluate, "answer", lambda part, *more: calls.append(len(part)) or answer(part, *more))
    with (tmp_path / "a.jsonl").open("a") as log:
        log.write('{"key": "half a li')
    again = evaluate.answers(model, tokenizer, asked, tmp_path / "a.jsonl", chunk=6)
    assert calls == [6, 6, 6, 2]
    for a, b in zip(whole, again):
        assert a["key"] == b["key"] and a["ll"] == pytest.approx(b["ll"], rel=1e-5)
    assert evaluate.answers(model, tokenizer, asked[::-1], tmp_path / "a.jsonl") == again[::-1] and calls[4:] == []


def test_metrics_by_hand():
    q = evaluate.choose("", ["ab", "abcdef"], 1)
    found = evaluate.metrics([q, q], [{"ll": [-2.0, -3.0]}, {"ll": [-9.0, -1.0]}])
    assert found == {"acc": [0.0, 1.0], "acc_norm": [1.0, 1.0]}
    last = evaluate.Exact([("a", " b")])
    found = evaluate.metrics([last, last], [{"ll": [-1.0], "greedy": True}, {"ll": [-3.0], "greedy": False}])
    assert found["acc"] == [1.0, 0.0] and evaluate.summary(found["ppl"])[0] == pytest.approx(math.exp(2))
    assert evaluate.summary(found["ppl"])[1] == pytest.approx(math.exp(2) * 1.0)  # by the mean's error, 1
    pages = [evaluate.Page("x", 2, 10), evaluate.Page("y", 3, 20)]
    found = evaluate.metrics(pages, [{"ll": -5.0, "tokens": 4}, {"ll": -10.0, "tokens": 6}])
    assert evaluate.summary(found["word_ppl"])[0] == pytest.approx(math.exp(3))
    assert evaluate.summary(found["byte_ppl"])[0] == pytest.approx(math.exp(0.5))
    sums = {"so 3 #### 1,234.": "1234", "it is -7": "-7", "$1,000.50 in all": "1000.50", "none": None}
    assert {text: evaluate.number_in(text) for text in sums} == sums
    solved = evaluate.Written("p", "x\n#### 18", 9)
    assert evaluate.metrics([solved] * 3, [{"text": "18"}, {"text": "a 17"}, {"text": "#### 18\nno 3"}])["acc"] == [
        1,
        0,
        1,
    ]


def test_comparisons_by_hand():
    a, b = [1.0] * 9 + [0.0] * 6, [1.0] * 4 + [0.0] * 10 + [1.0]
    assert evaluate.mcnemar(a, b) == (5, 1, pytest.approx(2 * 7 / 64))
    assert evaluate.mcnemar(a, a) == (0, 0, 1.0)
    torch.manual_seed(0)
    theirs = (torch.rand(1000) < 0.6).double()
    ours = theirs * (torch.rand(1000) < 0.5)
    value, low, high = evaluate.recovered(ours.tolist(), theirs.tolist())
    assert value == pytest.approx((ours.sum() / theirs.sum()).item()) and low < 0.5 < high
    assert high - low == pytest.approx(2 * 1.96 * math.sqrt(0.25 / theirs.sum().item()), rel=0.15)
    pairs = [(-float(n) * (2 + e), n) for n, e in zip(range(1, 400), torch.randn(399).tolist())]
    ppl, error = evaluate.summary(pairs)
    draws = [evaluate.summary([pairs[i] for i in torch.randint(399, (399,)).tolist()])[0] for _ in range(200)]
    assert error == pytest.approx(torch.tensor(draws).std().item(), rel=0.2)


def test_needles_fit_and_are_hidden():
    tokenizer, text = surgery.bytes_tokenizer(), "One sentence. Another longer sentence! " * 50
    for level in (1, 2, 3):
        asked = evaluate.needles(level, 900, tokenizer, text, 20)
        assert asked == evaluate.needles(level, 900, tokenizer, text, 20)
        depths, kind = set(), "uuid" if level == 3 else "number"
        for q in asked:
            assert 700 < len(tokenizer.encode(q.prompt)) <= 900 - q.new and q.prompt.count(q.wanted) == 1
            key = re.search(r"for (\S+) is: " + q.wanted, q.prompt)[1]
            start = (
                f"A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you"
            )
            assert q.prompt.startswith(f"{start} about the {kind} afterwards.\n")
            end = f"\nWhat is the special magic {kind} for {key} mentioned in the provided text? The special magic"
            assert q.prompt.endswith(f"{end} {kind} for {key} mentioned in the provided text is")
            hidden = rf"One of the special magic {kind}s for {key} is: {q.wanted}\."
            assert re.search(rf"([.!?][ \n]|\n){hidden}", q.prompt)
            assert re.fullmatch(r"[0-9a-f-]{36}" if level == 3 else r"\d{7}", q.wanted)
            depths.add(q.prompt.index(q.wanted) // 100)
        assert len(depths) > 3 and ("grass" in asked[0].prompt) == (level == 1)
    with pytest.raises(surgery.BadInput, match="no words in it"):
        evaluate.needles(2, 900, tokenizer, " ", 1)


def test_decoding_holds_the_states_of_one_length(monkeypatch):
    model, after, made = tiny_teacher()[0], evaluate.after, []

    def watched(_, T, new):
        assert all(state() is None for t, state in made if t != T)
        state = after(model, T, new)
        made.append((T, weakref.ref(state[0]["k"])))
        return state

    monkeypatch.setattr(evaluate, "after", watched)
    rows = evaluate.print_decoding([("a", model), ("b", model)], (16, 64, 32), new=2, repeats=1)
    assert [row[:2] for row in rows] == [[name, T] for T in (16, 64, 32) for name in "ab"] and len(made) == 6


def test_decoding_is_measured(capsys):
    teacher, _ = tiny_teacher()
    models = [("teacher", teacher), ("student", surgery.linearize(teacher, "kda", window=4))]
    rows = evaluate.print_decoding(models, (16, 64), new=2, repeats=1)
    size = {(name, T): n for name, T, _, n in rows}
    assert size["teacher", 64] == 4 * 2 * 2 * 64 * 2 * 4 == 4 * size["teacher", 16]
    assert size["student", 64] == size["student", 16] and all(row[2] > 0 for row in rows)


def test_local_files_of_every_form(tmp_path):
    (tmp_path / "mmlu" / "test").mkdir(parents=True)
    (tmp_path / "mmlu" / "dev").mkdir()
    head = "question,choice0,choice1,choice2,choice3,answer\n"
    (tmp_path / "mmlu/test/odd_things_test.csv").write_text(head + '"Which, then?",1,"a, b",3,4,1\n')
    (tmp_path / "mmlu/dev/odd_things_dev.csv").write_text(head + "First?,1,2,3,4,0\nSecond?,5,6,7,8,3\n")
    letters = evaluate.questions_of("mmlu_letters", tmp_path, shots=1)[0]
    about = "The following are multiple choice questions (with answers) about odd things.\n\n"
    shown = "First?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer: A\n\n"
    assert letters.pairs[1] == (about + shown + "Which, then?\nA. 1\nB. a, b\nC. 3\nD. 4\nAnswer:", " B")
    cloze = evaluate.questions_of("mmlu", tmp_path)[0]
    about = "The following are questions (with answers) about odd things.\n\n"
    assert (
        cloze.pairs[1] == (about + "Question: Which, then?\nAnswer:", " a, b") and cloze.answer == letters.answer == 1
    )
    (tmp_path / "bear").mkdir()
    (tmp_path / "bear/P1.jsonl").write_text('{"sub_label": "Bo", "answer_idx": 1}\n')
    about = {"P1": {"templates": ["[Y] has [X]."], "answer_space_labels": ["Ann", "Cy"]}}
    (tmp_path / "bear/metadata_relations.json").write_text(json.dumps(about))
    asked = evaluate.questions_of("bear", tmp_path)[0]
    assert asked.pairs == [("", "Ann has Bo."), ("", "Cy has Bo.")] and (asked.answer, asked.group) == (1, "P1")
    (tmp_path / "wiki.test.raw").write_text(
        " \n = One = \n \n It 's a @-@ b , ( c ) . \n = = Two = = \n x\n = Next = \n y\n"
    )
    pages = evaluate.questions_of("wikitext", tmp_path)
    assert [p.text for p in pages] == [" = One =\n\nIt's a-b, (c).\n== Two ==\nx\n", " = Next =\ny\n"]
    (tmp_path / "gsm8k").mkdir()
    for name in ("test", "train"):
        (tmp_path / f"gsm8k/{name}.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n' * 7)
    solved = evaluate.questions_of("gsm8k", tmp_path)[0]
    assert solved.prompt == "Question: 1 + 1?\nAnswer: #### 2\n\n" * 5 + "Question: 1 + 1?\nAnswer:"
    (tmp_path / "winogrande.jsonl").write_text('{"context_options": ["a b", "a c"], "continuation": "d.", "gold": 0}\n')
    assert evaluate.questions_of("winogrande", tmp_path)[0].pairs == [("a b", " d."), ("a c", " d.")]


HUB = {  # rows as the hub has them, and lm-eval's task
    "lambada": ("lambada_openai", {"text": "He said so, and so it  was"}),
    "piqa": ("piqa", {"goal": "Boil it", "sol1": "with fire", "sol2": " with ice", "label": 0}),
    "arc_easy": (
        "arc_easy",
        {"question": "Why?", "choices": {"text": ["x", "y z"], "label": ["A", "B"]}, "answerKey": "B"},
    ),
    "hellaswag": (
        "hellaswag",
        {"activity_label": "Roof", "ctx_a": "A man [step] sits. [title] Up", "ctx_b": "he", "label": "1"}
        | {"endings": ["falls [x] down.", "is  there."]},
    ),
    "openbookqa": (
        "openbookqa",
        {"question_stem": "It is", "choices": {"text": ["x", "y z"], "label": ["A", "B"]}, "answerKey": "B"},
    ),
    "winogrande": (
        "winogrande",
        {"sentence": "Ann saw Bo as _ was tall.", "option1": "Ann", "option2": "Bo", "answer": "2"},
    ),
    "wikitext": ("wikitext", {"page": " = A = \n s ' x . , y ( b ) \" q \" 1 @,@ 000 : N 's = = B = = \n "}),
}


@pytest.mark.parametrize("name", HUB)
def test_oracle_prompts_are_those_of_lm_eval(tmp_path, monkeypatch, name):
    pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    datasets, (theirs, row) = pytest.importorskip("datasets"), HUB[name]
    rows = {split: datasets.Dataset.from_list([row]) for split in ("train", "validation", "test")}
    hub = lambda path, name=None, split=None, **_: rows[split] if split else datasets.DatasetDict(rows)
    monkeypatch.setattr(datasets, "load_dataset", hub)
    task = TaskManager().load(theirs)["tasks"][theirs]
    task.build_all_requests(rank=0, world_size=1)
    asked = evaluate.questions_of(name, None)[0]
    wanted = [tuple(instance.args) for instance in task.instances]
    page = isinstance(asked, evaluate.Page)
    assert wanted == ([(asked.text,)] if page else [tuple(pair) for pair in asked.pairs])
    if page:
        results = task.process_results(row, [-10.0])
        assert (asked.words, asked.bytes) == (results["word_perplexity"][1], results["byte_perplexity"][1])
    elif isinstance(asked, evaluate.Choice):
        values = [-float(i == asked.answer) for i in range(len(asked.pairs))]  # the others are likelier
        results = task.process_results(next(iter(task.eval_docs)), [(v, False) for v in values])
        found = evaluate.metrics([asked], [{"ll": values}])
        assert results["acc"] == found["acc"][0] and results.get("acc_norm", 0) == found.get("acc_norm", [0])[0]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["gpt2", "sentencepiece"])
def test_oracle_likelihoods_are_those_of_lm_eval(tmp_path, kind):
    transformers, _ = pytest.importorskip("transformers"), pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES | dict(vocab_size=900, max_position_embeddings=64, eos_token_id=1))
    theirs, made = transformers.LlamaForCausalLM(config).eval(), odd_tokenizers(kind)
    for p in theirs.parameters():
        p += 0.1 * torch.randn_like(p)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>" if kind == "sentencepiece" else None, eos_token="</s>", pad_token="</s>"
    )
    theirs.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model, ours = surgery.load_teacher(tmp_path)
    pairs = [
        ("It is", " so"),
        ("A longer context, with words:  ", "and an end"),
        ("", "alone"),
        ("x y z " * 40, " cut"),
    ]
    harness, judge = (
        evaluate.Harness(model, ours),
        HFLM(pretrained=theirs, tokenizer=tokenizer, max_length=64, device="cpu"),
    )
    calls = [("loglikelihood", pair) for pair in pairs]
    calls += [("loglikelihood_rolling", ("some words " * 40,))] if kind == "gpt2" else []  # theirs has a second <s>
    for call, args in calls:
        asked = [Instance(request_type=call, doc={}, arguments=args, idx=0)]
        wanted, found = getattr(judge, call)(asked), getattr(harness, call)(asked)
        assert found == [pytest.approx(w, rel=1e-4, abs=1e-4) for w in wanted], args
    asked = [
        Instance(
            request_type="generate_until", doc={}, arguments=("It is", {"until": ["zz"], "max_gen_toks": 9}), idx=0
        )
    ]
    if tokenizer.bos_token is None:  # the other's byte tokens are special ones, which theirs leaves out of a text
        assert harness.generate_until(asked) == judge.generate_until(asked)


def test_oracle_lm_eval_items_beyond_the_context_are_told(capsys):
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    harness, how = evaluate.Harness(*tiny_teacher()), {"until": [], "max_gen_toks": 4}
    harness.generate_until([instance("generate_until", {}, ("x" * n, how), 0, ("t", n, 1)) for n in (300, 5)])
    assert "lm-eval: 1 of 2 items go beyond the context of 64; read whole" in capsys.readouterr().out
    assert harness.beyond == {("t", 300)}


def test_oracle_lm_eval_has_our_tokenizer_by_name(monkeypatch):
    lm_eval, transformers = pytest.importorskip("lm_eval"), pytest.importorskip("transformers")
    model, tokenizer = tiny_teacher()

    def simple_evaluate(harness, metadata, **_):
        theirs = transformers.AutoTokenizer.from_pretrained(metadata["tokenizer"])
        assert theirs("An odd text, déjà vu").input_ids == tokenizer.encode("An odd text, déjà vu")
        return {"results": {"ruler": {"4096,none": 0.5}}}

    monkeypatch.setattr(lm_eval, "simple_evaluate", simple_evaluate)
    assert evaluate.with_lm_eval(model, tokenizer, ["ruler"], 0, None)["ruler"]["4096"][0] == 0.5


@pytest.mark.parametrize("named", [True, False])
def test_a_package_that_lm_eval_lacks_is_one_sentence(monkeypatch, named):
    def simple_evaluate(*_, **__):
        try:
            raise ModuleNotFoundError("No module named 'wonderwords'", name="wonderwords")
        except ImportError as error:
            raise error if named else ImportError("Please install the `wonderwords` package") from error

    fake = types.SimpleNamespace(simple_evaluate=simple_evaluate, LM=types.SimpleNamespace(register=lambda cls: None))
    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model"):
        monkeypatch.setitem(sys.modules, name, fake)
    with pytest.raises(surgery.BadInput, match="^--tasks niah_single_1: pip install wonderwords; lm-eval says: .*word"):
        evaluate.with_lm_eval(*tiny_teacher(), ["niah_single_1"], 0, None)


def test_oracle_lm_eval_runs_its_tasks_on_us(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    datasets = pytest.importorskip("datasets")
    data = {
        n: datasets.Dataset.from_list([HUB["piqa"][1] | {"label": i % 2, "goal": "A goal. " * i} for i in range(6)])
        for n in ("train", "validation")
    }
    monkeypatch.setattr(datasets, "load_dataset", lambda path, name=None, **_: datasets.DatasetDict(data))
    model, tokenizer = tiny_teacher()
    found = evaluate.with_lm_eval(model, tokenizer, ["piqa"], 0, None)
    ours = evaluate.metrics(
        *(lambda q: (q, evaluate.answers(model, tokenizer, q)))([evaluate.piqa(r) for r in data["validation"]])
    )
    assert found["piqa"]["acc"] == pytest.approx(evaluate.summary(ours["acc"])) and 0 < found["piqa"]["beyond"] < 6


ITEMS = {  # task: an item that is none
    "lambada": {"context": "a", "continuation": ""},
    "piqa": {"query": "Q", "choices": []},
    "arc_easy": {"query": "Q", "choices": ["x", "y"]},
    "winogrande": {"context_options": ["a", "b"], "continuation": "c", "gold": 7},
    "gsm8k": {"question": "a", "answer": ""},
    "hellaswag": {"ctx": "a", "endings": ["b", 3], "gold": 0},
    "arc_challenge": {"query": "Q", "choices": ["", "x"], "gold": 1},
}


@pytest.mark.parametrize("task, item", ITEMS.items(), ids=ITEMS)
def test_items_that_are_none_are_one_sentence(tmp_path, task, item):
    (tmp_path / "gsm8k").mkdir()
    file = "gsm8k/test.jsonl" if task == "gsm8k" else f"{task}.jsonl"
    (tmp_path / file).write_text(json.dumps(item) + "\n")
    with pytest.raises(surgery.BadInput, match=f"task '{task}'"):
        evaluate.questions_of(task, tmp_path, shots=0 if task == "gsm8k" else None)


SCORING = {
    "a file as folder": (["--out", "FILE"], "a file of that name exists"),
    "somebody else's scores": (["--out", "ODD"], "delete it, or give another --out"),
    "no template": (["--chat", "--prompt", "hi"], "has no chat template"),
    "no turn": (["--chat"], "give --prompt TEXT too"),
    "no task": (["--tasks", ",,"], "no task in it"),
    "no length": (["--lengths", "512,0"], "wanted numbers of tokens, 1 or more"),
    "too short a needle": (["--tasks", "niah_1", "--lengths", "200"], "alone take"),
    "a colon alone": (["--tasks", "niah_1:"], "number of needles after the colon"),
    "no state": (["--rank"], "softmax alone has no state"),
    "no hay": (["--tasks", "niah_2", "--haystack", "/missing/x"], "--haystack /missing/x"),
    "nothing to show": (["--tasks", "lambada", "--shots", "5"], "no examples to show"),
    "no items": (["--tasks", "piqa"], "no piqa*.jsonl under"),
    "no checkpoint": (["--baseline", "UNDONE"], "a run without a checkpoint yet; go on with train.py --resume"),
}


@pytest.mark.parametrize("words, sentence", SCORING.values(), ids=SCORING)
def test_bad_scoring_is_one_sentence(teacher_folder, tmp_path, monkeypatch, words, sentence):
    monkeypatch.setattr(evaluate, "CACHE", tmp_path / "cache")
    (tmp_path / "lambada.jsonl").write_text(json.dumps({"context": "a b", "continuation": "c"}) + "\n")
    (tmp_path / "FILE").write_text("")
    (tmp_path / "ODD").mkdir()
    (tmp_path / "ODD" / "evaluation.json").write_text('{"models": []}')
    (tmp_path / "UNDONE").mkdir()
    (tmp_path / "UNDONE" / "args.json").write_text('{"teacher": "none"}')
    words = [str(tmp_path / w) if w in ("FILE", "ODD", "UNDONE") else w for w in words]
    with pytest.raises(surgery.BadInput, match=re.escape(sentence)):
        call(evaluate, monkeypatch, teacher_folder, "--data-dir", tmp_path, *words)


def test_models_are_compared_in_one_table(teacher_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluate, "CACHE", tmp_path / "cache")
    for name in ("gla", "delta"):
        call(train, monkeypatch, *command(teacher_folder, tmp_path / name, "--mixer", name))
    rows = [{"query": f"Is {i} odd?", "choices": ["yes it is", "no"], "gold": i % 2} for i in range(40)]
    (tmp_path / "piqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "wiki.test.raw").write_text(" = One = \n a b c\n = Two = \n d e\n")
    capsys.readouterr()
    words = [tmp_path / "gla", tmp_path / "delta", "--tasks", "piqa,wikitext,niah_1", "--data-dir", tmp_path]
    words += ["--lengths", "800", "--limit", "10", "--out", tmp_path / "out", "--decode", "--baseline", teacher_folder]
    call(evaluate, monkeypatch, *words)
    told = capsys.readouterr().out
    assert "piqa acc (10)" in told and "niah_1@800 acc (10)" in told and "wikitext word_ppl (2)" in told
    saved = json.loads((tmp_path / "out" / "evaluation.json").read_text())["models"]
    assert saved.keys() == {str(tmp_path / "gla"), str(tmp_path / "delta"), str(teacher_folder)}
    saved = {Path(name).name: row for name, row in saved.items()}
    assert saved["gla"]["tasks"]["piqa"]["acc"][2] == 10 and saved["gla"]["held"]["kl"][0] > 0
    before = saved["gla"]["tasks"]
    call(evaluate, monkeypatch, *words[:4], "--limit", "5", "--data-dir", tmp_path, "--out", tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "evaluation.json").read_text())["models"][str(tmp_path / "gla")]["tasks"]
    assert saved["wikitext"]["word_ppl"] == before["wikitext"]["word_ppl"] and saved["piqa"]["limit"] == 5
    for file in ("evaluation.md", "evaluation.png", "decoding.png", "decoding.json"):
        assert (tmp_path / "out" / file).stat().st_size > 100
    assert len(list((tmp_path / "gla" / "answers").rglob("*.answers"))) == 6
    decoded = json.loads((tmp_path / "out" / "decoding.json").read_text())
    assert {row[0] for row in decoded} == {"gla", "delta", teacher_folder.name}
    (tmp_path / "other").mkdir()
    (tmp_path / "delta").rename(tmp_path / "other" / "gla")
    words = [tmp_path / "gla", tmp_path / "other" / "gla", "--decode", "--lengths", "8", "--baseline", "none"]
    call(evaluate, monkeypatch, *words, "--out", tmp_path / "out")
    decoded = json.loads((tmp_path / "out" / "decoding.json").read_text())
    assert [row[0] for row in decoded] == [str(tmp_path / "gla"), str(tmp_path / "other" / "gla")]


def test_what_is_told_is_what_is_kept(teacher_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluate, "CACHE", tmp_path / "cache")
    student, tokenizer = tiny_teacher()
    student.embed.weight.data += torch.randn(257, 24)  # it has other favourites
    surgery.save(surgery.linearize(student, "gla"), tokenizer, tmp_path / "student")
    for task in ("piqa", "arc_easy"):
        rows = [{"query": f"{task} {i}?", "choices": [f"{7 * i}", f"{9 * i + 1}"], "gold": i % 2} for i in range(40)]
        (tmp_path / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked, out = evaluate.questions_of("piqa", tmp_path), tmp_path / "out"
    both = (surgery.load(folder) for folder in (teacher_folder, tmp_path / "student"))
    theirs, ours = (evaluate.metrics(asked, evaluate.answer(asked, *model)) for model in both)
    words = [tmp_path / "student", "--baseline", teacher_folder, "--data-dir", tmp_path, "--out", out, "--tasks"]
    call(evaluate, monkeypatch, *words, "piqa", "--precision", "fp32")
    kept = json.loads((out / "evaluation.json").read_text())
    row = kept["models"][str(tmp_path / "student")]["tasks"]["piqa"]
    shares = {name: list(evaluate.recovered(ours[name], theirs[name])) for name in ("acc", "acc_norm")}
    assert row["recovered"] == shares and row["baseline"] == str(teacher_folder)
    assert "  {:.0%} [{:.0%}, {:.0%}]".format(*shares["acc"]) in capsys.readouterr().out
    assert kept["models"][str(teacher_folder)]["tasks"]["piqa"]["recovered"] == {}
    *alone, p = evaluate.mcnemar(theirs["acc"], ours["acc"])
    models = [str(teacher_folder), str(tmp_path / "student")]
    assert kept["mcnemar"] == [{"task": "piqa", "models": models, "alone": alone, "p": p}] and sum(alone)
    call(evaluate, monkeypatch, *words, "arc_easy")
    noted = (out / "evaluation.md").read_text()
    assert noted.startswith(f"|  | {models[0]} | {models[1]} |\n") and "| arc_easy acc (40) | " in noted
    assert "| piqa acc (40) | {:.3f}".format(kept["models"][models[0]]["tasks"]["piqa"]["acc"][0]) in noted
    assert f"\n\npiqa: right in {models[0]} alone {alone[0]}, in {models[1]} alone {alone[1]}, p = {p:.2g}" in noted
    call(evaluate, monkeypatch, *words, "piqa", "--limit", "3")  # what is scored again replaces what it was
    kept = json.loads((out / "evaluation.json").read_text())
    assert sum(sum(row["alone"]) <= 3 for row in kept["mcnemar"] if row["task"] == "piqa") < 2
    assert "| piqa acc (3) |" in (out / "evaluation.md").read_text()


def test_accuracy_by_relation_is_told_and_kept(teacher_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluate, "CACHE", tmp_path / "cache")
    (tmp_path / "bear").mkdir()
    about = {"templates": ["[X] has [Y]."], "answer_space_labels": ["it", "a b c"]}
    (tmp_path / "bear/metadata_relations.json").write_text(json.dumps({"P1": about, "P2": about}))
    for name, right in (("P1", [0, 0, 0]), ("P2", [1, 1, 1, 0])):  # the shorter sentence is the likelier one
        rows = [{"sub_label": f"Bo {i}", "answer_idx": answer} for i, answer in enumerate(right)]
        (tmp_path / f"bear/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [teacher_folder, "--tasks", "bear", "--data-dir", tmp_path, "--out", tmp_path / "out"]
    call(evaluate, monkeypatch, *words, "--groups")
    row = json.loads((tmp_path / "out" / "evaluation.json").read_text())["models"][str(teacher_folder)]["tasks"]["bear"]
    assert row["acc"][0] == 4 / 7 and row["acc of P1"] == [1, 0, 3] and row["acc of P2"] == [0.25, 0.25, 4]
    told = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert told.index("bear acc of P2 (4) 0.250 ± 0.250") + 1 == told.index("bear acc of P1 (3) 1.000 ± 0.000")


def test_runs_of_different_teachers_are_not_in_one_table(tmp_path, monkeypatch):
    for name, teacher in (("a", "140m"), ("b", "none"), ("c", "360m")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "args.json").write_text(json.dumps({"teacher": teacher}))
    with pytest.raises(surgery.BadInput, match="140m and 360m: different teachers; score them in separate calls"):
        call(evaluate, monkeypatch, *(tmp_path / name for name in "abc"))
    with pytest.raises(surgery.BadInput, match="without a checkpoint"):  # so far it is well
        call(evaluate, monkeypatch, *(tmp_path / name for name in "abc"), "--baseline", "none")
    assert evaluate.teacher_of([{}, {"teacher": "none"}]) == "none"


def test_tasks_from_local_files(teacher_folder, tmp_path, monkeypatch, capsys):
    piqa = {"query": "Q", "choices": ["x", "y"], "gold": 1}
    monkeypatch.setattr(evaluate, "CACHE", tmp_path / "cache")
    items = {"lambada": {"context": "a b", "continuation": "c"}, "piqa": piqa}
    for name, item in items.items():
        (tmp_path / f"{name}.jsonl").write_text((json.dumps(item) + "\n") * 3)
    call(evaluate, monkeypatch, teacher_folder, "--tasks", "lambada,piqa", "--data-dir", tmp_path)
    printed = capsys.readouterr().out
    assert "lambada acc (3)" in printed and "piqa acc_norm (3)" in printed
    (tmp_path / "piqa.jsonl").write_text(json.dumps(piqa | {"gold": 2}))
    with pytest.raises(surgery.BadInput, match="2 is right among 2 choices"):
        call(evaluate, monkeypatch, teacher_folder, "--tasks", "piqa", "--data-dir", tmp_path)
    with pytest.raises(surgery.BadInput, match="did you mean 'piqa'"):
        call(evaluate, monkeypatch, teacher_folder, "--tasks", "pika")


def test_a_mixer_sets_options_that_there_are():
    with pytest.raises(TypeError, match="Typo: no option featrue to set"):
        type("Typo", (mixers.Mixer,), {}, featrue="relu")
    assert type("More", (mixers.Mixer,), {}, conv=0, new=dict(more=1)).options["more"] == 1


def test_a_report_has_the_measures_that_all_have(tmp_path, capsys):
    rows = [
        finished("a", {"ce": [3.0, 0.1]}, 1.0),
        finished("b", {"ce": [4.0, 0.1], "teacher_ce": [1.0, 0]}, 1.0, mixer="gla"),
    ]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluate.report_runs(tmp_path)
    told = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "mixer lr seeds CE" in told and "gla 0.001 1 4.000" in told


def test_many_needles_and_windows_with_them(tmp_path):
    tokenizer, text = surgery.bytes_tokenizer(), "A long sentence about nothing at all. " * 100
    for asked in evaluate.needles(2, 1500, tokenizer, text, 20, keys=6):
        told = re.findall(r"numbers for ([a-z]+-[a-z]+) is: (\d{7})\.", asked.prompt)
        assert len(dict(told)) == 6 and len(tokenizer.encode(asked.prompt)) <= 1500 - 64
        key = re.search(r"number for ([a-z-]+) mentioned in the provided text is$", asked.prompt)[1]
        assert dict(told)[key] == asked.wanted
    assert len({asked.prompt.index("numbers for") for asked in evaluate.needles(1, 1500, tokenizer, "", 20)}) > 5
    (tmp_path / "text.txt").write_text(text * 20)
    args = types.SimpleNamespace(data=str(tmp_path / "text.txt"), context=1024, needles=0.5)
    windows = list(train.ids_from(args, tokenizer))
    assert {len(window) for window in windows} == {1024}
    asked = [tokenizer.decode(window) for window in windows if 256 in window]
    assert 0.35 < len(asked) / len(windows) < 0.65
    for text in asked:
        key, value = re.search(
            r"(?:number|uuid) for ([a-z-]+) mentioned in the provided text is (\S+)\.<", text
        ).groups()
        assert re.search(f"s for {key} is: {value}\\.", text)
    assert list(train.ids_from(args, tokenizer, 30)) == windows[30:]


def test_ranks_are_of_the_state(capsys):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(2, 2)

        def trunk(self, ids, state):  # after T tokens a state whose singular values are T ones
            T = ids.size(1) + (state[0]["T"] if state else 0)
            return None, [{"S": torch.eye(600)[None, None] * (torch.arange(600) < T), "T": T}]

    tokenizer = types.SimpleNamespace(encode=lambda text: [0] * len(text))
    rows = evaluate.print_ranks([("a", Model(), tokenizer)], "x" * 600, (4, 550, 16, 10_000))
    assert [row[:2] for row in rows] == [["a", 4], ["a", 16], ["a", 550]]
    assert [row[2] for row in rows] == pytest.approx([4, 16, 550]) and "550.0" in capsys.readouterr().out


def finished(name, scores, held, **args):
    usual = {"mixer": "delta", "seed": 0, "lr": 1e-3, "tokens": 100, "teacher": "t"}
    return {"run": name, "args": usual | args, "scores": scores, "held": [[0, 9.0], [5, held]]}


def test_a_sweep_is_told_by_hand(tmp_path, capsys):
    scores = lambda ce: {"ce": [ce, 0.1], "teacher_ce": [2.0, 0.1], "kl": [ce - 2.5, 0.1], "agreement": [0.5, 0.1]}
    rows = [finished(f"a{i}", scores(ce), 1.0, seed=i) for i, ce in enumerate((3.0, 4.0, 5.0))]
    rows += [finished(f"b{i}", scores(1.0), 1.1, seed=i, lr=3e-3) for i in range(3)]  # validates worse
    rows += [finished("c", scores(4.5), 2.0, mixer="gla")]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluate.report_runs(tmp_path)
    told = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "delta 0.001 3 4.000 ± 1.000 2.000 ± 1.000 1.500 ± 1.000 0.500 ± 0.000" in told
    assert "gla 0.001 1 4.500 2.500 2.000 0.500" in told


def test_laws_are_found_again():
    x = np.repeat([1e5, 3e5, 1e6, 3e6], 3)
    hits = 0
    for trial in range(60):
        g = np.random.default_rng(trial)
        E, A, alpha = g.uniform(0, 2), g.uniform(1, 4), g.uniform(0.2, 0.8)
        y = E + A * (x / 1e5) ** -alpha + 0.005 * A * g.standard_normal(len(x))
        *_, low, high = evaluate.fit_law(x, y, draws=300)
        hits += low <= alpha <= high
    assert hits >= 50  # 57 of 60 are expected
    E, A, alpha, *_ = evaluate.fit_law(x, 1.5 + 40 * x**-0.3)
    assert (E, A, alpha) == pytest.approx((1.5, 40, 0.3), rel=0.05)
    told = evaluate.law(x, 1 + 1e-8 * x, "N"), evaluate.law(x[:9], x[:9], "D")
    assert told == ("does not fall with N", "not fitted: 3 different D are too few for three numbers; give 4 or more")
