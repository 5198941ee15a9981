"""The equation of mixers.py by matmuls instead of a loop over time, and by Triton kernels where there is a GPU.

`chunked` gives the same answer as `mixers.recurrent`: outputs, final state and gradients, in PyTorch, on any device.
`kernel` is `chunked` with its loop over chunks in two Triton kernels, and one more for a single token.
Read `recurrent` first. Up to its last section this file knows nothing of models: tensors go in, tensors come out. It
imports without triton.

`python kernels.py` checks the kernels, times them on a GPU, and without one says what they would take there;
`--bench cpu` times `chunked` against PyTorch's attention, and a 140m student's step and decoding against softmax's.
"""

import functools
import inspect
import math
import os
import re
import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
except ImportError:  # no GPU build of torch, and nobody asked
    triton = None
jit, constexpr = (triton.jit, tl.constexpr) if triton else (lambda f: f, None)


def check(q, k, v, log_decay, beta, erase, S):
    """-> (dtype to compute in, state to start from); ValueError names the argument, what was wanted and what came."""
    if q.dim() != 4 or v.dim() != 4 or 0 in q.shape:
        raise ValueError(
            f"q, v: wanted (B, T, H, K) and (B, T, H, V), none of them 0, got {(*q.shape,)}, {(*v.shape,)}"
        )
    (B, T, H, K), V = q.shape, v.size(-1)
    per_channel = log_decay is not None and log_decay.shape[-1:] != (1,)
    wanted = {"q": (q, (B, T, H, K)), "k": (k, (B, T, H, K)), "v": (v, (B, T, H, V)), "S": (S, (B, H, K, V))}
    wanted |= {"log_decay": (log_decay, (B, T, H, K if per_channel else 1)), "beta": (beta, (B, T, H, 1))}
    wanted |= {f"erase[{i}]": (x, (B, T, H, K)) for i, x in enumerate(() if erase is None else erase)}
    for name, (x, shape) in wanted.items():
        if x is not None and (x.shape != shape or x.device != q.device or not x.is_floating_point()):
            raise ValueError(f"{name}: wanted floats {shape} on {q.device}, got {x.dtype} {(*x.shape,)} on {x.device}")
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    return dtype, q.new_zeros(B, H, K, V, dtype=dtype) if S is None else S.to(dtype)


# ------------------------------------------------------------------ by matmuls


PIECE, KEPT = 1 << 19, 16  # a CPU works on so many numbers of q at once (its caches), and keeps so many such pieces


def chunked(q, k, v, *, log_decay=None, beta=None, erase=None, S=None, chunk=32, loops=None):
    """The same answer as `recurrent` (arguments, results, errors), with matmuls over chunks of `chunk` rows.

    On a CPU a long sequence is cut in pieces. For the backward pass the intermediates of the last KEPT are kept, those
    of earlier ones are computed again (`Again`). `loops`: see `Carry`. Differentiable once.
    """
    if chunk < 1 or chunk & (chunk - 1):
        raise ValueError(f"chunk: wanted a power of two (`scores` halves it), got {chunk}")
    _, S = check(q, k, v, log_decay, beta, erase, S)
    r, out = None, v.dtype
    if erase is not None:
        q, r, k, v, log_decay, beta = two_rows(q, k, v, log_decay, beta, *erase)
    T = q.size(1)
    C = min(chunk, max(1 << (T - 1).bit_length(), 16 if loops else 1))  # of about T if T is short; kernels need 16
    rows = max(PIECE // (C * q[:, 0].numel()), 1) * C if q.device.type == "cpu" else T
    xs = {name: x for name, x in dict(q=q, k=k, v=v, g=log_decay, beta=beta, r=r).items() if x is not None}
    form = lambda S, *part: piece(S, **dict(zip(xs, part)), C=C, loops=loops or (carry, carry_back))
    early, outputs = max(-(-T // rows) - KEPT, 0) * rows if torch.is_grad_enabled() else 0, []
    with torch.autocast(q.device.type, enabled=False):
        late = xs.values()
        if early:
            first, late = zip(*(x.split([early, T - early], 1) for x in late))
            o, S = Again.apply(form, rows, S, *first)
            outputs.append(o)
        for part in zip(*(x.split(rows, 1) for x in late)):
            o, S = form(S, *part)
            outputs.append(o)
        o = torch.cat(outputs, 1)
    return (o if erase is None else o[:, 1::2]).to(out), S


class Again(torch.autograd.Function):
    """o and the last S of `form` over pieces of `rows` tokens of xs (q, k, v, …); only the S before each is kept.

    The backward pass computes each piece again (gradient checkpointing, arXiv 1604.06174) and writes its gradients into
    their place: a long sequence takes little more memory than its q, k, v and their gradients, V / rows of q for the
    states. With torch.utils.checkpoint, whose pieces of gradients lie between what is freed, it is twice as much.
    """

    @staticmethod
    def forward(ctx, form, rows, S, *xs):
        o, states, ctx.form = xs[2].new_empty(xs[2].shape, dtype=S.dtype), [], form
        ctx.pieces = [slice(t, t + rows) for t in range(0, o.size(1), rows)]
        for here in ctx.pieces:
            states.append(S)
            o[:, here], S = form(S, *(x[:, here] for x in xs))
        ctx.save_for_backward(*xs, *states)
        return o, S

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, by_o, by_S):
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad[3:]
        xs, states = saved[: len(needs)], saved[len(needs) :]
        by = [torch.empty_like(x) if need else None for x, need in zip(xs, needs)]
        for here, S in zip(reversed(ctx.pieces), reversed(states)):
            S, part = S.detach().requires_grad_(), [x[:, here].detach() for x in xs]
            given = [x.requires_grad_() for x, need in zip(part, needs) if need]
            with torch.enable_grad(), torch.autocast(S.device.type, enabled=False):
                results = ctx.form(S, *part)
                by_S, *found = torch.autograd.grad(results, [S, *given], (by_o[:, here], by_S))
            for whole, g in zip((x for x in by if x is not None), found):
                whole[:, here] = g
        return None, None, by_S, *by


def piece(S, q, k, v, g=None, beta=None, r=None, *, C, loops):
    """`chunked` of tokens that are worked on at once -> o (B, T, H, V), S. r: the key that a write erases at, None: k.

    A delta write depends on the writes before it in its chunk and, linearly, on S before the chunk: write = u − w S.
    One inverse of a triangle gives u and w of all chunks at once (the WY form, arXiv 2406.06484 eq. 10; gated,
    2412.06464), in float64: at β = 2 float32 leaves 1e-4 in the place of 1e-5. The loop over chunks, `Carry`, carries S
    alone. A ragged last chunk is padded: a zero key writes nothing, a zero log_decay keeps all.
    """
    T = q.size(1)

    def blocks(x):  # (B, T, H, D) -> (N, B, H, C, D)
        if x is None:
            return None
        x = F.pad(x, (0, 0, 0, 0, 0, -T % C)) if T % C else x
        return x.unflatten(1, (-1, C)).permute(1, 0, 3, 2, 4).to(S.dtype, memory_format=torch.contiguous_format)

    q, k, v, g, beta, r = map(blocks, (q, k, v, g, beta, r))
    r = k if r is None else r
    A, *own = scores([q] if beta is None else [q, r], k, g)  # (N, B, H, C, C)
    u, w, keep = v, None, None
    if g is not None:  # rows see S faded since the chunk began, keys fade until it ends, and S fades by all of it
        seen, keep = g.cumsum(-2).exp(), g.sum(-2, keepdim=True).exp().mT
        q, r, k = q * seen, r if beta is None else r * seen, k * after(g).exp()
    if beta is not None:
        L = longest(own[0] * beta)
        one = torch.eye(C, dtype=L.dtype, device=L.device).expand_as(L)
        inverse = torch.linalg.solve_triangular(L, one, upper=False, unitriangular=True)
        inverse = inverse.to(S.dtype) * beta.mT
        u, w = inverse @ v, inverse @ r
    before, writes, S = Carry.apply(u, w, k, keep, S, loops)
    o = (q @ before).flatten(0, 2).baddbmm_(A.flatten(0, 2), writes.flatten(0, 2)).view_as(writes)
    return o.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :T], S


def two_rows(q, k, v, log_decay, beta, e, b):
    """A token that erases at another key becomes two delta rows: one takes back the recall of e along b, one writes."""
    one, row = torch.ones_like(k[..., :1]), lambda first, second: torch.stack([first, second], 2).flatten(1, 2)
    r = row(e, torch.zeros_like(k) if beta is None else k)
    log_decay = None if log_decay is None else row(log_decay, torch.zeros_like(log_decay))
    beta = row(one, one if beta is None else beta)
    return row(q, q), r, row(b, k), row(torch.zeros_like(v), v), log_decay, beta


def scores(xs, y, g):
    """For each x of xs: A_ij = Σ_d x_id y_jd exp(Σ of g_d after j up to i) for j ≤ i, else 0.

    x, y (…, C, K), g None | (…, C, 1 | K) -> list of (…, C, C). exp(±Σ g) overflows, and differences of long sums lose
    the small in the large: with one decay per head the sums are float64, masked before exp. Per channel, if no
    sum is below −32, both factors are counted from the middle row, and products above the diagonal, up to exp(32), are
    masked; else rows are halved until it is so, and late ones and early columns meet at the middle with factors ≤ 1.
    """
    C = y.size(-2)
    if g is None or C == 1:
        return [(x @ y.mT).tril() for x in xs]
    if g.size(-1) == 1:
        G = longest(g).clamp(min=-1e4).cumsum(-2)  # -inf - -inf is nan
        future = torch.ones(C, C, dtype=torch.bool, device=y.device).triu(1)
        faded = (G - G.mT).to(y.dtype).masked_fill(future, -math.inf).exp()
        return [(x @ y.mT) * faded for x in xs]
    if g.detach().sum(-2).min() > -32:
        G = g.cumsum(-2)
        G = G - G[..., C // 2 - 1 : C // 2, :]
        up, y = G.exp(), y * (-G).exp()
        return [((x * up) @ y.mT).tril() for x in xs]
    y, g, *xs = (z.unflatten(-2, (2, C // 2)) for z in (y, g, *xs))
    up, y_up = g[..., 1, :, :].cumsum(-2).exp(), y[..., 0, :, :] * after(g[..., 0, :, :]).exp()
    full = []
    for x, near in zip(xs, scores(xs, y, g)):  # near (…, 2, C/2, C/2): both halves against themselves
        low = torch.cat([(x[..., 1, :, :] * up) @ y_up.mT, near[..., 1, :, :]], -1)
        full.append(torch.cat([F.pad(near[..., 0, :, :], (0, C // 2)), low], -2))
    return full


def longest(x):
    """x in float64, or float32 on a Mac's GPU, which has no longer one."""
    return x.float() if x.device.type == "mps" else x.double()


def after(g):
    """Sums of what follows a row, (…, C, K) -> like g."""
    return F.pad(g[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)


class Carry(torch.autograd.Function):
    """The loop over chunks: write = u − w S, then S = keep · S + kᵀ write; S before each chunk and each write come out.

    u (N, B, H, C, V); w, k (N, B, H, C, K), w None: nothing is taken back; keep (N, B, H, K | 1, 1), None: 1; S
    (B, H, K, V) -> before (N, B, H, K, V), writes like u, the last S. `loops`: the two loops, in PyTorch or in Triton.
    """

    @staticmethod
    def forward(ctx, u, w, k, keep, S, loops):
        before, writes, S = loops[0](u, w, k, keep, S)
        ctx.loops = loops
        ctx.save_for_backward(w, k, keep, before, writes)
        return before, writes, S

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, by_before, by_writes, by_S):
        w, k, keep, before, writes = ctx.saved_tensors
        # later: the gradient of S after a chunk
        later, by_writes, by_S = ctx.loops[1](by_before, by_writes, by_S, w, k, keep)
        by_w = None if w is None else -by_writes @ before.mT
        by_keep = None if keep is None else (later * before).sum((-2, -1) if keep.size(-2) == 1 else -1).view_as(keep)
        return by_writes, by_w, writes @ later.mT, by_keep, by_S, None


def carry(u, w, k, keep, S):
    """`Carry` forwards, each chunk into its place."""
    before, writes = S.new_empty(len(k) + 1, *S.shape), u if w is None else u.new_empty(u.shape)
    before[0] = S
    keep = S.new_ones(len(k), 1, 1) if keep is None else keep.flatten(1, 2)
    S, write, k, u = (x.flatten(1, 2) for x in (before, writes, k.mT, u))
    w = w if w is None else w.flatten(1, 2)
    for n in range(len(k)):
        if w is not None:
            torch.baddbmm(u[n], w[n], S[n], alpha=-1, out=write[n])
        torch.mul(S[n], keep[n], out=S[n + 1]).baddbmm_(k[n], write[n])
    return before[:-1], writes, before[-1].clone()  # a view would keep all of them


def carry_back(by_before, by_writes, by_S, w, k, keep):
    """`Carry` backwards: of each chunk the gradients of the S after it and of its writes, and that of the first S."""
    later, by = by_S.new_empty(len(k) + 1, *by_S.shape), by_writes.new_empty(by_writes.shape)
    later[-1] = by_S
    keep = by_S.new_ones(len(k), 1, 1) if keep is None else keep.flatten(1, 2)
    S, write, k, by_before, by_writes = (x.flatten(1, 2) for x in (later, by, k, by_before, by_writes))
    w = w if w is None else w.mT.flatten(1, 2)
    for n in reversed(range(len(k))):
        torch.baddbmm(by_writes[n], k[n], S[n + 1], out=write[n])
        torch.addcmul(by_before[n], S[n + 1], keep[n], out=S[n])
        if w is not None:
            S[n].baddbmm_(w[n], write[n], alpha=-1)
    return later[1:], by, later[0].clone()


# ------------------------------------------------------------------ by Triton


@jit
def carry_kernel(
    u,
    w,
    k,
    keep,
    S,
    before,
    writes,
    last,
    N,
    BH,
    K,
    V,
    C: constexpr,
    KB: constexpr,
    VB: constexpr,
    BACK: constexpr,
    FADE: constexpr,
    P: constexpr,
):
    """Spec: `carry`. A program has one head of one sequence, all of K and VB of the values. FADE: 0 none, 1 a head, 2 a
    channel; BACK: w is there. Rows and columns beyond K and V are 0."""
    i, c, kk, vv = tl.program_id(0), tl.arange(0, C), tl.arange(0, KB), tl.program_id(1) * VB + tl.arange(0, VB)
    in_k, in_v = kk < K, vv < V
    ck, cv, kv = c[:, None] * K + kk[None, :], c[:, None] * V + vv[None, :], kk[:, None] * V + vv[None, :]
    here = in_k[:, None] & in_v[None, :]
    s = tl.load(S + i * K * V + kv, mask=here, other=0.0)
    for n in range(N):
        at = (n * BH + i).to(tl.int64)
        tl.store(before + at * K * V + kv, s, mask=here)
        write = tl.load(u + at * C * V + cv, mask=in_v[None, :], other=0.0)
        if BACK:
            write -= tl.dot(tl.load(w + at * C * K + ck, mask=in_k[None, :], other=0.0), s, input_precision=P)
        tl.store(writes + at * C * V + cv, write, mask=in_v[None, :])
        if FADE == 1:
            s *= tl.load(keep + at)
        if FADE == 2:
            s *= tl.load(keep + at * K + kk, mask=in_k, other=0.0)[:, None]
        key = tl.load(k + at * C * K + ck, mask=in_k[None, :], other=0.0)
        s += tl.dot(tl.trans(key), write, input_precision=P)
    tl.store(last + i * K * V + kv, s, mask=here)


@jit
def carry_back_kernel(
    by_before,
    by_writes,
    by_last,
    w,
    k,
    keep,
    after,
    by_u,
    by_S,
    N,
    BH,
    K,
    V,
    C: constexpr,
    KB: constexpr,
    VB: constexpr,
    BACK: constexpr,
    FADE: constexpr,
    P: constexpr,
):
    """Spec: `carry_back`; programs and flags as in `carry_kernel`."""
    i, c, kk, vv = tl.program_id(0), tl.arange(0, C), tl.arange(0, KB), tl.program_id(1) * VB + tl.arange(0, VB)
    in_k, in_v = kk < K, vv < V
    ck, cv, kv = c[:, None] * K + kk[None, :], c[:, None] * V + vv[None, :], kk[:, None] * V + vv[None, :]
    here = in_k[:, None] & in_v[None, :]
    s = tl.load(by_last + i * K * V + kv, mask=here, other=0.0)
    for m in range(N):
        at = ((N - 1 - m) * BH + i).to(tl.int64)
        tl.store(after + at * K * V + kv, s, mask=here)
        key = tl.load(k + at * C * K + ck, mask=in_k[None, :], other=0.0)
        write = tl.load(by_writes + at * C * V + cv, mask=in_v[None, :], other=0.0) + tl.dot(key, s, input_precision=P)
        tl.store(by_u + at * C * V + cv, write, mask=in_v[None, :])
        if FADE == 1:
            s *= tl.load(keep + at)
        if FADE == 2:
            s *= tl.load(keep + at * K + kk, mask=in_k, other=0.0)[:, None]
        s += tl.load(by_before + at * K * V + kv, mask=here, other=0.0)
        if BACK:
            s -= tl.dot(tl.trans(tl.load(w + at * C * K + ck, mask=in_k[None, :], other=0.0)), write, input_precision=P)
    tl.store(by_S + i * K * V + kv, s, mask=here)


@jit
def step_kernel(
    q,
    k,
    v,
    log_decay,
    beta,
    S,
    o,
    new,
    K,
    V,
    KB: constexpr,
    VB: constexpr,
    WRITE: constexpr,
    FADE: constexpr,
):
    """Spec: one turn of the loop in `recurrent`, without erase. WRITE: 0 add, 1 delta; FADE as in `carry_kernel`."""
    i, kk, vv = tl.program_id(0), tl.arange(0, KB), tl.program_id(1) * VB + tl.arange(0, VB)
    in_k, in_v = kk < K, vv < V
    kv, here = kk[:, None] * V + vv[None, :], in_k[:, None] & in_v[None, :]
    s = tl.load(S + i * K * V + kv, mask=here, other=0.0)
    if FADE == 1:
        s *= tl.exp(tl.load(log_decay + i).to(tl.float32))
    if FADE == 2:
        s *= tl.exp(tl.load(log_decay + i * K + kk, mask=in_k, other=0.0).to(tl.float32))[:, None]
    key = tl.load(k + i * K + kk, mask=in_k, other=0.0).to(tl.float32)[:, None]
    write = tl.load(v + i * V + vv, mask=in_v, other=0.0).to(tl.float32)
    if WRITE:
        write = tl.load(beta + i).to(tl.float32) * (write - tl.sum(key * s, 0))
    s += key * write[None, :]
    query = tl.load(q + i * K + kk, mask=in_k, other=0.0).to(tl.float32)[:, None]
    tl.store(o + i * V + vv, tl.sum(query * s, 0), mask=in_v)
    tl.store(new + i * K * V + kv, s, mask=here)


CHUNK, PRECISION, HOW = 32, "tf32x3", dict(num_warps=8, num_stages=2)  # of every launch and of `resources`


def tiles(K, V):
    """-> (rows of S that a program holds, its columns): powers of two that spill nothing at K = 64 (`resources`)."""
    KB = max(16, 1 << (K - 1).bit_length())
    return KB, max(16, min(2048 // KB, 1 << (V - 1).bit_length()))


def fade(keep):
    """FADE of a kernel."""
    return 0 if keep is None else 1 if keep.size(-2) == 1 else 2


def launch(kernel, tensors, sizes, C, back, keep):
    """Run a carry kernel over heads and blocks of values; None stands for a tensor that its flags never read."""
    (N, BH, K, V), (KB, VB) = sizes, tiles(*sizes[2:])
    some = next(x for x in tensors if x is not None)
    flags = dict(C=C, KB=KB, VB=VB, BACK=back, FADE=fade(keep), P=PRECISION, **HOW)
    kernel[BH, triton.cdiv(V, VB)](*(some if x is None else x for x in tensors), N, BH, K, V, **flags)


def carry_triton(u, w, k, keep, S):
    """`carry` in one kernel."""
    u, w, k, keep, S = (x if x is None else x.contiguous() for x in (u, w, k, keep, S))
    N, B, H, C, K = k.shape
    before, writes, last = u.new_empty(N, *S.shape), torch.empty_like(u), torch.empty_like(S)
    launch(carry_kernel, (u, w, k, keep, S, before, writes, last), (N, B * H, K, u.size(-1)), C, w is not None, keep)
    return before, writes, last


def carry_back_triton(by_before, by_writes, by_S, w, k, keep):
    """`carry_back` in one kernel."""
    by_before, by_writes, by_S, w, k, keep = (
        x if x is None else x.contiguous() for x in (by_before, by_writes, by_S, w, k, keep)
    )
    N, B, H, C, K = k.shape
    after, by_u, first = torch.empty_like(by_before), torch.empty_like(by_writes), torch.empty_like(by_S)
    tensors = (by_before, by_writes, by_S, w, k, keep, after, by_u, first)
    launch(carry_back_kernel, tensors, (N, B * H, K, by_writes.size(-1)), C, w is not None, keep)
    return after, by_u, first


def why_not(q, v):
    """Why the kernels cannot take these tensors, in words; None if they can."""
    if triton is None:
        return "triton is not installed"
    if q.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"they need a CUDA device, not {q.device.type}"
    if max(q.size(-1), v.size(-1)) > 256 or v.dtype == torch.float64:
        return f"they take K and V up to 256 and no float64, not {q.size(-1)}, {v.size(-1)} and {v.dtype}"


@functools.cache
def fall_back(why):
    """Say once that the kernels are not used."""
    print(f"form kernel: {why}; chunked, in PyTorch, runs instead", file=sys.stderr)


def kernel(q, k, v, *, log_decay=None, beta=None, erase=None, S=None):
    """The same answer as `recurrent` (arguments, results, errors) by Triton; by `chunked` where it cannot, aloud."""
    more = dict(log_decay=log_decay, beta=beta, erase=erase, S=S)
    _, S = check(q, k, v, *more.values())
    if why := why_not(q, v):
        fall_back(why)
        return chunked(q, k, v, **more)
    tracked = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, log_decay, beta, S))
    if q.size(1) > 1 or erase is not None or tracked:
        return chunked(q, k, v, **more, chunk=CHUNK, loops=(carry_triton, carry_back_triton))
    (B, _, H, K), V = q.shape, v.size(-1)
    KB, VB = tiles(K, V)
    q, k, v, S = (x.contiguous() for x in (q, k, v, S))
    decay, strength = (k if x is None else x.contiguous() for x in (log_decay, beta))
    o, new = torch.empty_like(v), torch.empty_like(S)
    flags = dict(KB=KB, VB=VB, WRITE=beta is not None, FADE=0 if log_decay is None else 1 + (log_decay.size(-1) > 1))
    flags |= HOW
    step_kernel[B * H, triton.cdiv(V, VB)](q, k, v, decay, strength, S, o, new, K, V, **flags)
    return o, new


# ------------------------------------------------------------------ python kernels.py


def example(decay, write, B, T, H, K, V, device="cpu", seed=0):
    """Random inputs of one cell of the grid, as keyword arguments but for q, k, v; all want gradients."""
    g = torch.Generator().manual_seed(seed)
    random = lambda *shape: torch.randn(*shape, generator=g)
    q, k, v = random(B, T, H, K) * K**-0.5, F.normalize(random(B, T, H, K), dim=-1), random(B, T, H, V)
    more = {} if decay == "none" else {"log_decay": -torch.rand(B, T, H, 1 if decay == "head" else K, generator=g) / 4}
    more |= {} if write == "add" else {"beta": torch.rand(B, T, H, 1, generator=g)}
    ready = lambda x: x.to(device).requires_grad_()
    return [ready(x) for x in (q, k, v)], {name: ready(x) for name, x in more.items()}


def run(form, qkv, more):
    """Outputs, last state (if the form has one) of a form, and the gradients of half the sum of their squares."""
    results = form(*qkv, **more)
    results = results if isinstance(results, tuple) else (results,)
    return *results, *torch.autograd.grad(results, [*qkv, *more.values()], [z.detach() for z in results])


CELLS = [(decay, write) for decay in ("none", "head", "channel") for write in ("add", "delta")]


def compare(device):
    """Print how far the kernels are from `chunked`, relative to the largest number, over cells and awkward sizes."""
    for decay, write in CELLS:
        worst = 0.0
        for T, K, V in ((1, 16, 16), (15, 64, 64), (65, 60, 100), (130, 64, 32)):
            inputs = example(decay, write, 2, T, 2, K, V, device)
            for a, b in zip(run(chunked, *inputs), run(kernel, *inputs)):
                worst = max(worst, ((a - b).abs().max() / a.abs().max().clamp(min=1e-9)).item())
        print(f"  decay {decay:<8} write {write:<6} largest difference {worst:.0e}")


def resources(arch):
    """Build each kernel ahead of time for an architecture -> lines: registers, stack (spills) and shared memory."""
    import subprocess
    import tempfile

    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    (KB, VB), lines = tiles(64, 64), []
    flags = dict(C=CHUNK, KB=KB, VB=VB, BACK=True, FADE=2, P=PRECISION, WRITE=True)
    for made in (carry_kernel, carry_back_kernel, step_kernel):
        fixed = {name: flags[name] for name in made.arg_names if name in flags}
        kind = lambda name, fixed=fixed: (
            "constexpr" if name in fixed else "i32" if name in ("N", "BH", "K", "V") else "*fp32"
        )
        places = {(made.arg_names.index(name),): value for name, value in fixed.items()}
        source = ASTSource(made, {name: kind(name) for name in made.arg_names}, places)
        built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=HOW)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(built.asm["cubin"])
            file.flush()
            tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
            told = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True).stdout
        registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", told).groups()
        words = f"{registers:>4} registers, {stack:>4} bytes spilled, {built.metadata.shared / 1024:.0f} KiB shared"
        lines.append(f"  sm_{arch} {made.__name__:<18} {words}")
    return lines


def medians(forms, repeats=5):
    """{name: call} -> {name: median seconds}, all of them in turn so that a slow moment meets each alike."""
    import time

    times = {name: [] for name in forms}
    for turn in range(repeats + 1):
        for name, call in forms.items():
            began = time.perf_counter()
            call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn:  # the first warms up
                times[name].append(time.perf_counter() - began)
    return {name: sorted(found)[len(found) // 2] for name, found in times.items()}


def bench(device, shapes, H=9, K=64):
    """Print forward and backward of cells over PyTorch's causal attention, in one run; others' where installed."""
    form = kernel if device == "cuda" else chunked
    print(
        f"{device}, {torch.get_num_threads()} threads, {H} heads of {K}, float32, forward and backward, over attention:"
    )
    for B, T in shapes:
        attention = functools.partial(F.scaled_dot_product_attention, is_causal=True)
        x = [torch.randn(B, H, T, K, device=device, requires_grad=True) for _ in range(3)]
        forms = {"attention": functools.partial(run, attention, x, {})}
        for decay, write in CELLS:
            forms[f"{decay}, {write}"] = functools.partial(run, form, *example(decay, write, B, T, H, K, K, device))
        if theirs := transformers_form():
            forms["transformers' head, delta"] = functools.partial(
                run, theirs, *example("head", "delta", B, T, H, K, K, device)
            )
        found = medians(forms)
        print(
            f"  B {B} T {T}: attention {found['attention'] * 1000:.0f} ms; "
            + ", ".join(
                f"{name} {seconds / found['attention']:.2f}" for name, seconds in found.items() if name != "attention"
            )
        )


def transformers_form():
    """transformers' chunked gated delta rule in PyTorch, called as ours, or None."""
    try:
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule
    except ImportError:
        return None
    theirs = inspect.unwrap(torch_chunk_gated_delta_rule)  # without what it prefers where it is installed
    return lambda q, k, v, log_decay, beta: theirs(q, k, v, log_decay[..., 0], beta[..., 0], output_final_state=True)


def exponent(sizes, values):
    """p of values ≈ c · sizes^p: the least-squares slope between their logarithms."""
    return statistics.linear_regression([math.log(n) for n in sizes], [math.log(x) for x in values]).slope


def resident(field):
    """Bytes of this process in memory: VmRSS now, VmHWM at most so far; nan without Linux's /proc."""
    status = Path("/proc/self/status")
    return 1024 * int(re.search(rf"{field}:\s+(\d+)", status.read_text())[1]) if status.exists() else math.nan


def peak(T, H, K):
    """Bytes by which `growth`'s cell, its inputs and its gradients raise the memory of this process at most.

    The high-water mark of the resident set less what was resident before q, k, v were made: what PyTorch and its
    libraries touched, not what they asked for. Only a new process tells it: an old one has freed memory to use again.
    """
    cell = functools.partial(example, "head", "delta", 1, H=H, K=K, V=K)
    run(chunked, *cell(64))  # what the libraries keep for themselves
    before = resident("VmRSS")
    run(chunked, *cell(T))
    return resident("VmHWM") - before


def growth(lengths=tuple(1024 << i for i in range(7)), H=9, K=64):
    """Print how time and memory of gated_delta's cell, forward and backward, grow with T."""
    import multiprocessing

    with multiprocessing.get_context("spawn").Pool(1) as fresh:
        share = fresh.apply(peak, (lengths[-1], H, K)) / (2 * 3 * 4 * lengths[-1] * H * K)
    found = medians({T: functools.partial(run, chunked, *example("head", "delta", 1, T, H, K, K)) for T in lengths})
    print("head, delta, B 1: " + ", ".join(f"T {T} {seconds * 1000:.0f} ms" for T, seconds in found.items()))
    print(f"  time grows as T^{exponent(lengths, found.values()):.2f} (aim: below 1.1)")
    print(f"  peak memory at T {lengths[-1]}: {share:.1f} × q, k, v and their gradients (aim: 3 at most)")


def of_140m(**smaller):
    """-> (a teacher of 140m's shape with random weights, {mixer: its student}), or of a smaller shape."""
    from surgery import SHAPE, Config, Transformer, linearize

    teacher = Transformer(Config(**SHAPE | smaller))
    return teacher, {name: linearize(teacher, name) for name in ("softmax", "gated_delta")}


@torch.no_grad()
def forward_flops(model, T):
    """FLOPs of a token in a sequence of T: 2 a weight, 4 to 9 a number of S, of softmax 4 a number of T / 2 keys."""
    from distill import Stage
    from evaluate import mixing
    from train import flops_per_token

    weights = flops_per_token(model, Stage("ce", 1.0, 0.0)) / 3  # of forward and backward
    return weights + sum(mixing(block.mixer, T // 2) for block in model.blocks)


def step(sequences=4, T=512, **smaller):
    """Print time and work of a training step (both forwards, backward, AdamW) of gated_delta and of softmax.

    Work is `forward_flops`, three times for the student and once for the teacher. The rate is 0: the same work, and the
    two students share what they do not swap.
    """
    import copy

    import train
    from distill import RECIPES
    from evaluate import precision

    (teacher, students), dtype, (stage,) = of_140m(**smaller), precision("cpu")[0], RECIPES["default"]
    frozen = copy.deepcopy(teacher).to(dtype).requires_grad_(False)
    args, tokens = train.parser().parse_args(["--device", "cpu"]), torch.randint(teacher.config.vocab, (sequences, T))
    forms, work, rate = {}, {}, train.matmul_rate("cpu", dtype)
    for name, student in students.items():
        made = train.Run(args, None, student, frozen, None, None, [], dtype)
        forms[name] = functools.partial(train.one_step, made, tokens, stage, train.optimizer_for(student, stage), 0.0)
        work[name] = tokens.numel() * (3 * forward_flops(student, T) + forward_flops(frozen, T))
    found = medians(forms)
    print(f"training step, 140m, {sequences} × {T}, {dtype}; a matmul alone: {rate / 1e9:.0f} GFLOP/s")
    for name, seconds in found.items():
        print(f"  {name}: {seconds:.2f} s, {work[name] / seconds / rate:.0%} of the matmul's rate (aim: 50% at least)")
    print(f"  gated_delta over softmax: {found['gated_delta'] / found['softmax']:.2f} (aim: 1.25 at most)")


def decoding(lengths=(1024, 4096, 8192, 16384, 32768), last=65536, **smaller):
    """Print tokens a second of gated_delta at 140m against context, alone to `last`, then beside its teacher."""
    from evaluate import autocast, precision, print_decoding

    (teacher, students), dtype = of_140m(**smaller), precision("cpu")[0]
    student = "gated_delta", students["gated_delta"].to(dtype)
    print(f"decoding, 140m, {dtype}")
    with autocast("cpu", dtype):
        alone = {T: speed for _, T, speed, _ in print_decoding([student], (*lengths, last))}
        rows = print_decoding([student, ("teacher", teacher.to(dtype))], lengths)
    speed = {(name, T): speed for name, T, speed, _ in rows}
    flat = alone[last] / alone[lengths[0]]
    print(f"  gated_delta's speed after {last} tokens over that after {lengths[0]}: {flat:.2f} (aim: 0.95 at least)")
    for T in lengths:
        print(f"  gated_delta over teacher at {T}: {speed['gated_delta', T] / speed['teacher', T]:.2f}")


def main():
    """Check and time, or say what a GPU would be asked for."""
    import argparse
    import subprocess

    parser = argparse.ArgumentParser(description="Check the kernels, time them on a GPU, build them without one.")
    parser.add_argument("--check", action="store_true", help="compare with chunked, and stop")
    parser.add_argument("--bench", choices=["cpu"], help="time chunked against PyTorch's attention on this CPU")
    args = parser.parse_args()
    if args.bench:
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as train.py does: large pages
        bench("cpu", ((4, 512), (1, 2048), (1, 8192)))
        growth()
        step()
        return decoding()
    if triton is None:
        parser.error("triton is not installed: pip install triton; chunked, in PyTorch, needs none")
    cuda = torch.cuda.is_available()
    if cuda or os.environ.get("TRITON_INTERPRET") == "1":
        compare("cuda" if cuda else "cpu")
        if cuda and not args.check:
            bench("cuda", [(max(65536 // T, 1), T) for T in (1024, 4096, 16384, 65536)])
        return None
    print("no CUDA device: the kernels run in Triton's interpreter; no GPU time is measured", flush=True)
    subprocess.run([sys.executable, __file__, "--check"], env=os.environ | {"TRITON_INTERPRET": "1"}, check=True)
    if args.check:
        return None
    for arch in (80, 90):
        print(*resources(arch), sep="\n")


if __name__ == "__main__":
    main()
